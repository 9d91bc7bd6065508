"""A straight-line program over a register file: what a CPU graph runs at replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

Call = Callable[..., Any]


@dataclass(frozen=True)
class _Operation:
    """`registers[output] = call(*registers[inputs])`; an optional one is left out when nobody reads it."""

    call: Call
    inputs: tuple[int, ...]
    output: int
    optional: bool


class Program:
    """Runs its instructions in order; a register that an instruction wrote is emptied after its last use."""

    def __init__(self, registers: list[Any], instructions: list[tuple[Any, ...]], written: Sequence[int]) -> None:
        self._registers = registers
        self._instructions = instructions
        self._written = written

    def run(self) -> None:
        """Execute every instruction once."""
        registers = self._registers
        try:
            for call, fetch, many, output, dead in self._instructions:
                registers[output] = call(*fetch(registers)) if many else call(fetch(registers))
                for register in dead:
                    registers[register] = None
        except BaseException:
            for register in self._written:
                registers[register] = None
            raise


class ProgramBuilder:
    """Collects constants and operations, then lays them out as a Program."""

    def __init__(self) -> None:
        self._constants: dict[int, Any] = {}
        self._operations: list[_Operation] = []
        self._count = 0

    def constant(self, value: Any) -> int:
        """A register that holds `value` for good."""
        register = self._new_register()
        self._constants[register] = value
        return register

    def is_constant(self, register: int) -> bool:
        """Whether the register was made by `constant`."""
        return register in self._constants

    def emit(self, call: Call, inputs: Sequence[int], *, optional: bool = False) -> int:
        """Append `call` on the values of `inputs`; returns the register of its result."""
        output = self._new_register()
        self._operations.append(_Operation(call, tuple(inputs), output, optional))
        return output

    def build(self) -> Program:
        """Drop optional operations without a reader, and plan which registers die where."""
        kept, last_use = self._live_operations()
        instructions = []
        for index, operation in enumerate(kept):
            touched = {*operation.inputs, operation.output}
            dead = tuple(r for r in touched if not self.is_constant(r) and last_use[r] == index)
            many = len(operation.inputs) != 1
            instructions.append((operation.call, _fetch(operation.inputs), many, operation.output, dead))
        registers = [self._constants.get(register) for register in range(self._count)]
        return Program(registers, instructions, [operation.output for operation in kept])

    def _live_operations(self) -> tuple[list[_Operation], dict[int, int]]:
        read: set[int] = set()
        kept: list[_Operation] = []
        for operation in reversed(self._operations):
            if not operation.optional or operation.output in read:
                kept.append(operation)
                read.update(operation.inputs)
        kept.reverse()
        last_use: dict[int, int] = {}
        for index, operation in enumerate(kept):
            last_use[operation.output] = index
            last_use.update(dict.fromkeys(operation.inputs, index))
        return kept, last_use

    def _new_register(self) -> int:
        self._count += 1
        return self._count - 1


def _fetch(inputs: tuple[int, ...]) -> Callable[[list[Any]], Any]:
    """Reads the inputs: a tuple of values, or the bare value of a single input."""
    return itemgetter(*inputs) if inputs else _nothing


def _nothing(_registers: list[Any]) -> tuple[()]:
    return ()
