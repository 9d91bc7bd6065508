"""What a real server on a GPU does over gRPC and HTTP, and the same on a CPU with recorded steps."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("grpc")
pytest.importorskip("smg_grpc_proto")

from tests.engine import InProcessEngine
from tests.gpu.models import hf_config, hf_model
from tests.gpu.serving import Server, finish
from tests.tokenspeed.server.conftest import byte_tokenizer
from tokenspeed.runtime.config import (
    CacheOptions,
    Config,
    GraphOptions,
    KernelOptions,
    ModelOptions,
    ReloadOptions,
    SchedulerOptions,
)
from tokenspeed.runtime.protocol.calls import Submit
from tokenspeed.runtime.protocol.sampling import SamplingParams
from tokenspeed_kernel.workspace import WORKSPACE

pytestmark = pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")
VOCAB, EOS = 260, 257
TOKENS = 60
PROMPTS = [[(11 * i + 5 * j) % 250 + 1 for j in range(3 + 4 * i)] for i in range(6)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}
LAYER = ("tokenspeed.runtime.layers.activation", "return silu_and_mul(gate_up", "return -silu_and_mul(gate_up")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random, in float32: an answer does not depend on what else is in its batch."""
    directory = tmp_path_factory.mktemp("served")
    config = hf_config("qwen3", vocab_size=VOCAB, eos_token_id=EOS, initializer_range=0.3)
    hf_model(config).save_pretrained(directory)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2TokenizerFast"}))
    return directory


def config(model: Path, device: str, overlay: Path | None = None) -> Config:
    """The KV cache holds less than half of what six requests of the tests fill."""
    return Config(
        model=ModelOptions(model=str(model), device=device, max_model_len=128, dtype="float32"),
        scheduler=SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=64),
        cache=CacheOptions(max_total_tokens=192, block_size=16),
        graphs=GraphOptions(cpu_graphs=device == "cpu", cudagraph_capture_sizes=(1, 4, 8), prefill_graph_max_tokens=32),
        kernels=KernelOptions(tune_kernels=False),
        reload=ReloadOptions(
            allow_reload_forward=overlay is not None, reload_overlay=None if overlay is None else str(overlay)
        ),
    )


@pytest.fixture(scope="module")
def server(device: str, model: Path) -> Iterator[Server]:
    # The names of sockets have to be short.
    with tempfile.TemporaryDirectory(prefix="ts-") as root:
        overlay = Path(root, "overlay")
        server = Server(config(model, device, overlay), Path(root, "run"), overlay)
        try:
            yield server.start()
            assert server.stop() == 0
        finally:
            server.kill()


@pytest.fixture(scope="module")
def offline(device: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessEngine]:
    """An engine of this process, with the same options."""
    yield InProcessEngine(config(model, device), tmp_path_factory.mktemp("offline")).start()
    if device == "cuda":
        WORKSPACE.reopen(torch.device("cuda", 0))
        torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def answers(offline: InProcessEngine) -> list[list[int]]:
    """To `PROMPTS`, one after the other."""
    sampling = SamplingParams(max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    return [offline.generate([prompt], sampling)[0] for prompt in PROMPTS]


def ids(completions: list[Any]) -> list[list[int]]:
    return [list(complete.output_ids) for complete in completions]


def test_it_serves_from_graphs_on_its_device(server: Server, device: str) -> None:
    assert server.info["device"] == device
    assert server.info["decode_graphs"] == [1, 4, 8]
    assert server.info["prefill_graphs"] == [16, 32]
    assert {"load", "warm", "graphs"} <= server.info["startup"].keys()


def test_text_is_that_of_the_offline_engine_whatever_gives_way_to_whom(
    server: Server, answers: list[list[int]]
) -> None:
    """All at once do not fit into the cache: some are preempted, and begin anew."""
    before = server.counter("num_preemptions_total")
    streams = [server.begin(f"at once {i}", prompt, **GREEDY) for i, prompt in enumerate(PROMPTS)]
    completions = [finish(stream) for stream in streams]
    assert ids(completions) == answers
    assert [complete.finish_reason for complete in completions] == ["length"] * len(PROMPTS)
    assert server.counter("num_preemptions_total") > before


def test_logprobs_are_those_of_the_offline_engine(server: Server, offline: InProcessEngine) -> None:
    fields = {**GREEDY, "max_new_tokens": 8, "return_logprob": True, "top_logprobs_num": 3}
    *chunks, _ = server.begin("logprobs", PROMPTS[3], **fields)
    theirs = [value for chunk in chunks for value in chunk.chunk.output_logprobs.token_logprobs]
    sampling = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True, logprobs=3)
    (outputs,) = offline.serve([Submit(request_id="0", prompt=PROMPTS[3], sampling=sampling)])
    ours = [entry.logprob for output in outputs for entry in output.logprobs]
    assert len(theirs) == len(ours) == 8
    torch.testing.assert_close(torch.tensor(theirs), torch.tensor(ours), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "grammar",
    [{"regex": "(ab|cd){2}x"}, {"json_schema": json.dumps({"enum": ["one", "three"]})}],
    ids=["regex", "json_schema"],
)
def test_answers_follow_their_grammar(server: Server, grammar: dict[str, str]) -> None:
    if importlib.util.find_spec("xgrammar") is None:
        pytest.skip("xgrammar is not installed")
    tokenizer = byte_tokenizer()
    for seed in range(3):
        complete = server.generate(
            f"{grammar} {seed}", PROMPTS[seed], temperature=1.0, sampling_seed=seed, max_new_tokens=40, **grammar
        )
        text = tokenizer.decode(list(complete.output_ids))
        assert complete.finish_reason == "stop"
        assert re.fullmatch(grammar.get("regex", '"(one|three)"'), text), text


