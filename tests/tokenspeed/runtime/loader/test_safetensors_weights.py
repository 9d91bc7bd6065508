from __future__ import annotations

import json
import resource
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from tokenspeed.errors import ModelError
from tokenspeed.runtime.loader.safetensors_weights import INDEX, SINGLE, find_shards, safetensors_weights


def assert_same(directory: Path, model: LlamaForCausalLM) -> None:
    got, expected = dict(safetensors_weights(directory)), model.state_dict()
    assert set(got) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


def test_one_file(tmp_path: Path, tiny_llama: LlamaForCausalLM) -> None:
    tiny_llama.save_pretrained(tmp_path)
    assert list(find_shards(tmp_path)) == [tmp_path / SINGLE]
    assert_same(tmp_path, tiny_llama)


def test_several_files(tmp_path: Path, tiny_llama: LlamaForCausalLM) -> None:
    tiny_llama.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(find_shards(tmp_path)) > 1
    assert_same(tmp_path, tiny_llama)


def write_sparse(path: Path, num_bytes: int) -> None:
    header = json.dumps({"w": {"dtype": "BF16", "shape": [num_bytes // 2], "data_offsets": [0, num_bytes]}}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + num_bytes)


def test_what_is_not_used_is_not_read(tmp_path: Path) -> None:
    write_sparse(tmp_path / SINGLE, 1 << 31)
    before = psutil.Process().memory_info().rss
    ((_, tensor),) = safetensors_weights(tmp_path)
    assert tensor[1 << 29].item() == 0
    assert psutil.Process().memory_info().rss - before < 1 << 28


def test_a_file_that_does_not_fit_into_the_address_space_is_named(tmp_path: Path) -> None:
    write_sparse(tmp_path / SINGLE, 1 << 34)
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (1 << 32), before[1]))
    try:
        with pytest.raises(ModelError, match=r"model\.safetensors cannot be mapped"):
            list(safetensors_weights(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_tensor_that_the_index_does_not_name_is_left_out(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "one.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    assert [name for name, _ in safetensors_weights(tmp_path)] == ["a"]


def test_a_missing_shard_is_named(tmp_path: Path, tiny_llama: LlamaForCausalLM) -> None:
    tiny_llama.save_pretrained(tmp_path, max_shard_size="100KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ModelError, match=f"lacks {lost.name}"):
        find_shards(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}))
    with pytest.raises(ModelError, match=r"one\.safetensors lacks b"):
        list(safetensors_weights(tmp_path))


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_a_damaged_index_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ModelError, match=r"index\.json is damaged"):
        find_shards(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path, tiny_llama: LlamaForCausalLM) -> None:
    tiny_llama.save_pretrained(tmp_path)
    content = (tmp_path / SINGLE).read_bytes()
    for damaged in (b"", content[:6], content[:100], content[:-1], b"\xff" * 64):
        (tmp_path / SINGLE).write_bytes(damaged)
        with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
            list(safetensors_weights(tmp_path))


def test_quantised_types_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4).to(torch.float8_e4m3fn)}, tmp_path / SINGLE)
    with pytest.raises(ModelError, match=r"has a as torch\.float8_e4m3fn"):
        list(safetensors_weights(tmp_path))


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no weights; .*dummy"):
        find_shards(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"only PyTorch \.bin files"):
        find_shards(tmp_path)
