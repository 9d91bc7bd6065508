"""The replies of `reload_forward`."""

from __future__ import annotations

from typing import Any

from tokenspeed.runtime.execution.generation import Generation
from tokenspeed_kernel.jit import JitCount
from tokenspeed_reload import Report

KERNELS = "tokenspeed_kernel.ops."
CAPTURED = ("tokenspeed.runtime.execution.graphs.", "dict object['_copies']")
"""How the names of the holders in a captured graph begin; the second is what its `Snapshotter` remembers."""


def overlay_note(strays: list[str]) -> list[str]:
    """What to say of files in the overlay that nothing reads: a wrong folder or a misspelled name, mostly."""
    if not strays:
        return []
    files = ", ".join(strays)
    return [
        f"these files of the overlay are no module that is loaded, and do nothing: {files}; the overlay is laid out "
        "as the packages, as in tokenspeed/runtime/models/llama.py"
    ]


def nothing_changed(
    call_id: str, generation: int, looked_at: list[str], outside: list[str], notes: list[str]
) -> dict[str, Any]:
    """The reply of a reload that found every module of the forward packages as it last ran.

    `outside` are the changed modules elsewhere.
    """
    return {
        "success": True,
        "id": call_id,
        "generation": generation,
        "message": "nothing to reload: no module of the forward packages changed since it last ran; looked at "
        + ", ".join(looked_at),
        "modules": [],
        "pending": [],
        "objects_patched": 0,
        "stale": [],
        "needs_restart": [{"what": name, "why": "it lies outside the forward packages"} for name in outside],
        "notes": notes,
        "graphs": {"how": "none", "decode": 0, "prefill": 0, "nodes": 0},
        "jit": {"compiled": 0, "seconds": 0.0},
        "seconds": {"total": 0.0, "held": 0.0},
    }


def success(
    call_id: str,
    report: Report,
    generation: Generation,
    jit: JitCount,
    seconds: dict[str, float],
    swapped: int | None = None,
    why_recaptured: str | None = None,
) -> dict[str, Any]:
    """The reply of a committed reload.

    Args:
        swapped: nodes of captured steps that got new code; None where the steps were captured anew.
        why_recaptured: why they were, as a clause.
    """
    captured = len(generation.decode) + len(generation.prefill) > 0
    how = "none" if not captured else "recaptured" if swapped is None else "swapped"
    return {
        "success": True,
        "id": call_id,
        "generation": generation.number,
        "message": _summary(report, how, swapped, jit, seconds),
        "modules": [{"name": module.name, "why": module.why} for module in report.modules],
        "pending": list(report.pending),
        "objects_patched": report.objects_patched,
        "stale": _stale(report),
        "needs_restart": [{"what": item.what, "why": item.why} for item in report.needs_restart],
        "notes": [*report.notes, *_recapture_note(report, how, why_recaptured), *_beyond(report)],
        "graphs": {
            "how": how,
            "decode": len(generation.decode),
            "prefill": len(generation.prefill),
            "nodes": generation.num_nodes if swapped is None else swapped,
        },
        "jit": {"compiled": jit.compiled, "seconds": round(jit.seconds, 3)},
        "seconds": {name: round(value, 4) for name, value in seconds.items()} | {"held": 0.0},
    }


def _stale(report: Report) -> list[dict[str, Any]]:
    """What holds old objects and stays: the generation that goes held what it was captured with."""
    told = []
    for item in report.stale:
        held_by = [holder for holder in item.held_by if not holder.startswith(CAPTURED)]
        if held_by or not item.held_by:
            told.append({"definition": item.definition, "why": item.why, "held_by": held_by})
    return told


def _beyond(report: Report) -> list[str]:
    """What the edit did, or left, where neither the patch nor an undo reaches."""
    running = [f"{r.what} goes on with its old code, {r.where}, line {r.line}" for r in report.running]
    return running + [f"{effect.module}: {effect.what}; an undo does not take that back" for effect in report.effects]


def _recapture_note(report: Report, how: str, why: str | None) -> list[str]:
    """Why an edit of kernels did not go into the captured steps as they are."""
    edits_kernels = any(
        module.name.startswith(KERNELS) and not module.why.startswith("uses") for module in report.modules
    )
    if how != "recaptured" or why is None or not edits_kernels:
        return []
    return [f"captured steps were captured anew, which an edit of kernel bodies alone does not need: {why}"]


def _summary(report: Report, how: str, swapped: int | None, jit: JitCount, seconds: dict[str, float]) -> str:
    users = [module for module in report.modules if module.why.startswith("uses ")]
    edited = [module.name for module in report.modules if module not in users]
    patched = (
        f"reloaded {', '.join(edited)} and {len(users)} dependent module(s), "
        f"{report.objects_patched} object(s) patched in {seconds['patch']:.2f} s"
    )
    steps = [f"warmed in {seconds['warm']:.1f} s"]
    if how == "recaptured":
        steps.append(f"recaptured in {seconds['graphs']:.1f} s")
    if how == "swapped":
        steps.append(f"swapped {swapped} node(s) in {seconds['graphs']:.2f} s")
    steps.append(f"JIT-compiled {jit.compiled} kernel(s) in {jit.seconds:.1f} s")
    return f"{patched};\n{'; '.join(steps)}"
