"""Which solutions the user has asked for: by a context manager, else by a flag, else by an environment variable."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

VARIABLE = "TOKENSPEED_KERNEL_"
"""TOKENSPEED_KERNEL_NORM_RMS_NORM=reference overrides norm.rms_norm."""


@dataclass(frozen=True)
class Wish:
    """Solutions of which one has to be taken, and who says so."""

    solutions: tuple[str, ...]
    said_by: str


@dataclass(frozen=True)
class Wishes:
    """All that is wished at one time: what an engine was started with."""

    context: Mapping[str, Wish]
    flags: Mapping[str, Wish]
    variables: Mapping[str, str]

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Within it these hold, whatever is wished outside; an `override` inside still goes before."""
        tokens = _context.set(self.context), _started_with.set(self)
        try:
            yield
        finally:
            _context.reset(tokens[0])
            _started_with.reset(tokens[1])


_context: ContextVar[Mapping[str, Wish] | None] = ContextVar("tokenspeed_kernel_overrides", default=None)
_started_with: ContextVar[Wishes | None] = ContextVar("tokenspeed_kernel_started_with", default=None)


@dataclass
class Overrides:
    """The wishes of this process, by operation (`family.mode`)."""

    flags: dict[str, Wish] = field(default_factory=dict)

    def set_flags(self, solutions: Mapping[str, Sequence[str]], said_by: str) -> None:
        """Take the flag `said_by`, with the solutions that it permits for each operation; later ones win."""
        for operation, permitted in solutions.items():
            self.flags[operation] = Wish(tuple(permitted), said_by)

    def now(self) -> Wishes:
        """What is wished here and now."""
        variables = {name: value for name, value in os.environ.items() if name.startswith(VARIABLE)}
        return Wishes(_context.get() or {}, dict(self.flags), variables)

    def wish(self, family: str, mode: str) -> Wish | None:
        """What is wished for an operation; None leaves it to priorities."""
        operation = f"{family}.{mode}"
        started = _started_with.get()
        flags = self.flags if started is None else started.flags
        wish = (_context.get() or {}).get(operation) or flags.get(operation)
        if wish is not None:
            return wish
        variable = f"{VARIABLE}{family}_{mode}".upper()
        solution = (os.environ if started is None else started.variables).get(variable)
        return Wish((solution,), f"{variable}={solution}") if solution else None


@contextmanager
def override(**solutions: str) -> Iterator[None]:
    """Within it, plans take these solutions: `override(**{"norm.rms_norm": "reference"})`."""
    wishes = {name: Wish((solution,), f"override {name}={solution}") for name, solution in solutions.items()}
    token = _context.set({**(_context.get() or {}), **wishes})
    try:
        yield
    finally:
        _context.reset(token)


def assignments() -> tuple[str, ...]:
    """What the contexts around here wish, as --kernel takes it: for processes that are to follow them."""
    return tuple(f"{name}={wish.solutions[0]}" for name, wish in (_context.get() or {}).items())