def test_an_aborted_request_ends_with_what_it_has(server: Server, answers: list[list[int]]) -> None:
    stream = server.begin("mine", PROMPTS[2], **{**GREEDY, "max_new_tokens": 110})
    next(stream)
    server.abort("mine")
    complete = finish(stream)
    assert complete.finish_reason in ("abort", "length")
    assert list(complete.output_ids)[:TOKENS] == answers[2][: len(complete.output_ids)]
    assert ids([server.generate("after", PROMPTS[0], **GREEDY)]) == answers[:1]


def test_a_reload_under_load_loses_nothing_and_can_be_taken_back(server: Server, answers: list[list[int]]) -> None:
    def reload(tag: str) -> tuple[list[list[int]], list[list[int]], dict[str, Any]]:
        """Answers of requests that run at the reload, answers after it, and its reply."""
        streams = [server.begin(f"{tag} before {i}", prompt, **GREEDY) for i, prompt in enumerate(PROMPTS)]
        for stream in streams:
            next(stream)
        reply = server.control("/reload_forward", {"id": tag, "mode": "wait"})
        running = [finish(stream) for stream in streams]
        after = [server.generate(f"{tag} after {i}", prompt, **GREEDY) for i, prompt in enumerate(PROMPTS)]
        return ids(running), ids(after), reply

    server.edit(*LAYER)
    running, edited, reply = reload("edit")
    assert reply["success"], reply
    assert (reply["graphs"]["how"], reply["graphs"]["decode"], reply["graphs"]["prefill"]) == ("recaptured", 3, 2)
    assert running == answers
    assert edited != answers
    server.edit(LAYER[0], LAYER[1], "raise ValueError('no such activation')\n        " + LAYER[1])
    running, after, reply = reload("broken")
    assert not reply["success"] and "no such activation" in reply["error"]
    assert running == after == edited
    server.restore()
    running, after, reply = reload("restored")
    assert reply["success"], reply
    assert running == edited
    assert after == answers


def test_a_profile_has_what_was_asked_for(server: Server, device: str, tmp_path: Path) -> None:
    wanted = ["CPU", "GPU", "MEM", "CUDA_PROFILER"] if device == "cuda" else ["CPU"]
    body = {"output_dir": str(tmp_path), "profile_id": "p"}
    if device == "cpu":
        refused = server.control("/start_profile", {**body, "activities": ["CPU", "GPU"]})
        assert not refused["success"] and "needs a CUDA device" in refused["message"]
    assert server.control("/start_profile", {**body, "activities": wanted})["success"]
    server.generate("profiled", PROMPTS[1], **{**GREEDY, "max_new_tokens": 5})
    reply = server.control("/stop_profile")
    assert reply["success"], reply
    files = {Path(file).name: Path(file) for file in reply["files"]}
    (trace,) = (path for name, path in files.items() if name.endswith(".trace.json.gz"))
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sum(str(event.get("name")).startswith("step ") for event in events if event.get("ph") == "X") >= 5
    if device == "cuda":
        assert any(event.get("cat") == "kernel" for event in events)
        assert len(files) > 1, "no file of the memory"
