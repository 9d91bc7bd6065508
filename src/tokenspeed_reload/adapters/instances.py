"""Instances that a class-based decorator put in the place of a definition."""

from __future__ import annotations

from types import MemberDescriptorType
from typing import Any

from tokenspeed_reload.merge import Merge
from tokenspeed_reload.undo import (
    MISSING,
    DictContents,
    InstanceSlots,
    InstanceState,
    ListContents,
    SetContents,
    elements_of,
    items_of,
    replace_dict,
    replace_elements,
    slots_of,
)
from tokenspeed_reload.values import attributes_of, is_a, is_atom, same_value

_HEAP_TYPE = 1 << 9


class InstanceAdapter:
    """Lets a live instance adopt the attributes of the new one, while what it wraps is updated in place."""

    def matches(self, live: Any, new: Any, merge: Merge) -> bool:
        """True for instances of one Python class whose state is all in `__dict__`, slots and a container's contents."""
        kind = type(live)
        return kind is merge.resolve(type(new)) and (_is_plain(kind) or _container_of(kind) is not None)

    def merge(self, live: Any, new: Any, where: str, merge: Merge) -> Any:
        """Update `live`."""
        merge.follow(live, new)
        state, wanted = attributes_of(live), dict(attributes_of(new) or {})
        if state is not None:
            for name, value in wanted.items():
                if name in state:
                    wanted[name] = merge.merge(state[name], value, f"{where}.{name}")
            if list(state) != list(wanted) or any(not same_value(state[name], wanted[name]) for name in wanted):
                merge.log.once(InstanceState, live)
                state.clear()
                state.update(wanted)
                merge.touch(live)
        self._slots(live, new, where, merge)
        if _container_of(type(live)) is not None:
            self._contents(live, new, where, merge)
        return live

    def _contents(self, live: Any, new: Any, where: str, merge: Merge) -> None:
        """Give a live instance of a container's subclass what the new one holds, whatever its class overrides."""
        if is_a(live, dict):
            before = {key: value for key, value in items_of(live) if is_atom(key)}
            items: list[Any] = [
                (key, merge.merge(before[key], value, f"{where}[{key!r}]") if is_atom(key) and key in before else value)
                for key, value in items_of(new)
            ]
            now: list[Any] = items_of(live)
            record: Any = DictContents
        else:
            items, now = elements_of(new), elements_of(live)
            if is_a(live, list):
                pairs = enumerate(zip(now, items, strict=False))
                items[: len(now)] = [merge.merge(old, value, f"{where}[{index}]") for index, (old, value) in pairs]
            record = ListContents if is_a(live, list) else SetContents
        is_same = len(items) == len(now) and all(map(same_value, now, items))
        if not is_same:
            merge.log.once(record, live)
            (replace_dict if is_a(live, dict) else replace_elements)(live, items)
            merge.touch(live)

    def _slots(self, live: Any, new: Any, where: str, merge: Merge) -> None:
        held, values = slots_of(live), {slot.__name__: value for slot, value in slots_of(new)}
        for slot, old in held:
            value = values.get(slot.__name__, MISSING)
            is_set = old is not MISSING and value is not MISSING
            stays = merge.merge(old, value, f"{where}.{slot.__name__}") if is_set else value
            if not same_value(old, stays):
                merge.log.once(InstanceSlots, live)
                if stays is MISSING:
                    slot.__delete__(live)
                else:
                    slot.__set__(live, stays)
                merge.touch(live)


def _container_of(cls: type) -> type | None:
    """The container from which a Python class derives, if nothing else of an instance is known to C code only."""
    built_in = [base for base in cls.__mro__[:-1] if not base.__flags__ & _HEAP_TYPE]
    is_derived = len(built_in) == 1 and built_in[0] is not cls and built_in[0] in (dict, list, set)
    return built_in[0] if is_derived else None


def _is_plain(cls: type) -> bool:
    """True when no part of an instance is known to C code only."""
    if issubclass(cls, type) or cls.__mro__[-1] is not object:
        return False
    for base in cls.__mro__[:-1]:
        made_in_python = {"__dict__", "__slots__"} & vars(base).keys() or any(
            {"__dict__", "__slots__"} & vars(above).keys() for above in base.__mro__[:-1]
        )
        if not base.__flags__ & _HEAP_TYPE or not made_in_python:
            return False
    slots = sum(is_a(member, MemberDescriptorType) for base in cls.__mro__ for member in vars(base).values())
    return cls.__dictoffset__ != 0 or slots > 0
