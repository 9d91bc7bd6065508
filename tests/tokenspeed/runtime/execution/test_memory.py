"""What of a GPU's memory is left for the KV cache."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.errors import ResourceError
from tokenspeed.runtime.distributed.group import Group
from tokenspeed.runtime.execution.memory import MemoryUse, check_weights_fit
from tokenspeed.runtime.models.config import ModelConfig
from tokenspeed.runtime.models.registry import build_model

GIB = 1 << 30


def test_the_cache_gets_what_weights_steps_and_graphs_leave() -> None:
    use = MemoryUse(total=100 * GIB, held=20 * GIB, step=2 * GIB, graphs=3 * GIB)
    assert use.left(0.5) == 25 * GIB
    assert use.left(0.2) == -5 * GIB
    assert str(use) == "100.00 GiB in all, 20.00 GiB held, 2.00 GiB for a step, 3.00 GiB for graphs"


def test_weights_that_are_more_than_what_is_free_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"vocab_size": 1 << 20, "hidden_size": 1024, "intermediate_size": 1024, "tie_embeddings": True}
    config = ModelConfig(
        "Qwen3ForCausalLM",
        "qwen3",
        num_layers=1,
        num_heads=8,
        num_kv_heads=8,
        head_dim=128,
        **shape,  # type: ignore[arg-type]
    )
    model = build_model(config, Group.solo())
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 80 * GIB))
    check_weights_fit(model, torch.bfloat16, gpu)
    with pytest.raises(ResourceError, match=r"weights take 4.03 GiB and the GPU has 3.00 GiB free; raise --tensor"):
        check_weights_fit(model, torch.float32, gpu)
