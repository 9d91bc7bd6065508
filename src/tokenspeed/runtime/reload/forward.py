"""The reload-forward transaction over all ranks: read, patch, warm, swap or capture, then commit or undo."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tokenspeed.runtime.distributed.channel import Channel
from tokenspeed.runtime.distributed.vote import Ballot, Vote
from tokenspeed.runtime.distributed.world import World
from tokenspeed.runtime.execution.executor import Executor
from tokenspeed.runtime.execution.plans import Plans
from tokenspeed.runtime.loader.kept import KeptWeights
from tokenspeed.runtime.protocol.calls import Reload
from tokenspeed.runtime.protocol.refusals import reload_failure
from tokenspeed.runtime.protocol.reports import CallReply
from tokenspeed.runtime.reload.attempt import Attempt
from tokenspeed.runtime.reload.committed import CommittedCode
from tokenspeed.runtime.reload.device import TrialDevice
from tokenspeed.runtime.reload.failures import CostRanks, PhaseFailed
from tokenspeed.runtime.reload.finite import Finiteness
from tokenspeed.runtime.reload.reply import nothing_changed, overlay_note, success
from tokenspeed.runtime.scheduler.scheduler import Scheduler
from tokenspeed_kernel.jit import count_compiles
from tokenspeed_kernel.tactics import TACTICS
from tokenspeed_reload import Reloader, ReloadError, UnknownModules

Status = Callable[[str, Reload, str], None]
"""Called with the state, the call and a detail at every change."""


class ForwardReload:
    """Runs one reload on this rank, in step with the others. No step is in flight; requests may be held."""

    def __init__(
        self,
        reloader: Reloader,
        code: CommittedCode,
        plans: Plans,
        executor: Executor,
        scheduler: Scheduler,
        channel: Channel,
        world: World,
        status: Status,
        weight_version: str,
        finiteness: Finiteness | None,
        kept: KeptWeights | None = None,
    ):
        self.reloader = reloader
        self.code = code
        self.plans = plans
        self.executor = executor
        self.scheduler = scheduler
        self.channel = channel
        self.world = world
        self.status = status
        self.weight_version = weight_version
        self.kept = kept
        self.finiteness = finiteness
        """What the dummy steps of the serving code gave; None where nobody is to compare."""
        self.device = TrialDevice(executor)
        self._told_strays: frozenset[str] = frozenset()

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
        notes = [*overlay_note(self.reloader.strays()), *sources.notes()]
        return nothing_changed(call.id, self.generation, self.reloader.looked_at(), sources.outside, notes)

    def run(self, call: Reload, drained_after: float) -> dict[str, Any]:
        """Apply the edit on every rank or on none, and return the reply.

        Raises:
            CostRanks: the edit was not applied, and this rank, or another one, cannot go on.
        """
        started = time.perf_counter()
        if not self._has_spare():
            message = f"no spare communicator can be made ({self.world.why_no_spare}); nothing was changed, try again"
            return reload_failure(call.id, "failed", "queue", message)
        attempt = Attempt(self, call)
        self.executor.note_kernels()
        TACTICS.look_again()
        self.device.begin()
        try:
            with count_compiles() as jit:
                generation = attempt.apply()
        except PhaseFailed as error:
            self.status("undoing", call, error.phase)
            if error.device_lost:
                raise CostRanks(self._failed(call, error)) from None
            self.executor.note_kernels()
            attempt.undo()
            TACTICS.look_again()
            self.executor.unload_kernels()
            return self._failed(call, error)
        self.status("committing", call, "")
        self.executor.install(generation)
        if attempt.swapped is None:
            self.world.group.promote(attempt.calls)
        else:
            self.world.group.remember(attempt.calls)
        # What running requests hold was computed by the old code.
        kept = self.scheduler.recompute_running()
        self.scheduler.reseed_cache(generation.number, self.weight_version)
        report = attempt.commit()
        self.executor.unload_kernels()
        if self.finiteness is not None:
            self.finiteness.accept(attempt.seen)
        self.device.commit()
        if kept:
            report.notes.append(
                f"{kept} running request(s) were kept; the new code computes their prompts and answers anew"
            )
        report.notes.extend(TACTICS.lost())
        strays = self.reloader.strays()
        report.notes.extend(overlay_note([file for file in strays if file not in self._told_strays]))
        self._told_strays = frozenset(strays)
        total = time.perf_counter() - started + drained_after
        seconds = {"drain": drained_after, **attempt.seconds, "total": total}
        body = success(call.id, report, generation, jit, seconds, attempt.swapped, attempt.why_recaptured)
        self.code.tell(CallReply(call=call.call, body=body))
        return body

    def _has_spare(self) -> bool:
        """Whether every rank has the communicators of a trial, made now where one lacks them; alike on all ranks."""
        if self._all_have_spare():
            return True
        self.world.renew_spare()
        return self._all_have_spare()

    def _all_have_spare(self) -> bool:
        why = self.world.why_no_spare
        ballot = Ballot(rank=self.channel.rank, error=None if why is None else {"error": why})
        return Vote(self.channel).cast(ballot).failed is None

    def _failed(self, call: Reload, error: PhaseFailed) -> dict[str, Any]:
        place = f" ({error.fault['file']}:{error.fault['line']})" if error.fault["file"] else ""
        body = reload_failure(call.id, "failed", error.phase, str(error), rank=error.rank) | error.fault
        body["undone"] = True
        number = self.generation
        rest = f"the ranks are replaced and serve generation {number} on" if error.device_lost else ""
        rest = rest or f"generation {number} serves on"
        body["message"] = f"failed in {error.phase} on rank {error.rank}: {error}{place}; undone, {rest}"
        return body
