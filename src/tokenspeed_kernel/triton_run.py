"""Launches of Triton kernels with less Python around them than `kernel[grid](…)` has.

A captured step is hundreds of launches, and capturing all steps is tens of thousands: what the host does for one is
what a reload waits for. Triton's own binder still says what a call is specialised for. What is left out is what is
the same for every launch: options as text, hooks that nobody has set, metadata that nobody reads.
"""

from __future__ import annotations

from typing import Any

from tokenspeed_kernel.triton_language import triton

_OWN = "tokenspeed"
"""Begins the keys of this file in a dict of Triton's."""


def run_triton(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """`kernel[grid](*args, **meta)` for a kernel that `triton.jit` made; any other is called just so.

    What was compiled is kept in the kernel's own caches, beside Triton's: an edit that lets the kernel compile anew
    takes both.
    """
    caches = vars(kernel).get("device_caches")
    if caches is None or _is_watched(kernel):
        kernel[grid](*args, **meta)
        return
    driver = triton.runtime.driver.active
    device = driver.get_current_device()
    # The first dict holds what was compiled by Triton's key, the second these keys by what they are made of.
    _, keys, _, _, binder = caches[device]
    bound, specialisation, options = binder(*args, **meta)
    key = (_OWN, *specialisation, *options.items())
    compiled = keys.get(key)
    if compiled is None or _differs(kernel):
        # Triton compiles, or says which of the constants that the kernel reads has changed.
        keys[key] = kernel[grid](*args, **meta)
        return
    x, y, z, *_ = (*grid, 1, 1)
    stream = driver.get_current_stream(device)
    compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *bound.values())


def _is_watched(kernel: Any) -> bool:
    """Whether somebody wants to see launches, or has them compiled in another way than is usual."""
    runtime, compilation = triton.knobs.runtime, triton.knobs.compilation
    return bool(
        kernel.pre_run_hooks
        or _calls(runtime.launch_enter_hook)
        or _calls(runtime.launch_exit_hook)
        or runtime.debug
        or compilation.instrumentation_mode
        or runtime.add_stages_inspection_hook
    )


def _calls(hook: Any) -> Any:
    """What a hook calls; Triton's own, to which others are added, calls nothing at first."""
    return getattr(hook, "calls", hook)


def _differs(kernel: Any) -> bool:
    """Whether a global that was compiled in has another value now."""
    used = kernel.used_global_vals
    return bool(used) and any(names.get(name, kernel) != value for (name, _), (value, names) in used.items())
