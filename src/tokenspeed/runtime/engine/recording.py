"""What a profile records on one rank, and the files it leaves."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from tokenspeed.runtime.protocol.calls import ProfileActivity, StartProfile

log = logging.getLogger(__name__)

MEMORY_EVENTS = 100_000
"""Allocator events that a snapshot goes back."""


class Recording:
    """The activities of a call, from `start` to `stop`; `name` is the files' name without suffixes."""

    def __init__(self, call: StartProfile, activities: tuple[ProfileActivity, ...], name: str):
        self.call = call
        self.activities = activities
        self.name = name
        self._trace: torch.profiler.profile | None = None
        self._memory = False
        self._cuda = False

    def start(self) -> None:
        """Begin all activities, or none: what began is ended again when another fails."""
        try:
            self._start()
        except BaseException:
            self.discard()
            raise

    def _start(self) -> None:
        kinds = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA}
        traced = [kinds[activity] for activity in self.activities if activity in kinds]
        if traced:
            trace = torch.profiler.profile(
                activities=traced, with_stack=self.call.with_stack, record_shapes=self.call.record_shapes
            )
            trace.start()
            self._trace = trace
        if "MEM" in self.activities:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
            self._memory = True
        if "CUDA_PROFILER" in self.activities:
            torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
            self._cuda = True

    def stop(self) -> list[Path]:
        """End all activities and write what they recorded.

        Returns:
            The files. CUDA_PROFILER writes none: its data goes to the program that the server runs under.
        """
        files: list[Path] = []
        directory = Path(self.call.output_dir)
        try:
            if self._trace is not None:
                trace, self._trace = self._trace, None
                trace.stop()
                files.append(directory / f"{self.name}.trace.json.gz")
                trace.export_chrome_trace(str(files[-1]))
            if self._memory:
                files.append(directory / f"{self.name}.memory.pickle")
                torch.cuda.memory._dump_snapshot(str(files[-1]))
        finally:
            self.discard()
        return files

    def discard(self) -> None:
        """End all activities and keep nothing of them."""
        if self._trace is not None:
            with suppress(Exception):
                self._trace.stop()
            self._trace = None
        if self._memory:
            torch.cuda.memory._record_memory_history(enabled=None)
            self._memory = False
        if self._cuda:
            torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStop())
            self._cuda = False
