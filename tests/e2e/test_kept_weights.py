"""Ranks that replace lost ones find their weights in memory, and load only what is not as it should be."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import SMALL, restored, shared
from tests.e2e.harness import Server, dump
from tests.waiting import until

REPLACEMENTS = "tokenspeed:rank_replacements_total"
LLAMA = "tokenspeed.runtime.models.llama"
EMBEDDING = "tokenspeed.runtime.layers.embedding"
EMBED = "hidden = self.embed_tokens(input_ids)"
ROWS = "rows = -(-vocab_size // group.size)"
FLAGS = (*SMALL, "--tensor-parallel-size", "2")


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy whose files may be taken away."""
    return shutil.copytree(tiny_model, tmp_path_factory.mktemp("kept") / "model")


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Server]]:
    def start() -> Server:
        folder = tmp_path_factory.mktemp("server")
        return Server(str(model), *FLAGS, overlay=folder / "overlay", log=folder / "log").start()

    with shared(start) as running:
        yield running


@pytest.fixture
def pair(running: Callable[[], Server]) -> Iterator[Server]:
    yield from restored(running())


def replaced(server: Server, lose: Callable[[], object]) -> str:
    """What the server says from the loss on until it serves again."""
    before, said = server.metric(REPLACEMENTS), len(server.output())
    lose()
    healthy = lambda: server.control("GET", "/health").status_code == 200  # noqa: E731
    until(lambda: server.metric(REPLACEMENTS) > before and healthy(), server.stacks)
    return server.output()[said:]


def kill(server: Server, rank: int) -> None:
    (pid,) = (pid for pid, command in server.processes().items() if command.endswith(f"--rank {rank}"))
    os.kill(pid, signal.SIGKILL)


def test_weights_are_had_again_without_their_files_and_with_the_committed_code(pair: Server, model: Path) -> None:
    original = pair.text("Tell me")
    pair.replace(LLAMA, "return self.mlp(hidden), residual", "return self.mlp(hidden) * -0.7, residual")
    reply = pair.reload()
    assert reply["success"], dump(reply)
    edited = pair.text("Tell me")
    assert edited != original
    files = [path.rename(path.with_suffix(".away")) for path in model.glob("*.safetensors")]
    try:
        assert "their weights were kept" in replaced(pair, lambda: kill(pair, 0))
        assert pair.text("Tell me") == edited
    finally:
        for path in files:
            path.rename(path.with_suffix(".safetensors"))


def test_weights_that_an_edit_wrote_to_are_loaded_anew(pair: Server) -> None:
    expected = pair.text("Tell me")
    group = "self.embed_tokens.group"
    line = f"if {group}.rank == 1: self.norm.weight.data.mul_(-3); raise ValueError('after a write')"
    pair.replace(LLAMA, EMBED, f"{line}\n        {EMBED}")
    replies = []
    said = replaced(pair, lambda: replies.append(pair.reload()))
    (reply,) = replies
    assert not reply["success"] and reply["undone"], dump(reply)
    assert "a failed edit could not be undone (it has written to model.norm.weight)" in reply["error"], dump(reply)
    told = "the weights that were kept cannot be used again, and are loaded anew: something has written to"
    assert f"rank 1: {told} model.norm.weight\n" in said
    assert "their weights were loaded anew" in said
    assert pair.text("Tell me") == expected
    # What was loaded anew is kept in its turn.
    assert "their weights were kept" in replaced(pair, lambda: kill(pair, 0))
    assert pair.text("Tell me") == expected


def test_an_edit_that_writes_to_weights_is_refused_though_it_computes(pair: Server) -> None:
    expected = pair.text("Tell me")
    pair.replace(LLAMA, EMBED, f"self.norm.weight.data.mul_(-1)\n        {EMBED}")
    replies = []
    said = replaced(pair, lambda: replies.append(pair.reload()))
    assert not replies[0]["success"], dump(replies[0])
    assert "it has written to model.norm.weight" in replies[0]["error"], dump(replies[0])
    assert "their weights were loaded anew" in said
    assert pair.text("Tell me") == expected


def test_weights_of_another_layout_than_the_committed_code_wants_are_loaded_anew(pair: Server) -> None:
    expected = pair.text("Tell me")
    pair.replace(EMBEDDING, ROWS, f"{ROWS} + 8")
    reply = pair.reload()
    assert reply["success"], dump(reply)
    assert any("VocabParallelEmbedding.__init__" in item["what"] for item in reply["needs_restart"]), dump(reply)
    said = replaced(pair, lambda: kill(pair, 1))
    assert "are loaded anew: their layout has changed (model.embed_tokens.weight)" in said
    assert pair.text("Tell me") == expected
