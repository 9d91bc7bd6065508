"""The weights of a rank in memory that the front keeps, where the rank that replaces a lost one finds them again."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise

import msgspec
import torch
from torch import Tensor

from tokenspeed.errors import cause_of
from tokenspeed.runtime.loader.checksum import checksums
from tokenspeed.runtime.loader.slab import Slab, SlabError, make_slab, open_slab
from tokenspeed.runtime.models.base import CausalLM
from tokenspeed.runtime.protocol.keeping import ASK, DROP, KEEP, receive, send

log = logging.getLogger(__name__)

ALIGNMENT = 512
"""Bytes between which a tensor begins, as torch's own allocator for GPUs has it."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """One parameter in the memory."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def tensor(self, slab: Slab) -> Tensor:
        """The parameter's memory."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        length = torch.Size(self.shape).numel() * dtype.itemsize
        # At least a byte, since there are no views of none.
        return slab.bytes(self.offset, max(length, 1))[:length].view(dtype).view(self.shape)


class Layout(msgspec.Struct, frozen=True):
    """Where each parameter is. Two models of one layout can have each other's weights.

    It follows from the model, its type and quantisation, and the rank's part of it. What else decides on the weights,
    the files and the seed, is the same for all ranks of one server.
    """

    device: str
    places: tuple[Place, ...]
    size: int


class Manifest(msgspec.Struct, frozen=True):
    """What is told of the memory beside it: its layout, and each parameter's sum when the weights were complete."""

    layout: Layout
    sums: list[int]


def plan_layout(model: CausalLM, dtype: torch.dtype, device: torch.device) -> Layout:
    """All parameters of `model`, one behind the other."""
    places, offset = [], 0
    for path, (shape, kind) in model.weight_forms(dtype).items():
        places.append(Place(path, str(kind).removeprefix("torch."), tuple(shape), offset))
        offset += max(1, -(-shape.numel() * kind.itemsize // ALIGNMENT)) * ALIGNMENT
    return Layout(str(device), tuple(places), offset)


class KeptWeights:
    """One rank's side of what the front keeps. `connection` leads to the front.

    `fetch`, then `attach`; where that does not succeed, `prepare`, load into `tensors`, and `seal`.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._found: list[int] = []
        """Descriptors of what the front has kept: the manifest, then those of the memory."""
        self._slab: Slab | None = None
        self._layout: Layout | None = None
        self._sealed: list[int] = []
        """The sums of the weights when they were complete."""

    def fetch(self) -> bool:
        """Ask the front for what another rank has left; whether there is something."""
        self._found = self._call(ASK)
        return bool(self._found)

    def attach(self, layout: Layout) -> bool:
        """Take over the weights that were fetched, if they are what `layout` wants and nobody has written to them.

        If not, the log says why.
        """
        if not self._found:
            return False
        try:
            reason = self._attach(layout)
        except SlabError as error:
            reason = str(error)
        except Exception as error:  # what is kept may be damaged in any way, and a load from the disk is not
            reason = cause_of(error)
        self._close_found()
        if reason:
            log.warning("the weights that were kept cannot be used again, and are loaded anew: %s", reason)
        return not reason

    def prepare(self, layout: Layout, check: Callable[[], None]) -> bool:
        """Have memory for a load: what was attached where that fits, else new memory; whether there is some.

        If not, the log says why: the weights are then where no other rank finds them. `check` is called before new
        memory is taken, when all else is given back; what it raises is raised.
        """
        if self._slab is not None and self._layout == layout:
            return True
        self.release()
        check()
        try:
            self._slab, self._layout = make_slab(torch.device(layout.device), layout.size), layout
        except SlabError as error:
            log.warning("the weights cannot be kept for ranks that replace lost ones: %s", error)
            return False
        return True

    def release(self) -> None:
        """Give back what is attached and what the front keeps."""
        self._close_found()
        slab, self._slab = self._slab, None
        self._call(DROP)
        if slab is not None:
            with suppress(SlabError):  # the driver frees it with the process
                slab.close()

    def tensors(self) -> dict[str, Tensor]:
        """The memory of every parameter, by its path."""
        assert self._slab is not None and self._layout is not None, "attached or prepared"
        return {place.path: place.tensor(self._slab) for place in self._layout.places}

    def seal(self) -> None:
        """Leave the weights, which are complete, to the front."""
        assert self._slab is not None and self._layout is not None, "prepared"
        self._sealed = _sums(self._slab, self._layout)
        manifest = Manifest(self._layout, self._sealed)
        descriptors = [_file_of(msgspec.msgpack.encode(manifest)), *self._slab.descriptors()]
        self._call(KEEP, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)

    def written(self) -> list[str]:
        """The parameters to which something has written since they were complete; for a device that has not failed."""
        if self._slab is None or self._layout is None:
            return []
        sums = zip(self._layout.places, self._sealed, _sums(self._slab, self._layout), strict=True)
        return [place.path for place, before, now in sums if before != now]

    def _attach(self, layout: Layout) -> str:
        """Why not; nothing if it succeeded."""
        manifest = msgspec.msgpack.decode(_content_of(self._found[0]), type=Manifest)
        if manifest.layout != layout:
            return f"their layout has changed ({_difference(manifest.layout, layout)})"
        self._slab, self._layout = open_slab(torch.device(layout.device), layout.size, self._found[1:]), layout
        self._sealed = manifest.sums
        changed = self.written()
        return f"something has written to {some_of(changed)}" if changed else ""

    def _call(self, message: bytes, descriptors: Sequence[int] = ()) -> list[int]:
        send(self._connection, message, descriptors)
        _, received = receive(self._connection)
        return received

    def _close_found(self) -> None:
        for descriptor in self._found:
            os.close(descriptor)
        self._found = []


def _difference(old: Layout, new: Layout) -> str:
    """Which parameters are not as they were."""
    before, after = ({place.path: (place.dtype, place.shape) for place in layout.places} for layout in (old, new))
    paths = [path for path in dict.fromkeys((*before, *after)) if before.get(path) != after.get(path)]
    return some_of(paths) if paths else "their order"


def _sums(slab: Slab, layout: Layout) -> list[int]:
    """Of every parameter, with what lies between it and the next."""
    starts = [place.offset for place in layout.places]
    return checksums([slab.bytes(start, end - start) for start, end in pairwise((*starts, layout.size))])


def some_of(paths: Sequence[str]) -> str:
    """The first few, and how many there are beyond."""
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _file_of(data: bytes) -> int:
    descriptor = os.memfd_create("tokenspeed-manifest")
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)
    return descriptor


def _content_of(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
