"""Containers keyed by kernels: a kernel's hash comes from its source, so that an edit would lose it there."""

from __future__ import annotations

import functools
import gc
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from tokenspeed_reload.values import is_a

_CACHED_FUNCTION = type(functools.lru_cache(lambda: None))


def rehash(kernels: Iterable[Any]) -> None:
    """Build anew, in place, every dict and set that has one of `kernels` as a key or inside of a tuple that is one."""
    targets = list(kernels)
    if not targets:
        return
    keys = {id(kernel) for kernel in targets}
    references = [ref for kernel in targets for ref in weakref.getweakrefs(kernel)]
    holders = gc.get_referrers(*targets, *references)
    tuples = [holder for holder in holders if type(holder) is tuple]
    if tuples:
        holders += gc.get_referrers(*tuples)
    keys |= {id(item) for item in (*references, *tuples)}
    containers = {id(holder): holder for holder in holders if is_a(holder, dict | set)}
    for container in containers.values():
        if any(id(key) in keys for key in list(container)) and not _is_function_cache(container):
            _build_anew(container, keys)


def _is_function_cache(container: Any) -> bool:
    """True for the dict inside of functools.lru_cache, where a changed key shall miss."""
    return type(container) is dict and any(type(h) is _CACHED_FUNCTION for h in gc.get_referrers(container))


def _build_anew(container: Any, keys: set[int]) -> None:
    kind: Any = next(k for k in (OrderedDict, dict, set) if is_a(container, k))
    if kind is set:
        items = [_fresh(key, keys) for key in set.__iter__(container)]
    else:
        items = [(_fresh(key, keys), value) for key, value in kind.items(container)]
    kind.clear(container)
    kind.update(container, items)


def _fresh(key: Any, keys: set[int]) -> Any:
    """A weak reference remembers the hash of what it refers to: it needs a new one."""
    if type(key) is weakref.ref and id(key) in keys:
        target = key()
        return key if target is None else weakref.ref(target, key.__callback__)
    return key
