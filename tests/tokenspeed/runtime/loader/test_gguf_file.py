from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenspeed.errors import ModelError
from tokenspeed.runtime.loader.gguf_file import open_gguf
from tokenspeed.runtime.loader.source import ModelSource

WriteGGUF = Callable[..., Path]


def test_metadata_and_tensors_are_what_the_gguf_package_reads(write_gguf: WriteGGUF) -> None:
    path = write_gguf(
        metadata={
            "a.text": "Ġgrüße",
            "a.flag": True,
            "a.negative": [-1, 2, -3],
            "a.floats": [0.5, 1.5],
            "a.texts": ["", "x", "日本"],
            "a.flags": [True, False],
        }
    )
    file, reference = open_gguf(path), gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reference.fields.items() if not name.startswith("GGUF.")}
    assert dict(file.metadata) == fields
    assert set(file.tensors) == {tensor.name for tensor in reference.tensors}
    for tensor in reference.tensors:
        ours = file.tensors[tensor.name]
        assert ours.type == tensor.tensor_type
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert bytes(file.data(ours)) == tensor.data.tobytes()


def test_the_real_file(smollm2: ModelSource) -> None:
    file = open_gguf(smollm2.path)
    assert len(file.tensors) == 272
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert file.metadata["tokenizer.ggml.pre"] == "smollm"


def test_the_digest_follows_the_header(write_gguf: WriteGGUF) -> None:
    first = open_gguf(write_gguf(name="a.gguf")).header_digest
    assert open_gguf(write_gguf(name="b.gguf")).header_digest == first
    assert open_gguf(write_gguf(metadata={"general.name": "another"}, name="c.gguf")).header_digest != first


def test_an_alignment_of_its_own(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "aligned.gguf", "llama")
    writer.add_custom_alignment(128)
    writer.add_tensor("a", np.arange(3, dtype=np.float32))
    writer.add_tensor("b", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(tmp_path / "aligned.gguf")
    assert np.frombuffer(file.data(file.tensors["b"]), np.float32).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("content", [b"", b"GGU", b"PK\x03\x04 a zip file", b"version https://git-lfs"])
def test_what_is_no_gguf_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.gguf"):
        open_gguf(path)


def test_another_version_is_refused_by_number(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(100))
    with pytest.raises(ModelError, match="version 1"):
        open_gguf(path)


def test_a_file_that_ends_early_is_refused_wherever_it_ends(write_gguf: WriteGGUF, tmp_path: Path) -> None:
    content = write_gguf(tensors={"token_embd.weight": (np.ones((4, 4), np.float32), gguf.GGMLQuantizationType.F32)})
    whole = content.read_bytes()
    data_end = max(t.offset + t.num_bytes for t in open_gguf(content).tensors.values())
    path = tmp_path / "short.gguf"
    for length in range(1, data_end):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            open_gguf(path)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_damage_in_the_header_is_never_another_error(
    write_gguf: WriteGGUF, tmp_path: Path, data: st.DataObject
) -> None:
    source = tmp_path / "model.gguf"
    if not source.exists():
        write_gguf(tensors={"token_embd.weight": (np.ones((4, 4), np.float32), gguf.GGMLQuantizationType.F32)})
    content = bytearray(source.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] = data.draw(st.integers(0, 255))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content)
    try:
        open_gguf(damaged)
    except ModelError as error:
        assert "damaged.gguf" in str(error)
