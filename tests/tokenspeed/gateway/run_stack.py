"""`ts serve` with the stand-in front: `python run_stack.py BEHAVIOUR FLAG...`."""

from __future__ import annotations

import sys
from pathlib import Path

from tokenspeed.cli.flags import config_from
from tokenspeed.cli.parser import Parser
from tokenspeed.cli.serve import configure
from tokenspeed.errors import TokenSpeedError
from tokenspeed.gateway.stack import serve


def main() -> int:
    behaviour, *flags = sys.argv[1:]
    parser = Parser(prog="ts serve", description="")
    configure(parser)
    namespace = parser.parse(flags)
    config = config_from(namespace)
    stand_in = Path(__file__).with_name("stand_in_front.py")
    try:
        front = [sys.executable, str(stand_in), behaviour, config.model.model]
        return serve(config, front, namespace.gateway_flags)
    except TokenSpeedError as error:
        print(f"ts serve: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
