"""Requests of many kinds, sent all the time, each of which has to end in a permitted way."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

REGEX = "[ab]{3,9}"
LONG = 200
"""Tokens of a long prompt: more than a captured step takes, and more than warm-up runs."""

PROMPTS: tuple[tuple[int, ...], ...] = (
    (5, 6, 7, 8),
    tuple(range(100, 130)),
    tuple(range(300, 450)),
)
"""What is asked alone after each edit, and by some clients under load."""


@dataclass
class Answer:
    """What one request brought."""

    kind: str
    body: dict[str, Any]
    started: float
    ended: float = 0.0
    choices: list[dict[str, Any]] = field(default_factory=list)
    """`/generate`'s own: text, output_ids, meta_info."""
    error: str = ""
    left: bool = False
    """The client went away."""


class Load:
    """Clients that ask one after the other while the gate is open."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, clients: int, seed: int):
        self.session = session
        self.url = url
        self.model = model
        self.clients = clients
        self.seed = seed
        self.answers: list[Answer] = []
        """Those that nobody has taken yet."""
        self.ended: Counter[str] = Counter()
        self.in_flight = 0
        self._open = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to ask."""
        self._open.set()
        self._tasks = [asyncio.create_task(self._client(index)) for index in range(self.clients)]

    def pause(self) -> None:
        """Send no new request."""
        self._open.clear()

    def resume(self) -> None:
        """Send requests again."""
        self._open.set()

    async def stop(self) -> None:
        """End the clients, whatever they wait for."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def take(self) -> list[Answer]:
        """The answers that came since the last call."""
        taken, self.answers = self.answers, []
        return taken

    async def ask(self, kind: str, body: dict[str, Any], leave_after: int | None = None) -> Answer:
        """One request; with `leave_after` the client goes away after so many lines of a stream."""
        answer = Answer(kind, body, time.monotonic())
        self.in_flight += 1
        try:
            async with self.session.post(f"{self.url}/generate", json={"model": self.model, **body}) as reply:
                if reply.status != 200:
                    answer.error = f"{reply.status}: {(await reply.text())[:2000]}"
                elif body.get("stream"):
                    await self._read_stream(reply, answer, leave_after)
                else:
                    answer.choices = json.loads(await reply.read())
        except (aiohttp.ClientError, OSError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        finally:
            self.in_flight -= 1
        answer.ended = time.monotonic()
        return answer

    async def _read_stream(self, reply: aiohttp.ClientResponse, answer: Answer, leave_after: int | None) -> None:
        count = answer.body["sampling_params"].get("n", 1)
        choices: list[dict[str, Any]] = [{"output_ids": [], "meta_info": {}} for _ in range(count)]
        lines = 0
        async for line in reply.content:
            if leave_after is not None and lines >= leave_after:
                answer.left = True
                return
            if not line.startswith(b"data: {"):
                continue
            lines += 1
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                answer.error = str(event["error"])
                return
            choice = choices[event.get("index", 0)]
            choice["text"], choice["meta_info"] = event["text"], event["meta_info"]
            # The last event of an answer repeats its last token.
            if event["meta_info"]["completion_tokens"] > len(choice["output_ids"]):
                choice["output_ids"] += event["output_ids"]
        answer.choices = choices

    async def _client(self, index: int) -> None:
        rng = random.Random(f"{self.seed}/{index}")
        while True:
            await self._open.wait()
            answer = await self.ask(*draw_request(rng))
            self.answers.append(answer)
            self.ended["left" if answer.left else "error" if answer.error else finish(answer.choices[0])] += 1
            if answer.error:
                await asyncio.sleep(0.1)


def draw_request(rng: random.Random) -> tuple[str, dict[str, Any], int | None]:
    """A kind of request, its body, and after how many lines its client leaves."""
    params: dict[str, Any] = {"max_new_tokens": rng.choice((4, 12, 24, 48)), "ignore_eos": True, "temperature": 0}
    body: dict[str, Any] = {"input_ids": list(rng.choice(PROMPTS)), "sampling_params": params, "return_logprob": True}
    body["stream"] = rng.random() < 0.5
    kind = rng.choice(("greedy", "greedy", "seeded", "several", "penalties", "long", "grammar", "leaves", "random"))
    if kind == "seeded":
        params |= {"temperature": 0.9, "sampling_seed": rng.randrange(9), "top_p": rng.choice((1.0, 0.8))}
    elif kind == "several":
        params |= {"temperature": 1.0, "n": rng.choice((2, 3)), "top_k": rng.choice((-1, 20)), "sampling_seed": 3}
    elif kind == "penalties":
        params |= {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.3, "min_p": 0.01}
    elif kind == "long":
        body["input_ids"] = [rng.randrange(3, 49000) for _ in range(LONG)]
        params["max_new_tokens"] = 6
    elif kind == "grammar":
        params |= {"regex": REGEX, "temperature": 1.0, "ignore_eos": False, "max_new_tokens": 20}
    elif kind == "random":
        body["input_ids"] = [rng.randrange(3, 49000) for _ in range(rng.randrange(1, 60))]
        body["return_logprob"] = False
        params["temperature"] = 0.8
    elif kind == "leaves":
        body["stream"] = True
        params["max_new_tokens"] = 100
        return kind, body, rng.randrange(6)
    return kind, body, None


def finish(choice: dict[str, Any]) -> str:
    """The reason of the end of one answer."""
    reason = choice["meta_info"].get("finish_reason")
    return reason["type"] if isinstance(reason, dict) else str(reason)


def wrong(answer: Answer, may_abort: bool, may_fail: list[str]) -> str | None:
    """What is not permitted about an answer; None for one that is as it should be.

    Args:
        answer: of `Load`.
        may_abort: some call ended running requests while this one ran.
        may_fail: texts, one of which an error has to have.
    """
    if answer.left:
        return None
    if answer.error:
        return None if any(text in answer.error for text in may_fail) else f"ended with {answer.error}"
    params = answer.body["sampling_params"]
    if len(answer.choices) != params.get("n", 1):
        return f"has {len(answer.choices)} answers"
    for choice in answer.choices:
        reason, ids, limit = finish(choice), choice["output_ids"], params["max_new_tokens"]
        if reason == "abort" and may_abort and len(ids) <= limit:
            continue
        if answer.kind == "grammar":
            if reason not in ("stop", "length") or (reason == "stop" and not re.fullmatch(REGEX, choice["text"])):
                return f"does not follow its grammar: {choice}"
        elif reason != "length" or len(ids) != limit or choice["meta_info"]["completion_tokens"] != limit:
            return f"ended with {reason} after {len(ids)} of {limit} tokens: {choice}"
        if answer.body["return_logprob"] and not answer.body["stream"]:
            told = choice["meta_info"]["output_token_logprobs"]
            if [int(token) for _, token, *_ in told][: len(ids)] != ids:
                return f"has log-probabilities of other tokens: {choice}"
    return None
