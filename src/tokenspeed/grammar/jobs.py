"""What the front and the process that compiles grammars say to each other, through pipes."""

from __future__ import annotations

import struct

import msgspec

from tokenspeed.runtime.protocol.sampling import Grammar

LENGTH = struct.Struct("<I")


class Job(msgspec.Struct, tag=True, frozen=True):
    """A grammar to compile."""

    number: int
    grammar: Grammar


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """Nobody waits for the job of this number any more; it has no outcome."""

    number: int


class Outcome(msgspec.Struct, frozen=True):
    """What became of the job of this number: the compiled form, or one sentence."""

    number: int
    compiled: bytes = b""
    error: str = ""


def frame(message: Job | Cancel | Outcome) -> bytes:
    """A message as it goes through a pipe."""
    data = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(data)) + data
