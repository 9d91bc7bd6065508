"""Entry of one rank process: `python -m tokenspeed.rank --run-dir DIR --rank R`.

This file imports nothing of `tokenspeed.runtime` or `tokenspeed_kernel` at its top: the reloader's hook has to be
in place before any of them is loaded, so that it knows the bytes of everything that runs.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import signal
import sys
from pathlib import Path

from tokenspeed import hook
from tokenspeed_reload import Reloader


def main() -> int:
    """Run the rank until the front stops it; the exit code is 0 only after an orderly stop."""
    parser = argparse.ArgumentParser(prog="tokenspeed.rank")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    args = parser.parse_args()
    faulthandler.register(signal.SIGUSR1)  # tells where a rank hangs
    # Ctrl-C in a terminal reaches the whole process group; the front decides when a rank ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hook.let_threads_sleep()
    reloader = install_reloader(args.run_dir)

    from tokenspeed.runtime.engine.process import run

    return run(args.run_dir, args.rank, reloader)


def install_reloader(run_dir: Path) -> Reloader | None:
    """The reloader of this process, already recording; None where the server does not permit reloads."""
    options = json.loads((run_dir / "config.json").read_bytes())["reload"]
    return hook.install_reloader(options["reload_overlay"]) if options["allow_reload_forward"] else None


if __name__ == "__main__":
    sys.exit(main())
