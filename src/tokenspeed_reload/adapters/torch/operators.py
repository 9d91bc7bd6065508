"""Registration of operators while modules are executed again: what is registered already is not registered twice."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import FrameType, FunctionType, SimpleNamespace
from typing import Any

from tokenspeed_reload.merge import Merge
from tokenspeed_reload.undo import Record
from tokenspeed_reload.values import is_a


def _module(name: str) -> Any:
    return sys.modules.get(name)


def is_operator(value: Any) -> bool:
    """True for what `torch.library.custom_op` and `triton_op` make."""
    module = _module("torch._library.custom_ops")
    return module is not None and issubclass(type(value), getattr(module, "CustomOpDef", ()))


def is_library(value: Any) -> bool:
    """True for a `torch.library.Library`."""
    module = _module("torch.library")
    return module is not None and issubclass(type(value), getattr(module, "Library", ()))


def operators_of() -> list[Any]:
    """All custom operators that are registered."""
    module = _module("torch._library.custom_ops")
    return list(module.OPDEFS.values()) if hasattr(module, "OPDEFS") else []


class Operators(Record):
    """Stands between modules that are executed again and the dispatcher, and takes back what was registered anew."""

    def __init__(self, merge: Merge) -> None:
        self._merge = merge
        self._replaced: list[tuple[Any, str, Any]] = []
        self._made: list[Any] = []
        self._registered = True

    @property
    def added(self) -> bool:
        """True when the reload registered an operator that there was not."""
        return bool(self._made)

    def stand_between(self) -> None:
        """Intercept the definition of operators and the registration of their implementations."""
        ops, library = _module("torch._library.custom_ops"), _module("torch.library")
        if ops is None or library is None:
            return
        self._put(ops.CustomOpDef, "__init__", self._operator)
        self._put(library.Library, "__init__", self._library)
        self._put(library.Library, "define", self._define)
        self._put(library.Library, "impl", self._impl)
        self._put(library.Library, "_register_fake", self._fake)

    def step_aside(self) -> None:
        """Let operators be registered as usual."""
        while self._replaced:
            owner, name, original = self._replaced.pop()
            setattr(owner, name, original)

    def exchange(self) -> None:
        """Withdraw the operators that the reload added, or register them again."""
        self.step_aside()
        ops = _module("torch._library.custom_ops")
        for operator in self._made:
            if self._registered:
                _withdraw(operator, ops)
            else:
                _register(operator, ops)
        self._registered = not self._registered

    def _put(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        original = vars(owner)[name]

        def replacement(*args: Any, **options: Any) -> Any:
            return method(original, *args, **options)

        self._replaced.append((owner, name, original))
        setattr(owner, name, replacement)

    def _operator(self, original: Any, operator: Any, namespace: str, name: str, schema: str, *rest: Any) -> None:
        """An operator that is registered already gets a stand-in, which only holds what the live one takes over."""
        ops = _module("torch._library.custom_ops")
        live = ops.OPDEFS.get(f"{namespace}::{name}")
        if live is None or any(live is made for made in self._made):
            original(operator, namespace, name, schema, *rest)
            if live is None:
                self._made.append(operator)
            return
        held = (ops.OPDEFS, ops.get_library_allowing_overwrite, ops.CustomOpDef._register_to_dispatcher)
        try:
            ops.OPDEFS = {}
            ops.get_library_allowing_overwrite = lambda *args: _NoLibrary()
            ops.CustomOpDef._register_to_dispatcher = lambda *args: None
            original(operator, namespace, name, schema, *rest)
        finally:
            ops.OPDEFS, ops.get_library_allowing_overwrite, ops.CustomOpDef._register_to_dispatcher = held
        if live._schema == schema:
            operator._opoverload = live._opoverload
        else:
            parsed = _module("torch")._C.parse_schema(name + schema)
            operator._opoverload = SimpleNamespace(_schema=parsed, tags=())

    def _library(self, original: Any, library: Any, ns: str, kind: str, dispatch_key: str = "") -> None:
        """A library that its module made before shares the state of the live one."""
        names = sys._getframe(2).f_globals
        for live in (value for value in names.values() if is_library(value) and value.m is not None):
            if (live.ns, live.kind, live.dispatch_key) == (ns, kind, dispatch_key):
                library.__dict__ = vars(live)
                return
        original(library, ns, kind, dispatch_key)

    def _define(self, original: Any, library: Any, schema: str, *rest: Any, **options: Any) -> str:
        name = schema.split("(")[0].strip()
        known = _schema(f"{library.ns}::{name}")
        if known is None:
            defined: str = original(library, schema, *rest, **options)
            self._effect(f"It registered the operator {library.ns}::{name}, which stays registered.")
            return defined
        if str(known) != str(_module("torch")._C.parse_schema(f"{library.ns}::{schema}")):
            self._merge.restart(
                f"{library.ns}::{name}", "The schema of the operator changed; a registered operator keeps its own."
            )
        return name

    def _impl(self, original: Any, library: Any, op_name: Any, fn: Any, *rest: Any, **options: Any) -> None:
        name = op_name if is_a(op_name, str) else op_name._name
        key = rest[0] if rest else options.get("dispatch_key", "") or library.dispatch_key
        known = f"{library.ns}/{name.split('::')[-1]}/{key}" in _module("torch.library")._impls
        if known and self._has_live_version(fn):
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            original(library, op_name, fn, *rest, **options)
        if known:
            self._effect(f"It registered {library.ns}::{name.split('::')[-1]} for {key} anew.")

    def _fake(self, original: Any, library: Any, op_name: str, fn: Any, _stacklevel: int = 1, **options: Any) -> None:
        registry = _module("torch._library.simple_registry")
        entry = registry.singleton.find(f"{library.ns}::{op_name}") if registry is not None else None
        known = entry is not None and bool(entry.fake_impl.kernel)
        if known and self._has_live_version(fn):
            return
        original(library, op_name, fn, _stacklevel=_stacklevel + 1, **options)

    def _effect(self, what: str) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") not in self._merge.inputs.modules:
            frame = frame.f_back
        self._merge.effect(frame.f_globals["__name__"] if frame is not None else "torch", what)

    def _has_live_version(self, fn: Any) -> bool:
        """True when a function that is registered already takes over the code of `fn`, and with it all there is."""
        if type(fn) is not FunctionType or fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__:
            return False
        codes = self._merge.codes.get(fn.__code__.co_filename)
        return codes is not None and codes.is_certain(fn.__code__)


class _NoLibrary:
    """Takes registrations and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **options: None


