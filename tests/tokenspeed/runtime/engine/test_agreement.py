"""The bundled model says what transformers says, token for token, however it is batched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from tests.engine import InProcessEngine
from tests.ranks import RankProcesses, tokens
from tokenspeed.runtime.config import CacheOptions, Config, GraphOptions, ModelOptions, SchedulerOptions
from tokenspeed.runtime.loader.source import resolve
from tokenspeed.runtime.loader.weights import checkpoint_weights
from tokenspeed.runtime.protocol.sampling import SamplingParams

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):",
    "Once upon a time, in a small village,",
    "The quick brown fox",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,",
    "In the year 1969,",
    "The three laws of motion are",
    "She opened the door and saw",
)
TOKENS = 64
GREEDY = SamplingParams(max_new_tokens=TOKENS, min_new_tokens=TOKENS, temperature=0.0)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    source = resolve(ModelOptions(model="smollm2"), lambda _: None)
    tokenizer = Tokenizer.from_file(f"{source.tokenizer_dir}/tokenizer.json")
    return [tokenizer.encode(prompt).ids for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    """What transformers' own Llama generates with the same weights."""
    from transformers import AutoConfig, LlamaForCausalLM

    source = resolve(ModelOptions(model="smollm2"), lambda _: None)
    model = LlamaForCausalLM(AutoConfig.from_pretrained(source.tokenizer_dir)).float().eval()
    weights = dict(checkpoint_weights(source, torch.device("cpu")))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected  # the head is tied to the embedding
    model.tie_weights()
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
                pad_token_id=2,
            )
            answers.append(out[0, len(prompt) :].tolist())
    return answers


@pytest.fixture(scope="module", params=["eager", "graphs"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessEngine]:
    graphs = GraphOptions(cpu_graphs=True, cudagraph_capture_sizes=(1, 16), prefill_graph_max_tokens=32)
    config = Config(
        model=ModelOptions(model="smollm2", max_model_len=256),
        scheduler=SchedulerOptions(max_num_seqs=16, max_num_batched_tokens=48),
        cache=CacheOptions(max_total_tokens=4096),
        graphs=graphs if request.param == "graphs" else GraphOptions(),
    )
    yield InProcessEngine(config, tmp_path_factory.mktemp("engine")).start()


def test_alone(engine: InProcessEngine, prompts: list[list[int]], expected: list[list[int]]) -> None:
    # A replayed decode step of one row is the same graph for every prompt: a few show it.
    few = 3 if engine.executor.generation.decode else len(prompts)
    for prompt, answer in list(zip(prompts, expected, strict=True))[:few]:
        assert engine.generate([prompt], GREEDY) == [answer]


def test_batched(engine: InProcessEngine, prompts: list[list[int]], expected: list[list[int]]) -> None:
    assert engine.generate(prompts, GREEDY) == expected


def test_preempted(prompts: list[list[int]], expected: list[list[int]], tmp_path: Path) -> None:
    config = Config(
        model=ModelOptions(model="smollm2", max_model_len=96),
        scheduler=SchedulerOptions(max_num_seqs=16, max_num_batched_tokens=48),
        cache=CacheOptions(max_total_tokens=256),
    )
    engine = InProcessEngine(config, tmp_path).start()
    assert engine.generate(prompts, GREEDY) == expected
    assert engine.scheduler.loads(paused=False).preemptions > 0


def test_over_three_ranks(prompts: list[list[int]], expected: list[list[int]], rank_processes: RankProcesses) -> None:
    """The model has nine heads and three KV heads."""
    config = Config(
        model=ModelOptions(model="smollm2", max_model_len=256),
        scheduler=SchedulerOptions(max_num_seqs=16, max_num_batched_tokens=48),
        cache=CacheOptions(max_total_tokens=4096),
    )
    assert tokens(rank_processes.generate(3, config, prompts, GREEDY)) == expected
