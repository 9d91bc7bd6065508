"""Engines on several ranks over gloo say what one rank says, and what transformers says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as replace_struct

from tests.block_fp8 import checkpoint
from tests.byte_tokenizer import EOS, VOCAB_SIZE, write_tokenizer
from tests.hf_models import write_model
from tests.ranks import RankProcesses, check, tokens
from tokenspeed.runtime.config import CacheOptions, Config, GraphOptions, ModelOptions, SchedulerOptions
from tokenspeed.runtime.protocol.cache import CacheEvents
from tokenspeed.runtime.protocol.calls import (
    Abort,
    Continue,
    DefineGrammar,
    FlushCache,
    LoadGrammars,
    Pause,
    Ping,
    Submit,
    ToEngine,
    WatchCache,
)
from tokenspeed.runtime.protocol.message import Message
from tokenspeed.runtime.protocol.reports import Outputs, RequestOutput, TokenLogprobs
from tokenspeed.runtime.protocol.sampling import Grammar, SamplingParams

GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True, logprobs=3, prompt_logprobs=2)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9], [7], [11, 12, 13], [5, 4, 3, 2, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8]]
GRAPHS = GraphOptions(cpu_graphs=True, cudagraph_capture_sizes=(1, 4), prefill_graph_max_tokens=16)

SHAPES: dict[str, dict[str, Any]] = {
    "llama, heads replicated": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "llama, mha and biases": {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 8, "num_key_value_heads": 2},
    "qwen3, tied, odd vocabulary": {
        "model_type": "qwen3",
        "head_dim": 12,
        "tie_word_embeddings": True,
        "vocab_size": 69,
        "attention_bias": True,
    },
}


def config(model: Path, graphs: GraphOptions | None = None, **model_options: Any) -> Config:
    return Config(
        model=ModelOptions(model=str(model), **model_options),
        scheduler=SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=16),
        cache=CacheOptions(max_total_tokens=512),
        graphs=graphs or GraphOptions(),
    )


def numbers(outputs: list[list[RequestOutput]]) -> list[float]:
    """All log-probabilities, those of the prompts as well."""
    found = []
    for answer in outputs:
        for output in answer:
            for entry in (*output.logprobs, *(output.prompt_logprobs or [None])[1:]):
                found += [entry.logprob, *entry.top_logprobs]
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_the_text_is_that_of_one_rank_and_of_transformers(
    rank_processes: RankProcesses, tmp_path: Path, shape: str
) -> None:
    directory, theirs = tmp_path, write_model(tmp_path, **SHAPES[shape])
    alone = rank_processes.generate(1, config(directory), PROMPTS, GREEDY)
    for prompt, answer in zip(PROMPTS, tokens(alone), strict=True):
        assert answer == transformers_answer(theirs, prompt, len(answer))
    for ranks, graphs in ((2, GRAPHS), (4, None)):
        spread = rank_processes.generate(ranks, config(directory, graphs), PROMPTS, GREEDY)
        assert tokens(spread) == tokens(alone)
        assert numbers(spread) == pytest.approx(numbers(alone), abs=1e-3)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_float8_weights_with_scales_are_spread(rank_processes: RankProcesses, tmp_path: Path, load_format: str) -> None:
    directory, _ = checkpoint(tmp_path)
    (directory / "tokenizer.json").write_text(json.dumps({}))
    settings = config(directory, load_format=load_format)
    alone, spread = (rank_processes.generate(ranks, settings, PROMPTS, GREEDY) for ranks in (1, 2))
    assert tokens(spread) == tokens(alone)
    assert numbers(spread) == pytest.approx(numbers(alone), abs=1e-3)


def test_each_rank_has_the_memory_of_its_part_only(rank_processes: RankProcesses, tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8192, "num_key_value_heads": 4}
    write_model(tmp_path, **sizes)
    whole, *_ = check(rank_processes.run(1, config(tmp_path)))
    parts = check(rank_processes.run(4, config(tmp_path)))
    assert [part.weight_bytes for part in parts] == pytest.approx([whole.weight_bytes / 4] * 4, rel=0.01)
    assert max(part.memory for part in parts) < 0.6 * whole.weight_bytes


def transformers_answer(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(count):
            ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), dim=1)
    return ids[0, len(prompt) :].tolist()


def test_all_that_a_request_may_wish_for_is_as_on_one_rank(rank_processes: RankProcesses, tmp_path: Path) -> None:
    """Everything that rank 0 says, in its order, but for the rounding of log-probabilities."""
    write_model(tmp_path, vocab_size=VOCAB_SIZE, eos_token_id=EOS)
    write_tokenizer(tmp_path)
    tight = replace(
        config(tmp_path, GRAPHS, max_model_len=72),
        scheduler=SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=32),
        cache=CacheOptions(max_total_tokens=72, block_size=4),
    )
    rounds = [
        [WatchCache(watch=1), *submits(tmp_path)],
        *[[]] * 5,
        [Abort(request_id="aborted"), Abort(request_id="unknown"), Ping()],
        [Pause(call=1, mode="wait"), Submit(request_id="held", prompt=PROMPTS[0], sampling=SAMPLED)],
        *[[]] * 60,
        [Continue(call=2), Submit(request_id="cached", prompt=LONG, sampling=SHORT)],
        *[[]] * 30,
        [FlushCache(call=3), Submit(request_id="flushed", prompt=LONG, sampling=SHORT)],
    ]
    alone, spread = (rounded(check(rank_processes.run(ranks, tight, rounds))[0].sent) for ranks in (1, 2))
    assert spread == alone
    ends = {
        output.request_id: output for message in alone if isinstance(message, Outputs) for output in message.outputs
    }
    assert {name: output.finish_reason for name, output in ends.items()} == {
        **dict.fromkeys(("greedy", "sampled", "penalised", "biased", "first", "second", "held"), "length"),
        **dict.fromkeys(("cached", "flushed"), "length"),
        "aborted": "abort",
        "structured": "stop",
    }
    last = [message.loads for message in alone if isinstance(message, Outputs)][-1]
    assert last.preemptions > 0
    assert any(isinstance(message, CacheEvents) for message in alone)


LONG = [(7 * i) % 250 for i in range(30)]
SHORT = SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(
    max_new_tokens=20, temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, seed=7, ignore_eos=True, logprobs=1
)


def submits(tokenizer_dir: Path) -> list[ToEngine]:
    """One request for each wish, and what has to come before."""
    from tokenspeed.grammar.compiler import Compiler
    from tokenspeed.grammar.vocabulary import read_vocabulary

    grammar = Grammar(kind="regex", text="[ab]{3,8}c")
    compiled = Compiler(read_vocabulary(tokenizer_dir, VOCAB_SIZE, [EOS])).compile(grammar)
    wishes = {
        "greedy": GREEDY,
        "sampled": SAMPLED,
        "penalised": replace_struct(SAMPLED, presence_penalty=0.5, frequency_penalty=0.7, repetition_penalty=1.2),
        "biased": replace_struct(GREEDY, logit_bias=((5, 4.0), (6, -100.0)), stop_token_ids=(8,), min_new_tokens=9),
        "aborted": replace_struct(GREEDY, max_new_tokens=60),
        "structured": replace_struct(SAMPLED, ignore_eos=False, grammar=replace_struct(grammar, key=1)),
    }
    return [
        LoadGrammars(),
        DefineGrammar(key=1, compiled=compiled),
        *(
            Submit(request_id=name, prompt=PROMPTS[0][: i + 3], sampling=s)
            for i, (name, s) in enumerate(wishes.items())
        ),
        Submit(request_id="first", prompt=LONG, sampling=SAMPLED),
        Submit(request_id="second", prompt=LONG, sampling=replace_struct(SAMPLED, seed=8), shares_prompt_with="first"),
    ]


def rounded(sent: list[Message]) -> list[Message]:
    """The messages with log-probabilities to three digits."""

    def short(entry: TokenLogprobs | None) -> TokenLogprobs | None:
        if entry is None:
            return None
        return replace_struct(
            entry, logprob=round(entry.logprob, 3), top_logprobs=[round(value, 3) for value in entry.top_logprobs]
        )

    def output_of(output: RequestOutput) -> RequestOutput:
        prompt = output.prompt_logprobs and [short(entry) for entry in output.prompt_logprobs]
        return replace_struct(output, logprobs=[short(entry) for entry in output.logprobs], prompt_logprobs=prompt)

    return [
        replace_struct(message, outputs=[output_of(output) for output in message.outputs])
        if isinstance(message, Outputs)
        else message
        for message in sent
    ]


def test_a_rank_that_differs_is_noticed(rank_processes: RankProcesses, tmp_path: Path) -> None:
    write_model(tmp_path)
    differ = """
from tokenspeed.runtime.sampling.sampler import Sampler
choose = Sampler.__call__
Sampler.__call__ = lambda self, logits, batch: (choose(self, logits, batch) + 1) % 60
def undo():
    Sampler.__call__ = choose
"""
    rounds = [[Submit(request_id="a", prompt=PROMPTS[0], sampling=SHORT)]]
    told = rank_processes.run(2, config(tmp_path), rounds, differ)
    assert "RanksDiffer: rank 1 has not computed what rank 0 has in the 1 steps so far" in told[1].error


def test_all_ranks_have_the_cache_of_the_one_with_the_least_memory(
    rank_processes: RankProcesses, tmp_path: Path
) -> None:
    write_model(tmp_path)
    little = """
from tokenspeed.runtime.cache.pool import MemoryBudget
usual = MemoryBudget.__dict__["of_host"]
MemoryBudget.of_host = classmethod(lambda cls, free: cls(80_000, 80_000))
def undo():
    MemoryBudget.of_host = usual
"""
    settings = replace(config(tmp_path), cache=CacheOptions())
    plenty, scarce = (check(rank_processes.run(2, settings, change=change)) for change in ("", little))
    assert scarce[0].num_blocks < plenty[0].num_blocks
