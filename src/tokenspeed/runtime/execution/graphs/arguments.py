"""How a recorded call gets its arguments from registers, and where its results go."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import torch

from tokenspeed.runtime.execution.graphs.program import ProgramBuilder
from tokenspeed.runtime.execution.graphs.reach import is_atom

Leaves = tuple[Any, ...]
Part = Callable[[Leaves], Any]
Bind = Callable[[Callable[..., Any]], Callable[..., Any]]


class ArgumentPlanner:
    """Turns the arguments of one call into registers.

    Containers of tensors that the program computes are rebuilt at each run; all else is laid down once.
    `register_of` gives the register of a tensor, `pin` what to keep for any other value.
    """

    def __init__(
        self,
        builder: ProgramBuilder,
        register_of: Callable[[torch.Tensor], int],
        pin: Callable[[Any], Any] | None = None,
    ) -> None:
        self._builder = builder
        self._register_of = register_of
        self._pin = pin

    def plan(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Bind, list[int], list[Any]]:
        """How `call(*args, **kwargs)` is made: what turns `call` into a callable, its input registers, their values."""
        leaves = _Leaves()
        positional = [self._part(value, leaves) for value in args]
        named = {name: self._part(value, leaves) for name, value in kwargs.items()}
        if all(isinstance(part, int) for part in positional) and all(map(leaves.is_constant, named.values())):
            fixed = {name: leaves.values[part] for name, part in named.items() if isinstance(part, int)}
            count = len(positional)
            bind = (lambda call: partial(call, **fixed)) if fixed else _as_it_is
            return bind, leaves.registers[:count], leaves.values[:count]
        getters, named_getters = [_getter(p) for p in positional], {k: _getter(p) for k, p in named.items()}
        return (lambda call: _assembled(call, getters, named_getters)), leaves.registers, leaves.values

    def _part(self, value: Any, leaves: _Leaves) -> int | Part:
        """The position of a plain value among `leaves`, or a function that rebuilds a container from them."""
        if isinstance(value, torch.Tensor):
            register = self._register_of(value)
            return leaves.add(register, value, self._builder.is_constant(register))
        if is_atom(value) or all(self._builder.is_constant(self._register_of(tensor)) for tensor in tensors_in(value)):
            pinned = self._pin(value) if self._pin else value
            return leaves.add(self._builder.constant(pinned), pinned, True)
        parts = [_getter(self._part(child, leaves)) for _, child in children(value)]
        assemble = _assembler(value, self._pin)
        return lambda values: assemble([part(values) for part in parts])


class _Leaves:
    """The plain values of one call: their registers, what they are now, and which never change."""

    def __init__(self) -> None:
        self.registers: list[int] = []
        self.values: list[Any] = []
        self._constant: list[bool] = []

    def add(self, register: int, value: Any, constant: bool) -> int:
        self.registers.append(register)
        self.values.append(value)
        self._constant.append(constant)
        return len(self.registers) - 1

    def is_constant(self, part: int | Part) -> bool:
        return isinstance(part, int) and self._constant[part]


def children(value: Any) -> Iterator[tuple[Callable[[Any], Any], Any]]:
    """(getter, child) for each item of a list, tuple, dict or dataclass instance; else nothing."""
    if isinstance(value, list | tuple):
        yield from ((itemgetter(index), child) for index, child in enumerate(value))
    elif isinstance(value, dict):
        yield from ((itemgetter(key), child) for key, child in value.items())
    elif hasattr(type(value), "__dataclass_fields__"):
        for field in dataclasses.fields(value):
            yield attrgetter(field.name), getattr(value, field.name)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor inside nested containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif not is_atom(value):
        for _, child in children(value):
            yield from tensors_in(child)


def _getter(part: int | Part) -> Part:
    return itemgetter(part) if isinstance(part, int) else part


def _assembler(value: Any, pin: Callable[[Any], Any] | None) -> Callable[[list[Any]], Any]:
    """A function that makes a container like `value` from its new items."""
    kind = pin(type(value)) if pin else type(value)
    if isinstance(value, dict):
        keys = list(value)
        return lambda items: kind(zip(keys, items, strict=True))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return lambda items: kind(*items)
    if isinstance(value, list | tuple):
        return kind
    names = [field.name for field in dataclasses.fields(value)]

    def record(items: list[Any]) -> Any:
        # Past __init__, which may do work, and past frozen.
        new = object.__new__(kind)
        for name, item in zip(names, items, strict=True):
            object.__setattr__(new, name, item)
        return new

    return record


def _as_it_is(call: Callable[..., Any]) -> Callable[..., Any]:
    return call


def _assembled(call: Callable[..., Any], positional: list[Part], named: dict[str, Part]) -> Callable[..., Any]:
    def assembled(*leaves: Any) -> Any:
        return call(*[part(leaves) for part in positional], **{name: part(leaves) for name, part in named.items()})

    return assembled
