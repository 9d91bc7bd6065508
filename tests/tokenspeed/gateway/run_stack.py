"""`ts serve` with the stand-in front: `python run_stack.py BEHAVIOUR FLAG...`."""

from __future__ import annotations

import sys
from pathlib import Path

from tokenspeed.cli.flags import add_flags, config_from
from tokenspeed.cli.parser import Parser
from tokenspeed.errors import TokenSpeedError
from tokenspeed.gateway.stack import serve


def main() -> int:
    behaviour, *flags = sys.argv[1:]
    parser = Parser(prog="ts serve", description="")
    add_flags(parser)
    config = config_from(parser.parse(flags))
    stand_in = Path(__file__).with_name("stand_in_front.py")
    try:
        return serve(config, [sys.executable, str(stand_in), behaviour, config.model.model])
    except TokenSpeedError as error:
        print(f"ts serve: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
