"""A step that was launched, until its result is on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tokenspeed.runtime.sampling.logprobs import Logprobs
from tokenspeed.runtime.scheduler.batch import StepLogprobs, StepResult


@dataclass(frozen=True)
class WantedLogprobs:
    """Log-probabilities on the device, and how many of the likeliest tokens of each row are wanted."""

    found: Logprobs
    tops: Sequence[int]


@dataclass
class PendingStep:
    """The ids that a step samples, int64 [rows that sample], and log-probabilities, on their way to the host."""

    ids: torch.Tensor
    rows: Sequence[int] = ()
    """Of the ids, those with log-probabilities."""
    sampled: WantedLogprobs | None = None
    prompt: Mapping[int, Sequence[WantedLogprobs]] = field(default_factory=dict)
    """By row of the batch."""

    def fetch(self) -> PendingStep:
        """Start the copies to the host, behind what was launched before."""
        cuda = self.ids.device.type == "cuda"
        # On a CPU the next step writes where the ids of this one are.
        self.ids = _to_host(self.ids) if cuda else self.ids.clone()
        if cuda:
            self.sampled = None if self.sampled is None else _logprobs_to_host(self.sampled)
            self.prompt = {row: [_logprobs_to_host(part) for part in parts] for row, parts in self.prompt.items()}
        self._event = torch.cuda.Event() if cuda else None
        if self._event is not None:
            self._event.record()
        return self

    def wait(self) -> StepResult:
        """What the step computed; blocks until the device is done with it."""
        if self._event is not None:
            self._event.synchronize()
        sampled, prompt = {}, {}
        if self.sampled is not None:
            sampled = dict(zip(self.rows, self.sampled.found.tolist(self.sampled.tops), strict=True))
        for row, parts in self.prompt.items():
            prompt[row] = [entry for part in parts for entry in part.found.tolist(part.tops)]
        return StepResult(self.ids.tolist(), StepLogprobs(sampled, prompt) if sampled or prompt else None)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _logprobs_to_host(wanted: WantedLogprobs) -> WantedLogprobs:
    found = wanted.found
    return WantedLogprobs(Logprobs(_to_host(found.chosen), _to_host(found.top), _to_host(found.top_ids)), wanted.tops)
