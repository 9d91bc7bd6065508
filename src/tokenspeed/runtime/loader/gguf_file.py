"""Reads the header of a GGUF file and maps its tensors, without touching their data.

The `gguf` package has a reader too; it makes a numpy array of every element of every array, which takes five
seconds on a vocabulary of 49,152 tokens and its merges. This one takes well under a tenth of a second.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from tokenspeed.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies. `shape` is in torch's order (rows first), the reverse of the file's."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    """From the start of the file, in bytes."""
    num_bytes: int


@dataclass(frozen=True)
class GGUFFile:
    """An open GGUF file."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]
    header_digest: str
    """SHA-256 of everything before the tensor data: the same metadata and layout give the same digest."""
    buffer: mmap.mmap

    def data(self, tensor: GGUFTensor) -> memoryview:
        """The raw bytes of `tensor`, mapped from the file and not yet read."""
        return memoryview(self.buffer)[tensor.offset : tensor.offset + tensor.num_bytes]


def open_gguf(path: Path) -> GGUFFile:
    """Map the file and parse its header.

    Raises:
        ModelError: for a file that cannot be read, is no GGUF file, or ends too early.
    """
    try:
        with path.open("rb") as file:
            # A private writable mapping: torch warns about tensors over read-only memory.
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); give a readable .gguf file") from error
    if buffer[:4] != MAGIC:
        raise ModelError(f"{path} does not start like a GGUF file; download it again")
    try:
        return _parse(path, buffer)
    except (struct.error, ValueError, KeyError, OverflowError, MemoryError) as error:
        raise ModelError(f"{path} is damaged ({error}); download it again") from error


class _Cursor:
    """A position in the header that moves on with each read."""

    def __init__(self, buffer: mmap.mmap, position: int) -> None:
        self.buffer = buffer
        self.position = position

    def scalar(self, code: str) -> Any:
        return self.array(code, 1)[0]

    def array(self, code: str, count: int) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        values = struct.unpack_from(layout, self.buffer, self.position)
        self.position += struct.calcsize(layout)
        return values

    def string(self) -> str:
        return next(self.strings(1))

    def strings(self, count: int) -> Iterator[str]:
        unpack, buffer = struct.Struct("<Q").unpack_from, self.buffer
        for _ in range(count):
            start = self.position + 8
            self.position = start + unpack(buffer, self.position)[0]
            if self.position > len(buffer):
                raise ValueError("a text reaches beyond its end")
            yield buffer[start : self.position].decode("utf-8")

    def value(self) -> Any:
        kind = GGUFValueType(self.scalar("I"))
        if kind is GGUFValueType.STRING:
            return self.string()
        if kind is not GGUFValueType.ARRAY:
            return self.scalar(_SCALARS[kind])
        element, count = GGUFValueType(self.scalar("I")), self.scalar("Q")
        if element is GGUFValueType.STRING:
            return list(self.strings(count))
        if element is GGUFValueType.ARRAY:
            raise ValueError("arrays of arrays are not supported")
        return list(self.array(_SCALARS[element], count))


def _parse(path: Path, buffer: mmap.mmap) -> GGUFFile:
    cursor = _Cursor(buffer, len(MAGIC))
    version = cursor.scalar("I")
    if version not in VERSIONS:
        raise ModelError(f"{path} has GGUF version {version}; versions 2 and 3 (little endian) are supported")
    tensor_count, key_count = cursor.array("Q", 2)
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.string()
        metadata[key] = cursor.value()
    infos = [_tensor_info(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise ValueError(f"its alignment is {alignment!r}")
    digest = hashlib.sha256(memoryview(buffer)[: cursor.position]).hexdigest()
    start = math.ceil(cursor.position / alignment) * alignment
    tensors = {name: _locate(name, dims, kind, start + offset) for name, dims, kind, offset in infos}
    end = max((tensor.offset + tensor.num_bytes for tensor in tensors.values()), default=0)
    if end > len(buffer):
        raise ValueError(f"it has {len(buffer)} bytes and its tensors need {end}")
    return GGUFFile(path, metadata, tensors, digest, buffer)


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    dimensions = cursor.scalar("I")
    if dimensions > _MAX_DIMENSIONS:
        raise ValueError(f"tensor {name} has {dimensions} dimensions")
    return name, cursor.array("Q", dimensions), cursor.scalar("I"), cursor.scalar("Q")


def _locate(name: str, dims: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
    quantization = GGMLQuantizationType(kind)
    block_size, block_bytes = GGML_QUANT_SIZES[quantization]
    shape = tuple(reversed(dims))
    if shape and shape[-1] % block_size:
        raise ValueError(f"tensor {name} has rows of {shape[-1]}, no multiple of the {block_size} of a block")
    num_bytes = math.prod(shape) // block_size * block_bytes
    return GGUFTensor(name, quantization, shape, offset, num_bytes)
