"""Profiles of the running engine: every rank records its own steps."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import record_function

from tokenspeed.errors import TokenSpeedError, cause_of
from tokenspeed.runtime.distributed.channel import Channel
from tokenspeed.runtime.distributed.vote import Ballot, Vote
from tokenspeed.runtime.engine.outbox import Outbox
from tokenspeed.runtime.engine.recording import Recording
from tokenspeed.runtime.protocol.calls import ControlCall, ProfileActivity, StartProfile, StopProfile
from tokenspeed.runtime.scheduler.batch import Batch

log = logging.getLogger(__name__)

WRITING_DEADLINE_S = 600.0
"""Longest that one rank may need to write its files while the others wait."""

STAGES = ("prefill", "decode")


class Profile:
    """One profile on one rank: which steps it records, and into which files.

    By stage, each stage has a recording and a count of its own. A prefill recording ends early when the first
    decode step comes, since the next prefill may be long in coming; a decode recording is never cut short.

    What to record when depends on the steps alone and is alike on every rank. A fault in recording is this
    rank's own: it is kept in `fault`, and the count goes on.
    """

    def __init__(self, call: StartProfile, activities: tuple[ProfileActivity, ...], rank: int):
        self.call = call
        self.activities = activities
        self.rank = rank
        self.files: list[Path] = []
        self.fault = ""
        self._stage: str | None = None
        """Stage that is recorded now, "" for all; None while nothing is recorded."""
        self._num_steps = 0
        self._ended: set[str] = set()
        self._recording: Recording | None = None

    def open(self, next_step: int) -> None:
        """Make the directory, and begin to record if the next step is to be recorded."""
        self._try(self._make_directory)
        if not self.call.profile_by_stage and next_step >= self.call.start_step:
            self._begin("")

    def before(self, step: int, stage: str) -> None:
        """The step of this number is about to run."""
        if step < self.call.start_step:
            return
        wanted = stage if self.call.profile_by_stage else ""
        if self._stage is None and wanted not in self._ended:
            self._begin(wanted)
        elif (self._stage, wanted) == STAGES and wanted not in self._ended:
            self.close()
            self._begin(wanted)

    def after(self, stage: str) -> bool:
        """The step has run; whether the profile is over by its count."""
        if self._stage is None or self._stage not in ("", stage):
            return False
        self._num_steps += 1
        if self._num_steps != self.call.num_steps:
            return False
        self.close()
        return not self.call.profile_by_stage or self._ended.issuperset(STAGES)

    def close(self) -> None:
        """Write the files of the recording that runs, if one does."""
        if self._stage is not None:
            self._ended.add(self._stage)
            self._stage = None
        if self._recording is not None:
            recording, self._recording = self._recording, None
            self._try(lambda: self.files.extend(recording.stop()))

    def discard(self) -> None:
        """End without files."""
        if self._recording is not None:
            self._recording.discard()

    def _begin(self, stage: str) -> None:
        self._stage, self._num_steps = stage, 0
        if self.fault:
            return
        name = f"{self.call.profile_id}-TP{self.rank}" + (f"-{stage}" if stage else "")
        recording = Recording(self.call, self.activities, name)
        if self._try(recording.start):
            self._recording = recording

    def _make_directory(self) -> None:
        directory = Path(self.call.output_dir)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TokenSpeedError(f"output_dir {directory} cannot be made ({error.strerror}); give another") from error
        if not os.access(directory, os.W_OK | os.X_OK):
            raise TokenSpeedError(f"output_dir {directory} cannot be written to; give another")

    def _try(self, work: Callable[[], object]) -> bool:
        try:
            work()
        except TokenSpeedError as error:
            self.fault = self.fault or str(error)
        except Exception as error:
            log.exception("recording for profile %s failed", self.call.profile_id)
            self.fault = self.fault or cause_of(error)
        else:
            return True
        return False


class Profiler:
    """Starts and stops the profile of this rank in step with the other ranks, and shows it every step.

    A call is answered when all ranks have carried it out. No fault in a profile ends the server.
    """

    def __init__(self, channel: Channel, outbox: Outbox, device_type: str):
        self.channel = channel
        self.outbox = outbox
        self.device_type = device_type
        self._steps = 0
        self._profile: Profile | None = None
        self._label: record_function | None = None
        self._last = ""

    def start(self, call: StartProfile) -> None:
        """Answer `StartProfile`."""
        refusal = self._refusal(call)
        if refusal is not None:
            self._reply(call, refusal)
            return
        activities = call.activities or (("CPU", "GPU") if self.device_type == "cuda" else ("CPU",))
        profile = Profile(call, activities, self.channel.rank)
        profile.open(self._steps + 1)
        fault = self._fault_anywhere(profile)
        if fault is not None:
            profile.discard()
            self._reply(call, fault)
            return
        self._profile = profile
        message = f"profile {call.profile_id} of {', '.join(activities)} has started, files go to {call.output_dir}"
        self._reply(call, message, success=True, profile_id=call.profile_id, step=self._steps)

    def stop(self, call: StopProfile) -> None:
        """Answer `StopProfile`."""
        profile, self._profile = self._profile, None
        if profile is None:
            self._reply(call, f"no profile is running{self._last}; start one with start_profile")
            return
        profile.close()
        fault = self._fault_anywhere(profile)
        if fault is not None:
            self._reply(call, fault)
            return
        files = self._files(profile)
        message = f"wrote {', '.join(files)}" if files else "nothing was recorded to a file"
        self._reply(call, f"profile {profile.call.profile_id} has ended: {message}", success=True, files=files)

    def before(self, batch: Batch) -> None:
        """A step of the model is about to run."""
        self._steps += 1
        if self._profile is None:
            return
        stage = _stage(batch)
        self._profile.before(self._steps, stage)
        self._label = record_function(f"step {self._steps}: {stage}, {len(batch.rows)} rows, {batch.num_tokens} tokens")
        self._label.__enter__()

    def after(self, batch: Batch) -> None:
        """That step has run, or failed."""
        label, self._label = self._label, None
        if label is not None:
            label.__exit__(None, None, None)
        profile = self._profile
        if profile is not None and profile.after(_stage(batch)):
            self._profile = None
            outcome = f"failed: {profile.fault}" if profile.fault else f"wrote to {profile.call.output_dir}"
            self._last = f" (the last one, {profile.call.profile_id}, ended by itself and {outcome})"
            log.info("profile %s ended by itself and %s", profile.call.profile_id, outcome)

    def _refusal(self, call: StartProfile) -> str | None:
        """Why this call cannot be served, alike on every rank."""
        if self._profile is not None:
            return f"profile {self._profile.call.profile_id} is running; end it with stop_profile first"
        needs_cuda = [activity for activity in call.activities if activity != "CPU"]
        if needs_cuda and self.device_type != "cuda":
            names = ", ".join(needs_cuda)
            return f"{names} needs a CUDA device, and this server runs on a {self.device_type}; use activity CPU"
        if call.profile_by_stage and call.num_steps is None:
            return "profile_by_stage needs num_steps, the number of steps to record of each stage"
        return None

    def _fault_anywhere(self, profile: Profile) -> str | None:
        """Hear how all ranks fared: the first failure as a sentence, alike on every rank."""
        error = {"error": profile.fault} if profile.fault else None
        failed = Vote(self.channel).cast(Ballot(rank=self.channel.rank, error=error), WRITING_DEADLINE_S).failed
        if failed is None or failed.error is None:
            return None
        return f"the profile failed on rank {failed.rank}: {failed.error['error']}"

    def _files(self, profile: Profile) -> list[str]:
        """The files of all ranks, which have the same names but for the rank."""
        prefix = f"{profile.call.profile_id}-TP"
        here = f"{prefix}{self.channel.rank}"
        return [
            str(path.with_name(path.name.replace(here, f"{prefix}{rank}", 1)))
            for rank in range(self.channel.size)
            for path in profile.files
        ]

    def _reply(self, call: ControlCall, message: str, *, success: bool = False, **more: Any) -> None:
        code = {} if success else {"code": "bad_request", "error": message}
        self.outbox.reply(call, {"success": success, "message": message, **code, **more})


def _stage(batch: Batch) -> str:
    return "decode" if batch.is_decode else "prefill"
