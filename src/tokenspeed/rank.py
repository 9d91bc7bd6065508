"""Entry of one rank process: `python -m tokenspeed.rank --run-dir DIR --rank R`.

This file imports nothing of `tokenspeed.runtime` or `tokenspeed_kernel` at its top: the reloader's hook has to be
in place before any of them is loaded, so that it knows the bytes of everything that runs.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tokenspeed import hook
from tokenspeed.forward import COMMITTED_FILE
from tokenspeed_reload import Origin, Reloader, SourceText


def main() -> int:
    """Run the rank until the front stops it; the exit code is 0 only after an orderly stop."""
    parser = argparse.ArgumentParser(prog="tokenspeed.rank")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--keeper-fd", type=int)
    args = parser.parse_args()
    faulthandler.register(signal.SIGUSR1)  # tells where a rank hangs
    # Ctrl-C in a terminal reaches the whole process group; the front decides when a rank ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hook.let_threads_sleep()
    before = committed(args.run_dir)
    reloader = install_reloader(args.run_dir, before.modules if before is not None else {})

    from tokenspeed.runtime.engine.signs import Signs

    Signs(args.rank, args.run_dir).start()  # before torch is imported, which takes its time

    from tokenspeed.runtime.engine.process import run

    keeper = None if args.keeper_fd is None else socket.socket(fileno=args.keeper_fd)
    generation, tactics = (0, None) if before is None else (before.generation, before.tactics)
    exit_code = run(args.run_dir, args.rank, reloader, generation, tactics, keeper)
    if keeper is not None:
        keeper.close()
    if exit_code:
        # Communicators whose other ranks are gone, and graphs that hold them, can block the interpreter's end.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    return exit_code


def install_reloader(run_dir: Path, kept: Mapping[str, Origin]) -> Reloader | None:
    """The reloader of this process, already recording; None where the server does not permit reloads."""
    options = json.loads((run_dir / "config.json").read_bytes())["reload"]
    return hook.install_reloader(options["reload_overlay"], kept) if options["allow_reload_forward"] else None


class Before(NamedTuple):
    """What ranks before this one ran: the number of its generation, its modules, and what `Tactics.in_use` gave."""

    generation: int
    modules: dict[str, Origin]
    tactics: dict[str, Any]


def committed(run_dir: Path) -> Before | None:
    """What the ranks that this one replaces ran; None for the first ranks."""
    try:
        data = (run_dir / COMMITTED_FILE).read_bytes()
    except FileNotFoundError:
        return None
    # Not as the protocol's type, which lies in a module that is about to be imported from these sources.
    known: dict[str, Any] = msgspec.msgpack.decode(data)
    modules = {
        name: Origin(SourceText(module["path"], module["data"]), module["origin"])
        for name, module in known["modules"].items()
    }
    return Before(known["generation"], modules, known["tactics"])


if __name__ == "__main__":
    sys.exit(main())
