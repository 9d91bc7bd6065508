"""What rank 0 decides by its clock and its files, and puts into the stream for every rank.

The ranks run the same deterministic code; a decision that depends on time or on a disk is made once, here.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenspeed.runtime.protocol.calls import ToEngine
from tokenspeed.runtime.protocol.message import Message


class Begin(Message, frozen=True):
    """The reload at the head of the queue starts its drain."""

    id: str


class Settle(Message, frozen=True):
    """The reload at the head of the queue ends without running, with this reply."""

    id: str
    body: dict[str, Any]


class Expire(Message, frozen=True):
    """A reload waited longer than its `timeout_s`."""

    id: str


Directive = Begin | Settle | Expire
StreamMessage = ToEngine | Directive

encoder = msgspec.msgpack.Encoder()
decoder = msgspec.msgpack.Decoder(tuple[int, list[StreamMessage]])
"""Of what rank 0 passes on: its `StepDigest`, then the messages."""
