"""The root of all messages."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Root of everything that crosses a process boundary."""
