"""Triton and Gluon: kernels, device and constexpr functions, their autotuners and heuristics, the interpreter.

A live kernel takes over the new source and keeps its identity. Kernels that depend on what changed compile anew,
and no others; the binaries of before live as long as an undo could need them.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from tokenspeed_reload.adapters.triton.adopt import Adoption
from tokenspeed_reload.adapters.triton.library import Triton, chain, function_of, is_tritons, triton
from tokenspeed_reload.adapters.triton.reach import Reach, Reaches, callees_first, differing_globals, key_of
from tokenspeed_reload.adapters.triton.rehash import rehash
from tokenspeed_reload.adapters.triton.states import KernelStates, Redone, Undone, forget_binaries
from tokenspeed_reload.adapters.triton.window import CompileWindow
from tokenspeed_reload.merge import Merge
from tokenspeed_reload.values import is_a


class TritonAdapter:
    """Updates what Triton's decorators make."""

    def __init__(self) -> None:
        self._reaches = Reaches()

    def matches(self, live: Any, new: Any, merge: Merge) -> bool:
        """True for two kernels of one definition, wrappers included."""
        library = triton()
        if library is None or not library.is_kernel(live) or not library.is_kernel(new):
            return False
        functions = [function_of(kernel, library) for kernel in (live, new)]
        if functions[0] is None or functions[1] is None:
            return False
        return (id(live), id(new)) in merge.forced or merge.same_definition(functions[0], functions[1])

    def merge(self, live: Any, new: Any, where: str, merge: Merge) -> Any:
        """Let `live` take over `new`; the kernel is compiled anew if anything about it changed."""
        library = triton()
        assert library is not None
        if self not in merge.kept:  # Triton was imported by the modules of this very reload
            self.begin(merge)
        states, _ = merge.kept[self]
        return Adoption(library, states, merge).merge(live, new, where)

    def wraps(self, value: Any) -> bool:
        """True for kernels, so that `NAME = triton.jit(f)` is merged too."""
        library = triton()
        return library is not None and library.is_kernel(value)

    def begin(self, merge: Merge) -> None:
        """Remember which kernels are registered."""
        library = triton()
        if library is not None:
            states = KernelStates(library, self._reaches, merge.inputs.modules)
            window = CompileWindow(library, self._reaches, states.add)
            merge.kept[self] = states, window
            merge.log.add(Undone(states, window))
            window.open()

    def kinds(self) -> set[type]:
        """The classes of kernels."""
        library = triton()
        return library.kinds() if library is not None else set()

    def finish(self, objects: list[Any], merge: Merge) -> None:
        """Find the kernels that depend on what changed, and let them compile anew."""
        library = triton()
        if library is None or self not in merge.kept:
            return
        states, window = merge.kept.pop(self)
        window.close()
        sweep = _Sweep(library, states, self._reaches, merge)
        sweep.run([o for o in objects if library.is_kernel(o)])
        merge.log.add(Redone(states))


