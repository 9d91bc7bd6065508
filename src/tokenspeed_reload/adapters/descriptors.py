"""Properties, static and class methods, and partial objects."""

from __future__ import annotations

import functools
from typing import Any

from tokenspeed_reload.merge import Merge
from tokenspeed_reload.undo import Exchange, MethodWrapper
from tokenspeed_reload.values import same_dict, same_value


class PropertyAdapter:
    """Updates the functions of a property, and the property itself when they cannot follow."""

    def matches(self, live: Any, new: Any, merge: Merge) -> bool:
        """True for two plain properties."""
        return type(live) is property and type(new) is property

    def merge(self, live: property, new: property, where: str, merge: Merge) -> Any:
        """Update `live`."""
        merge.follow(live, new)
        pairs = ((live.fget, new.fget), (live.fset, new.fset), (live.fdel, new.fdel))
        wanted = tuple(merge.merge(old, value, where) for old, value in pairs)
        current = (live.fget, live.fset, live.fdel)
        if any(a is not b for a, b in zip(wanted, current, strict=True)) or live.__doc__ != new.__doc__:
            doc = new.__doc__
            merge.log.add(Exchange(lambda: _property_state(live), lambda s: live.__init__(*s)))  # type: ignore[misc]
            live.__init__(*wanted, doc)  # type: ignore[misc]
            merge.touch(live)
        return live


def _property_state(live: property) -> tuple[Any, ...]:
    return (live.fget, live.fset, live.fdel, live.__doc__)


class MethodWrapperAdapter:
    """Updates the function inside of a static or class method."""

    def matches(self, live: Any, new: Any, merge: Merge) -> bool:
        """True for two static methods or two class methods."""
        return type(live) is type(new) and type(live) in (staticmethod, classmethod)

    def merge(self, live: Any, new: Any, where: str, merge: Merge) -> Any:
        """Update `live`."""
        merge.follow(live, new)
        stays = merge.merge(live.__func__, new.__func__, where)
        if stays is not live.__func__:
            merge.log.once(MethodWrapper, live)
            live.__init__(stays)
            merge.touch(live)
        return live


class PartialAdapter:
    """Updates functools.partial objects."""

    def matches(self, live: Any, new: Any, merge: Merge) -> bool:
        """True for two partial objects."""
        return type(live) is functools.partial and type(new) is functools.partial

    def merge(self, live: Any, new: Any, where: str, merge: Merge) -> Any:
        """Update `live`."""
        function = merge.merge(live.func, new.func, where)
        merge.follow(live, new)
        if (
            function is not live.func
            or not same_value(live.args, new.args)
            or not same_dict(live.keywords, new.keywords)
        ):
            merge.log.add(Exchange(lambda: live.__reduce__()[2], live.__setstate__))
            live.__setstate__((function, new.args, new.keywords, vars(new) or None))
            merge.touch(live)
        return live
