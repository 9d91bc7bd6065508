"""What a campaign saw, edit by edit, and its figures."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

from tests.fuzz.usage import Growth, Life, Usage, growth, lives


@dataclass
class Step:
    """What came of one edit."""

    number: int
    kind: str
    way: str
    expect: str
    committed: bool
    seconds: float
    rank: int | None = None
    phase: str = ""
    mode: str = "wait"
    """Of the reload whose reply counts."""
    came: str = ""
    """`swapped`, `recaptured` or `eager` where it committed; `not finite` or `failed`."""


@dataclass
class Result:
    """What a campaign saw."""

    steps: list[Step] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)
    usages: list[dict[str, Usage]] = field(default_factory=list)
    fresh: int = 0
    """Comparisons with a fresh server."""
    compared: int = 0
    """Answers under load that were compared with those of the probes."""
    continued: int = 0
    """Answers that one code began and another one ended, as the other one would have."""

    @property
    def committed(self) -> int:
        return sum(step.committed for step in self.steps)

    @property
    def failed(self) -> int:
        return len(self.steps) - self.committed

    @property
    def came(self) -> Counter[str]:
        """How often edits were swapped into graphs, captured anew, refused for numbers that are none, or failed."""
        return Counter(step.came for step in self.steps)

    def growth(self) -> list[Growth]:
        """From a fifth of the way on, when caches are full."""
        return growth(self.usages[len(self.usages) // 5 :])

    def lives(self) -> list[Life]:
        """The memory of each process while it lived."""
        return lives(self.usages)

    def summary(self) -> dict[str, Any]:
        """Figures, as JSON has them."""
        seconds = [step.seconds for step in self.steps]
        modes = {step.mode for step in self.steps}
        kinds: dict[str, Counter[str]] = {"committed": Counter(), "failed": Counter()}
        for step in self.steps:
            names = step.kind.split(", ") if step.committed else [step.kind]
            kinds["committed" if step.committed else "failed"].update(names)
        return {
            "edits": len(self.steps),
            "committed": self.committed,
            "failed": self.failed,
            "phases": Counter(step.phase for step in self.steps if not step.committed),
            "seconds": {
                "median": round(median(seconds), 3),
                "p95": round(quantiles(seconds, n=20)[-1] if len(seconds) > 1 else seconds[0], 3),
            },
            "requests": self.requests,
            "compared": self.compared,
            "continued": self.continued,
            "fresh": self.fresh,
            "growth": [vars(grown) | {"rss": f"{grown.rss / 2**20:.1f} MiB"} for grown in self.growth()],
            "memory": [life.figures() for life in self.lives()],
            "came": self.came,
            "modes": {mode: Counter(s.came for s in self.steps if s.mode == mode) for mode in sorted(modes)},
            "kinds": kinds,
            "ways": Counter(step.way for step in self.steps),
        }
