"""A seed's sequence of edits. Edit K follows from the seed alone, so that it can be made again by itself."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.fuzz import faults
from tests.fuzz.features import FEATURES, Feature, make, numbers
from tests.fuzz.rewrites import REWRITES
from tests.fuzz.sources import MODULES, Sources

MOST_FEATURES = 4
MOST_REWRITES = 10

Numbers = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Kinds:
    """Which edits a server can be given."""

    ranks: int = 1
    graphs: bool = False
    across_ranks: bool = True
    """Whether one rank may fail where its peers wait for it."""
    deadly: float = 0.0
    """Share of the broken edits that cost the ranks' processes."""


@dataclass
class Edit:
    """One change of the overlay, and what has to come of it."""

    number: int
    kind: str
    before: Sources
    """What serves before."""
    during: Sources
    """What the edit writes."""
    after: Sources
    """What the next edit begins with: `during` where it has to commit, else `before`."""
    expect: str
    """`commit`, `fail` or `either`."""
    numbers: Numbers | None
    """What the model computes once `during` is committed; None where nobody knows."""
    fault: faults.Fault | None = None
    features: list[str] = field(default_factory=list)

    @property
    def modules(self) -> list[str]:
        """The modules whose text changes."""
        return self.before.changed(self.during)

    def diff(self) -> str:
        """The edit as a diff."""
        return self.before.diff(self.during)


@dataclass(frozen=True)
class _Rewrite:
    seed: int
    module: str
    suffix: str

    def apply(self, sources: Sources) -> str | None:
        rng = random.Random(self.seed)
        rewrite = rng.choice(REWRITES)
        done = rewrite(rng, sources, self.module, self.suffix)
        return rewrite.__name__ if done else None


class Program:
    """The edits of a seed, in order."""

    def __init__(self, seed: int, kinds: Kinds):
        self.seed = seed
        self.kinds = kinds
        self._chosen: dict[str, Any] = {}
        self._rewrites: list[_Rewrite] = []

    def edits(self) -> Iterator[Edit]:
        """All edits from the first on; endless."""
        sources = Sources()
        number = 0
        while True:
            edit = self._edit(number, sources)
            yield edit
            sources = edit.after
            number += 1

    def _edit(self, number: int, before: Sources) -> Edit:
        # One generator an edit: what one draws does not shift the others.
        rng = random.Random(f"{self.seed}/{number}")
        if rng.random() < 0.5:
            edit = self._break(rng, number, before)
            if edit is not None:
                return edit
        while True:
            edit = self._change(rng, number, before)
            if edit.modules:
                return edit

    # ---- valid edits ----

    def _change(self, rng: random.Random, number: int, before: Sources) -> Edit:
        changes: list[str] = []
        draw = rng.random()
        if draw < 0.06:
            self._chosen, self._rewrites = {}, []
            changes.append("back to what is installed")
        if 0.06 < draw < 0.2:
            changes.append(self._toggle(rng, [feature for feature in FEATURES if feature.in_kernels]))
        if 0.2 < draw < 0.6:
            changes.append(self._toggle(rng, FEATURES))
        if draw > 0.5:
            for index in range(rng.choice((1, 1, 2, 4))):
                changes += self._rewrite(rng, f"{number}_{index}")
        during = self._render()
        return Edit(number, ", ".join(changes), before, during, during, "commit", numbers(self._chosen), None, changes)

    def _toggle(self, rng: random.Random, among: Sequence[Feature]) -> str:
        """Make, vary or take back one feature of those given."""
        on = sorted(self._chosen.keys() & {feature.name for feature in among})
        if on and (len(self._chosen) >= MOST_FEATURES or rng.random() < 0.3):
            name = rng.choice(on)
            del self._chosen[name]
            return f"without {name}"
        feature = rng.choice(among)
        others = [value for value in feature.values if value != self._chosen.get(feature.name)]
        self._chosen[feature.name] = rng.choice(others)
        return feature.name

    def _rewrite(self, rng: random.Random, suffix: str) -> list[str]:
        if self._rewrites and (len(self._rewrites) >= MOST_REWRITES or rng.random() < 0.2):
            del self._rewrites[rng.randrange(len(self._rewrites))]
            return ["a rewrite less"]
        self._rewrites.append(_Rewrite(rng.randrange(2**32), rng.choice(MODULES), suffix))
        name = self._rewrites[-1].apply(self._render(len(self._rewrites) - 1))
        if name is None:
            self._rewrites.pop()
            return []
        return [name.replace("_", " ")]

    def _render(self, rewrites: int | None = None) -> Sources:
        sources = make(self._chosen)
        for rewrite in self._rewrites[:rewrites]:
            rewrite.apply(sources)
        return sources

    # ---- broken edits ----

    def _break(self, rng: random.Random, number: int, before: Sources) -> Edit | None:
        kinds = self.kinds
        makes = list(faults.ALWAYS)
        deadly = list(faults.DEADLY)
        if kinds.ranks > 1:
            makes = [make for make in makes if make not in faults.COSTLY]
            deadly += faults.COSTLY
            makes += faults.ACROSS_RANKS * 2 if kinds.across_ranks else ()
        if rng.random() < kinds.deadly:
            makes = deadly
        make_fault = rng.choice(makes)
        ranks = kinds.ranks if kinds.across_ranks or make_fault in faults.RANKS_MEET_NOWHERE else 1
        for attempt in range(20):
            during = before.copy()
            try:
                fault = make_fault(rng, during, f"fuzz_{number}_{attempt}", ranks)
            except (KeyError, AssertionError):
                continue  # a rewrite has moved what this one breaks
            expect = fault.expect
            if expect == "graphs":
                expect = "fail" if kinds.graphs else "commit"
            if during.changed(before):
                stays = expect == "commit" and not fault.serves
                known = numbers(self._chosen) if expect == "commit" else None
                return Edit(number, fault.kind, before, during, during if stays else before, expect, known, fault)
        return None
