"""One pass over all objects of the process, for the functions that still run old code."""

from __future__ import annotations

import gc
import sys
from collections.abc import Container, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, compress
from operator import attrgetter, is_, not_
from types import FunctionType
from typing import Any

from tokenspeed_reload.adapters.caches import CACHED_FUNCTION, clear_cache
from tokenspeed_reload.codes import fit, is_in_place, is_redirection
from tokenspeed_reload.merge import NEW_CELLS, REMOVED, Edit, Merge
from tokenspeed_reload.undo import FunctionCode, set_code
from tokenspeed_reload.values import same_code


@contextmanager
def thawed() -> Iterator[None]:
    """Make objects that were hidden with gc.freeze() visible, and hide them again."""
    frozen = _is_frozen()
    if frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()


def _is_frozen() -> bool:
    """True when the program has called gc.freeze(), which hides the oldest objects.

    gc.get_freeze_count() does not tell: it walks over all that is frozen, and CPython 3.12 keeps what is immortal, a
    few hundred objects, with these.
    """
    generations = map(gc.get_objects, (2, 1, 0))
    return not any(map(partial(is_, sys.modules), chain.from_iterable(generations)))


class Survey:
    """What one pass over all objects of the process found, at the speed of C.

    Attributes:
        functions: the functions whose code stands in one of the files.
        others: the objects of exactly the wanted types.
    """

    def __init__(self, paths: Container[str], kinds: set[type]) -> None:
        objects = gc.get_objects()
        wanted = {FunctionType, *kinds}
        objects = list(compress(objects, map(wanted.__contains__, map(type, objects))))
        is_function = list(map(partial(is_, FunctionType), map(type, objects)))
        functions = list(compress(objects, is_function))
        self.functions = list(compress(functions, map(paths.__contains__, map(_FILE_OF, functions))))
        self.others = list(compress(objects, map(not_, is_function)))


class Made:
    """The functions and classes of modules, found in one pass over all objects of the process.

    Attributes:
        functions: the functions whose code stands in one of the files.
        classes: the classes of one of the modules.
    """

    def __init__(self, paths: Container[str], modules: Container[str]) -> None:
        objects = gc.get_objects()
        kinds = list(map(type, objects))
        metaclasses = {kind for kind in set(kinds) if issubclass(kind, type)}
        functions = list(compress(objects, map(partial(is_, FunctionType), kinds)))
        classes = list(compress(objects, map(metaclasses.__contains__, kinds)))
        self.functions: list[FunctionType] = list(
            compress(functions, map(paths.__contains__, map(_FILE_OF, functions)))
        )
        self.classes: list[type] = [cls for cls in classes if vars(cls).get("__module__") in modules]


def update_functions(survey: Survey, merge: Merge) -> None:
    """Give every function that still has old code the code that follows it.

    This reaches closures that were made at run time, and empties all functools caches of the modules.
    """
    names = merge.inputs.modules
    for function in survey.functions:
        _update(function, merge)
    for value in survey.others:
        inner = getattr(value, "__wrapped__", None) if type(value) is CACHED_FUNCTION else None
        if type(inner) is FunctionType and inner.__globals__.get("__name__") in names:
            clear_cache(value, merge)


def is_nested(function: FunctionType) -> bool:
    """True for a function that another one made, and that is not the member of a class."""
    return function.__code__.co_qualname.rpartition(".")[0].endswith("<locals>")


_FILE_OF = attrgetter("__code__.co_filename")


def finish_libraries(objects: list[Any], merge: Merge) -> None:
    """Let the adapters of libraries see the objects of their kinds."""
    wanted = [(library, library.kinds()) for library in merge.libraries]
    every = set().union(*(kinds for _, kinds in wanted))
    found = [o for o in objects if type(o) in every] if every else []
    for library, kinds in wanted:
        library.finish([o for o in found if type(o) in kinds], merge)


def _update(function: FunctionType, merge: Merge) -> None:
    code = function.__code__
    after = merge.follower(code)
    if merge.runs_new_code(function):
        return
    if is_redirection(function) or id(function) in merge.pinned:
        return
    where = f"{function.__module__}.{function.__qualname__}"
    if after is None and merge.is_replaced(code) and is_nested(function):
        if not any(entry.old is function for entry in merge.replaced):
            merge.replace(where, function, REMOVED)
        return
    if after is None or is_in_place(code, after):
        return
    fitted = fit(after, function, merge.definitions_for(after))
    if fitted is None:
        merge.replace(where, function, NEW_CELLS, is_held=True)
        return
    if is_in_place(code, fitted):
        return
    merge.note_padding(fitted, after)
    merge.log.add(FunctionCode(function))
    set_code(function, fitted)
    counts = not same_code(code, fitted)
    merge.touch(function, counts=counts)
    if counts:
        merge.edited.append(Edit(where, function))
