"""One run of a reload through its phases, on one rank: read, patch, warm, swap or capture, with a vote after each."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch

from tokenspeed.runtime.distributed.errors import culprit, is_victim
from tokenspeed.runtime.distributed.vote import Ballot, Vote
from tokenspeed.runtime.execution.dummies import Part, see_nothing
from tokenspeed.runtime.execution.generation import Generation
from tokenspeed.runtime.execution.graphs.base import BodyEdit, CannotSwap, CaptureError, EditedKernel
from tokenspeed.runtime.execution.swap import KernelSwap, prepare_swap
from tokenspeed.runtime.loader.kept import some_of
from tokenspeed.runtime.protocol.calls import Reload
from tokenspeed.runtime.reload.device import definition
from tokenspeed.runtime.reload.failures import NoTokens, NotUndone, PhaseFailed, WeightsWritten
from tokenspeed.runtime.reload.fault import describe
from tokenspeed.runtime.reload.finite import Observation
from tokenspeed_kernel.progress import PROGRESS
from tokenspeed_reload import Bodies, IncompleteUndo, NeedsRestart, ReloadError, Report, Sources, Transaction

if TYPE_CHECKING:
    from tokenspeed.runtime.reload.forward import ForwardReload

TOLD_AS = {"proof": "graphs"}
"""Phases that replies count as parts of others."""

Result = TypeVar("Result")


class Attempt:
    """One run through the phases."""

    def __init__(self, reload: ForwardReload, call: Reload):
        self.reload = reload
        self.call = call
        self.seconds: dict[str, float] = {}
        self.seen = Observation()
        self._checksum: int | None = None
        self._captured: Generation | None = None
        self.calls: dict[str, list[str]] = {}
        """Collectives that the edited code called, by phase."""
        self.swapped: int | None = None
        """Nodes of captured steps that got new code; None where the steps were captured anew."""
        self.why_recaptured: str | None = None
        self._swap: KernelSwap | None = None
        self._cannot_swap: str | None = None
        self._transaction: Transaction | None = None
        self._not_undone: list[str] = []
        self._edited_files: dict[str, str] = {}
        self._own_files = {record.source.path for record in reload.reloader.records.modules.values()}

    def apply(self) -> Generation:
        """Go through read, patch, warm and graphs, with a vote after each.

        Raises:
            PhaseFailed: on every rank, when any rank failed.
        """
        sources = self._phase("read", "reading", self._share_sources)
        edited = (*sources.modules.values(), *sources.unloaded.values())
        self._edited_files = {source.path: source.data.decode(errors="replace") for source in edited}
        self._own_files |= self._edited_files.keys()
        self._phase("patch", "patching", lambda: self._patch(sources), trial="patch")
        self._phase("warm", "warming", self._warm, trial="warm")
        self._captured = self._swapped() or self._recaptured()
        self._phase("proof", "graphs", self._prove, trial="proof")
        return self._captured

    def _swapped(self) -> Generation | None:
        """The graphs that serve, with the new code in them; None where some rank has to capture anew."""
        if self._swap is None or self.why_recaptured is not None:
            return None
        generation = self._phase("graphs", "graphs", self._apply_swap, trial="swap")
        if self.why_recaptured is not None:
            return None
        self.swapped = self._swap.num_nodes
        return generation

    def _recaptured(self) -> Generation:
        # A recorder runs what it records, a GPU does not.
        runs = self.reload.world.device.type != "cuda"
        return self._phase("graphs", "graphs", self._capture, trial="graphs", runs=runs)

    def undo(self) -> None:
        """Take back what this rank patched, and drop the connections that the edited code has used.

        Raises:
            NotUndone: on every rank, where some rank could not restore something and must not serve on.
        """
        self._captured = None  # before the communicators that its graphs hold
        self.seen = Observation()  # which is on the device
        try:
            self._drop_swap()
        except CaptureError as error:
            self._not_undone = [str(error)]
        if self._transaction is not None:
            try:
                self._transaction.undo()
            except IncompleteUndo as error:
                self._not_undone += error.errors
        if "patch" in self.seconds:
            self.reload.world.renew_spare()
            self.reload.device.regain()
            self._not_undone += self._written_to()
        rank, why = self.reload.channel.rank, "; ".join(dict.fromkeys(self._not_undone))
        verdict = Vote(self.reload.channel).cast(Ballot(rank=rank, error={"error": why} if why else None))
        told = [str(ballot.error["error"]) for ballot in verdict.ballots if ballot.error is not None]
        if told:
            raise NotUndone(told)

    def _written_to(self) -> list[str]:
        """A clause where the edited code has written to weights: no undo brings those back, but a new start does."""
        if self.reload.kept is None:
            return []
        try:
            written = self.reload.kept.written()
        except torch.OutOfMemoryError:
            return ["there is no memory left to see whether it has written to weights"]
        except RuntimeError:
            return []  # the device has failed, as the next step will tell
        return [f"it has written to {some_of(written)}"] if written else []

    def commit(self) -> Report:
        """Make the patch final and return its report."""
        assert self._transaction is not None
        if self._swap is not None:
            self._swap.keep()
            self._swap = None
        self._transaction.commit()
        report = self._transaction.report
        report.bodies = Bodies()  # it holds what was compiled before
        return report

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
        reload, refused = self.reload, dict[str, str]()
        try:
            self._transaction = reload.reloader.reload(
                self.call.modules,
                sources,
                settle=lambda: refused.update(reload.plans.make_anew()),
                progress=mark_patch,
            )
        except ReloadError as error:
            self._not_undone = error.not_undone
            raise
        reload.executor.synchronize()  # plans may have launched something
        self._transaction.report.needs_restart.extend(NeedsRestart(*item) for item in refused.items())

    def _warm(self) -> None:
        """Run the edited code. What captured steps need of it is compiled first, since several compile at once."""
        executor = self.reload.executor
        self._prepare_swap()
        # A collective would be waited for on the host, which the watch over its ranks does not expect.
        with self.reload.device.watched() if self.reload.world.size == 1 else nullcontext():
            executor.warm(self._progress("warming"), self._look)
        # What the device finds wrong is a fault of this phase.
        executor.synchronize()
        self._check_finite()

    def _look(self, part: Part, computed: torch.Tensor) -> None:
        """Take logits and sampled ids into the checksum: every rank samples for itself, so they must be alike."""
        if self.reload.finiteness is not None:
            self.seen.look(part, computed)
        if part.what == "ids":
            self._check_ids(computed)
        if self.reload.world.size > 1 and part.what != "hidden states":
            data = computed.contiguous().view(torch.uint8).cpu().numpy().tobytes()
            self._checksum = zlib.crc32(data, self._checksum or 0)

    def _check_ids(self, token_ids: torch.Tensor) -> None:
        executor = self.reload.executor
        vocab = executor.logits.shape[1]
        if bool(((token_ids < 0) | (token_ids >= vocab)).any()):
            sentence = f"the sampler gives ids that are no tokens: there are {vocab}, counted from 0"
            raise NoTokens(sentence, definition(type(executor.sampler).__call__))

    def _check_finite(self) -> None:
        if self.reload.finiteness is not None:
            self.seen.check(self.reload.finiteness, self.reload.executor)

    def _prepare_swap(self) -> None:
        assert self._transaction is not None
        report, generation = self._transaction.report, self.reload.executor.generation
        if not (generation.decode or generation.prefill):
            return
        beyond = [*report.bodies.beyond, *(f"{effect.module}: {effect.what}" for effect in report.effects)]
        kernels = [EditedKernel(changed.name, changed.kernel, changed.before) for changed in report.bodies.kernels]
        try:
            if beyond:
                raise CannotSwap(beyond[0])
            self._swap = prepare_swap(self.reload.executor, BodyEdit(report.bodies.functions, kernels))
        except CannotSwap as error:
            self._cannot_swap = str(error)

    def _apply_swap(self) -> Generation | None:
        assert self._swap is not None
        try:
            return self._swap.apply(self.reload.generation + 1)
        except (CannotSwap, CaptureError) as error:  # or the driver refuses
            self._cannot_swap = str(error)
            return None

    def _drop_swap(self) -> None:
        """Put back what captured steps ran before. Raises CaptureError where the driver refuses."""
        if self._swap is not None:
            self._swap.undo()
            self._swap = None

    def _capture(self) -> Generation:
        self._drop_swap()
        return self.reload.executor.capture(self.reload.generation + 1, self._progress("graphs"))

    def _prove(self) -> None:
        """Replay the largest steps: a capture on a GPU computes nothing, and what fails must not wait for requests."""
        assert self._captured is not None
        executor = self.reload.executor
        executor.replay_largest(self._captured, self.seen.look if self.reload.finiteness is not None else see_nothing)
        executor.synchronize()
        self._check_finite()
        for clause in self._written_to():
            raise WeightsWritten(f"{clause}, which no undo takes back")

    def _progress(self, state: str) -> Callable[[str], None]:
        def progress(detail: str) -> None:
            PROGRESS.step(f"{state} {detail}")
            self.reload.status(state, self.call, detail)

        return progress

    def _phase(
        self, phase: str, state: str, work: Callable[[], Result], *, trial: str | None = None, runs: bool = True
    ) -> Result:
        """Do `work` on this rank, then hear how all ranks fared.

        Args:
            trial: the name under which collectives of the work are known, which calls edited code: they go over the
                spare communicator.
            runs: False where it only captures them.
        """
        self.reload.status(state, self.call, "")
        PROGRESS.step(state)
        rank, group = self.reload.channel.rank, self.reload.world.group
        vote = Vote(self.reload.channel)
        started = time.perf_counter()
        ballot = Ballot(rank=rank)
        result: Result | None = None
        try:
            with group.trial(trial, vote, runs=runs) if trial is not None else nullcontext() as calls:
                result = work()
        # Edited code may raise anything, SystemExit and KeyboardInterrupt included: none may end the server.
        except BaseException as error:
            fault = describe(error, self._edited_files, self._own_files)
            ballot = Ballot(
                rank=rank,
                error=fault,
                is_victim=is_victim(error, rank),
                culprit=culprit(error),
                device_lost=self.reload.device.is_lost(error),
            )
        else:
            ballot = Ballot(rank=rank, recapture=self._cannot_swap)
            if calls is not None and trial is not None:
                self.calls[trial] = calls.made
                ballot = msgspec.structs.replace(
                    ballot,
                    collectives=len(calls.made),
                    calls=calls.checksum,
                    like_before=calls.like_before,
                    checksum=self._checksum,
                )
        verdict = vote.cast(msgspec.structs.replace(ballot, seconds=time.perf_counter() - started))
        phase = TOLD_AS.get(phase, phase)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + verdict.seconds
        self.why_recaptured = verdict.recapture
        failure = PhaseFailed.of(verdict, phase)
        if failure is not None:
            del result  # the traceback would keep graphs that hold the communicator
            raise failure
        return result  # type: ignore[return-value]


def mark_patch(what: str) -> None:
    """Count a part of the patch, and give the thread that tells of it a turn, which a reload hardly does."""
    PROGRESS.launch(what)
    time.sleep(0)
