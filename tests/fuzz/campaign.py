"""Edits against a running server under load: what each has to leave behind, and how to make a finding again."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import aiohttp

from tests.e2e.harness import Server
from tests.fuzz.calls import Calls, Reply, draw_way
from tests.fuzz.faults import not_finite
from tests.fuzz.load import PROMPTS, Answer, Load, finish, wrong
from tests.fuzz.program import Edit, Kinds, Numbers, Program
from tests.fuzz.result import Result, Step
from tests.fuzz.sources import overlay_path
from tests.fuzz.usage import usage

Probe = str
"""What the probes were answered, as JSON, so that equal means equal in every bit."""

PROBES: tuple[dict[str, Any], ...] = (
    *({"input_ids": list(ids), "sampling_params": {"max_new_tokens": 12, "temperature": 0}} for ids in PROMPTS),
    {
        "input_ids": list(PROMPTS[0]),
        "sampling_params": {
            "max_new_tokens": 12, "temperature": 0.8, "sampling_seed": 4, "top_p": 0.9,
            "presence_penalty": 0.5, "repetition_penalty": 1.2,
        },
    },
)  # fmt: skip
"""Asked one after the other, alone, with an empty prefix cache."""


class Finding(AssertionError):
    """Something that must not happen, at edit `number`."""

    def __init__(self, report: str, number: int):
        super().__init__(report)
        self.number = number


@dataclass(frozen=True)
class Settings:
    """One campaign."""

    seed: int
    model: str
    flags: tuple[str, ...] = ()
    kinds: Kinds = field(default_factory=Kinds)
    first: int = 0
    count: int = 50
    clients: int = 5
    limit_s: float = 180.0
    """What takes longer hangs."""
    fresh_every: int = 0
    """Compare with a server that starts with the same files after so many commits; 0: never."""


class Campaign:
    """Runs the edits of a seed against a server that it starts."""

    def __init__(
        self, settings: Settings, folder: Path, tell: Callable[[str], None] = print, result: Result | None = None
    ):
        self.settings = settings
        self.folder = folder
        self.tell = tell
        self.result = Result() if result is None else result
        self.server = Server(settings.model, *settings.flags, overlay=folder / "overlay", log=folder / "log")
        self._known: dict[Numbers, Probe] = {}
        self._last: Probe = ""
        self._failing: list[tuple[float, float, str]] = []
        """From when to when requests may end with which error."""
        self._commits = 0
        self._continued: list[tuple[Answer, int]] = []
        """Answers of two codes, each with the first token that the old one did not give."""

    def run(self) -> Result:
        """All edits; raises a `Finding` at the first thing that must not happen."""
        settings = self.settings
        edits = Program(settings.seed, settings.kinds).edits()
        edits = islice(edits, settings.first, settings.first + settings.count)
        first = next(edits)
        assert self.server.overlay is not None
        self.server.overlay.mkdir(parents=True, exist_ok=True)
        first.before.write(self.server.overlay)
        self.server.start()
        try:
            asyncio.run(self._run(chain([first], edits)))
        finally:
            self.server.stop()
        return self.result

    async def _run(self, edits: Iterable[Edit]) -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            self.calls = Calls(session, self.server.control_url, self.settings.limit_s)
            self.load = Load(session, self.server.url, self.server.served, self.settings.clients, self.settings.seed)
            self._last = await self._probe()
            self.load.start()
            try:
                for edit in edits:
                    await self._try(edit)
            finally:
                await self.load.stop()

    async def _try(self, edit: Edit) -> None:
        rng = random.Random(f"{self.settings.seed}/{edit.number}/call")
        way = draw_way(rng)
        replies: list[Reply] = []
        try:
            await self._one(edit, way, rng, replies)
        except (AssertionError, TimeoutError, aiohttp.ClientError, ValueError, KeyError) as error:
            raise Finding(self._report(edit, way, replies, error), edit.number) from error

    async def _one(self, edit: Edit, way: str, rng: random.Random, replies: list[Reply]) -> None:
        assert self.server.overlay is not None
        last = self._last
        generation = (await self.calls.loads())["generation"]
        await self._until(lambda: self.load.in_flight > 0, "no request arrives")
        await asyncio.sleep(rng.random() * 0.2)
        edit.during.write(self.server.overlay)
        started = time.monotonic()
        replies += await self.calls.send(way, edit, rng)
        seconds = time.monotonic() - started
        committed = self._check_reply(edit, replies, generation)
        if edit.fault is not None and edit.fault.serves and committed:
            self._failing.append((started, float("inf"), edit.fault.serves))
        await self._served(3)
        await self._idle(edit)
        self._last = await self._probe()
        if not committed:
            _same(last, self._last, "probes after the undo")
        elif edit.numbers is not None:
            known = self._known.setdefault(edit.numbers, self._last)
            _same(known, self._last, "probes of the same code")
        self._check_answers([last, self._last], committed)
        await self._check_continued()
        reply = replies[-1]
        step = Step(edit.number, edit.kind, way, edit.expect, committed, round(seconds, 3), mode=reply["mode"])
        if committed:
            how = next(one["graphs"]["how"] for one in replies if one["success"] and one["modules"])
            step.came = "eager" if how == "none" else how
        else:
            step.phase, step.rank = reply.get("phase") or "", reply.get("rank")
            step.came = "not finite" if not_finite.MARK in reply["error"] else "failed"
        self.result.steps.append(step)
        self.result.usages.append(usage(self.server))
        self.tell(f"{edit.number:>5} {step.came:<10} {seconds:6.2f} s  {way}: {edit.kind}")
        await self._settle(edit, committed, last, rng)
        self._commits += committed
        if committed and self.settings.fresh_every and self._commits % self.settings.fresh_every == 0:
            await self._compare_with_a_fresh_server(edit)
        self.load.resume()

    async def _settle(self, edit: Edit, committed: bool, last: Probe, rng: random.Random) -> None:
        """Bring the overlay to what the next edit begins with."""
        assert self.server.overlay is not None
        draw = rng.random()
        if not committed and draw < 0.2:
            again = await self.calls.reload()
            assert not again["success"], f"the same edit was taken at the second time: {again}"
        edit.after.write(self.server.overlay)
        as_it_serves = edit.after == (edit.during if committed else edit.before)
        if as_it_serves and draw < 0.4:
            nothing = await self.calls.reload()
            assert nothing["success"] and not nothing["modules"], f"something is left to reload: {nothing}"
        if not as_it_serves:
            reply = await self.calls.reload()
            assert reply["success"] and reply["modules"], f"the edit cannot be taken back: {reply}"
            self._failing = [(a, min(b, time.monotonic()), text) for a, b, text in self._failing]
            self._last = await self._probe()
            _same(last, self._last, "probes after the edit was taken back")

    def _check_reply(self, edit: Edit, replies: list[Reply], generation: int) -> bool:
        reply, fault = replies[-1], edit.fault
        committed = bool(reply["success"])
        assert edit.expect in ("either", "commit" if committed else "fail"), "the edit must not have this outcome"
        if committed:
            assert any(one["success"] and one["modules"] for one in replies), "no module was reloaded"
            assert reply["stale"] == [], "something stale is left"
            return True
        assert (reply["code"], reply.get("undone")) in (("failed", True), ("failed", None)), (
            "not a failure that is undone"
        )
        if fault is not None and fault.phases:
            assert reply["phase"] in fault.phases, f"failed in {reply['phase']}, not in one of {fault.phases}"
            assert fault.mark in reply["error"], f"the error does not tell {fault.mark}"
            assert fault.rank is None or reply["rank"] == fault.rank, f"rank {fault.rank} failed"
            if fault.module:
                assert self.server.overlay is not None
                path = str(overlay_path(self.server.overlay, fault.module))
                assert reply["file"] == path, f"the failure is in {path}"
        return False

    async def _probe(self) -> Probe:
        await self.calls.control("POST", "/flush_cache")
        told = []
        for body in PROBES:
            params = {**body["sampling_params"], "ignore_eos": True}
            async with asyncio.timeout(self.settings.limit_s):
                answer = await self.load.ask("probe", {**body, "sampling_params": params, "return_logprob": True})
            assert not answer.error, f"a probe ended with {answer.error}"
            (choice,) = answer.choices
            meta = choice["meta_info"]
            assert finish(choice) == "length" and len(choice["output_ids"]) == 12, f"a probe ended early: {choice}"
            # The last probe has the first one's prompt, which is shorter than a block.
            assert meta["cached_tokens"] == 0, f"a probe found {meta['cached_tokens']} tokens in the prefix cache"
            told.append([choice["output_ids"], meta["output_token_logprobs"]])
        return json.dumps(told)

    async def _served(self, count: int) -> None:
        """Wait until so many more requests have ended."""
        wanted = len(self.load.answers) + count
        await self._until(lambda: len(self.load.answers) >= wanted, "requests do not end")

    async def _idle(self, edit: Edit) -> None:
        """Let all requests end, and look at what is left of them."""
        self.load.pause()
        await self._until(lambda: self.load.in_flight == 0, "requests do not end")
        deadline = time.monotonic() + self.settings.limit_s
        while True:
            loads = await self.calls.loads()
            left = {name: loads[name] for name in ("running", "waiting", "used_blocks", "paused") if loads[name]}
            if not left:
                break
            assert time.monotonic() < deadline, f"an idle server has {left}"
            await asyncio.sleep(0.05)
        status = await self.calls.control("GET", "/reload_status")
        assert status["state"] == "idle", f"the reload is over, and its state {status}"

    def _check_answers(self, probes: list[Probe], committed: bool) -> None:
        expected = [json.loads(probe) for probe in probes]
        for answer in self.load.take():
            span = answer.started, answer.ended
            may_abort = any(begin <= span[1] and end >= span[0] for begin, end in self.calls.aborted)
            may_fail = [text for begin, end, text in self._failing if begin <= span[1] and end >= span[0]]
            problem = wrong(answer, may_abort, may_fail)
            assert problem is None, f"a request ({answer.kind}) {problem}; it was {answer.body}"
            self.result.requests["left" if answer.left else "error" if answer.error else finish(answer.choices[0])] += 1
            if answer.kind == "greedy" and not answer.body["stream"] and not answer.error:
                kept = any(begin <= span[1] and end >= span[0] for begin, end in self.calls.kept)
                self._compare(answer, expected, may_change=kept and committed)
        del self.calls.aborted[:-4], self.calls.kept[:-4]

    def _compare(self, answer: Answer, expected: list[Any], may_change: bool) -> None:
        """A greedy answer under load is that of the code before or after the edit, or begun by one and ended by the
        other where running requests were kept.

        A batch may add in another order, so that of two tokens with nearly equal scores the other one is taken.
        """
        index = PROMPTS.index(tuple(answer.body["input_ids"]))
        told = _tokens(answer)
        wanted = [list(zip(ids, [logprob for logprob, *_ in logprobs], strict=True)) for ids, logprobs in
                  (probe[index] for probe in expected)]  # fmt: skip
        if any(_differ_at(told, want) is None for want in wanted):
            self.result.compared += 1
            return
        assert may_change, f"a greedy answer under load is neither the old code's nor the new one's: {told} {expected}"
        self._continued.append((answer, _differ_at(told, wanted[0]) or 0))

    async def _check_continued(self) -> None:
        """What the new code added to an answer of the old one is what it adds to it as a prompt."""
        continued, self._continued = self._continued, []
        for answer, at in continued[:2]:
            told = _tokens(answer)
            body = {
                "input_ids": [*answer.body["input_ids"], *(token for token, _ in told[:at])],
                "sampling_params": {"max_new_tokens": len(told) - at, "temperature": 0, "ignore_eos": True},
                "return_logprob": True,
            }
            async with asyncio.timeout(self.settings.limit_s):
                again = await self.load.ask("continued", body)
            assert not again.error, f"a kept answer cannot be continued: {again.error}"
            assert _differ_at(told[at:], _tokens(again)) is None, (
                f"a kept answer goes on from token {at} as neither code would: {told} {_tokens(again)}"
            )
            self.result.continued += 1

    async def _until(self, condition: Callable[[], bool], problem: str) -> None:
        deadline = time.monotonic() + self.settings.limit_s
        while not condition():
            assert self.server.process.poll() is None, f"the server ended with {self.server.process.returncode}"
            assert time.monotonic() < deadline, f"{problem} within {self.settings.limit_s:g} s"
            await asyncio.sleep(0.01)

    async def _compare_with_a_fresh_server(self, edit: Edit) -> None:
        """A server that starts with the files as they are answers the same."""
        with tempfile.TemporaryDirectory() as scratch:
            overlay = Path(scratch, "overlay")
            assert self.server.overlay is not None
            shutil.copytree(self.server.overlay, overlay)
            fresh = Server(self.settings.model, *self.settings.flags, overlay=overlay, log=Path(scratch, "log"))
            try:
                await asyncio.to_thread(fresh.start)
                own = self.calls, self.load
                session = self.load.session
                self.calls = Calls(session, fresh.control_url, self.settings.limit_s)
                self.load = Load(session, fresh.url, fresh.served, 0, 0)
                try:
                    answered = await self._probe()
                finally:
                    self.calls, self.load = own
            finally:
                await asyncio.to_thread(fresh.stop)
        self.result.fresh += 1
        _same(answered, self._last, "probes of a fresh server and of this one")

    def _report(self, edit: Edit, way: str, replies: list[Reply], error: BaseException) -> str:
        seed = self.settings.seed
        is_hang = isinstance(error, TimeoutError) or " within " in str(error)
        alive = self.server.process.poll() is None
        log = self.server.stacks() if is_hang and alive else self.server.output()
        return "\n".join(
            [
                f"edit {edit.number} of seed {seed} ({edit.kind}; {way}): {str(error) or type(error).__name__}",
                f"again with: --seed {seed} --first {edit.number} --count 1",
                "---- the edit ----",
                edit.diff()[:6000],
                "---- the replies ----",
                *(json.dumps(reply, indent=1)[:4000] for reply in replies),
                "---- the server's log ----",
                *log.splitlines()[-80:],
            ]
        )


def _same(first: Probe, second: Probe, what: str) -> None:
    """Refuse probes that differ, with the first that does."""
    for index, (one, other) in enumerate(zip(json.loads(first), json.loads(second), strict=True)):
        # As text: NaN equals itself there.
        assert json.dumps(one) == json.dumps(other), f"{what} differ, first number {index}:\n{one}\n{other}"


def _tokens(answer: Answer) -> list[tuple[int, float | None]]:
    """Each token of an answer with its log-probability."""
    return [(int(token), value) for value, token, *_ in answer.choices[0]["meta_info"]["output_token_logprobs"]]


def _differ_at(told: list[tuple[int, float | None]], wanted: list[tuple[int, float | None]]) -> int | None:
    """The first token at which two answers are of different codes; None where one code may have given both."""
    for index, ((token, value), (want, want_value)) in enumerate(zip(told, wanted, strict=False)):
        if value is None or want_value is None:
            return None
        if abs(value - want_value) > 0.01:
            return index
        if token != want:
            return None
    return None
