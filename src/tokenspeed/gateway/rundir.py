"""The run directory: of one server alone, and gone after it, however that ended."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tokenspeed.errors import ResourceError

PREFIX = "tokenspeed-"

LOCK_NAME = "lock"
"""File that the server keeps locked for as long as it lives; the kernel unlocks it even after a kill -9."""

MAX_TEMPORARY_PATH = 70
"""Bytes of $TMPDIR above which sockets in the run directory would have longer names than the kernel takes (107)."""


@contextmanager
def private_directory() -> Iterator[Path]:
    """A directory of this run alone, with a path short enough for sockets in it.

    What servers left that were killed is removed first.

    Raises:
        ResourceError: when there is no place for it.
    """
    try:
        base = tempfile.gettempdir()
        short = base if len(os.fsencode(base)) <= MAX_TEMPORARY_PATH else "/tmp"
        remove_abandoned(Path(short))
        directory = tempfile.TemporaryDirectory(prefix=PREFIX, dir=short, ignore_cleanup_errors=True)
        lock = _lock(Path(directory.name))
    except OSError as error:
        raise ResourceError("no temporary directory can be written to; set TMPDIR to a short one that can") from error
    try:
        with directory as path:
            yield Path(path)
    finally:
        os.close(lock)


def remove_abandoned(base: Path) -> None:
    """Remove the run directories in `base` that are ours and whose server is gone."""
    for path in base.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it may go away while we look, or not be ours to read
            if _is_ours(path) and _is_unlocked(path / LOCK_NAME):
                shutil.rmtree(path, ignore_errors=True)


def _lock(directory: Path) -> int:
    """Make the lock file, locked from the first moment that others can see it; its open descriptor."""
    unseen = directory / f"new-{LOCK_NAME}"
    descriptor = os.open(unseen, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unseen.rename(directory / LOCK_NAME)
    return descriptor


def _is_ours(path: Path) -> bool:
    """Whether it is a directory of this user; a link is not."""
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _is_unlocked(lock: Path) -> bool:
    """Whether nobody holds the lock. Without a lock file it is no run directory, or one that is just being made."""
    descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
