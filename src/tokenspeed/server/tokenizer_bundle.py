"""The files of a tokenizer, for a gateway that cannot read them where they lie."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from smg_grpc_proto.generated import common_pb2 as common

from tokenspeed.server.errors import UnsupportedCall

PATTERNS = (
    "*token*.json",
    "config.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "*processor_config.json",
    "*.model",
    "*.tiktoken",
    "*.jinja",
)
"""Of names in the directory itself; weights are never among them."""

CHUNK_BYTES = 64 * 1024
"""Far below the 4 MiB that gRPC clients take in one message."""


def read_bundle(directory: str) -> bytes:
    """A zip archive of the files. The same files give the same bytes.

    Raises:
        UnsupportedCall: when there are none.
    """
    root = Path(directory)
    files = sorted({path for pattern in PATTERNS for path in root.glob(pattern) if path.is_file()})
    if not files:
        raise UnsupportedCall(f"{directory} has no tokenizer files to send")
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as bundle:
        for path in files:
            bundle.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return archive.getvalue()


def chunks(bundle: bytes) -> Iterator[common.GetTokenizerChunk]:
    """The archive in pieces, the last one with the SHA-256 of the whole."""
    starts = range(0, len(bundle), CHUNK_BYTES)
    for start in starts:
        last = start == starts[-1]
        digest = hashlib.sha256(bundle).hexdigest() if last else ""
        yield common.GetTokenizerChunk(data=bundle[start : start + CHUNK_BYTES], sha256=digest)
