"""Records a step while it runs: ATen ops through a dispatch mode, launches through the launch hook."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tokenspeed.runtime.execution.graphs import refusals
from tokenspeed.runtime.execution.graphs.arguments import ArgumentPlanner, children, tensors_in
from tokenspeed.runtime.execution.graphs.base import Node
from tokenspeed.runtime.execution.graphs.launches import LaunchCall, OutsideCode
from tokenspeed.runtime.execution.graphs.program import Program, ProgramBuilder
from tokenspeed.runtime.execution.graphs.reach import closure_values
from tokenspeed.runtime.execution.graphs.snapshot import Snapshotter
from tokenspeed_kernel.launch import recording

_lift_fresh = torch.ops.aten.lift_fresh.default
_clone = torch.ops.aten.clone.default
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_Run = Callable[[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]], Any]


class StepRecorder:
    """Keeps what a step does, as a program and its nodes.

    A tensor that no recorded operation returned (a weight, the KV pool, a static buffer) is held by
    reference. A tensor that one returned lives in a register of the program. `outside` is told which functions
    run outside of launches.
    """

    def __init__(self, snapshots: Snapshotter, outside: OutsideCode) -> None:
        self.nodes: list[Node] = []
        self.launches: list[LaunchCall] = []
        self._snapshots = snapshots
        self._code_outside = outside
        self._builder = ProgramBuilder()
        self._outside: dict[int, int] = {}
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._storages: dict[int, StorageWeakRef] = {}
        self.running = ""  # The outermost operation, for messages.
        self._functions = _FunctionMode()

    def record(self, step: Callable[[], None]) -> Program:
        """Run `step` once and return the program that repeats it."""
        with (
            torch.inference_mode(),
            recording(self),
            self._functions,
            _DispatchMode(self),
            self._code_outside.watched(),
        ):
            step()
        return self._builder.build()

    def op(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], run: _Run) -> Any:
        """Let `run` carry out one ATen op, and keep it as a node."""
        if op is _lift_fresh:
            return self._host_constant(args[0])
        self.running = str(op)
        if torch.Tag.inplace_view in op.tags and not self._is_made(args[0]):
            raise refusals.reshaped_buffer(self.running)
        bind, inputs, _ = self._planner().plan(args, kwargs)
        result = run(op, args, kwargs)
        if not args or result is not args[0] or op._schema.is_mutable:
            self._keep(Node(self.running), bind(op._op), inputs, result)
            self._own_storages(args, kwargs, result)
        return result

    def launch(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a launch from a snapshot of its code, and keep it as one node."""
        self.running = name
        node = Node(name, function)
        while isinstance(function, partial):
            args, kwargs = function.args + args, {**function.keywords, **kwargs}
            function = function.func
        for where, tensor in _hidden_tensors(function, args):
            if self._is_made(tensor):
                raise refusals.hidden_argument(name, where)
        given: list[Any] = []

        def pin(value: Any) -> Any:
            pinned = self._snapshots.pin(value)
            given.extend([] if pinned is value else [value])
            return pinned

        with recording(None), self._functions.off(), self._code_outside.away(), torch._C._DisableTorchDispatch():
            bind, inputs, values = self._planner(pin).plan(args, kwargs)
            call = LaunchCall(name, function, bind, self._snapshots.snapshot(function), values, given)
            result = call.first(values)
        self.launches.append(call)
        self._keep(node, call, inputs, result)
        return result

    def _planner(self, pin: Callable[[Any], Any] | None = None) -> ArgumentPlanner:
        return ArgumentPlanner(self._builder, self._register_of, pin)

    def _keep(self, node: Node, call: Callable[..., Any], inputs: list[int], result: Any) -> None:
        self.nodes.append(node)
        self._bind(result, self._builder.emit(call, inputs))

    def _bind(self, value: Any, register: int) -> None:
        """Let the new tensors of a result live in registers."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self._outside and not self._is_made(value):
                self._made[id(value)] = weakref.ref(value), register
            return
        for getter, child in children(value):
            if next(tensors_in(child), None) is not None:
                self._bind(child, self._builder.emit(getter, [register], optional=True))

    def _register_of(self, tensor: torch.Tensor) -> int:
        if self._is_made(tensor):
            return self._made[id(tensor)][1]
        register = self._outside.get(id(tensor))
        if register is None:
            if _storage_id(tensor) in self._storages:
                raise refusals.hidden_alias(self.running)
            register = self._outside[id(tensor)] = self._builder.constant(tensor)
        return register

    def _is_made(self, tensor: torch.Tensor) -> bool:
        # The id of a tensor that has died may belong to another one now.
        entry = self._made.get(id(tensor))
        return entry is not None and entry[0]() is tensor

    def _own_storages(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Remember the memory that an op allocated, to notice tensors that reach it unseen."""
        given = {_storage_id(tensor) for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            storage = _storage_id(tensor)
            if storage is not None and storage not in given:
                self._storages[storage] = StorageWeakRef(tensor.untyped_storage())

    def _host_constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Data that the step brings from the host: fixed at capture, and fresh at each replay."""
        source = self._builder.constant(tensor.clone())
        self.nodes.append(Node(str(_lift_fresh)))
        self._bind(tensor, self._builder.emit(_clone._op, [source]))
        return tensor


class _DispatchMode(TorchDispatchMode):
    """Hands every ATen op to the recorder; inside a composite op it only watches."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch wraps the mode in a call of torch._dynamo, which takes seconds to import.
        return False

    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._watching = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._watching:
            return self._run(func, args, kwargs or {})
        return self._recorder.op(func, args, kwargs or {}, self._run)

    def _run(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op; a composite one with an eye on the ops that it is made of."""
        if not _is_composite(op):
            refusals.check_op(self._recorder.running, op, args, kwargs)
            return op(*args, **kwargs)
        outer, self._watching = self._watching, True
        try:
            with self:
                return op._op_dk(_COMPOSITE, *args, **kwargs)
        finally:
            self._watching = outer


class _FunctionMode(TorchFunctionMode):
    """Refuses reads of tensor data that the dispatcher does not see."""

    def __init__(self) -> None:
        super().__init__()
        self._on = True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._on:
            refusals.check_function(func)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def off(self) -> Iterator[None]:
        self._on = False
        try:
            yield
        finally:
            self._on = True


@cache
def _is_composite(op: torch._ops.OpOverload) -> bool:
    """Whether the op is only a sequence of other ops, on every device."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(op.name(), _COMPOSITE) and not has_kernel(op.name(), torch._C.DispatchKey.CPU)


def _storage_id(tensor: torch.Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def _hidden_tensors(function: Any, args: tuple[Any, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that a launch reaches without being given them, and through what; one level deep."""
    if isinstance(function, FunctionType):
        for value in closure_values(function):
            for tensor in _direct_tensors(value):
                yield "its closure", tensor
    # Dataclasses among the arguments are rebuilt from their fields.
    objects = [argument for argument in args if not dataclasses.is_dataclass(argument)]
    for holder in (getattr(function, "__self__", None), function, *objects):
        if isinstance(holder, torch.Tensor | ModuleType | type):
            continue
        for attribute, value in getattr(holder, "__dict__", {}).items():
            for tensor in _direct_tensors(value):
                yield f"the attribute {attribute} of a {type(holder).__name__}", tensor


def _direct_tensors(value: Any) -> Iterator[torch.Tensor]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
    return (item for item in items if isinstance(item, torch.Tensor))