def _schema(qualname: str) -> Any:
    """The schema under which an operator is registered, or None."""
    base, _, overload = qualname.partition(".")
    schemas = _module("torch")._C._jit_get_schemas_for_operator(base)
    return next((s for s in schemas if s.overload_name == overload), None)


def register_added(operator: Any, state: dict[str, Any]) -> list[str]:
    """Tell the dispatcher of what `state` has and the operator had not; returns for what that was."""
    kernels, live = state["_backend_fns"], operator._backend_fns
    devices = [device for device in kernels if device not in live]
    for device in devices:
        operator.register_kernel(device)(kernels[device])
    added = [str(device or "all devices") for device in devices]
    if operator._vmap_fn is None and state["_vmap_fn"] is not None:
        operator.register_vmap(state["_vmap_fn"])
        added.append("vmap")
    for device, dtype in state.get("_autocast_dtype", {}).items():
        if device not in operator._autocast_dtype:
            operator.register_autocast(device, dtype)
            added.append(f"autocast on {device}")
    for cls, function in state.get("_torch_dispatch_fns", {}).items():
        if cls not in operator._torch_dispatch_fns:
            operator.register_torch_dispatch(cls, function)
            added.append(f"dispatch to {cls.__name__}")
    return added


def _withdraw(operator: Any, ops: Any) -> None:
    name = operator._qualname
    if ops.OPDEFS.get(name) is operator:
        del ops.OPDEFS[name]
    library = ops.OPDEF_TO_LIB.pop(name, None)
    if library is not None:
        library._destroy()


def _register(operator: Any, ops: Any) -> None:
    kernels = dict(operator._backend_fns)
    operator._lib = ops.get_library_allowing_overwrite(operator._namespace, operator._name)
    operator._backend_fns.clear()
    operator._register_to_dispatcher(operator._tags)
    for device, kernel in kernels.items():
        operator.register_kernel(device)(kernel)
    ops.OPDEFS[operator._qualname] = operator
