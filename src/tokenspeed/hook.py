"""The reloader of a process that runs the model; in place before anything of the engine is imported.

This file imports nothing of `tokenspeed.runtime` or `tokenspeed_kernel`, so that the hook sees the bytes of
everything that runs.
"""

from __future__ import annotations

from pathlib import Path

from tokenspeed.forward import BUILDS_ONCE, FORWARD_PACKAGES, START_UP_MODULES, WATCHED_PACKAGES
from tokenspeed_reload import RUNS_ONCE, Reloader


def install_reloader(overlay: str | None) -> Reloader:
    """A reloader that records from here on what is imported.

    Args:
        overlay: directory, laid out as the packages, whose modules are read before the installed ones.
    """
    reloader = Reloader(
        packages=FORWARD_PACKAGES,
        watch=WATCHED_PACKAGES,
        overlay=Path(overlay).resolve() if overlay else None,
        runs_once=RUNS_ONCE.union(BUILDS_ONCE),
        built_by=START_UP_MODULES,
        beside=("tokenspeed", "tokenspeed_reload"),
    )
    reloader.install()
    return reloader
