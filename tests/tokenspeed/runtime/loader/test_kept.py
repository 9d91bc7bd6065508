"""Weights that a front keeps are found again by the rank that replaces a lost one, as they were left, or not at all."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from multiprocessing import get_context
from typing import Any, TypeVar

import pytest
import torch

from tests.waiting import PATIENCE
from tokenspeed.runtime.distributed.group import Group
from tokenspeed.runtime.loader.dummy import dummy_weights
from tokenspeed.runtime.loader.kept import KeptWeights, Layout, plan_layout
from tokenspeed.runtime.loader.slab import HostSlab
from tokenspeed.runtime.models.base import CausalLM
from tokenspeed.runtime.models.config import ModelConfig
from tokenspeed.runtime.models.registry import build_model
from tokenspeed.server.kept import KeptMemory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs anonymous files")

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    vocab_size=101,
    hidden_size=24,
    intermediate_size=10,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=12,
)
Connect = Callable[[], socket.socket]
T = TypeVar("T")


@pytest.fixture
def connect() -> Iterator[Connect]:
    """`connect()` is a rank's end of a new connection to a front, which runs in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    memory = KeptMemory(1)
    opened: list[socket.socket] = []

    async def dial() -> socket.socket:
        with memory.connect(0) as end:
            return end.dup()

    async def close() -> None:
        memory.close()

    def in_loop(work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result(PATIENCE)

    def make() -> socket.socket:
        opened.append(in_loop(dial()))
        return opened[-1]

    try:
        yield make
        in_loop(close())
    finally:
        for connection in opened:
            connection.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def build(**changes: Any) -> CausalLM:
    return build_model(ModelConfig(**{**vars(CONFIG), **changes}), Group.solo())


def fill(model: CausalLM, kept: KeptWeights, layout: Layout, seed: int = 3) -> None:
    """What a first rank does."""
    assert kept.prepare(layout, lambda: None)
    model.materialize(CPU, torch.float32, kept.tensors())
    shapes = {name: slot.shape for name, (_, slot) in model.weight_slots().items()}
    model.load_weights(dummy_weights(shapes, seed, CPU, torch.float32))
    kept.seal()


def values(model: CausalLM) -> dict[str, torch.Tensor]:
    return {name: parameter.clone() for name, parameter in model.named_parameters()}


def left(connect: Connect) -> dict[str, torch.Tensor]:
    """Leave weights, and return them."""
    model, kept = build(), KeptWeights(connect())
    assert not kept.fetch()
    assert not kept.attach(plan_layout(model, torch.float32, CPU))
    fill(model, kept, plan_layout(model, torch.float32, CPU))
    return values(model)


def test_a_second_rank_finds_what_the_first_has_left(connect: Connect) -> None:
    expected = left(connect)
    for _ in range(2):
        model, kept = build(), KeptWeights(connect())
        assert kept.fetch()
        assert kept.attach(plan_layout(model, torch.float32, CPU))
        model.materialize(CPU, torch.float32, kept.tensors())
        model.process()
        assert kept.written() == []
        assert all(torch.equal(value, expected[name]) for name, value in values(model).items())


def _first(connection: socket.socket) -> None:
    model, kept = build(), KeptWeights(connection)
    kept.fetch()
    fill(model, kept, plan_layout(model, torch.float32, CPU), seed=5)
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_process_left_that_was_killed_is_there(connect: Connect) -> None:
    process = get_context("spawn").Process(target=_first, args=(connect(),))
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL
    model, kept = build(), KeptWeights(connect())
    assert kept.fetch()
    assert kept.attach(plan_layout(model, torch.float32, CPU))
    model.materialize(CPU, torch.float32, kept.tensors())
    expected = build()
    expected.materialize(CPU, torch.float32)
    shapes = {name: slot.shape for name, (_, slot) in expected.weight_slots().items()}
    expected.load_weights(dummy_weights(shapes, 5, CPU, torch.float32))
    assert all(torch.equal(value, dict(expected.named_parameters())[name]) for name, value in values(model).items())


def test_weights_that_were_written_to_are_named_and_loaded_again_in_place(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    model, kept = build(), KeptWeights(connect())
    layout = plan_layout(model, torch.float32, CPU)
    kept.fetch()
    fill(model, kept, layout)
    expected = values(model)
    assert kept.written() == []
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.down_proj.weight")[3, 2] += 1
    assert kept.written() == ["model.layers.1.mlp.down_proj.weight"]
    second = KeptWeights(connect())
    assert second.fetch()
    assert not second.attach(layout)
    assert "something has written to model.layers.1.mlp.down_proj.weight\n" in caplog.text
    fill(model, second, layout)
    third = KeptWeights(connect())
    assert third.fetch() and third.attach(layout)
    model.materialize(CPU, torch.float32, third.tensors())
    assert all(torch.equal(value, expected[name]) for name, value in values(model).items())


@pytest.mark.parametrize(
    ("changes", "dtype", "told"),
    [
        ({"num_layers": 3}, torch.float32, "model.layers.2.input_layernorm.weight"),
        ({"intermediate_size": 12}, torch.float32, "model.layers.0.mlp.gate_up_proj.weight"),
        ({}, torch.bfloat16, "model.embed_tokens.weight"),
    ],
)
def test_another_layout_is_not_taken(
    connect: Connect, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], dtype: torch.dtype, told: str
) -> None:
    left(connect)
    model, kept = build(**changes), KeptWeights(connect())
    layout = plan_layout(model, dtype, CPU)
    assert kept.fetch()
    assert not kept.attach(layout)
    assert "are loaded anew: their layout has changed" in caplog.text
    assert told in caplog.text
    checked = []
    assert kept.prepare(layout, lambda: checked.append(True))
    assert checked
    assert not KeptWeights(connect()).fetch(), "the front has given the memory back"


def test_memory_that_cannot_be_had_is_told(
    connect: Connect, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    kept = KeptWeights(connect())
    kept.fetch()
    assert not kept.prepare(plan_layout(build(), torch.float32, CPU), lambda: None)
    assert "cannot be kept for ranks that replace lost ones: this system has no anonymous files" in caplog.text


def test_a_layout_has_each_parameter_once_and_apart() -> None:
    model = build(tie_embeddings=True)
    layout = plan_layout(model, torch.bfloat16, CPU)
    assert [place.path for place in layout.places] == [name for name, _ in model.named_parameters()]
    slab = HostSlab(layout.size)
    slab.make()
    tensors = {place.path: place.tensor(slab) for place in layout.places}
    for number, tensor in enumerate(tensors.values()):
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(number)
    for number, tensor in enumerate(tensors.values()):
        assert tensor.eq(number).all()
    versions = [tensor._version for tensor in tensors.values()]
    next(iter(tensors.values())).zero_()
    assert [tensor._version for tensor in tensors.values()][1:] == versions[1:], "a write is one to a tensor alone"
    slab.close()
