"""A live kernel takes over the state of a new one; wrappers around it follow, tuned choices included."""

from __future__ import annotations

import inspect
from types import FunctionType, MethodType
from typing import Any

from tokenspeed_reload.adapters.triton.alike import BINARIES, NOT_COMPARED, same_setting
from tokenspeed_reload.adapters.triton.library import Triton, chain
from tokenspeed_reload.adapters.triton.states import KernelStates, forget_binaries
from tokenspeed_reload.codes import fit
from tokenspeed_reload.merge import Merge
from tokenspeed_reload.undo import MISSING, Entry
from tokenspeed_reload.values import same_value


class Adoption:
    """Merges kernels within one reload."""

    def __init__(self, library: Triton, states: KernelStates, merge: Merge) -> None:
        self._library = library
        self._states = states
        self._merge = merge

    def merge(self, live: Any, new: Any, where: str) -> Any:
        """Let `live` take over `new`, both with all that is wrapped around them."""
        olds, news = chain(live, self._library), chain(new, self._library)
        pairs = list(zip(olds, news, strict=False))
        if [_family(k) for k in olds] != [_family(k) for k in news]:
            if any(id(old) in self._merge.new_of or id(fresh) in self._merge.live_of for old, fresh in pairs):
                return new
            return self._restack(olds, news, where)
        if any(self._merge.new_of.get(id(old), fresh) is not fresh for old, fresh in pairs):
            return new
        pairs = [(old, fresh) for old, fresh in pairs if id(old) not in self._merge.new_of and old is not fresh]
        for old, fresh in pairs:
            self._merge.follow(old, fresh)
        for old, fresh in reversed(pairs):
            self._one(old, fresh, where)
        return live

    def renew(self, kernel: Any, function: FunctionType) -> None:
        """Build the state of `kernel` from its function, whose code was updated in place."""
        registered = dict(self._library.registry)
        fresh = self._remade(kernel, function)
        self._library.registry.clear()
        self._library.registry.update(registered)
        self._states.add(kernel)
        state = {name: value for name, value in vars(fresh).items() if name != "pre_run_hooks"}
        if "hash" in state:
            state["hash"] = vars(kernel)["hash"]
        self._write(kernel, type(kernel), {**vars(kernel), **state})
        self.forget_rewritten(function)

    def forget_rewritten(self, function: Any) -> None:
        """Let the interpreter rewrite `function` anew."""
        rewritten: dict[Any, Any] = getattr(self._library.interpreted, "rewritten_fn", {})
        if function in rewritten:
            self._merge.log.add(Entry(rewritten, function))
            del rewritten[function]

    def _one(self, live: Any, new: Any, where: str) -> None:
        """One kernel or one wrapper of the same family."""
        state = dict(vars(new))
        function = self._function(live, new, where)
        state["fn"] = function
        changed = type(live) is not type(new) or function is not live.fn or id(live.fn) in self._merge.patched
        for name, value in vars(new).items():
            if name in NOT_COMPARED:
                continue
            old = vars(live).get(name, MISSING)
            state[name] = self._value(old, value, f"{where}.{name}")
            changed = changed or not same_setting(old, state[name])
        if "pre_run_hooks" in state:
            state["pre_run_hooks"] = self._hooks(live, new)
            changed = changed or not same_setting(live.pre_run_hooks, state["pre_run_hooks"])
        if self._library.is_source(new):
            _register(live, self._library)
        if not changed:
            return
        self._states.add(live)
        if "base_fn" in state:
            state["base_fn"] = chain(new, self._library)[-1].fn
            state["base_fn"] = self._merge.resolve(state["base_fn"])
        if "cache" in state:
            state["cache"] = self._kept(self._tuned([live]) or state, state, where)
        if self._library.is_interpreted(new):
            self.forget_rewritten(function)
            state["rewriter"].fn = function
        if "hash" in state:
            state["hash"] = vars(live).get("hash")  # containers keyed by it stay in order until all is merged
        self._write(live, type(new), state)

    def _restack(self, olds: list[Any], news: list[Any], where: str) -> Any:
        """The decorators around a kernel changed in kind, number or order.

        A wrapper can become another kind of wrapper in place. A kernel that is wrapped now, or no longer, cannot:
        the new object takes its place in whatever holds it.
        """
        tuned = self._tuned(olds)
        for new in news:
            if tuned is not None and issubclass(type(new), self._library.autotuner):
                new.cache = self._kept(tuned, vars(new), where)
        if len(olds) == 1 or len(news) == 1:
            for old in {id(k): k for k in (olds[0], olds[-1] if len(news) == 1 else olds[0])}.values():
                self._merge.superseded.append((old, news[0]))
            self._merge.replace(where, olds[0], "Its decorators changed; a new object took its place.")
            return news[0]
        pairs = {id(news[0]): olds[0], id(news[-1]): olds[-1]}
        pairs |= {id(new): old for new, old in zip(news[1:-1], olds[1:-1], strict=False)}
        for new in news:
            if id(new) in pairs:
                self._merge.follow(pairs[id(new)], new)
        self._one(olds[-1], news[-1], where)
        for new in reversed(news[:-1]):
            new.fn = self._merge.resolve(new.fn)
            old = pairs.get(id(new))
            if old is not None:
                self._states.add(old)
                self._write(old, type(new), dict(vars(new)))
        return olds[0]

    def _tuned(self, kernels: list[Any]) -> dict[str, Any] | None:
        """What the first autotuner among `kernels` has chosen, and from what."""
        tuner = next((k for k in kernels if issubclass(type(k), self._library.autotuner)), None)
        return None if tuner is None else {name: vars(tuner)[name] for name in ("cache", "configs", "keys")}

    def _write(self, kernel: Any, cls: type, state: dict[str, Any]) -> None:
        if type(kernel) is not cls:
            kernel.__class__ = cls
        state = {name: _rebound(value, kernel) for name, value in state.items()}
        for name in BINARIES - {"device_caches"}:
            if name != "kernel":
                state.pop(name, None)
        vars(kernel).clear()
        vars(kernel).update(state)
        if "device_caches" in state:
            held = state["hash"]
            forget_binaries(kernel)
            vars(kernel)["hash"] = held
        # Not among the touched objects: a later write to the dict itself would hide the hash from `states`.
        self._merge.patched[id(kernel)] = kernel

    def _function(self, live: Any, new: Any, where: str) -> Any:
        """The wrapped kernel, or the Python function, that stays."""
        if type(new.fn) is not FunctionType or type(live.fn) is not FunctionType:
            return self._merge.resolve(new.fn)
        if fit(new.fn.__code__, live.fn, self._merge.definitions_for(new.fn.__code__)) is None:
            return new.fn  # a redirection would hide the closure from the compiler
        self._merge.forced.add((id(live.fn), id(new.fn)))
        return self._merge.merge(live.fn, new.fn, where)

    def _value(self, old: Any, new: Any, where: str) -> Any:
        """What stays of one attribute; functions in lists and dicts are merged one by one."""
        merge = self._merge
        if type(old) is not type(new):
            return merge.resolve(new)
        if type(new) is list and len(old) == len(new):
            items = [self._value(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(old, new, strict=True))]
            return old if all(map(same_value, old, items)) else items
        if type(new) is dict:
            members = {k: self._value(old.get(k, MISSING), v, f"{where}[{k!r}]") for k, v in new.items()}
            same = list(old) == list(members) and all(same_value(old[k], members[k]) for k in old)
            return old if same else members
        if type(new).__module__ == "triton.runtime.autotuner" and _alike_configs(old, new, merge, where):
            return old
        if type(new) is FunctionType:
            return merge.merge(old, new, where)
        return old if same_setting(old, new) else merge.resolve(new)

    def _hooks(self, live: Any, new: Any) -> list[Any]:
        """The hooks that the module adds, and after them those that came from outside."""
        hooks = [self._merge.resolve(hook) for hook in new.pre_run_hooks]
        own = {id(hook) for hook in hooks}
        others = [h for h in live.pre_run_hooks if id(h) not in own]
        return [*hooks, *(h for h in others if not (hooks and self._merge.is_old_code(h)))]

    def _kept(self, tuned: dict[str, Any], state: dict[str, Any], where: str) -> dict[Any, Any]:
        """The tuned choices that are still among the configurations."""
        if not same_setting(list(tuned["keys"]), list(state["keys"])):
            return {}
        now = [(_config(c), c) for c in state["configs"]]
        kept = {}
        for key, choice in tuned["cache"].items():
            same = next((c for config, c in now if same_setting(config, _config(choice))), None)
            if same is not None:
                kept[key] = same
        before = [_config(c) for c in tuned["configs"]]
        added = [config for config, _ in now if not any(same_setting(config, old) for old in before)]
        if kept and added:
            self._merge.notes.append(
                f"{where} has {len(added)} new configuration(s); {len(kept)} choice(s) tuned before stay as they are."
            )
        return kept

    def _remade(self, kernel: Any, function: FunctionType) -> Any:
        """A new kernel with the options of an old one."""
        cls = type(kernel)
        if self._library.is_interpreted(kernel):
            return cls(function, **kernel.kwargs)
        state = vars(kernel)
        options = [p for p in list(inspect.signature(cls.__init__).parameters)[2:] if p in state or f"_{p}" in state]
        return cls(function, **{p: state.get(f"_{p}", state.get(p)) for p in options})


def _family(kernel: Any) -> type:
    """Kernels of different languages can become each other; wrappers of different kinds are told apart."""
    for cls in reversed(type(kernel).__mro__):
        if cls.__module__.startswith("triton.") and cls.__name__ not in ("KernelInterface", "JITCallable"):
            return cls
    return type(kernel)


def _register(kernel: Any, library: Triton) -> None:
    """The table of kernels names the live one, not the one that a reload made."""
    function = kernel.fn
    key = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '')}"
    if key in library.registry:
        library.registry[key] = kernel


def _rebound(value: Any, kernel: Any) -> Any:
    """A bound method of a kernel becomes the live one's."""
    if type(value) is MethodType and type(value.__self__) is type(kernel):
        return MethodType(value.__func__, kernel)
    return value


def _config(config: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(config).items() if name != "pre_hook"}


def _alike_configs(old: Any, new: Any, merge: Merge, where: str) -> bool:
    if not same_setting(_config(old), _config(new)):
        return False
    hooks = (vars(old).get("pre_hook"), vars(new).get("pre_hook"))
    return same_value(hooks[0], merge.merge(*hooks, f"{where}.pre_hook"))
