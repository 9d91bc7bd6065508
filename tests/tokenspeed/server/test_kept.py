"""The front keeps what ranks leave with it, and lets go of it when it should."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

from tokenspeed.runtime.protocol.keeping import ASK, DONE, DROP, KEEP, receive, send
from tokenspeed.server.kept import KeptMemory


def connect(memory: KeptMemory, rank: int) -> socket.socket:
    with memory.connect(rank) as end:
        return end.dup()


async def call(connection: socket.socket, message: bytes, descriptors: list[int] | None = None) -> list[int]:
    send(connection, message, descriptors or [])
    answer, received = await asyncio.to_thread(receive, connection)
    assert answer == DONE
    return received


def opened(path: Path) -> int:
    """How often this process has the file open."""
    return sum(link.is_symlink() and link.readlink() == path for link in Path("/proc/self/fd").iterdir())


async def leave(memory: KeptMemory, rank: int, path: Path) -> None:
    """As a rank does that ends right after it."""
    path.touch()
    descriptor = os.open(path, os.O_RDONLY)
    with connect(memory, rank) as connection:
        assert await call(connection, KEEP, [descriptor]) == []
    os.close(descriptor)


async def test_each_rank_finds_its_own(tmp_path: Path) -> None:
    memory = KeptMemory(2)
    for rank in range(2):
        await leave(memory, rank, tmp_path / str(rank))
        assert opened(tmp_path / str(rank)) == 1
    memory.hang_up()
    for rank in (1, 0, 1):
        with connect(memory, rank) as connection:
            (found,) = await call(connection, ASK)
        assert Path(f"/proc/self/fd/{found}").readlink() == tmp_path / str(rank)
        os.close(found)
    memory.close()
    assert [opened(tmp_path / str(rank)) for rank in range(2)] == [0, 0]


async def test_what_is_left_later_takes_the_place_of_what_was_left(tmp_path: Path) -> None:
    memory = KeptMemory(1)
    await leave(memory, 0, tmp_path / "old")
    await leave(memory, 0, tmp_path / "new")
    assert (opened(tmp_path / "old"), opened(tmp_path / "new")) == (0, 1)
    with connect(memory, 0) as connection:
        assert await call(connection, DROP) == []
        assert opened(tmp_path / "new") == 0
        assert await call(connection, ASK) == []
    memory.close()


async def test_a_rank_that_ends_in_the_middle_of_a_conversation_is_no_harm(tmp_path: Path) -> None:
    memory = KeptMemory(1)
    await leave(memory, 0, tmp_path / "kept")
    with connect(memory, 0) as connection:
        send(connection, ASK)  # and does not wait for the answer
    with connect(memory, 0) as connection:
        (found,) = await call(connection, ASK)
    os.close(found)
    memory.hang_up()
    assert opened(tmp_path / "kept") == 1
    memory.close()


async def test_nothing_is_heard_of_ranks_after_a_hang_up(tmp_path: Path) -> None:
    """Their last words would otherwise meet the memory of those that come after them."""
    memory = KeptMemory(1)
    await leave(memory, 0, tmp_path / "kept")
    with connect(memory, 0) as connection:
        send(connection, DROP)
        memory.hang_up()
        await asyncio.sleep(0.05)  # in which the word would be heard
    assert opened(tmp_path / "kept") == 1
    memory.close()
