"""Bodies of replies that both sides build."""

from __future__ import annotations

from typing import Any, Literal

ReloadCode = Literal["not_enabled", "bad_request", "cancelled", "timeout", "failed"]

NOT_ENABLED = "this server does not permit reloads; start it with --allow-reload-forward (development only)"


def reload_failure(
    call_id: str | None, code: ReloadCode, phase: str, error: str, *, rank: int | None = None
) -> dict[str, Any]:
    """The reply of a reload that changed nothing. `phase` is where it ended, `rank` whose failure that was."""
    return {
        "success": False,
        "id": call_id,
        "code": code,
        "phase": phase,
        "rank": rank,
        "error": error,
        "message": error,
    }
