"""Functions behind functools.cache and lru_cache."""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any

from tokenspeed_reload.merge import Merge
from tokenspeed_reload.undo import CacheClear, InstanceState
from tokenspeed_reload.values import same_value

CACHED_FUNCTION = type(functools.lru_cache(lambda: None))


class CachedFunctionAdapter:
    """Updates the function inside of the wrapper, which cannot be exchanged, and empties the cache."""

    def matches(self, live: Any, new: Any, merge: Merge) -> bool:
        """True for two cached Python functions."""
        return (
            type(live) is CACHED_FUNCTION
            and type(new) is CACHED_FUNCTION
            and type(live.__wrapped__) is FunctionType
            and type(new.__wrapped__) is FunctionType
        )

    def merge(self, live: Any, new: Any, where: str, merge: Merge) -> Any:
        """Update `live`, unless the size or the kind of the cache changed: these are fixed in the wrapper."""
        clear_cache(live, merge)
        if live.cache_parameters() != new.cache_parameters():
            merge.merge(live.__wrapped__, new.__wrapped__, where)
            merge.replace(where, live, "the parameters of a functools cache cannot be changed in place")
            return new
        merge.follow(live, new)
        merge.merge(live.__wrapped__, new.__wrapped__, where)
        changed = {
            name: value
            for name, value in vars(new).items()
            if name != "__wrapped__" and not same_value(vars(live).get(name), value)
        }
        if changed:
            merge.log.once(InstanceState, live)
            vars(live).update(changed)
            merge.touch(live)
        return live


def clear_cache(cached: Any, merge: Merge) -> None:
    """Empty a functools cache, now and whenever the code is exchanged."""
    merge.log.once(CacheClear, cached)
    cached.cache_clear()
