"""What a process that runs the model does first, before anything of the engine is imported.

This file imports nothing of `tokenspeed.runtime` or `tokenspeed_kernel`, so that the hook sees the bytes of
everything that runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tokenspeed.forward import BUILDS_ONCE, FORWARD_PACKAGES, START_UP_MODULES, WATCHED_PACKAGES
from tokenspeed_reload import RUNS_ONCE, Origin, Reloader


def install_reloader(overlay: str | None, kept: Mapping[str, Origin] | None = None) -> Reloader:
    """A reloader that records from here on what is imported.

    Args:
        overlay: directory, laid out as the packages, whose modules are read before the installed ones.
        kept: what other ranks ran, which is imported whatever the disk holds.
    """
    reloader = Reloader(
        packages=FORWARD_PACKAGES,
        watch=WATCHED_PACKAGES,
        overlay=Path(overlay).resolve() if overlay else None,
        runs_once=RUNS_ONCE.union(BUILDS_ONCE),
        built_by=START_UP_MODULES,
        beside=("tokenspeed", "tokenspeed_reload"),
    )
    reloader.keep(kept or {})
    reloader.install()
    return reloader


def let_threads_sleep() -> None:
    """Have OpenMP's threads sleep at a barrier, unless the user has said how they wait.

    They spin by default. Where another process wants a core, each barrier then lasts as long as the system's time
    slice, and a step on a CPU takes ten times as long. Read when torch is loaded.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
