"""Weights outlive a rank whose context is lost: its successor finds them on the GPU, and on a CPU likewise."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("grpc")
pytest.importorskip("smg_grpc_proto")

from tests.gpu.models import hf_config, hf_model
from tests.gpu.serving import Server
from tests.tokenspeed.server.conftest import byte_tokenizer
from tests.waiting import until
from tokenspeed.runtime.config import (
    CacheOptions,
    Config,
    GraphOptions,
    KernelOptions,
    ModelOptions,
    ReloadOptions,
    SchedulerOptions,
)
from tokenspeed.runtime.loader.checksum import PIECE, checksums
from tokenspeed.runtime.loader.slab import make_slab, open_slab

VOCAB, EOS = 260, 257
PROMPTS = [[(11 * i + 5 * j) % 250 + 1 for j in range(3 + 4 * i)] for i in range(4)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 20, "ignore_eos": True}
BAD_ACCESS = {
    "cuda": ("tokenspeed_kernel.ops.activation.triton", "tl.store(out + row", "tl.store(out + (1 << 45) + row"),
    "cpu": (
        "tokenspeed_kernel.ops.activation.reference",
        "silu(gate) * up",
        "silu(gate) * up * __import__('ctypes').string_at(0)",
    ),
}
"""An edit that writes or reads where nothing is: it ends the context, or the process."""
QWEN3_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}


def write_tokenizer(directory: Path) -> None:
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2TokenizerFast"}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kept")
    config = hf_config("qwen3", vocab_size=VOCAB, eos_token_id=EOS, initializer_range=0.3)
    hf_model(config).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


@pytest.fixture
def root() -> Iterator[Path]:
    """A short path: the names of sockets are bounded."""
    with tempfile.TemporaryDirectory(prefix="ts-") as directory:
        yield Path(directory)


def answers(server: Server, tag: str) -> list[list[int]]:
    return [list(server.generate(f"{tag} {i}", prompt, **GREEDY).output_ids) for i, prompt in enumerate(PROMPTS)]


def until_replaced(server: Server, times: int) -> None:
    until(lambda: server.counter("rank_replacements_total") >= times, server.log)


def kill(server: Server) -> None:
    """End the rank from outside."""
    ranks = [
        child.pid
        for child in psutil.Process(server.process.pid).children(recursive=True)
        if "tokenspeed.rank" in " ".join(child.cmdline())
    ]
    os.kill(ranks[-1], signal.SIGKILL)


def test_memory_is_had_again_by_its_descriptor(device: str) -> None:
    """Within one process; that it outlives one is shown below."""
    size = 2 * PIECE + 4096
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    slab = make_slab(place, size)
    memory = slab.bytes(0, size)
    words = torch.arange(size // 8, device=place)
    memory.view(torch.int64).copy_(words * words)
    sums, descriptors = checksums([memory]), slab.descriptors()
    assert sums == checksums([(words * words).cpu().view(torch.uint8)])
    del memory
    slab.close()
    again = open_slab(place, size, descriptors)
    memory = again.bytes(0, size)
    assert torch.equal(memory.view(torch.int64), words * words)
    half = again.bytes(4096, 64)
    half.zero_()
    assert checksums([memory]) != sums
    assert memory[4096:4160].eq(0).all()
    del memory, half
    again.close()
    for descriptor in descriptors:
        os.close(descriptor)
    if device == "cuda":
        before, _ = torch.cuda.mem_get_info()
        large = make_slab(place, 1 << 30)
        assert before - torch.cuda.mem_get_info()[0] >= 1 << 30
        large.close()
        until(lambda: before - torch.cuda.mem_get_info()[0] < 1 << 28, lambda: "closed memory is not given back")


def test_a_bad_access_of_an_edited_kernel_costs_the_rank_and_not_its_weights(
    device: str, model: Path, root: Path
) -> None:
    overlay = root / "overlay"
    config = Config(
        model=ModelOptions(model=str(model), device=device, max_model_len=128, dtype="float32"),
        scheduler=SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=64),
        cache=CacheOptions(max_total_tokens=2048),
        graphs=GraphOptions(cpu_graphs=device == "cpu", cudagraph_capture_sizes=(1, 4), prefill_graph_max_tokens=32),
        kernels=KernelOptions(tune_kernels=False),
        reload=ReloadOptions(allow_reload_forward=True, reload_overlay=str(overlay)),
    )
    server = Server(config, root / "run", overlay)
    try:
        server.start()
        expected = answers(server, "before")
        files = [path.rename(path.with_suffix(".away")) for path in model.glob("*.safetensors")]
        try:
            server.edit(*BAD_ACCESS[device])
            reply = server.control("/reload_forward", {"id": "bad access"})
            assert not reply["success"] and reply["undone"], reply
            print(f"\n{device}: the reply to a bad access: {reply['error']}")
            until_replaced(server, 1)
            assert answers(server, "after") == expected
            server.restore()
            kill(server)
            until_replaced(server, 2)
            assert answers(server, "killed") == expected
        finally:
            for path in files:
                path.rename(path.with_suffix(".safetensors"))
        said = [line for line in server.log().splitlines() if "the ranks were replaced in" in line]
        print("\n".join(said))
        assert len(said) == 2, server.log()
        assert all("their weights were kept" in line for line in said), server.log()
        assert server.stop() == 0, server.log()
    finally:
        server.kill()


@pytest.mark.gpu
def test_seconds_to_replace_a_rank_of_the_shape_of_qwen3_8b(root: Path) -> None:
    """Nothing is said of the time, which is printed: the goal is 10 s on one H200."""
    directory = root / "model"
    directory.mkdir()
    config = hf_config("qwen3", vocab_size=151936, eos_token_id=EOS, dtype="bfloat16", **QWEN3_8B)
    config.save_pretrained(directory)
    write_tokenizer(directory)
    overlay = root / "overlay"
    options = Config(
        model=ModelOptions(model=str(directory), device="cuda", load_format="dummy", max_model_len=4096),
        kernels=KernelOptions(tune_kernels=False),
        reload=ReloadOptions(allow_reload_forward=True, reload_overlay=str(overlay)),
    )
    server = Server(options, root / "run", overlay)
    try:
        began = time.monotonic()
        server.start()
        print(f"\nstart: {time.monotonic() - began:.1f} s, phases {server.info['startup']}")
        expected = answers(server, "before")
        for number, lose in enumerate(("kill", "bad access")):
            began = time.monotonic()
            if lose == "kill":
                kill(server)
            else:
                server.edit(*BAD_ACCESS["cuda"])
                assert not server.control("/reload_forward", {"id": lose})["success"]
                server.restore()
            until_replaced(server, number + 1)
            first = server.generate(f"first after {lose}", PROMPTS[0], **GREEDY)
            print(f"{lose}: {time.monotonic() - began:.1f} s to the end of an answer of 20 tokens")
            assert list(first.output_ids) == expected[0]
            assert answers(server, lose) == expected
        said = re.findall(r"the ranks were replaced in .*", server.log())
        print("\n".join(said))
        assert len(said) == 2 and all("their weights were kept" in line for line in said), server.log()
    finally:
        server.kill()
