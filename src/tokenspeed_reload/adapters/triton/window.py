"""Compiles that modules ask for while they are executed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenspeed_reload.adapters.triton.library import Triton
from tokenspeed_reload.adapters.triton.reach import Reach, Reaches, callees_first, key_of

_COMPILE = "_do_compile"


class CompileWindow:
    """Stands before Triton's compile from the beginning of a reload to its end.

    In between, kernels keep the hash under which containers know them, though their code is the new one. A compile
    under that key would store new code where the old is looked up, on the disk for all later processes too.
    """

    def __init__(self, library: Triton, reaches: Reaches, remember: Callable[[Any], None]) -> None:
        self._library = library
        self._reaches = reaches
        self._remember = remember
        self._original: Callable[..., Any] | None = None

    def open(self) -> None:
        """Compile under the keys of what is compiled."""
        cls, window = self._library.function, self
        original = vars(cls).get(_COMPILE)
        if original is None or self._original is not None:
            return

        def compile_anew(kernel: Any, key: Any, *args: Any, **options: Any) -> Any:
            held = window.renew_keys(kernel)
            try:
                return original(kernel, key, *args, **options)
            finally:
                for known, text in held:
                    known.hash = text
                for caches in kernel.device_caches.values():
                    caches[0].pop(key, None)  # these may be the ones that an undo gives back

        self._original = original
        setattr(cls, _COMPILE, compile_anew)

    def close(self) -> None:
        """Compile as Triton does."""
        if self._original is not None:
            setattr(self._library.function, _COMPILE, self._original)
            self._original = None

    def renew_keys(self, kernel: Any) -> list[tuple[Any, str | None]]:
        """Compute the keys of `kernel` and of all that it reaches anew; returns those that they had."""
        kernels: dict[int, Any] = {}
        reached: dict[int, Reach] = {}
        todo = [kernel]
        while todo:
            known = todo.pop()
            if id(known) not in kernels:
                kernels[id(known)] = known
                reached[id(known)] = self._reaches.of(known, self._library)
                todo.extend(reached[id(known)].callees.values())
        held = [(known, known.hash) for known in kernels.values()]
        for known in kernels.values():
            self._remember(known)
            known.hash, known.used_global_vals = None, {}
        for known in callees_first(kernels, reached):
            key_of(known, reached[id(known)])
        return held
