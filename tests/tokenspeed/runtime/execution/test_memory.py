"""What of a GPU's memory is left for the KV cache."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.errors import ResourceError
from tokenspeed.runtime.execution.memory import MemoryUse, check_weights_fit

GIB = 1 << 30


def test_the_cache_gets_what_weights_steps_and_graphs_leave() -> None:
    use = MemoryUse(total=100 * GIB, held=20 * GIB, step=2 * GIB, graphs=3 * GIB)
    assert use.left(0.5) == 25 * GIB
    assert use.left(0.2) == -5 * GIB
    assert str(use) == "100.00 GiB in all, 20.00 GiB held, 2.00 GiB for a step, 3.00 GiB for graphs"


def test_weights_that_are_more_than_what_is_free_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    model = torch.nn.Linear(1024, 1 << 20, bias=False, device="meta")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 80 * GIB))
    check_weights_fit(model, torch.bfloat16, gpu)
    with pytest.raises(ResourceError, match=r"weights take 4.00 GiB and the GPU has 3.00 GiB free; raise --tensor"):
        check_weights_fit(model, torch.float32, gpu)
