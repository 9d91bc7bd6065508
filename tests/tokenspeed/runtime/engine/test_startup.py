"""What a start says when the memory of a GPU ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine import MemoryOutbox
from tokenspeed.errors import ResourceError
from tokenspeed.runtime.config import Config
from tokenspeed.runtime.distributed.channel import Channel
from tokenspeed.runtime.engine.startup import Startup
from tokenspeed.runtime.protocol.reports import Starting


def test_a_gpu_whose_memory_ran_out_is_one_sentence_that_names_the_phase(tmp_path: Path) -> None:
    outbox = MemoryOutbox()
    startup = Startup(Config(), Channel(0, 1, tmp_path), outbox)  # type: ignore[arg-type]
    with (
        pytest.raises(ResourceError, match=r"ran out in start-up phase graphs; lower --max-num-batched-tokens"),
        startup._phase("graphs") as progress,
    ):
        progress("decode 256")
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
    told = [(m.phase, m.detail) for m in outbox.sent if isinstance(m, Starting)]
    assert told == [("graphs", ""), ("graphs", "decode 256")]
    assert "graphs" not in startup.seconds
