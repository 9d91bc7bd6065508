"""The undo log: every write of a reload, as a record that can exchange the old state and the new one."""

from __future__ import annotations

import gc
import linecache
import sys
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import CellType, CodeType, FunctionType, MemberDescriptorType
from typing import Any, Protocol

MISSING: Any = type("MISSING", (), {"__repr__": lambda self: "MISSING"})()


class Participant(Protocol):
    """Something that keeps state of its own about what modules define, such as a registry.

    The reloader calls `snapshot` before the first module is executed, and exchanges the state seen then
    with the later one through `restore` when a transaction is undone or swapped. A snapshot must not be
    changed by later registrations.
    """

    def snapshot(self) -> Any:
        """The present state, as a value that later changes do not touch."""

    def restore(self, state: Any) -> None:
        """Return to a state that `snapshot` gave."""

    def withdraw(self, module: str, definitions: Mapping[str, Any]) -> None:
        """Forget what these definitions of a module registered: they are gone, or are executed again right now.

        Called between `snapshot` and `restore`, with the objects that the names held before.
        """


class Record(ABC):
    """One place that a reload wrote to. It holds the state that is not in force."""

    @abstractmethod
    def exchange(self) -> None:
        """Put the held state in force and hold the one that was."""


class UndoLog:
    """The records of one transaction, in the order of the writes."""

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._seen: set[tuple[type, int]] = set()
        self._reversed = False

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def add(self, record: Record) -> None:
        """Append a record; to be called before the write."""
        self._records.append(record)

    def once(self, kind: Callable[[Any], Record], target: Any) -> None:
        """Append `kind(target)` unless the log holds that record already."""
        key = (kind, id(target))
        if key not in self._seen:
            self._seen.add(key)  # type: ignore[arg-type]
            self._records.append(kind(target))

    def insert_first(self, records: list[Record]) -> None:
        """Put records of writes that came before all others."""
        self._records[:0] = records

    @property
    def in_force(self) -> bool:
        """True while the new state is in force."""
        return not self._reversed

    def exchange(self) -> None:
        """Go from the new state to the old one, or back."""
        errors: list[BaseException] = []
        for record in self._records if self._reversed else reversed(self._records):
            try:
                record.exchange()
            except BaseException as error:  # the rest must be restored all the same
                errors.append(error)
        self._reversed = not self._reversed
        if errors:
            raise BaseExceptionGroup("some state could not be exchanged; restart the program", errors)

    def held_containers(self) -> list[Any]:
        """The containers in which the log itself keeps old objects."""
        found: list[Any] = [self._records]
        todo: list[Any] = []
        for record in self._records:
            found.append(vars(record))
            todo.extend(held for held in [vars(record).get("held")] if type(held) in (list, tuple, dict))
        while todo:
            value = todo.pop()
            found.append(value)
            inner = value.values() if isinstance(value, dict) else value
            todo.extend(item for item in inner if type(item) in (list, tuple, dict))
        return found

    def clear(self) -> None:
        """Let go of the state that is not in force."""
        self._records.clear()
        self._seen.clear()


class Attribute(Record):
    """An attribute of an object, set or missing."""

    def __init__(self, target: Any, name: str) -> None:
        self.target, self.name = target, name
        self.held = self._read()

    def _read(self) -> Any:
        return getattr(self.target, self.name, MISSING)

    def exchange(self) -> None:
        held, self.held = self.held, self._read()
        if held is MISSING:
            if self.held is not MISSING:
                delattr(self.target, self.name)
        else:
            setattr(self.target, self.name, held)


class Entry(Record):
    """One key of a dict; the order of the others is kept, and restored when the key comes back."""

    def __init__(self, target: dict[Any, Any], key: Any) -> None:
        self.target, self.key = target, key
        self.held = target.get(key, MISSING)
        self.order = list(target)

    def exchange(self) -> None:
        held, self.held = self.held, self.target.get(self.key, MISSING)
        order, self.order = self.order, list(self.target)
        if held is MISSING:
            self.target.pop(self.key, None)
            return
        self.target[self.key] = held
        if self.held is MISSING and order[-1:] != [self.key]:
            known = [key for key in order if key in self.target]
            rest = set(known)
            items = [(k, self.target[k]) for k in (*known, *(k for k in self.target if k not in rest))]
            replace_dict(self.target, items)


