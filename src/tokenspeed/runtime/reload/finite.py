"""Whether edited code computes numbers where the code before it did: NaN and infinity are failures of an edit.

What counts is the difference. A model may mask a part of its vocabulary with -inf, and random weights may overflow: the
values that were no finite numbers before may be anything. So the serving code's dummy steps are looked at first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from traceback import FrameSummary
from typing import Any

import torch
from torch import Tensor, nn

from tokenspeed.runtime.execution.dummies import Part
from tokenspeed.runtime.execution.executor import Executor
from tokenspeed.runtime.reload.device import definition
from tokenspeed.runtime.reload.fault import PlacedError

ADVICE = "start with --no-reload-check-finite if that is meant"


class NotFinite(PlacedError):
    """A dummy step of edited code gave NaN or infinity where the code before it gave numbers."""


class Finiteness:
    """What is not finite in the dummy steps of the code that serves, on the device: a mask where anything is."""

    def __init__(self) -> None:
        self._masks: dict[Part, Tensor | None] = {}

    def accept(self, seen: Observation) -> None:
        """From now on this code serves."""
        self._masks.update(seen.masks())

    def is_exempt(self, part: Part) -> bool:
        """Whether nothing is known of a part, and others of its kind are not finite as a whole."""
        return part not in self._masks and any(
            mask is not None for known, mask in self._masks.items() if known.what == part.what
        )

    def mask(self, part: Part) -> Tensor | None:
        """Where the serving code has no finite numbers; None where all are."""
        return self._masks.get(part)


class Observation:
    """One run of the dummy steps. Looking waits for no device; `masks` and `check` do."""

    def __init__(self) -> None:
        self._bad: dict[Part, Tensor] = {}

    def look(self, part: Part, computed: Tensor) -> None:
        """Take in a part of what was computed."""
        if part.what != "ids":
            self._bad[part] = ~computed.isfinite()

    def masks(self) -> dict[Part, Tensor | None]:
        """Where each part is not finite; None where all of it is."""
        return {part: self._bad[part] if count else None for part, count in _counts(self._bad).items()}

    def check(self, before: Finiteness, executor: Executor) -> None:
        """Compare with the code that serves.

        Raises:
            NotFinite: naming the step, how many of its values are no numbers, and the layer that they come from.
        """
        new = {}
        for part, bad in self._bad.items():
            mask = before.mask(part)
            if not before.is_exempt(part):
                new[part] = bad if mask is None or mask.shape != bad.shape else bad & ~mask
        for part, count in _counts(new).items():
            if count:
                where, place = _origin(part, executor)
                raise NotFinite(
                    f"{part} have {count} of {new[part].numel()} values that are NaN or infinite and were not before"
                    f"{where}; {ADVICE}",
                    place,
                )


def _counts(masks: dict[Part, Tensor]) -> dict[Part, int]:
    """How many values of each mask are set; the device is asked once."""
    if not masks:
        return {}
    counts: list[int] = torch.stack([mask.sum() for mask in masks.values()]).tolist()
    return dict(zip(masks, counts, strict=True))


def _origin(part: Part, executor: Executor) -> tuple[str, FrameSummary | None]:
    """Where they come from, found by running the step again eagerly; its collectives may fail, then nobody knows."""
    model, found, layers = executor.model, list[str](), dict(executor.model.named_modules())
    seen = Observation()
    with suppress(Exception), _watched(layers, found.append):
        executor.run_dummy(part.shape, seen.look)
    if found:
        module = layers[found[0]]
        name = f"{found[0]} ({type(module).__name__})" if found[0] else type(module).__name__
        return f"; they come first from {name}", definition(type(module).forward)
    with suppress(Exception):
        if any(_counts(seen._bad).values()):
            name = f"{type(model).__name__}.compute_logits"
            return f"; they come from {name}", definition(type(model).compute_logits)
    return "; the same step without a graph has none" if part.captured else "", None


@contextmanager
def _watched(layers: dict[str, nn.Module], tell: Callable[[str], None]) -> Iterator[None]:
    """Tell the name of the layer in which values that are not finite appear, innermost first: the one whose result has
    them, or the one around it where they are in what that is given."""
    found = False

    def note(name: str) -> None:
        nonlocal found
        if not found:
            found = True
            tell(name)

    def before(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not found and _any_bad((args, kwargs)):
                note(name.rpartition(".")[0])

        return hook

    def after(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, result: Any) -> None:
            if not found and _any_bad(result):
                note(name)

        return hook

    handles = []
    for name, layer in layers.items():
        if name:
            handles.append(layer.register_forward_pre_hook(before(name), with_kwargs=True))
        handles.append(layer.register_forward_hook(after(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _any_bad(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point() and not bool(value.isfinite().all())
    if isinstance(value, tuple | list):
        return any(map(_any_bad, value))
    return isinstance(value, dict) and any(map(_any_bad, value.values()))
