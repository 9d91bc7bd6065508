"""What stands against the start of a set of ranks is one sentence."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.errors import ResourceError
from tokenspeed.runtime.config import Config
from tokenspeed.runtime.protocol.blackbox import Work
from tokenspeed.server.committed import CommittedCode
from tokenspeed.server.incarnation import Incarnation
from tokenspeed.server.ranks import RANK_COMMAND


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A short path: a socket's name is bounded."""
    with tempfile.TemporaryDirectory(prefix="ts-") as directory:
        yield Path(directory)


def incarnation(directory: Path) -> Incarnation:
    nothing: Any = lambda message: None  # noqa: E731
    return Incarnation(directory, Config(), RANK_COMMAND, nothing, nothing, lambda: 0.0, CommittedCode())


async def test_a_directory_that_cannot_be_made(run_dir: Path) -> None:
    ranks = incarnation(run_dir / "gone" / "0")
    with pytest.raises(ResourceError, match=r"gone/0 cannot be written \(No such file or directory\); make room there"):
        await ranks.start()
    assert await ranks.end() == Work()


async def test_a_process_that_cannot_be_started(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*command: str, **options: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    ranks = incarnation(run_dir / "0")
    with pytest.raises(ResourceError, match=r"no process for rank 0 can be started .*; stop what else runs"):
        await ranks.start()
    await ranks.end()
    assert list(run_dir.iterdir()) == []
