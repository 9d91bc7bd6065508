"""What real requests get, token by token, against the logits of transformers and the definitions written out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.engine import InProcessEngine
from tests.tiny import tiny_llama
from tokenspeed.runtime.config import CacheOptions, Config, GraphOptions, ModelOptions, SchedulerOptions
from tokenspeed.runtime.protocol.calls import Submit
from tokenspeed.runtime.protocol.reports import RequestOutput
from tokenspeed.runtime.protocol.sampling import SamplingParams
from tokenspeed_kernel.ops.sampling.noise import gumbel_noise

CLOSE = 1e-3
"""Two candidates this close may change places with the rounding of another batch."""

GRAPHS = GraphOptions(cpu_graphs=True, cudagraph_capture_sizes=(1, 8), prefill_graph_max_tokens=32)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def peer(model_dir: Path) -> Any:
    """transformers' own Llama with the same weights."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def engine(model_dir: Path, run_dir: Path, *, cache_tokens: int = 4096, **options: Any) -> InProcessEngine:
    config = Config(
        model=ModelOptions(model=str(model_dir), max_model_len=96),
        scheduler=SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=24),
        cache=CacheOptions(max_total_tokens=cache_tokens, block_size=8),
        graphs=options.get("graphs", GraphOptions()),
    )
    return InProcessEngine(config, run_dir, overlap=options.get("overlap", False)).start()


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 12, "ignore_eos": True, "logprobs": 2, **fields})


WISHES = (
    params(temperature=0.0),
    params(temperature=0.0, repetition_penalty=1.6),
    params(temperature=0.0, frequency_penalty=1.5, presence_penalty=0.5, logprobs=None),
    params(temperature=0.0, logit_bias=((17, 30.0), (44, -100.0)), prompt_logprobs=3),
    params(temperature=1.0, seed=4),
    params(temperature=0.8, top_p=0.7, seed=-3, logprobs=0),
    params(temperature=1.3, top_k=5, seed=2**62, presence_penalty=-0.5),
    params(temperature=1.0, min_p=0.2, seed=77, repetition_penalty=1.2, logit_bias=((3, 4.0),)),
    params(temperature=1.0, seed=5, prompt_logprobs=0, logprobs=None),
    params(temperature=1.0, top_p=0.9, seed=6, logprobs=None),
)


def requests(prompt_lengths: Sequence[int] = (5, 40, 17)) -> list[Submit]:
    prompts = [[(7 * i * i + 3 * length) % 900 + 2 for i in range(length)] for length in prompt_lengths]
    pairs = zip(itertools.cycle(prompts), WISHES, strict=False)
    return [Submit(request_id=str(i), prompt=p, sampling=wish) for i, (p, wish) in enumerate(pairs)]


