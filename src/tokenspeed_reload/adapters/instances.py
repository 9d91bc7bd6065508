"""Instances that a class-based decorator put in the place of a definition."""

from __future__ import annotations

from types import MemberDescriptorType
from typing import Any

from tokenspeed_reload.merge import Merge
from tokenspeed_reload.undo import MISSING, InstanceSlots, InstanceState, slots_of
from tokenspeed_reload.values import attributes_of, is_a, same_value

_HEAP_TYPE = 1 << 9


class InstanceAdapter:
    """Lets a live instance adopt the attributes of the new one, while what it wraps is updated in place."""

    def matches(self, live: Any, new: Any, merge: Merge) -> bool:
        """True for instances of one Python class whose state is all in `__dict__` and slots."""
        return type(live) is merge.resolve(type(new)) and _is_plain(type(live))

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
        return live

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
