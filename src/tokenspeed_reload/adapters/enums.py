"""Enumerations: members keep their identity, new ones are grafted onto the live class."""

from __future__ import annotations

import enum
from typing import Any

from tokenspeed_reload.adapters.classes import ClassAdapter
from tokenspeed_reload.merge import Merge
from tokenspeed_reload.undo import ClassState, DictContents, InstanceState, ListContents
from tokenspeed_reload.values import is_a, same_value


class EnumAdapter(ClassAdapter):
    """Updates the members and methods of a live enumeration."""

    def matches(self, live: Any, new: Any, merge: Merge) -> bool:
        """True for two enumerations of one definition."""
        return is_a(live, enum.EnumMeta) and super().matches(live, new, merge)

    def merge(self, live: Any, new: Any, where: str, merge: Merge) -> Any:
        """Update `live`."""
        merge.log.once(ClassState, live)
        for mapping in (live._member_map_, live._value2member_map_):
            merge.log.once(DictContents, mapping)
        merge.log.once(ListContents, live._member_names_)
        merge.follow(live, new)
        old_members = dict(live._member_map_)
        changed = list(old_members) != list(new._member_map_)
        members: dict[str, Any] = {}
        for name, member in new._member_map_.items():
            held = old_members.get(name)
            if held is None or (held.name != member.name) or not _same_data(new, held, member):
                members[name] = self._graft(live, member, members)
                changed = True
                if held is not None and name == member.name:
                    merge.replace(f"{where}.{name}", held, "a member that is a value itself cannot take another one")
            else:
                members[name] = held
                merge.follow(held, member)
                changed = self._update(held, member, merge) or changed
        self._install(live, new, members, set(old_members) - set(members))
        if changed:
            merge.touch(live)
        self.merge_members(live, new, where, merge, skip=set(members) | set(old_members) | _BOOKKEEPING)
        return live

    def _graft(self, live: Any, member: Any, members: dict[str, Any]) -> Any:
        if member.name in members:
            return members[member.name]  # an alias
        member.__class__ = live
        member.__dict__["__objclass__"] = live
        return member

    def _update(self, held: Any, member: Any, merge: Merge) -> bool:
        wanted = {n: v for n, v in vars(member).items() if n != "__objclass__"}
        if all(same_value(vars(held).get(name), value) for name, value in wanted.items()):
            return False
        merge.log.once(InstanceState, held)
        vars(held).update(wanted)
        merge.touch(held)
        return True

    def _install(self, live: Any, new: Any, members: dict[str, Any], removed: set[str]) -> None:
        for name in removed:
            if name in live.__dict__:
                type.__delattr__(live, name)
        for name, member in members.items():
            if name not in live.__dict__:
                type.__setattr__(live, name, new.__dict__.get(name, member))
            if is_a(live.__dict__.get(name), type(member)):
                type.__setattr__(live, name, member)
        live._member_map_.clear()
        live._member_map_.update(members)
        live._member_names_[:] = new._member_names_
        live._value2member_map_.clear()
        for value, member in new._value2member_map_.items():
            live._value2member_map_[value] = members[member.name]


def _same_data(new: Any, held: Any, member: Any) -> bool:
    """True when the members are equal as what else they are: integers or texts, which do not change."""
    data = new._member_type_
    return data is object or data.__eq__(held, member) is True


_BOOKKEEPING = {
    *("_member_map_", "_member_names_", "_value2member_map_", "_unhashable_values_", "_hashable_values_"),
    *("_unhashable_values_map_", "_member_type_", "_value_repr_", "_new_member_", "_use_args_"),
}
