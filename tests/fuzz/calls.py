"""The ways in which an edit is sent to a server, and what each may be answered with."""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from typing import Any

import aiohttp

from tests.fuzz.program import Edit
from tests.fuzz.sources import MODULES

Reply = dict[str, Any]

WAYS = {
    "wait": 50,
    "abort": 16,
    "named": 8,
    "concurrent": 8,
    "same id": 4,
    "paused": 6,
    "short timeout": 4,
    "cancelled": 4,
}
"""How often each is taken, of a hundred."""


class Calls:
    """Control calls of one server."""

    def __init__(self, session: aiohttp.ClientSession, control_url: str, limit_s: float):
        self.session = session
        self.control_url = control_url
        self.limit_s = limit_s
        self.aborted: list[tuple[float, float]] = []
        """Between which times of `time.monotonic` running requests were ended."""

    async def control(self, method: str, path: str, body: Any = None) -> Reply:
        """One control call; a reply that does not come is a TimeoutError."""
        async with asyncio.timeout(self.limit_s):
            async with self.session.request(method, f"{self.control_url}{path}", json=body) as reply:
                parsed: Reply = json.loads(await reply.read())
                return parsed

    async def reload(self, **body: Any) -> Reply:
        """`reload_forward` with a fresh id."""
        begun = time.monotonic()
        reply = await self.control("POST", "/reload_forward", {"id": uuid.uuid4().hex, **body})
        if body.get("mode") == "abort":
            self.aborted.append((begun, time.monotonic()))
        return reply

    async def loads(self) -> Reply:
        """What the scheduler holds."""
        loads: Reply = (await self.control("GET", "/server_info"))["loads"]
        return loads

    async def send(self, way: str, edit: Edit, rng: random.Random) -> list[Reply]:
        """Send an edit; the last reply is the one that counts."""
        if way == "abort":
            return [await self.reload(mode="abort")]
        if way == "named":
            names = [name for name in edit.modules if name in MODULES]
            replies = [await self.reload(modules=names)] if names else []
            # What lies in new files was not named.
            return [*replies, await self.reload()] if not replies or replies[-1].get("pending") else replies
        if way == "concurrent":
            modes = rng.choices(("wait", "abort"), k=2)
            replies = await asyncio.gather(*(self.reload(mode=mode) for mode in modes))
            return sorted(replies, key=lambda reply: bool(reply["success"] and reply["modules"]))
        if way == "same id":
            first, second = await asyncio.gather(*(self.reload(id=f"one-{edit.number}") for _ in range(2)))
            assert first == second, f"one id, two answers: {first} and {second}"
            return [first]
        if way == "paused":
            mode = rng.choice(("wait", "abort"))
            begun = time.monotonic()
            paused = await self.control("POST", "/pause_generation", {"mode": mode})
            if mode == "abort":
                self.aborted.append((begun, time.monotonic()))
            assert paused["success"], f"not paused: {paused}"
            reply = await self.reload(mode=rng.choice(("wait", "abort")))
            assert (await self.loads())["paused"], "the reload ended the pause"
            await self.control("POST", "/continue_generation")
            return [reply]
        if way == "short timeout":
            return await self._until_it_ran(self.reload(timeout_s=rng.choice((0.001, 0.02, 0.1))), "timeout")
        if way == "cancelled":
            call = asyncio.create_task(self.reload())
            await asyncio.sleep(rng.random() * 0.1)
            await self.control("POST", "/continue_generation")
            return await self._until_it_ran(call, "cancelled")
        return [await self.reload()]

    async def _until_it_ran(self, first: Any, code: str) -> list[Reply]:
        reply = await first
        return [reply, await self.reload()] if reply.get("code") == code else [reply]


def draw_way(rng: random.Random) -> str:
    """One of the ways."""
    return rng.choices(list(WAYS), list(WAYS.values()))[0]
