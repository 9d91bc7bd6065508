"""What `ts reload-forward` prints of the engines' answers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from tokenspeed.cli.rl_routes import EngineReply

SHOWN_FRAMES = 4
"""Frames of the way to an error that are printed; `--json` has them all."""


def succeeded(reply: EngineReply) -> bool:
    """Whether this engine runs what was asked for."""
    return reply.body.get("success") is True


def success_lines(body: dict[str, Any]) -> Iterator[str]:
    """The message, then what the reload could not do."""
    yield from str(body.get("message", "")).splitlines()
    for stale in body.get("stale", ()):
        yield f"stale: {stale['definition']}: {stale['why']}{_held_by(stale)}"
    for why, changes in groupby(sorted(body.get("needs_restart", ()), key=_why), key=_why):
        yield f"needs a restart: {', '.join(change['what'] for change in changes)}: {why}"
    if pending := body.get("pending"):
        yield f"changed, but not reloaded: {', '.join(pending)}"
    for note in body.get("notes", ()):
        yield f"note: {note}"


def failure_lines(reply: EngineReply) -> Iterator[str]:
    """One sentence, the place in the source and the way there when the engine named them, and what serves now."""
    if not reply.body:
        yield f"not reloaded: {reply.error}"
        return
    body = reply.body
    if body.get("code") == "not_enabled":
        yield "not reloaded: the engine runs without --allow-reload-forward; start it with that flag"
        return
    where = f" in phase {body['phase']}" if body.get("phase") else ""
    rank = f" on rank {body['rank']}" if body.get("rank") is not None else ""
    kind = f" ({body['code']})" if body.get("code") not in (None, "failed") else ""
    yield f"not reloaded{where}{rank}{kind}: {body.get('error') or body.get('message') or 'no reason given'}"
    if body.get("file"):
        line = f":{body['line']}" if body.get("line") is not None else ""
        text = f": {str(body['text']).strip()}" if body.get("text") else ""
        yield f"  {body['file']}{line}{text}"
        yield from _way_to(body)
    if body.get("undone"):
        yield "undone; the old code serves on"


def _way_to(body: dict[str, Any]) -> Iterator[str]:
    """The innermost frames of ours on the way to the error, outermost first; nothing when there is only its place."""
    trace = [str(frame) for frame in body.get("trace") or ()]
    if len(trace) > 1:
        yield "  on the way:"
        yield from (f"    {frame}" for frame in trace[-SHOWN_FRAMES:])


def status_line(status: dict[str, Any]) -> str:
    """`draining: 3 running`, or the state alone."""
    detail = status.get("detail")
    return f"{status['state']}: {detail}" if detail else str(status["state"])


def _why(change: dict[str, Any]) -> str:
    return str(change["why"])


def _held_by(stale: dict[str, Any]) -> str:
    held_by = stale.get("held_by")
    return f" (held by {', '.join(held_by)})" if held_by else ""
