"""Instances that a class-based decorator put in the place of a definition."""

from __future__ import annotations

from types import MemberDescriptorType
from typing import Any

from tokenspeed_reload.merge import Merge
from tokenspeed_reload.undo import InstanceState
from tokenspeed_reload.values import same_value

_HEAP_TYPE = 1 << 9


class InstanceAdapter:
    """Lets a live instance adopt the attributes of the new one, while what it wraps is updated in place."""

    def matches(self, live: Any, new: Any, merge: Merge) -> bool:
        """True for instances of one Python class whose state is all in `__dict__`."""
        return type(live) is merge.resolve(type(new)) and _is_plain(type(live))

    def merge(self, live: Any, new: Any, where: str, merge: Merge) -> Any:
        """Update `live`."""
        merge.follow(live, new)
        state, wanted = vars(live), dict(vars(new))
        for name, value in wanted.items():
            if name in state:
                wanted[name] = merge.merge(state[name], value, f"{where}.{name}")
        if list(state) != list(wanted) or any(not same_value(state[name], wanted[name]) for name in wanted):
            merge.log.once(InstanceState, live)
            state.clear()
            state.update(wanted)
            merge.touch(live)
        return live


def _is_plain(cls: type) -> bool:
    if cls.__dictoffset__ == 0 or issubclass(cls, type):
        return False
    for base in cls.__mro__[:-1]:
        made_in_python = {"__dict__", "__slots__"} & vars(base).keys() or any(
            "__dict__" in vars(above) for above in base.__mro__
        )
        if not base.__flags__ & _HEAP_TYPE or not made_in_python:
            return False
        if any(isinstance(member, MemberDescriptorType) for member in vars(base).values()):
            return False
    return cls.__mro__[-1] is object
