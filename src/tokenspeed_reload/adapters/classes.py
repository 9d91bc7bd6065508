"""Classes: the live class object stays; its members and bases are updated."""

from __future__ import annotations

import abc
import enum
import functools
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any, Literal

from tokenspeed_reload.adapters.containers import CONTAINERS, refill
from tokenspeed_reload.adapters.twins import twin_of
from tokenspeed_reload.codes import is_redirection, redirected_to
from tokenspeed_reload.merge import REMOVED, Edit, Merge
from tokenspeed_reload.undo import MISSING, ClassState, cell_value
from tokenspeed_reload.values import has_method, is_a, same_code, same_dict, same_value

METACLASS = "the metaclass changed; it is fixed when a class is made"
SLOTS = "the slots changed; a new class takes its place, and objects of the old one keep their layout"
LAYOUT = "the layout of its bases changed; a new class takes its place, and objects of the old one keep theirs"
OTHER_KIND = "it became another kind of object"
NEW_CLASS = "its bases cannot be changed in place; a new class takes its place"

_FIXED = frozenset(
    {"__dict__", "__weakref__", "__module__", "__slots__", "_abc_impl", "__abstractmethods__", "__qualname__"}
)
_POSITIONS = frozenset({"__firstlineno__", "__static_attributes__"})


class ClassAdapter:
    """Updates Python classes."""

    def matches(self, live: Any, new: Any, merge: Merge) -> bool:
        """True for two classes of one definition."""
        return (
            is_a(live, type)
            and is_a(new, type)
            and live.__module__ == new.__module__
            and live.__qualname__ == new.__qualname__
            and is_a(live, enum.EnumMeta) == is_a(new, enum.EnumMeta)
        )

    def merge(self, live: Any, new: Any, where: str, merge: Merge) -> Any:
        """Update `live`; what CPython fixes when a class is made is reported.

        A class that derives from object alone cannot get other bases. Then the new class takes its place:
        instances and subclasses move to it, and whatever holds the old class holds the new one. Where slots or
        the layout of bases changed, instances cannot move: they keep the old class, whose methods follow.
        """
        if merge.successors.get(id(live)) is new:
            return new
        if not self._bases(live, new, where, merge) and _same_layout(live, new):
            give_way(live, new, where, NEW_CLASS, merge)
            return new
        if type(live) is not merge.resolve(type(new)):
            merge.restart(where, METACLASS)
        slots = [vars(cls).get("__slots__") for cls in (live, new)]
        has_slots = same_value(*(tuple(s) if is_a(s, list) else s for s in slots))
        if not has_slots or not self._bases(live, new, where, merge):
            why = LAYOUT if has_slots else SLOTS
            merge.restart(where, why)
            merge.replace(where, live, why)
            self.merge_members(live, twin_of(new, live, merge), where, merge, skip=set())
            merge.supersede(live, new, keeps_objects=True)
            return new
        merge.follow(live, new)
        self.merge_members(live, new, where, merge, skip=set())
        return live

    def _bases(self, live: Any, new: Any, where: str, merge: Merge) -> bool:
        """Set the bases; False when CPython refuses."""
        wanted = tuple(merge.resolve(base) for base in new.__bases__)
        if len(wanted) == len(live.__bases__) and all(map(_same, wanted, live.__bases__)):
            return True
        merge.log.once(ClassState, live)
        try:
            live.__bases__ = wanted
        except TypeError:
            return False
        merge.touch(live)
        return True

    def merge_members(self, live: Any, new: Any, where: str, merge: Merge, skip: set[str]) -> None:
        """Set, update and remove members so that `live` has those of `new`."""
        unchanged = merge.comparison.unchanged_members(new)
        functions = merge.comparison.member_functions(new)
        for name, value in list(vars(new).items()):
            if name in _FIXED or name in skip or is_a(value, GetSetDescriptorType | MemberDescriptorType):
                continue
            self._member(
                live,
                name,
                value,
                f"{where}.{name}",
                merge,
                keep=name in unchanged,
                is_definition=name in functions,
            )
        defined = merge.comparison.defined_members(live)
        for name in list(vars(live)):
            gone = name not in vars(new) and name not in _FIXED and name not in skip
            if gone and (name in defined or _is_special(name)):
                self._note_edit(f"{where}.{name}", vars(live)[name], "removed", merge)
                if merge.is_old_code(vars(live)[name]):
                    merge.replace(f"{where}.{name}", vars(live)[name], REMOVED)
                self._remove(live, name, merge)
        self._finish(live, merge)

    def _member(
        self, live: Any, name: str, value: Any, where: str, merge: Merge, *, keep: bool, is_definition: bool
    ) -> None:
        old = vars(live).get(name, MISSING)
        if old is value:
            return  # a function that was set from outside, and whose own statement did not change
        if old is MISSING:
            stays = merge.resolve(value)
            self._note_edit(where, stays, "added", merge)
        elif keep and not _has_code(value):
            if type(old) is type(value) and type(value) in CONTAINERS and value:
                refill(old, value, where, merge)
            return
        elif is_called_otherwise(old, value):
            stays = merge.resolve(value)
            self._leave(live, old, f"{OTHER_KIND}: {type(value).__name__}", where, merge)
        elif name == "__annotations__":
            resolved = merge.resolved(value)
            stays = old if same_dict(old, resolved) else resolved
        else:
            module = merge.comparison.module_of(live)
            follows = is_definition and module is not None and merge.is_own(old, module)
            stays = merge.merge_definition(old, value, where) if follows else merge.merge(old, value, where)
            if keep and stays is value and not same_value(old, value):
                return  # set from outside; the class body did not change it
            if stays is value and merge.is_old_code(old) and id(old) not in merge.new_of and not is_redirection(old):
                merge.replace(where, old, f"{OTHER_KIND}: {type(value).__name__}")
        if is_a(stays, FunctionType) and is_redirection(stays):
            # The class calls the target at once; only those who hold the old function go the long way.
            stays = redirected_to(stays)
        if same_value(old, stays):
            return
        merge.log.once(ClassState, live)
        type.__setattr__(live, name, stays)
        if stays is value and has_method(stays, "__set_name__"):
            type(stays).__set_name__(stays, live, name)
        merge.touch(live, counts=name not in _POSITIONS)

    def _leave(self, live: Any, member: Any, why: str, where: str, merge: Merge) -> None:
        """Let the functions of a member go on with their old code: whoever holds them calls them as before."""
        todo = [value for value in _functions_in(member).values() if _is_member(value, live)]
        seen: set[int] = set()
        while todo:
            function = todo.pop()
            if type(function) is FunctionType and id(function) not in seen:
                seen.add(id(function))
                if merge.is_old_code(function):
                    merge.pinned[id(function)] = function
                    merge.replace(where, function, why)
                todo += [function.__dict__.get("__wrapped__"), *map(cell_value, function.__closure__ or ())]

    def _note_edit(self, where: str, member: Any, kind: Literal["added", "removed"], merge: Merge) -> None:
        """A function that came or went is an edit of what runs under its name."""
        if is_a(member, FunctionType):
            merge.edited.append(Edit(where, member, kind))

    def _remove(self, live: Any, name: str, merge: Merge) -> None:
        if is_a(vars(live)[name], MemberDescriptorType):
            return
        merge.log.once(ClassState, live)
        type.__delattr__(live, name)
        merge.touch(live, counts=name != "__annotations__")

    def _finish(self, live: Any, merge: Merge) -> None:
        if not is_a(live, abc.ABCMeta):
            return
        classes: list[Any] = [live]
        for cls in classes:
            merge.log.once(ClassState, cls)
            abc.update_abstractmethods(cls)
            cls._abc_caches_clear()
            classes.extend(sub for sub in type.__subclasses__(cls) if is_a(sub, abc.ABCMeta))


