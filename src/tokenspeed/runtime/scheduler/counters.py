"""What a scheduler has done since its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """The fields of `Loads` that only rise; see there."""

    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    step_tokens: int = 0
