from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tokenspeed.errors import ModelError
from tokenspeed.runtime.config import ModelOptions
from tokenspeed.runtime.loader.gguf_file import open_gguf
from tokenspeed.runtime.loader.source import ModelSource, resolve
from tokenspeed.runtime.loader.weights import checkpoint_weights, stored_weights

WriteGGUF = Callable[..., Path]
Kind = gguf.GGMLQuantizationType
CPU = torch.device("cpu")


def load(path: Path) -> dict[str, torch.Tensor]:
    source = resolve(ModelOptions(model=str(path)), print)
    return dict(checkpoint_weights(source, CPU))


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_1])
def test_every_weight_comes_back_under_its_name_and_in_its_order(
    write_gguf: WriteGGUF, llama_tensors: Callable[..., Any], tiny_llama: LlamaForCausalLM, kind: Kind
) -> None:
    got = load(write_gguf(llama_tensors(tiny_llama, kind)))
    expected = tiny_llama.state_dict()
    assert set(got) == set(expected)
    for name, tensor in expected.items():
        if tensor.ndim > 1:
            # Blocks lie within rows, so that quantising before or after the rows are reordered is the same.
            tensor = torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind))
        torch.testing.assert_close(got[name].float(), tensor, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16, Kind.Q4_1, Kind.Q5_1])
def test_a_part_is_that_of_the_whole(write_gguf: WriteGGUF, llama_tensors: Callable[..., Any], kind: Kind) -> None:
    """Parts that begin and end within a head and within a block of 32 as well."""
    source = resolve(ModelOptions(model=str(write_gguf(llama_tensors(kind=kind)))), print)
    whole = dict(checkpoint_weights(source, CPU))
    for name, weight in stored_weights(source, CPU):
        assert tuple(weight.shape) == tuple(whole[name].shape)
        for dim, size in enumerate(weight.shape):
            for start, length in (
                (0, size),
                (0, size // 2),
                (size // 2, size // 2),
                (size // 4, 3),
                (size - 1, 1),
                (size, 0),
            ):
                got = weight.narrow(dim, start, length)
                assert torch.equal(got, whole[name].narrow(dim, start, length)), (name, dim, start, length)


def test_plain_types_are_not_converted(write_gguf: WriteGGUF, llama_tensors: Callable[..., Any]) -> None:
    for kind, dtype in ((Kind.F16, torch.float16), (Kind.BF16, torch.bfloat16), (Kind.Q8_0, torch.float32)):
        weights = load(write_gguf(llama_tensors(kind=kind), name=f"{kind.name}.gguf"))
        assert weights["model.layers.1.self_attn.q_proj.weight"].dtype == dtype
        assert weights["model.layers.1.self_attn.q_proj.bias"].dtype == torch.float32


def test_the_real_model(smollm2: ModelSource) -> None:
    """Against gguf's arithmetic and llama.cpp's rule: rows 2i and 2i+1 of a head were rows i and d/2+i."""
    file = open_gguf(smollm2.path)
    weights = dict(checkpoint_weights(smollm2, CPU))
    assert sum(tensor.numel() for tensor in weights.values()) == 134_515_008

    def stored(name: str, rows: int = 1536) -> torch.Tensor:
        tensor = file.tensors[name]
        raw = np.frombuffer(file.data(tensor), np.uint8).reshape(tensor.shape[0], -1)
        return torch.from_numpy(gguf.dequantize(raw[:rows], tensor.type))

    assert torch.equal(weights["model.embed_tokens.weight"][:500], stored("token_embd.weight", rows=500))
    assert torch.equal(weights["model.layers.7.mlp.down_proj.weight"], stored("blk.7.ffn_down.weight"))
    for module, name, heads in (("q_proj", "attn_q", 9), ("k_proj", "attn_k", 3)):
        ours = weights[f"model.layers.29.self_attn.{module}.weight"].view(heads, 64, 576)
        theirs = stored(f"blk.29.{name}.weight").view(heads, 64, 576)
        assert torch.equal(ours[:, :32], theirs[:, 0::2])
        assert torch.equal(ours[:, 32:], theirs[:, 1::2])


def test_rope_factors_are_no_weight(write_gguf: WriteGGUF, llama_tensors: Callable[..., Any]) -> None:
    ones = np.ones(8, np.float32)
    weights = load(write_gguf({**llama_tensors(), "rope_freqs.weight": (ones, Kind.F32)}))
    assert not [name for name in weights if "rope" in name]


@pytest.mark.parametrize("name", ["blk.0.attn_sinks.weight", "mystery.weight", "blk.0.attn_q", "attn_q.weight"])
def test_an_unknown_tensor_is_named(write_gguf: WriteGGUF, llama_tensors: Callable[..., Any], name: str) -> None:
    path = write_gguf({**llama_tensors(), name: (np.ones(8, np.float32), Kind.F32)})
    with pytest.raises(ModelError, match=name):
        load(path)


def test_rows_that_the_heads_cannot_share_are_named(write_gguf: WriteGGUF, llama_tensors: Callable[..., Any]) -> None:
    path = write_gguf({**llama_tensors(), "blk.1.attn_k.weight": (np.ones((6, 64), np.float32), Kind.F32)})
    with pytest.raises(ModelError, match=r"blk\.1\.attn_k\.weight has 6 rows, but 2 heads"):
        load(path)


def test_a_type_that_nobody_can_read_is_named(write_gguf: WriteGGUF, llama_tensors: Callable[..., Any]) -> None:
    path = write_gguf({**llama_tensors(), "output_norm.weight": (np.ones(64, np.float32), Kind.F32)})
    content = path.read_bytes()
    at = content.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    path.write_bytes(content[:at] + int(Kind.I32).to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(ModelError, match="GGUF type I32"):
        load(path)
