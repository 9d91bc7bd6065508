"""Kernels that were chosen at start-up, and would be chosen otherwise after an edit."""

from __future__ import annotations

from tokenspeed_kernel.registry import Registry
from tokenspeed_reload import NeedsRestart

Choices = dict[str, tuple[str, str | None]]


def changed_choices(before: Choices, registry: Registry) -> list[NeedsRestart]:
    """The choices that an edit changed: layers keep the kernels that their plan gave them.

    Args:
        before: `registry.other_choices()` as it was before the edit.
        registry: after the edit.
    """
    return [
        NeedsRestart(
            operation,
            f"A start would choose {now or 'no kernel, and fail'}; the layers were planned with {chosen} and keep it.",
        )
        for operation, (chosen, now) in registry.other_choices().items()
        if before.get(operation) != (chosen, now)
    ]
