"""The cache directory: what was fetched or converted once, shared by every process of the user."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenspeed.errors import ModelError

_SCRATCH_PREFIX = ".partial-"


def cache_root() -> Path:
    """$TOKENSPEED_CACHE, else `tokenspeed` in the XDG cache directory; it need not exist yet."""
    if chosen := os.environ.get("TOKENSPEED_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tokenspeed"


def make_once(target: Path, build: Callable[[Path], Path]) -> Path:
    """Make `target` once and return it; a file or directory that exists is taken as it is.

    `build` gets an empty scratch directory beside `target` and returns the path in it that becomes `target`
    by one rename, so that nobody ever sees half of it. Processes that come meanwhile wait for the first.

    Raises:
        ModelError: if the cache cannot be written.
    """
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{target.name}.lock"):
            if not target.exists():
                _build(target, build)
    except OSError as error:
        raise ModelError(
            f"the cache {target.parent} cannot be written ({error.strerror or error}); "
            "make room there or set TOKENSPEED_CACHE to another directory"
        ) from error
    return target


def _build(target: Path, build: Callable[[Path], Path]) -> None:
    prefix = f"{_SCRATCH_PREFIX}{target.name}-"
    for abandoned in target.parent.glob(f"{prefix}*"):  # of a process that was killed: the lock is ours now
        shutil.rmtree(abandoned, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as scratch:
        build(Path(scratch)).rename(target)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel lets go of it when the process ends, however it ends."""
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
