"""Logits and greedy text against transformers on the same GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import InProcessEngine
from tests.gpu.models import hf_config, hf_model
from tokenspeed.errors import ModelError
from tokenspeed.runtime.config import CacheOptions, ModelOptions, SchedulerOptions
from tokenspeed.runtime.execution.buffers import BatchBuffers
from tokenspeed.runtime.execution.inputs import StepShape
from tokenspeed.runtime.loader.source import resolve
from tokenspeed.runtime.loader.weights import checkpoint_weights
from tokenspeed.runtime.protocol.sampling import SamplingParams
from tokenspeed.runtime.scheduler.batch import Batch, Row
from tokenspeed.runtime.scheduler.request import Request

DTYPES = ("float32", "float16", "bfloat16")
SLACK = {"float32": 1e-4, "float16": 1e-3, "bfloat16": 5e-3}
"""What our error may be more than one and a half times that of transformers in the same type on the same GPU.

An error is the norm of the difference over the norm of the logits, which are those of float64."""

TEXTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a small village by the sea,",
    "1, 2, 3, 5, 8, 13,",
    "The three laws of thermodynamics are",
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_logits_of_a_random_model(
    start: Callable[..., InProcessEngine], tiny: Callable[..., Path], model_type: str, dtype: str
) -> None:
    engine = start(
        tiny(model_type, dtype),
        scheduler=SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=128),
        cache=CacheOptions(max_total_tokens=8192),
    )
    tokens = torch.randint(1, 1000, (100,), generator=torch.Generator().manual_seed(3)).tolist()
    rounded = hf_model(hf_config(model_type)).cuda()
    for parameter in rounded.parameters():  # and not the frequencies, which a checkpoint does not round
        parameter.data = parameter.data.to(getattr(torch, dtype))
    with torch.inference_mode():
        ids = torch.tensor([tokens], device="cuda")
        theirs = rounded(ids).logits[0].double().cpu()
        exact = rounded.double()(ids).logits[0].cpu()
    for end in (1, 2, 17, 63, 100):
        wanted = exact[end - 1]
        error = relative(last_logits(engine, tokens[:end]), wanted)
        allowed = 1.5 * relative(theirs[end - 1], wanted) + SLACK[dtype]
        assert error <= allowed, f"prefill of {end}: {error} where {allowed} is allowed"


def relative(logits: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((logits - wanted).norm() / wanted.norm()).item()


def last_logits(engine: InProcessEngine, tokens: list[int]) -> torch.Tensor:
    """float64 [vocab] after a prefill of `tokens` in blocks of its own, with the shape of an eager step."""
    executor = engine.executor
    buffers: BatchBuffers = executor.buffers
    blocks = list(range(1, 2 + len(tokens) // buffers.block_size))
    request = Request("r", tokens, SamplingParams(max_new_tokens=1))
    row = Row(request, 0, len(tokens), True, tokens, None, blocks, ())
    shape = StepShape(len(tokens), 1, len(tokens), len(blocks))
    with torch.inference_mode():
        inputs = buffers.fill(Batch([row], len(tokens), int(len(tokens) == 1), 1), shape)
        hidden = executor._forward(shape, inputs)
        return executor.model.compute_logits(hidden[inputs.last_tokens])[0].double().cpu()


def test_greedy_text_of_smollm2(start: Callable[..., InProcessEngine]) -> None:
    """Both in bfloat16. Where the two likeliest tokens are nearly equal, either may be chosen; the text is compared
    up to there."""
    try:
        source = resolve(ModelOptions(model="smollm2"), lambda _: None)
    except ModelError as error:
        pytest.skip(str(error))
    assert source.tokenizer_dir is not None
    from tokenizers import Tokenizer
    from transformers import AutoConfig, LlamaForCausalLM

    tokenizer = Tokenizer.from_file(str(source.tokenizer_dir / "tokenizer.json"))
    theirs = LlamaForCausalLM(AutoConfig.from_pretrained(source.tokenizer_dir))
    weights = dict(checkpoint_weights(source, torch.device("cpu")))
    theirs.load_state_dict(weights, strict=False)
    theirs = theirs.to("cuda", torch.bfloat16).eval()
    prompts = [tokenizer.encode(text).ids for text in TEXTS]
    engine = start(
        source.path,
        model_options={"dtype": "bfloat16", "max_model_len": 512},
        scheduler=SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=256),
    )
    answers = engine.generate(prompts, SamplingParams(max_new_tokens=64, temperature=0.0, ignore_eos=True))
    agreed = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        agreed += check_greedy(theirs, prompt, answer)
    assert agreed >= 0.9 * 64 * len(TEXTS), f"only {agreed} tokens are those of transformers"


def check_greedy(model: Any, prompt: list[int], answer: list[int]) -> int:
    """Number of tokens that are the likeliest for transformers, which is given our text; others have to be close."""
    ids = torch.tensor([[*prompt, *answer]], device="cuda")
    with torch.inference_mode():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    best = logits.max(-1).values
    chosen = logits.gather(1, torch.tensor(answer, device="cuda").unsqueeze(1)).squeeze(1)
    assert ((best - chosen) <= 0.25).all(), "a token was chosen that transformers finds much less likely"
    return int((best == chosen).sum())