class Cell(Record):
    """The contents of a closure cell."""

    def __init__(self, target: CellType) -> None:
        self.target = target
        self.held = cell_value(target)

    def exchange(self) -> None:
        held, self.held = self.held, cell_value(self.target)
        if held is MISSING:
            del self.target.cell_contents
        else:
            self.target.cell_contents = held


class DictContents(Record):
    """All entries of a dict and their order."""

    def __init__(self, target: dict[Any, Any]) -> None:
        self.target = target
        self.held = list(target.items())

    def exchange(self) -> None:
        held, self.held = self.held, list(self.target.items())
        replace_dict(self.target, held)


class ListContents(Record):
    """All elements of a list or deque."""

    def __init__(self, target: list[Any] | deque[Any]) -> None:
        self.target = target
        self.held = list(target)

    def exchange(self) -> None:
        held, self.held = self.held, list(self.target)
        if isinstance(self.target, list):
            self.target[:] = held
        else:
            self.target.clear()
            self.target.extend(held)


class AddedEntry(Entry):
    """A key of a dict that has been written already, and was missing before."""

    def __init__(self, target: dict[Any, Any], key: Any) -> None:
        super().__init__(target, key)
        self.held = MISSING
        self.order = [known for known in self.order if known != key]


class SetContents(Record):
    """All elements of a set."""

    def __init__(self, target: set[Any]) -> None:
        self.target = target
        self.held = list(target)

    def exchange(self) -> None:
        held, self.held = self.held, list(self.target)
        self.target.clear()
        self.target.update(held)


_FUNCTION_PARTS = (
    *("__code__", "__defaults__", "__kwdefaults__", "__annotations__", "__doc__"),
    *("__name__", "__qualname__", "__module__"),
    *(("__type_params__",) if sys.version_info >= (3, 12) else ()),
)


class FunctionCode(Record):
    """The code of a function, and nothing else of it."""

    def __init__(self, target: FunctionType) -> None:
        self.target = target
        self.held = target.__code__

    def exchange(self) -> None:
        held, self.held = self.held, self.target.__code__
        set_code(self.target, held)


class FunctionState(Record):
    """All of a function that can be written: code, defaults, annotations, names, attributes."""

    def __init__(self, target: FunctionType) -> None:
        self.target = target
        self.held = self._read()

    def _read(self) -> tuple[list[Any], list[tuple[str, Any]]]:
        # Reading __annotations__ of a function without any would create a dict, which is harmless.
        return [getattr(self.target, part) for part in _FUNCTION_PARTS], list(self.target.__dict__.items())

    def exchange(self) -> None:
        (parts, attributes), self.held = self.held, self._read()
        for part, value in zip(_FUNCTION_PARTS, parts, strict=True):
            if getattr(self.target, part) is value:
                continue
            if part == "__code__":
                set_code(self.target, value)
            else:
                setattr(self.target, part, value)
        replace_dict(self.target.__dict__, attributes)


class ClassState(Record):
    """The members of a class with their order, and its bases."""

    def __init__(self, target: type) -> None:
        self.target = target
        self.held = self._read()

    def _read(self) -> tuple[tuple[type, ...], list[tuple[str, Any]]]:
        return self.target.__bases__, list(self.target.__dict__.items())

    def exchange(self) -> None:
        (bases, members), self.held = self.held, self._read()
        if self.target.__bases__ != bases:
            self.target.__bases__ = bases
        set_members(self.target, members)


