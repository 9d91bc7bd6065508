"""The reload-forward transaction over all ranks: read, patch, warm, capture, then commit or undo."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from tokenspeed.runtime.distributed.channel import Ballot, Channel
from tokenspeed.runtime.execution.executor import Executor
from tokenspeed.runtime.execution.generation import Generation
from tokenspeed.runtime.execution.plans import Plans
from tokenspeed.runtime.protocol import Reload, reload_failure
from tokenspeed.runtime.reload.fault import Fault, describe
from tokenspeed.runtime.reload.reply import nothing_changed, overlay_note, success
from tokenspeed.runtime.scheduler.scheduler import Scheduler
from tokenspeed_kernel.jit import count_compiles
from tokenspeed_reload import Reloader, ReloadError, Report, Sources, Transaction, UnknownModules

VOTE_DEADLINE_S = 300.0
"""Longest that one phase may differ between two ranks."""

Result = TypeVar("Result")
Status = Callable[[str, Reload, str], None]
"""Called with the state, the call and a detail at every change."""


class PhaseFailed(Exception):
    """Some rank failed in a phase; every rank raises the same."""

    def __init__(self, phase: str, rank: int, fault: Fault):
        super().__init__(fault["error"])
        self.phase = str(fault.get("phase", phase))
        self.rank = rank
        self.fault = {name: value for name, value in fault.items() if name != "phase"}


class ForwardReload:
    """Runs one reload on this rank, in step with the others. The engine has drained before."""

    def __init__(
        self,
        reloader: Reloader,
        plans: Plans,
        executor: Executor,
        scheduler: Scheduler,
        channel: Channel,
        status: Status,
        weight_version: str,
    ):
        self.reloader = reloader
        self.plans = plans
        self.executor = executor
        self.scheduler = scheduler
        self.channel = channel
        self.status = status
        self.weight_version = weight_version

    @property
    def generation(self) -> int:
        """Number of the generation that serves."""
        return self.executor.generation.number

    def settle_early(self, call: Reload) -> dict[str, Any] | None:
        """Rank 0's look at the files before the drain: the reply where there is nothing to run, else None."""
        try:
            sources = self.reloader.read(call.modules)
        except UnknownModules as error:
            return reload_failure(call.id, "bad_request", "queue", str(error))
        except (ReloadError, OSError):
            return None  # the read phase will meet it again, and tell every rank
        if sources.modules or call.modules is not None:
            return None
        notes = overlay_note(self.reloader.strays())
        return nothing_changed(call.id, self.generation, self.reloader.looked_at(), sources.outside, notes)

    def run(self, call: Reload, drained_after: float) -> dict[str, Any]:
        """Apply the edit on every rank or on none, and return the reply."""
        started = time.perf_counter()
        attempt = _Attempt(self, call)
        try:
            with count_compiles() as jit:
                generation = attempt.apply()
        except PhaseFailed as error:
            self.status("undoing", call, error.phase)
            attempt.undo()
            return self._failed(call, error)
        self.status("committing", call, "")
        self.executor.install(generation)
        self.scheduler.reseed_cache(generation.number, self.weight_version)
        report = attempt.commit()
        report.notes.extend(overlay_note(self.reloader.strays()))
        total = time.perf_counter() - started + drained_after
        return success(call.id, report, generation, jit, {"drain": drained_after, **attempt.seconds, "total": total})

    def _failed(self, call: Reload, error: PhaseFailed) -> dict[str, Any]:
        place = f" ({error.fault['file']}:{error.fault['line']})" if error.fault["file"] else ""
        body = reload_failure(call.id, "failed", error.phase, str(error), rank=error.rank) | error.fault
        body["undone"] = True
        body["message"] = (
            f"failed in {error.phase} on rank {error.rank}: {error}{place}; "
            f"undone, generation {self.generation} serves on"
        )
        return body


class _Attempt:
    """One run through the phases."""

    def __init__(self, reload: ForwardReload, call: Reload):
        self.reload = reload
        self.call = call
        self.seconds: dict[str, float] = {}
        self._transaction: Transaction | None = None
        self._edited_files: dict[str, str] = {}
        self._own_files = {record.source.path for record in reload.reloader.records.modules.values()}

    def apply(self) -> Generation:
        """Go through read, patch, warm and graphs, with a vote after each.

        Raises:
            PhaseFailed: on every rank, when any rank failed.
        """
        reload = self.reload
        sources = self._phase("read", "reading", self._share_sources)
        edited = (*sources.modules.values(), *sources.unloaded.values())
        self._edited_files = {source.path: source.data.decode(errors="replace") for source in edited}
        self._own_files |= self._edited_files.keys()
        self._phase("patch", "patching", lambda: self._patch(sources))
        self._phase("warm", "warming", lambda: reload.executor.warm(self._progress("warming")))
        number = reload.generation + 1
        return self._phase("graphs", "graphs", lambda: reload.executor.capture(number, self._progress("graphs")))

    def undo(self) -> None:
        """Take back what this rank patched."""
        if self._transaction is not None:
            self._transaction.undo()

    def commit(self) -> Report:
        """Make the patch final and return its report."""
        assert self._transaction is not None
        self._transaction.commit()
        return self._transaction.report

    def _share_sources(self) -> Sources:
        """Rank 0 reads the files; every rank gets its bytes."""
        channel = self.reload.channel
        if channel.rank != 0:
            return msgspec.msgpack.decode(channel.broadcast(None), type=Sources)
        try:
            sources = self.reload.reloader.read(self.call.modules)
        except BaseException:
            channel.broadcast(msgspec.msgpack.encode(Sources()))
            raise
        if channel.size > 1:
            channel.broadcast(msgspec.msgpack.encode(sources))
        return sources

    def _patch(self, sources: Sources) -> None:
        self._transaction = self.reload.reloader.reload(self.call.modules, sources)
        self.reload.plans.make_anew()

    def _progress(self, state: str) -> Callable[[str], None]:
        return lambda detail: self.reload.status(state, self.call, detail)

    def _phase(self, phase: str, state: str, work: Callable[[], Result]) -> Result:
        """Do `work` on this rank, then hear how all ranks fared."""
        self.reload.status(state, self.call, "")
        started = time.perf_counter()
        fault: Fault | None = None
        result: Result | None = None
        try:
            result = work()
        # Edited code may raise anything, SystemExit and KeyboardInterrupt included: none may end the server.
        except BaseException as error:
            fault = describe(error, self._edited_files, self._own_files)
        channel = self.reload.channel
        ballot = Ballot(rank=channel.rank, seconds=time.perf_counter() - started, error=fault)
        verdict = channel.vote(ballot, VOTE_DEADLINE_S)
        self.seconds[phase] = verdict.seconds
        if verdict.failed is not None:
            assert verdict.failed.error is not None
            raise PhaseFailed(phase, verdict.failed.rank, verdict.failed.error)
        return result  # type: ignore[return-value]
