"""Edits that fail, each in one way, on a server under load: it is told, nothing is lost, the old code serves on."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("grpc")
pytest.importorskip("smg_grpc_proto")

from tests.gpu.models import hf_config, hf_model
from tests.gpu.serving import Server, finish
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

PROMPTS = [[(11 * i + 5 * j) % 250 + 1 for j in range(3 + 4 * i)] for i in range(4)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
TIMEOUT = 20.0
"""Seconds that a rank on a GPU may stand still in a reload, of which a compile may take many."""

LAYER = "tokenspeed.runtime.layers.activation"
RETURN = "return silu_and_mul(gate_up, kernel=self.kernel)"
KERNEL = "tokenspeed_kernel.ops.activation.triton"
WIDE = "    wide = gate.to(tl.float32)\n"
HEAD = "\ndef silu_and_mul_kernel(x, out, x_stride, size, BLOCK: tl.constexpr):\n"
ATTENTION = "tokenspeed_kernel.ops.attention.triton_decode"
FILL = "held = [torch.empty(1 << 28, device=gate_up.device) for _ in range(10**6)]"


def in_layer(statement: str) -> tuple[str, str, str]:
    """An edit that puts a statement before the result of a layer."""
    return LAYER, RETURN, f"{statement}\n        {RETURN}"


def in_kernel(statements: str) -> tuple[str, str, str]:
    """An edit that puts statements into the body of a kernel."""
    return KERNEL, WIDE, "".join(f"    {line}\n" for line in statements.splitlines()) + WIDE


@dataclass(frozen=True)
class Failure:
    """An edit, and what its reply has to say."""

    edit: tuple[str, str, str]
    phase: str
    words: str
    text: str | None = None
    """Of the line that the reply names; None: any line of the edited file."""
    elsewhere: bool = False
    """What is wrong comes up in code that was not edited, and that is named."""


ANYWHERE = {
    "syntax error": Failure((LAYER, "def forward(", "def forward(("), "read", "SyntaxError"),
    "import error": Failure(
        (LAYER, "import torch\n", "import torch\nimport no_such_module\n"), "patch", "no_such_module"
    ),
    "exception": Failure(in_layer("raise ValueError('no such activation')"), "warm", "no such activation"),
    "wrong shape": Failure((LAYER, RETURN, f"{RETURN}[:, :-1]"), "warm", "shape", elsewhere=True),
    "not a number": Failure((LAYER, RETURN, f"{RETURN} * float('nan')"), "warm", "that are NaN or infinite"),
}
ON_A_CPU = ANYWHERE | {
    "k-th graph": Failure(
        in_layer(
            "from tokenspeed_kernel.launch import _recorder\n"
            "        if _recorder.get() is not None and len(gate_up) == 1: raise ValueError('the k-th graph')"
        ),
        "graphs",
        "the k-th graph",
    ),
}
CAPTURING = "torch.cuda.is_current_stream_capturing()"
ON_A_GPU = ANYWHERE | {
    "compile error": Failure(
        in_kernel("wide = gate + no_such_name"), "warm", "no_such_name", "wide = gate + no_such_name"
    ),
    "shared memory": Failure(
        (ATTENTION, 'num_stages=tactic["num_stages"]', "num_stages=18"), "warm", "out of resource: shared memory"
    ),
    "memory": Failure(in_layer(FILL), "warm", "out of memory", FILL),
    "memory at capture": Failure(in_layer(f"if {CAPTURING}: {FILL}"), "graphs", "out of memory"),
    "workspace": Failure(
        in_layer(
            "from tokenspeed_kernel.workspace import WORKSPACE\n"
            "        WORKSPACE.take('the edit', gate_up.device, ((1 << 33,), torch.uint8))"
        ),
        "warm",
        "the edit",
    ),
    "k-th graph": Failure(
        in_layer(f"if {CAPTURING} and len(gate_up) == 1: raise ValueError('the k-th graph')"),
        "graphs",
        "the k-th graph",
    ),
    "reads while it captures": Failure(in_layer("assert gate_up.sum().item() is not None"), "graphs", ""),
}
DEADLY = {
    "illegal access": Failure(
        (KERNEL, "tl.store(out + row", "tl.store(out + (1 << 45) + row"), "warm", "illegal memory access"
    ),
    "index out of range": Failure(
        in_layer("gate_up[torch.full((1,), 10**9, device=gate_up.device)].clone()"), "warm", "CUDA error"
    ),
    "device assert": Failure(
        (
            KERNEL,
            f"@triton.jit{HEAD}",
            f"@triton.jit(debug=True){HEAD}    tl.device_assert(size < 0, 'the edit says no')\n",
        ),
        "warm",
        "CUDA",
    ),
    "endless loop": Failure(
        in_kernel(
            # Times a number that may be none, so that no pass of the compiler knows how it comes out.
            "spin = tl.load(x, volatile=True) * 0.0\nwhile spin == 0.0:\n    spin = tl.load(x, volatile=True) * 0.0"
        ),
        "warm",
        f"rank 0 has not got on for {TIMEOUT:g} s",
    ),
}
"""Edits that cost the rank: it is replaced."""


class Load:
    """Requests that follow each other without end, from two clients."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.ended: list[tuple[int, Any]] = []
        """The number of the prompt, and the completion or what was raised instead."""
        self._may_go = threading.Event()
        self._busy = [0, 0]
        self._stopped = False
        self._threads = [threading.Thread(target=self._ask, args=(index,)) for index in range(2)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._may_go.set()
        for thread in self._threads:
            thread.join()

    def go_on(self) -> None:
        """Let requests run, and wait until some do."""
        before = len(self.ended)
        self._may_go.set()
        until(lambda: len(self.ended) > before and all(self._busy), self.server.log)

    def pause(self) -> None:
        """Let the requests that run end, and begin no more."""
        self._may_go.clear()
        until(lambda: not any(self._busy), self.server.log)

    def _ask(self, index: int) -> None:
        number = 0
        while not self._stopped:
            self._busy[index] = 0
            self._may_go.wait()
            self._busy[index] = 1
            number += 1
            which = (index + number) % len(PROMPTS)
            try:
                # The names of requests are the clients'.
                stream = self.server.begin(f"load {index} {number}", PROMPTS[which], **GREEDY)
                self.ended.append((which, finish(stream)))
            except Exception as error:  # the test tells
                self.ended.append((which, error))
                time.sleep(0.1)


@dataclass
class Running:
    """A server under load."""

    server: Server
    load: Load
    device: str
    expected: list[Any]
    free: int | None = None
    """Bytes of the GPU that were free after the first edit."""


@pytest.fixture(scope="module")
def running(device: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = tmp_path_factory.mktemp("failing")
    hf_model(hf_config("qwen3", vocab_size=260, eos_token_id=257, initializer_range=0.3)).save_pretrained(model)
    byte_tokenizer().save(str(model / "tokenizer.json"))
    with tempfile.TemporaryDirectory(prefix="ts-") as root:
        overlay = Path(root, "overlay")
        config = Config(
            # In float32 an answer does not depend on what else is in its batch.
            model=ModelOptions(model=str(model), device=device, max_model_len=128, dtype="float32"),
            scheduler=SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=64),
            cache=CacheOptions(max_total_tokens=2048, block_size=16),
            graphs=GraphOptions(
                cpu_graphs=device == "cpu", cudagraph_capture_sizes=(1, 4, 8), prefill_graph_max_tokens=32
            ),
            kernels=KernelOptions(tune_kernels=False),
            reload=ReloadOptions(
                allow_reload_forward=True,
                reload_overlay=str(overlay),
                reload_rank_timeout=TIMEOUT if device == "cuda" else 60.0,
            ),
        )
        server = Server(config, Path(root, "run"), overlay)
        try:
            server.start()
            load = Load(server)
            load.start()
            try:
                yield Running(server, load, device, probe(server))
            finally:
                load.stop()
            assert server.stop() == 0
        finally:
            server.kill()


def probe(server: Server) -> list[Any]:
    """Ids and log-probabilities of all prompts, one by one and with nothing in the prefix cache."""
    assert server.control("/flush_cache")["success"]
    told = []
    for index, prompt in enumerate(PROMPTS):
        fields = {**GREEDY, "return_logprob": True, "top_logprobs_num": 2}
        *chunks, last = server.begin(f"probe {index}", prompt, **fields)
        logprobs = [value for chunk in chunks for value in chunk.chunk.output_logprobs.token_logprobs]
        assert len(logprobs) == GREEDY["max_new_tokens"]
        told.append((list(last.complete.output_ids), logprobs))
    return told


def check(running: Running, failure: Failure, *, mode: str, deadly: bool = False) -> dict[str, Any]:
    """Reload an edit that fails, and see that nothing is left of it and nothing lost."""
    server, load = running.server, running.load
    server.edit(*failure.edit)
    load.go_on()
    replacements = server.counter("rank_replacements_total")
    reply = server.control("/reload_forward", {"id": f"{failure.edit} {time.monotonic()}", "mode": mode})
    load.pause()
    told = f"{reply}\n{server.log()[-6000:]}"
    assert (reply["success"], reply["code"], reply["phase"], reply["rank"]) == (False, "failed", failure.phase, 0), told
    assert reply["undone"] and failure.words in reply["error"], told
    path = server.overlay.joinpath(*failure.edit[0].split(".")).with_suffix(".py")
    assert deadly or failure.elsewhere or reply["file"] == str(path), told
    assert deadly or Path(reply["file"]).read_text().splitlines()[reply["line"] - 1].strip() == reply["text"], told
    assert failure.text is None or reply["text"] == failure.text, told
    until(lambda: server.counter("rank_replacements_total") == replacements + deadly, server.log)
    ended, load.ended = load.ended, []
    assert len(ended) > 1
    for which, complete in ended:
        assert not isinstance(complete, Exception), (complete, told)
        assert (complete.finish_reason, list(complete.output_ids)) == ("length", running.expected[which][0]), told
    assert probe(server) == running.expected, told
    server.restore()
    return reply


CASES = [("cpu", name) for name in ON_A_CPU] + [("cuda", name) for name in ON_A_GPU]


@pytest.mark.parametrize(("on", "name"), CASES, ids=[f"{name} {on}" for on, name in CASES])
def test_what_fails_is_told_and_undone(running: Running, on: str, name: str) -> None:
    if on != running.device:
        pytest.skip(f"happens on {on} only")
    failures = ON_A_CPU if on == "cpu" else ON_A_GPU
    check(running, failures[name], mode=("wait", "keep")[list(failures).index(name) % 2])
    if on == "cuda":
        free = torch.cuda.mem_get_info()[0]
        running.free = running.free or free
        assert running.free - free <= 96 << 20, f"{running.free} bytes were free after the first edit, now {free}"


@pytest.mark.parametrize("name", DEADLY)
def test_what_costs_the_rank_costs_no_request(running: Running, name: str) -> None:
    if running.device == "cpu":
        pytest.skip("a CPU has no context that could be lost")
    reply = check(running, DEADLY[name], mode="keep", deadly=True)
    print(f"\n{name}: {reply['error']} at {reply['file']}:{reply['line']}: {reply['text']}")