class InstanceState(Record):
    """The `__dict__` of an instance."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.held = list(self._state().items())

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = object.__getattribute__(self.target, "__dict__")
        return state

    def exchange(self) -> None:
        held, self.held = self.held, list(self._state().items())
        replace_dict(self._state(), held)


_HEAP_TYPE = 1 << 9


def slots_of(target: Any) -> list[tuple[Any, Any]]:
    """The slots of an instance, as (descriptor, value or MISSING)."""
    found: list[tuple[Any, Any]] = []
    for cls in type(target).__mro__:
        if "__slots__" not in vars(cls) or not cls.__flags__ & _HEAP_TYPE:
            continue
        for member in vars(cls).values():
            if type(member) is MemberDescriptorType:
                try:
                    found.append((member, member.__get__(target)))
                except AttributeError:
                    found.append((member, MISSING))
    return found


class InstanceSlots(Record):
    """The values in the slots of an instance."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.held = slots_of(target)

    def exchange(self) -> None:
        held, self.held = self.held, slots_of(self.target)
        for (slot, value), (_, now) in zip(held, self.held, strict=True):
            if value is now:
                continue
            if value is MISSING:
                slot.__delete__(self.target)
            else:
                slot.__set__(self.target, value)


class InstanceClass(Record):
    """The class of an instance."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.held = type(target)

    def exchange(self) -> None:
        held, self.held = self.held, type(self.target)
        set_class(self.target, held)


def set_class(target: Any, cls: type) -> None:
    """Assign the class of an instance, which its own `__setattr__` may forbid; raises TypeError."""
    object.__setattr__(target, "__class__", cls)


class Exchange(Record):
    """A place with its own way to read and to write."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        self.read, self.write = read, write
        self.held = read()

    def exchange(self) -> None:
        held, self.held = self.held, self.read()
        self.write(held)


class MethodWrapper(Record):
    """The function inside of a static or class method, and the attributes that were copied from it."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.held = self._read()

    def _read(self) -> tuple[Any, list[tuple[str, Any]]]:
        return self.target.__func__, list(vars(self.target).items())

    def exchange(self) -> None:
        (function, attributes), self.held = self.held, self._read()
        self.target.__init__(function)
        replace_dict(vars(self.target), attributes)


class CacheClear(Record):
    """A cache whose entries cannot be kept: it is emptied each time that the code changes."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def exchange(self) -> None:
        clear = getattr(self.target, "cache_clear", None) or self.target._clear_cache
        clear()


class LineCache(Record):
    """The text that tracebacks show for a file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.held: Any = linecache.cache.get(path, MISSING)

    def exchange(self) -> None:
        held, self.held = self.held, linecache.cache.get(self.path, MISSING)
        if held is MISSING:
            linecache.cache.pop(self.path, None)
        else:
            linecache.cache[self.path] = held


class ParticipantState(Record):
    """The state of a participant."""

    def __init__(self, target: Participant) -> None:
        self.target = target
        self.held = target.snapshot()

    def exchange(self) -> None:
        held, self.held = self.held, self.target.snapshot()
        self.target.restore(held)


def cell_value(cell: CellType) -> Any:
    """What a cell holds, or MISSING when it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def replace_dict(target: dict[Any, Any], items: list[tuple[Any, Any]]) -> None:
    """Give a dict these entries in this order, without a moment in which code could see it half empty."""
    if len(target) == len(items) and all(key is other for key, (other, _) in zip(target, items, strict=True)):
        for key, value in items:
            if target[key] is not value:
                target[key] = value
        return
    held = list(target.items())  # keeps the values alive, so that no finaliser runs between the two calls
    target.clear()
    target.update(items)
    del held


_FIXED_MEMBERS = frozenset({"__dict__", "__weakref__", "_abc_impl"})


def set_members(cls: type, members: list[tuple[str, Any]]) -> None:
    """Give a class these members in this order; `__dict__` and slots stay what they are."""
    wanted = dict(members)
    for name in list(cls.__dict__):
        if name not in wanted and name not in _FIXED_MEMBERS:
            type.__delattr__(cls, name)
    for name, value in members:
        if cls.__dict__.get(name, MISSING) is not value and name not in _FIXED_MEMBERS:
            type.__setattr__(cls, name, value)
    if list(cls.__dict__) != [name for name, _ in members]:
        # The values are those that type.__setattr__ has announced already: only the order is written here.
        (mapping,) = (r for r in gc.get_referents(cls.__dict__) if type(r) is dict)
        replace_dict(mapping, [(name, cls.__dict__[name]) for name, _ in members])


def set_code(function: FunctionType, code: CodeType) -> None:
    """Assign code; a plain function may become a generator or a coroutine function and back."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        function.__code__ = code
