"""Snapshots of code that is edited in place: a function as it was, whatever happens to its module later.

The forward code is patched while old graphs must still run: `__code__` is swapped on the same function
object, names are rebound in the same module, class attributes are replaced. A snapshot shares none of these
with the live code.
"""

from __future__ import annotations

import builtins
import enum
import functools
import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import (
    BuiltinMethodType,
    CellType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from tokenspeed.runtime.execution.graphs.base import CaptureError
from tokenspeed.runtime.execution.graphs.pinned_classes import empty_class, empty_instance, members_to_copy
from tokenspeed.runtime.execution.graphs.pinned_imports import PinnedImports, code_names
from tokenspeed.runtime.execution.graphs.reach import Reach, is_atom, slots_of

_F = TypeVar("_F", bound=Callable[..., Any])
_READS_OWN_GLOBALS = {"globals", "vars", "eval", "exec", "__globals__"}
_READS_ATTRIBUTES_BY_NAME = {"getattr", "vars", "attrgetter", "__dict__"}
_MODULE_FACTS = ("__name__", "__package__", "__file__", "__path__", "__spec__", "__doc__")


class Snapshotter:
    """Makes snapshots that share one memo, so that each function, class and module is copied once.

    `packages` are the prefixes of the modules that are edited in place. Their functions, classes, instances
    and modules are copied, as deep as the code reaches them by name, and so is what wraps them: closures,
    partials, caches, callable objects. Module-level lists, dicts and sets are copied too, and the attributes
    of a copied object are those of the moment. All else is shared: tensors, and code of other packages, which
    must not call back into `packages` through its own globals.

    One object serves one generation of the code: make a new one after the code has changed.
    """

    def __init__(self, packages: Sequence[str]) -> None:
        self._reach = Reach(packages)
        # By id; the originals are held so that an id is not used again.
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._modules: dict[int, tuple[dict[str, Any], ModuleType]] = {}
        self._live: dict[int, tuple[type, type]] = {}
        self._bound: set[tuple[int, frozenset[str] | None, frozenset[str] | None]] = set()
        self._unfilled: deque[Callable[[], None]] = deque()
        self._unhashed: deque[Callable[[], None]] = deque()
        self._finishing = False
        self._imports = PinnedImports(self._reach.leads_to, self._pin_imported)
        self._builtins = {**vars(builtins), "__import__": self._imports, "isinstance": self._isinstance}

    def snapshot(self, function: _F) -> _F:
        """The function as it is now. Raises CaptureError for code that cannot be copied."""
        copy: _F = self._copy(function)
        self._finish()
        if isinstance(function, FunctionType) and function.__code__ is not copy.__code__:
            raise CaptureError(
                f"the code of {function.__qualname__} has changed since the first capture of its generation; "
                "capture with a new backend object"
            )
        return copy

    def pin(self, value: Any) -> Any:
        """A value for a snapshot to work on: a copy where it leads to code of the packages, else the same."""
        if is_atom(value) or not self._reach(value):
            return value
        copy = self._copy(value)
        self._finish()
        return copy

    def originals(self, value: Any) -> set[int]:
        """Identities of everything that a snapshot of `value` has to copy. Raises CaptureError."""
        self.pin(value)
        return set(self._copies)

    def _finish(self) -> None:
        """Fill all that was made empty. Iterative: the call graph of a kernel may be deep."""
        if self._finishing:
            return
        self._finishing = True
        try:
            while self._unfilled or self._unhashed:
                (self._unfilled or self._unhashed).popleft()()
        finally:
            self._finishing = False

    def _remember(self, value: Any, copy: Any) -> Any:
        self._copies[id(value)] = value, copy
        return copy

    def _copy(self, value: Any) -> Any:
        """The copy of a value, perhaps still to be filled by `_finish`; the value itself where shared."""
        if is_atom(value):
            return value
        known = self._copies.get(id(value))
        if known is not None:
            return known[1]
        if isinstance(value, ModuleType):
            return self._pin_module(value, None)
        copier = _CONTAINERS.get(type(value))
        if copier is not None:
            return copier(self, value)
        if not self._reach(value):
            return value
        if isinstance(value, type):
            return self._class(value)
        return _WRAPPERS.get(type(value), Snapshotter._instance)(self, value)

    # Code.

    def _function(self, function: FunctionType) -> FunctionType:
        inside = self._reach.inside(function.__globals__.get("__name__"))
        scope = vars(self._namespace(function.__globals__)) if inside else function.__globals__
        closure = tuple(map(self._cell, function.__closure__ or ()))
        copy = FunctionType(function.__code__, scope, function.__name__, None, closure)
        self._remember(function, copy)

        def fill() -> None:
            for attribute in ("__qualname__", "__module__", "__doc__", "__annotations__"):
                setattr(copy, attribute, getattr(function, attribute))
            copy.__defaults__ = self._copy(function.__defaults__)
            copy.__kwdefaults__ = self._copy(function.__kwdefaults__)
            vars(copy).update({name: self._copy(item) for name, item in vars(function).items()})
            if inside:
                self._bind_names_of(function)

        self._unfilled.append(fill)
        return copy

    def _cell(self, cell: CellType) -> CellType:
        if id(cell) in self._copies:
            return self._copies[id(cell)][1]
        copy = self._remember(cell, CellType())

        def fill() -> None:
            with suppress(ValueError):
                copy.cell_contents = self._copy(cell.cell_contents)

        self._unfilled.append(fill)
        return copy

    def _bind_names_of(self, function: FunctionType) -> None:
        code, scope = function.__code__, function.__globals__
        names = code_names(code)
        through = None if names & _READS_ATTRIBUTES_BY_NAME else names
        self._bind(scope, None if names & _READS_OWN_GLOBALS else names, through)
        self._imports.pin_imports_of(code, scope.get("__package__"))

    # Modules.

    def _namespace(self, scope: dict[str, Any]) -> ModuleType:
        """The pinned module for the globals of a live one: all its snapshot functions share its namespace."""
        known = self._modules.get(id(scope))
        if known is not None:
            return known[1]
        module = ModuleType(scope["__name__"])
        vars(module).update({name: scope[name] for name in _MODULE_FACTS if name in scope})
        vars(module)["__builtins__"] = self._builtins
        self._modules[id(scope)] = scope, module
        return module

    def _pin_module(self, module: ModuleType, names: frozenset[str] | None) -> ModuleType:
        """The pinned module, with at least those of `names` that the live one has; None: with all."""
        if not self._reach.leads_to(module.__name__):
            return module
        self._unfilled.append(lambda: self._bind(vars(module), names, names))
        return self._namespace(vars(module))

    def _pin_imported(self, module: ModuleType, names: frozenset[str]) -> ModuleType:
        pinned = self._pin_module(module, names)
        self._finish()
        return pinned

    def _bind(self, scope: dict[str, Any], names: frozenset[str] | None, through: frozenset[str] | None) -> None:
        """Give the pinned module of `scope` the `names`, and the modules among these what `through` says."""
        key = id(scope), names, through
        if key in self._bound:
            return
        self._bound.add(key)
        target = vars(self._namespace(scope))
        for name in list(scope) if names is None else names & scope.keys():
            if isinstance(scope[name], ModuleType):
                target.setdefault(name, self._pin_module(scope[name], through))
            elif name not in target:
                target[name] = self._copy(scope[name])

    # Classes and instances.

    def _class(self, cls: type) -> type:
        metaclass = self._copy(type(cls))
        bases = tuple(map(self._copy, cls.__bases__))
        try:
            copy = empty_class(cls, bases, metaclass, run_metaclass=metaclass is type(cls))
        except Exception as error:
            raise CaptureError(
                f"a captured kernel uses the class {cls.__module__}.{cls.__qualname__}, which cannot be "
                f"copied ({error}); use it outside of kernels only, or move it out of the forward packages"
            ) from error
        self._remember(cls, copy)
        self._live[id(copy)] = copy, cls

        def fill() -> None:
            for name, member in members_to_copy(cls, copy):
                type.__setattr__(copy, name, self._copy(member))
            if isinstance(cls, enum.EnumMeta):
                for name, member in cls.__members__.items():
                    self._fill_instance(member, copy[name])  # type: ignore[index]

        self._unfilled.append(fill)
        return copy

    def _instance(self, value: Any) -> Any:
        cls = self._copy(type(value))
        if isinstance(value, enum.Enum):
            return self._remember(value, cls[value.name] if value.name in cls.__members__ else cls(value.value))
        copy = empty_instance(cls, value, self._copy)
        if copy is None:
            return value
        self._remember(value, copy)
        self._unfilled.append(lambda: self._fill_instance(value, copy))
        return copy

    def _fill_instance(self, value: Any, copy: Any) -> None:
        for name, item in slots_of(value):
            object.__setattr__(copy, name, self._copy(item))
        attributes = getattr(value, "__dict__", {})
        vars(copy).update({name: self._copy(item) for name, item in attributes.items()}) if attributes else None

    def _isinstance(self, value: object, kind: Any) -> bool:
        # Objects from outside of the snapshot are instances of the live classes.
        return isinstance(value, (kind, self._live_class(kind)))

    def _live_class(self, kind: Any) -> Any:
        if isinstance(kind, tuple):
            return tuple(map(self._live_class, kind))
        return self._live[id(kind)][1] if id(kind) in self._live else kind

    # What wraps code, and containers.

    def _method(self, method: MethodType) -> MethodType:
        return MethodType(self._copy(method.__func__), self._copy(method.__self__))

    def _builtin_method(self, method: BuiltinMethodType) -> Any:
        if isinstance(method.__self__, ModuleType | type):
            return method
        owner = self._copy(method.__self__)
        return method if owner is method.__self__ else getattr(owner, method.__name__)

    def _partial(self, value: functools.partial[Any]) -> Any:
        keywords = {name: self._copy(item) for name, item in value.keywords.items()}
        return self._remember(
            value, functools.partial(self._copy(value.func), *map(self._copy, value.args), **keywords)
        )

    def _cache(self, wrapper: Any) -> Any:
        copy = functools.lru_cache(**wrapper.cache_parameters())(self._copy(wrapper.__wrapped__))
        return self._remember(wrapper, copy)

    def _descriptor(self, value: staticmethod[Any, Any] | classmethod[Any, Any, Any]) -> Any:
        return self._remember(value, type(value)(self._copy(value.__func__)))

    def _property(self, value: property) -> property:
        fget, fset, fdel = map(self._copy, (value.fget, value.fset, value.fdel))
        return self._remember(value, property(fget, fset, fdel, value.__doc__))

    def _sequence(self, value: list[Any] | deque[Any]) -> Any:
        copy = self._remember(value, [] if isinstance(value, list) else deque(maxlen=value.maxlen))
        self._unfilled.append(lambda: copy.extend(list(map(self._copy, value))))
        return copy

    def _tuple(self, value: tuple[Any, ...] | frozenset[Any]) -> Any:
        items = list(map(self._copy, value))
        if all(map(operator.is_, items, value)):
            return value
        return self._remember(value, type(value)(items))

    def _set(self, value: set[Any]) -> set[Any]:
        copy: set[Any] = self._remember(value, set())
        self._fill_hashed(lambda: list(map(self._copy, value)), copy.update)
        return copy

    def _dict(self, value: dict[Any, Any]) -> Any:
        empty = defaultdict(self._copy(value.default_factory)) if isinstance(value, defaultdict) else type(value)()
        copy = self._remember(value, empty)
        self._fill_hashed(lambda: [(self._copy(k), self._copy(v)) for k, v in value.items()], copy.update)
        return copy

    def _mapping_proxy(self, value: MappingProxyType[Any, Any]) -> MappingProxyType[Any, Any]:
        return self._remember(value, MappingProxyType(self._dict(dict(value))))

    def _fill_hashed(self, items: Callable[[], list[Any]], fill: Callable[[list[Any]], None]) -> None:
        """Fill a container that hashes its items once these are filled themselves."""

        def copy_items() -> None:
            copied = items()
            self._unhashed.append(lambda: fill(copied))

        self._unfilled.append(copy_items)


_CONTAINERS: dict[type, Callable[[Snapshotter, Any], Any]] = {
    list: Snapshotter._sequence,
    deque: Snapshotter._sequence,
    tuple: Snapshotter._tuple,
    frozenset: Snapshotter._tuple,
    set: Snapshotter._set,
    dict: Snapshotter._dict,
    OrderedDict: Snapshotter._dict,
    defaultdict: Snapshotter._dict,
    WeakKeyDictionary: Snapshotter._dict,
    MappingProxyType: Snapshotter._mapping_proxy,
    SimpleNamespace: Snapshotter._instance,
    BuiltinMethodType: Snapshotter._builtin_method,
}
_WRAPPERS: dict[type, Callable[[Snapshotter, Any], Any]] = {
    FunctionType: Snapshotter._function,
    MethodType: Snapshotter._method,
    functools.partial: Snapshotter._partial,
    functools._lru_cache_wrapper: Snapshotter._cache,
    staticmethod: Snapshotter._descriptor,
    classmethod: Snapshotter._descriptor,
    property: Snapshotter._property,
}
