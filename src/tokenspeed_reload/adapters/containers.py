"""Containers: a live one takes over the contents of a new one."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from typing import Any

from tokenspeed_reload.merge import Merge
from tokenspeed_reload.undo import Attribute, DictContents, ListContents, SetContents
from tokenspeed_reload.values import is_a, is_atom, same_value

MAPPINGS = (dict, OrderedDict, defaultdict)
CONTAINERS = (*MAPPINGS, list, deque, set)


def merge_container(live: Any, new: Any, where: str, merge: Merge) -> Any:
    """Give a live container the contents of a new one; functions and classes in it are updated in place."""
    if id(live) in merge.new_of or (is_a(live, deque) and live.maxlen != new.maxlen):
        return new  # the limit of a deque is fixed when it is made
    merge.follow(live, new)
    if is_a(live, MAPPINGS):
        for key, value in new.items():
            if is_atom(key) and key in live:
                new[key] = merge.merge(live[key], value, f"{where}[{key!r}]")
        if is_a(live, defaultdict) and live.default_factory is not new.default_factory:
            merge.log.add(Attribute(live, "default_factory"))
            live.default_factory = new.default_factory
        same = len(live) == len(new) and all(
            same_value(a, b) and same_value(c, d) for (a, c), (b, d) in zip(live.items(), new.items(), strict=True)
        )
        record: Any = DictContents
    elif is_a(live, set):
        same = len(live) == len(new) and all(is_atom(item) for item in live | new) and live == new
        record = SetContents
    else:
        for index, (old, value) in enumerate(zip(list(live), list(new), strict=False)):
            new[index] = merge.merge(old, value, f"{where}[{index}]")
        same = len(live) == len(new) and all(map(same_value, live, new))
        record = ListContents
    if not same:
        merge.log.once(record, live)
        live.clear()
        live.extend(new) if is_a(live, list | deque) else live.update(new)
        merge.touch(live, counts=bool(new))
    return live


def refill(live: Any, new: Any, where: str, merge: Merge) -> None:
    """Add to a live container, which keeps what it holds, what a new one was given while its module ran."""
    if is_a(live, MAPPINGS):
        missing = [
            (merge.resolve(k), merge.resolve(v))
            for k, v in new.items()
            if not (is_atom(k) and k in live and same_value(live[k], merge.resolve(v)))
        ]
        record: Any = DictContents
    else:
        missing = [item for item in map(merge.resolve, new) if not any(same_value(item, held) for held in live)]
        record = SetContents if is_a(live, set) else ListContents
    if missing:
        merge.log.once(record, live)
        live.extend(missing) if is_a(live, list | deque) else live.update(missing)
        merge.touch(live)
    if len(live) != len(new):
        merge.notes.append(f"{where} keeps what it held, and got what its module put into it when it ran again")