class _Sweep:
    """The pass over all kernels of the process at the end of a reload."""

    def __init__(self, library: Triton, states: KernelStates, reaches: Reaches, merge: Merge) -> None:
        self._library = library
        self._states = states
        self._all_reaches = reaches
        self._merge = merge
        self._adoption = Adoption(library, states, merge)
        self._reaches: dict[int, Reach] = {}

    def run(self, kernels: list[Any]) -> None:
        """Renew what was made at run time, then invalidate what depends on a change."""
        gone = {id(d) for d in self._merge.discarded} | {
            id(entry.old) for entry in self._merge.replaced if not entry.goes_on
        }
        kernels = [k for k in kernels if id(k) not in gone]
        for kernel in kernels:
            if type(kernel.fn) is FunctionType:
                self._renew(kernel)
        for kernel in kernels:
            self._resolve(kernel)
            self._match_arguments(kernel)
        sources = {id(k): k for k in kernels if self._library.is_source(k) and not is_tritons(k.__module__)}
        self._reaches = {key: self._all_reaches.of(kernel, self._library) for key, kernel in sources.items()}
        self._invalidate({key: sources[key] for key in self._concerned(sources)})
        self._keep_choices(kernels)

    def _renew(self, kernel: Any) -> None:
        """Bring a kernel up to date whose function got other code, or the same in another place."""
        merge, function = self._merge, kernel.fn
        if id(function) in merge.patched and id(kernel) not in merge.patched:
            if merge.comparison.decorators_changed(function):
                where = f"{function.__module__}.{function.__qualname__}"
                merge.replace(where, kernel, "Its decorators changed; only a new call of its maker applies them.")
            self._adoption.renew(kernel, function)
        elif id(function) in merge.touched:
            self._adoption.forget_rewritten(function)
            if self._library.is_source(kernel) and kernel.hash is None and id(kernel) not in merge.patched:
                self._adoption.renew(kernel, function)  # it never compiled, so that its lines are free to move
                del merge.patched[id(kernel)]

    def _resolve(self, kernel: Any) -> None:
        """Put live objects in the place of discarded new ones."""
        if id(kernel) in self._merge.patched:
            for name, value in list(vars(kernel).items()):
                live = self._merge.resolve(value)
                if live is not value:
                    vars(kernel)[name] = live

    def _match_arguments(self, kernel: Any) -> None:
        """A wrapper knows the names of the arguments of what it wraps."""
        inner = chain(kernel, self._library)
        if len(inner) == 1 or id(inner[-1]) not in self._merge.patched or "arg_names" not in vars(kernel):
            return
        if kernel.arg_names != inner[-1].arg_names:
            self._states.add(kernel)
            kernel.arg_names = inner[-1].arg_names

    def _concerned(self, sources: dict[int, Any]) -> list[int]:
        """The kernels that changed, or that reach something that did."""
        merge, changed = self._merge, self._changed()
        concerned = {
            key
            for key, kernel in sources.items()
            if key in merge.patched
            or self._reaches[key].bindings & merge.rebound
            or self._reaches[key].objects.keys() & changed
            or differing_globals(kernel)
        }
        grown = True
        while grown:
            fresh = {k for k in sources if k not in concerned and self._reaches[k].callees.keys() & concerned}
            concerned |= fresh
            grown = bool(fresh)
        return [key for key in sources if key in concerned]

    def _invalidate(self, concerned: dict[int, Any]) -> None:
        moved: list[Any] = []
        for kernel in callees_first(concerned, self._reaches):
            before = kernel.hash
            if before is not None and id(kernel) not in self._merge.patched and self._is_as_before(kernel):
                continue
            self._states.add(kernel)
            self._take_place(kernel)
            forget_binaries(kernel)
            reach = self._reaches[id(kernel)]
            if before is not None or reach.values:
                key_of(kernel, reach)
            if before is not None:
                self._merge.patched[id(kernel)] = kernel
                moved.append(kernel)
        rehash(moved)

    def _is_as_before(self, kernel: Any) -> bool:
        """True when the key comes out as it was: the name was reached, but not what it stands for changed."""
        reach = self._reaches[id(kernel)]
        state = {name: vars(kernel)[name] for name in ("hash", "used_global_vals")}
        plain = any(type(old) is not self._library.constexpr for _, old in differing_globals(kernel))
        kernel.hash, kernel.used_global_vals = None, {}
        keys = (key_of(kernel, None), key_of(kernel, reach))
        used = kernel.used_global_vals
        vars(kernel).update(state)
        hidden = plain or bool(reach.attributes & self._merge.rebound or reach.objects.keys() & self._changed())
        same = state["hash"] == keys[1] or (state["hash"] == keys[0] and not hidden)
        if same and keys[0] is not None:
            vars(kernel)["used_global_vals"] = used
        return same and keys[0] is not None

    def _changed(self) -> set[int]:
        """The objects that changed, as far as kernels could compile them in."""
        merge = self._merge
        return merge.patched.keys() | {id(v) for v in merge.touched.values() if is_a(v, type)}

    def _take_place(self, kernel: Any) -> None:
        """A kernel that compiles anew does so with the lines on which it stands now."""
        if type(kernel.fn) is FunctionType and kernel.fn.__code__.co_firstlineno != kernel.starting_line_number:
            self._adoption.renew(kernel, kernel.fn)

    def _keep_choices(self, kernels: list[Any]) -> None:
        """What is tuned from now on is not to be seen after an undo."""
        for kernel in kernels:
            is_tuner = issubclass(type(kernel), self._library.autotuner) and kernel not in self._states
            if is_tuner and id(chain(kernel, self._library)[-1]) in self._merge.patched:
                self._states.add(kernel)
                kernel.cache = dict(kernel.cache)
