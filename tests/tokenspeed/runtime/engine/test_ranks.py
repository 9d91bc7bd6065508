"""Engines on several ranks over gloo say what one rank says, and what transformers says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hf_models import write_model
from tests.ranks import RankProcesses, tokens
from tokenspeed.runtime.config import CacheOptions, Config, GraphOptions, ModelOptions, SchedulerOptions
from tokenspeed.runtime.protocol import RequestOutput, SamplingParams

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


def transformers_answer(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(count):
            ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), dim=1)
    return ids[0, len(prompt) :].tolist()
