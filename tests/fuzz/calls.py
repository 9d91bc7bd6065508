"""The ways in which an edit is sent to a server, and what each may be answered with."""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp

from tests.fuzz.program import Edit
from tests.fuzz.sources import MODULES

Reply = dict[str, Any]

WAYS = {
    "wait": 36,
    "keep": 18,
    "abort": 12,
    "named": 8,
    "concurrent": 8,
    "same id": 4,
    "paused": 6,
    "short timeout": 4,
    "cancelled": 4,
}
"""How often each is taken, of a hundred."""

MODES = ("wait", "keep", "abort")


class Calls:
    """Control calls of one server."""

    def __init__(self, session: aiohttp.ClientSession, control_url: str, limit_s: float):
        self.session = session
        self.control_url = control_url
        self.limit_s = limit_s
        self.aborted: list[tuple[float, float]] = []
        """Between which times of `time.monotonic` running requests were ended."""
        self.kept: list[tuple[float, float]] = []
        """Between which of them running requests were held, to go on with the code of then."""

    async def control(self, method: str, path: str, body: Any = None) -> Reply:
        """One control call; a reply that does not come is a TimeoutError."""
        async with asyncio.timeout(self.limit_s):
            async with self.session.request(method, f"{self.control_url}{path}", json=body) as reply:
                parsed: Reply = json.loads(await reply.read())
                return parsed

    async def reload(self, **body: Any) -> Reply:
        """`reload_forward` with a fresh id; the reply has the mode too."""
        with self._noted(body.get("mode", "wait")):
            reply = await self.control("POST", "/reload_forward", {"id": uuid.uuid4().hex, **body})
        return {**reply, "mode": body.get("mode", "wait")}

    @contextmanager
    def _noted(self, mode: str) -> Iterator[None]:
        """Note when running requests may end or be held."""
        begun = time.monotonic()
        yield
        noted = {"abort": self.aborted, "keep": self.kept}.get(mode)
        if noted is not None:
            noted.append((begun, time.monotonic()))

    async def loads(self) -> Reply:
        """What the scheduler holds."""
        loads: Reply = (await self.control("GET", "/server_info"))["loads"]
        return loads

    async def send(self, way: str, edit: Edit, rng: random.Random) -> list[Reply]:
        """Send an edit; the last reply is the one that counts."""
        if way in ("abort", "keep"):
            return [await self.reload(mode=way)]
        if way == "named":
            names = [name for name in edit.modules if name in MODULES]
            replies = [await self.reload(modules=names)] if names else []
            # What lies in new files was not named.
            return [*replies, await self.reload()] if not replies or replies[-1].get("pending") else replies
        if way == "concurrent":
            modes = rng.choices(MODES, k=2)
            replies = await asyncio.gather(*(self.reload(mode=mode) for mode in modes))
            return sorted(replies, key=lambda reply: bool(reply["success"] and reply["modules"]))
        if way == "same id":
            first, second = await asyncio.gather(*(self.reload(id=f"one-{edit.number}") for _ in range(2)))
            assert first == second, f"one id, two answers: {first} and {second}"
            return [first]
        if way == "paused":
            mode = rng.choice(MODES)
            with self._noted("keep" if mode == "keep" else "wait"):
                with self._noted(mode):
                    paused = await self.control("POST", "/pause_generation", {"mode": mode})
                assert paused["success"], f"not paused: {paused}"
                reply = await self.reload(mode=rng.choice(MODES))
                assert (await self.loads())["paused"], "the reload ended the pause"
            await self.control("POST", "/continue_generation")
            return [reply]
        if way == "short timeout":
            call = self.reload(timeout_s=rng.choice((0.001, 0.02, 0.1)), mode=rng.choice(("wait", "keep")))
            return await self._until_it_ran(call, "timeout")
        if way == "cancelled":
            task = asyncio.create_task(self.reload())
            await asyncio.sleep(rng.random() * 0.1)
            await self.control("POST", "/continue_generation")
            return await self._until_it_ran(task, "cancelled")
        return [await self.reload()]

    async def _until_it_ran(self, first: Any, code: str) -> list[Reply]:
        reply = await first
        return [reply, await self.reload()] if reply.get("code") == code else [reply]


def draw_way(rng: random.Random) -> str:
    """One of the ways."""
    return rng.choices(list(WAYS), list(WAYS.values()))[0]