def give_way(live: Any, new: Any, where: str, why: str, merge: Merge) -> None:
    """Let `new` take the place of a class wherever it is held; objects that fit move to it."""
    _redirect_methods(live, new, where, merge)
    merge.supersede(live, new, keeps_objects=not _same_layout(live, new))
    merge.replace(where, live, why)


def _redirect_methods(live: Any, new: Any, where: str, merge: Merge) -> None:
    """Functions of the class that are held, in bound methods for instance, go on to those of the new class."""
    for name, member in vars(live).items():
        follower = vars(new).get(name)
        targets = _functions_in(follower) if type(follower) is type(member) else {}
        for part, function in _functions_in(member).items():
            target: Any = targets.get(part)
            if function is target or not _is_member(function, live):
                continue  # it is no product of the class statement: others use it too
            if is_a(target, FunctionType):
                if not same_code(function.__code__, target.__code__) or not _same_defaults(function, target):
                    merge.edited.append(Edit(f"{where}.{name}", function))
                merge.redirect(function, target)
            elif merge.is_old_code(function):
                merge.pinned[id(function)] = function
                merge.replace(f"{where}.{name}", function, REMOVED if follower is None else OTHER_KIND)


def _functions_in(member: Any) -> dict[str, Any]:
    """The functions of one member of a class."""
    if type(member) is property:
        return {"get": member.fget, "set": member.fset, "delete": member.fdel}
    return {"call": member.__func__ if type(member) in (staticmethod, classmethod) else member}


def is_called_otherwise(old: Any, new: Any) -> bool:
    """True for two kinds of methods of which the functions are given different things first: self, a class, nothing."""
    return {convention_of(old), convention_of(new)} in ({"", "self"}, {"", "cls"}, {"self", "cls"})


def convention_of(member: Any) -> str | None:
    """What the function of a member is given first: "self", "cls", "" for nothing, None if that is not known."""
    if is_a(member, staticmethod | classmethod):
        return "cls" if is_a(member, classmethod) else ""
    return "self" if is_a(member, FunctionType | property | functools.cached_property) else None


def _same_layout(live: type, new: type) -> bool:
    """True when an instance of one class can become an instance of the other."""
    if type(live) is not type(new) or any("__slots__" in vars(cls) for cls in (*live.__mro__, *new.__mro__)):
        return False
    places = [(c.__basicsize__, c.__itemsize__, c.__dictoffset__, c.__weakrefoffset__) for c in (live, new)]
    return places[0] == places[1]


def _same_defaults(left: FunctionType, right: FunctionType) -> bool:
    return same_value(left.__defaults__, right.__defaults__) and same_dict(left.__kwdefaults__, right.__kwdefaults__)


def _same(left: Any, right: Any) -> bool:
    return left is right


def _is_member(function: Any, cls: type, depth: int = 4) -> bool:
    """True for a function that the statement of a class made, decorators and what they put around it included."""
    if not is_a(function, FunctionType):
        return False
    names = {function.__qualname__, function.__code__.co_qualname}
    if function.__module__ == cls.__module__ and any(name.startswith(f"{cls.__qualname__}.") for name in names):
        return True
    inner = [function.__dict__.get("__wrapped__"), *(cell_value(c) for c in function.__closure__ or ())]
    return depth > 0 and any(_is_member(value, cls, depth - 1) for value in inner)


def _is_special(name: str) -> bool:
    """Members that a decorator such as dataclass made."""
    return name.startswith("__") and name.endswith("__")


def _has_code(value: Any) -> bool:
    return callable(value) or has_method(value, "__get__")