def tokens(outputs: Sequence[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def plain_choice(logits: torch.Tensor, request: Submit, answer: list[int]) -> tuple[int, float]:
    """The next token by the definitions, and by how much it beats the next best candidate."""
    wish, scores = request.sampling, logits.clone()
    for token_id, value in wish.logit_bias:
        scores[token_id] += value
    for token_id in {*request.prompt, *answer}:
        scores[token_id] *= wish.repetition_penalty if scores[token_id] < 0 else 1 / wish.repetition_penalty
    for token_id in answer:
        scores[token_id] -= wish.frequency_penalty
    for token_id in set(answer):
        scores[token_id] -= wish.presence_penalty
    if wish.temperature:
        scores /= wish.temperature
        order = scores.argsort(descending=True, stable=True).tolist()
        kept = order[: wish.top_k or None]
        probabilities = scores[kept].softmax(0)
        before = (probabilities.cumsum(0) - probabilities).tolist()
        least = wish.min_p * probabilities[0].item()
        rows = zip(kept, before, probabilities.tolist(), strict=True)
        kept = [token_id for token_id, sum_before, p in rows if sum_before < wish.top_p and p >= least]
        masked = torch.full_like(scores, -torch.inf)
        masked[kept] = scores[kept]
        position = torch.tensor([len(request.prompt) + len(answer)])
        scores = masked + gumbel_noise(torch.tensor([wish.seed]), position, len(scores))[0]
    best, second = scores.topk(2).values.tolist()
    return int(scores.argmax()), best - second


@torch.inference_mode()
def check(peer: Any, request: Submit, outputs: Sequence[RequestOutput]) -> None:
    answer, wish = tokens(outputs), request.sampling
    assert len(answer) == 12
    logits = peer(torch.tensor([request.prompt + answer])).logits[0].float()
    start = len(request.prompt)
    for index, token_id in enumerate(answer):
        chosen, margin = plain_choice(logits[start + index - 1], request, answer[:index])
        assert chosen == token_id or margin < CLOSE
    told = [entry for output in outputs for entry in output.logprobs]
    assert len(told) == (0 if wish.logprobs is None else 12)
    check_logprobs(logits[start - 1 :], answer, told, wish.logprobs)
    prompt = outputs[0].prompt_logprobs
    assert (prompt is None) == (wish.prompt_logprobs is None)
    if prompt is not None:
        assert len(prompt) == len(request.prompt)
        assert prompt[0] is None
        check_logprobs(logits, request.prompt[1:], prompt[1:], wish.prompt_logprobs)


def check_logprobs(logits: torch.Tensor, chosen: Sequence[int], told: Sequence[Any], top: int | None) -> None:
    for row, token_id, entry in zip(logits.log_softmax(-1), chosen, told, strict=False):
        assert abs(entry.logprob - row[token_id].item()) < CLOSE
        best = row.topk(top).values if top else row[:0]
        torch.testing.assert_close(torch.tensor(entry.top_logprobs), best, atol=CLOSE, rtol=0)
        torch.testing.assert_close(row[entry.top_ids], best, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("graphs", [GraphOptions(), GRAPHS], ids=["eager", "graphs"])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_every_answer_is_what_the_definitions_say(
    model_dir: Path, peer: Any, tmp_path: Path, graphs: GraphOptions, overlap: bool
) -> None:
    running, sent = engine(model_dir, tmp_path, graphs=graphs, overlap=overlap), requests()
    first = running.serve(sent)
    for request, outputs in zip(sent, first, strict=True):
        check(peer, request, outputs)
    # Again, with prompts that are cached now, and one at a time.
    for request, outputs in zip(sent, first, strict=True):
        (again,) = running.serve([request])
        assert tokens(again) == tokens(outputs)
        if request.sampling.prompt_logprobs is not None:
            check(peer, request, again)


def test_answers_go_on_in_another_engine(model_dir: Path, peer: Any, tmp_path: Path) -> None:
    """What was sent before a loss is not sent again, and the rest is what would have come anyway."""
    sent = requests()
    before = engine(model_dir, tmp_path).serve(sent)
    goes_on = engine(model_dir, tmp_path)
    kept = {request.request_id: index % 12 for index, request in enumerate(sent)}
    resubmitted = [
        msgspec.structs.replace(request, generated=tokens(outputs)[: kept[request.request_id]])
        for request, outputs in zip(sent, before, strict=True)
    ]
    for request, first, rest in zip(sent, before, goes_on.serve(resubmitted), strict=True):
        had = kept[request.request_id]
        whole = [*first[:had], *rest]
        assert all(output.prompt_logprobs is None for output in whole[1:])
        check(peer, request, whole)


def test_answers_survive_preemption(model_dir: Path, peer: Any, tmp_path: Path) -> None:
    running, sent = engine(model_dir, tmp_path, cache_tokens=96), requests((5, 30, 17))
    for request, outputs in zip(sent, running.serve(sent), strict=True):
        check(peer, request, outputs)
    assert running.scheduler.loads(paused=False).preemptions > 0
