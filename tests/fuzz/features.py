"""Edits that engineers make on purpose, each of which can be made, varied and taken back.

A feature changes what the model computes, or where its code stands; which features are on, and with which value,
says everything about the numbers that the model gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.fuzz.sources import Sources

LLAMA = "tokenspeed.runtime.models.llama"
ACTIVATION = "tokenspeed_kernel.ops.activation.reference"
NORM = "tokenspeed_kernel.ops.norm.reference"
ROPE = "tokenspeed_kernel.ops.rope.reference"
TURN = "tokenspeed_kernel.ops.rope.turn"
ROTARY = "tokenspeed.runtime.layers.rotary"
CONTEXT = "tokenspeed.runtime.layers.context"
ATTENTION = "tokenspeed.runtime.layers.attention"
TRIMMED = "tokenspeed_kernel.ops.attention.trimmed"
EMBEDDING = "tokenspeed_kernel.ops.embedding.reference"
LINEAR = "tokenspeed.runtime.layers.linear"
LAYER_NORM = "tokenspeed.runtime.layers.norm"
PENALTIES = "tokenspeed.runtime.sampling.edits"
LOGPROBS = "tokenspeed.runtime.sampling.logprobs"
SAMPLER = "tokenspeed.runtime.sampling.sampler"
NOISE = "tokenspeed_kernel.ops.sampling.noise"


@dataclass(frozen=True)
class Feature:
    """One edit with its variants; without a value it is not made."""

    name: str
    values: tuple[Any, ...]
    make: Callable[[Sources, Any], None]
    numeric: bool = True
    """Whether it changes what some request gets."""
    in_kernels: bool = False
    """Whether it changes nothing but bodies of kernels, so that captured steps can take it as they are."""


def _mlp_factor(sources: Sources, value: float) -> None:
    sources.replace(LLAMA, "return self.mlp(hidden), residual", f"return self.mlp(hidden) * {value}, residual")


def _gain_constant(sources: Sources, value: float) -> None:
    sources.replace(ACTIVATION, "return silu(gate) * up\n", "return silu(gate) * up * GAIN\n")
    sources.append(ACTIVATION, f"GAIN = {value}")


def _gate_factor(sources: Sources, value: float) -> None:
    sources.replace(ACTIVATION, "return silu(gate) * up", f"return silu(gate) * {value} * up")


def _norm_epsilon(sources: Sources, value: float) -> None:
    sources.replace(NORM, "mean_square + eps", f"mean_square + eps + {value}")


def _rotation_in_a_new_file(sources: Sources, value: float) -> None:
    """A function moves to a file of its own and gets a default argument."""
    head, _, rotate = sources[ROPE].partition("\n\n\ndef _rotate(")
    sources[ROPE] = head.replace("import torch\nfrom torch", "from torch") + "\n"
    sources.replace(
        ROPE,
        "from tokenspeed_kernel.registry",
        "from tokenspeed_kernel.ops.rope.turn import rotate as _rotate\nfrom tokenspeed_kernel.registry",
    )
    rotate = rotate.replace("sin: Tensor) -> Tensor:", f"sin: Tensor, gain: float = {value}) -> Tensor:")
    rotate = rotate.replace(".to(x.dtype)", ".to(x.dtype) * gain")
    sources[TURN] = (
        f"from __future__ import annotations\n\nimport torch\nfrom torch import Tensor\n\n\ndef rotate({rotate}"
    )


def _field_of_the_context(sources: Sources, value: float) -> None:
    sources[CONTEXT] = sources[CONTEXT].rstrip() + f"\n    sharpness: float = {value}\n"
    sources.replace(
        ATTENTION,
        "        keys, values = ctx.kv",
        "        query = query * ctx.sharpness\n        keys, values = ctx.kv",
    )


def _table_of_a_plan(sources: Sources, value: float) -> None:
    sources.replace(ROTARY, "base = 1.0 / self.theta**exponents", "base = _stretch() / self.theta**exponents")
    sources.append(ROTARY, f"def _stretch() -> float:\n    return {value}")


def _embedding_factor(sources: Sources, value: float) -> None:
    sources.replace(EMBEDDING, "absent.unsqueeze(1), 0)", f"absent.unsqueeze(1), 0) * {value}")


def _logits_property(sources: Sources, value: float) -> None:
    sources.replace(LLAMA, "return self.lm_head.logits(hidden)", "return self.lm_head.logits(hidden) * self.cooling")
    sources.replace(
        LLAMA,
        "    def compute_logits(",
        f"    @property\n    def cooling(self) -> float:\n        return {value}\n\n    def compute_logits(",
    )


def _kernel_of_higher_priority(sources: Sources, value: float) -> None:
    sources.append(
        ACTIVATION,
        '@register_kernel("activation", "silu_and_mul", solution="halved", priority=9)\n'
        f"def halved(x: Tensor) -> Tensor:\n    return x.chunk(2, dim=-1)[1] * {value}",
    )


def _decorated_method(sources: Sources, value: float) -> None:
    sources.replace(
        LLAMA,
        "class LlamaMLP(",
        f"def scaled(function):\n    return lambda *args: function(*args) * {value}\n\n\nclass LlamaMLP(",
    )
    sources.replace(
        LLAMA, "    def forward(self, hidden: Tensor) -> Tensor:", "    @scaled\n    def forward(self, hidden):"
    )


def _attention_scale(sources: Sources, value: float) -> None:
    sources.replace(
        TRIMMED, "    lengths = seq_lens.tolist()\n", f"    lengths = seq_lens.tolist()\n    scale = scale * {value}\n"
    )


def _collective(sources: Sources, value: str) -> None:
    """The sum over the ranks is left out, or made twice, on all ranks alike."""
    old = "return self.group.all_reduce(self.project(x, self.bias if self.group.rank == 0 else None))"
    new = (
        old.replace("self.group.all_reduce(", "(")
        if value == "none"
        else f"{old.replace('return ', 'return self.group.all_reduce(')})"
    )
    sources.replace(LINEAR, old, new)


def _penalty_factor(sources: Sources, value: float) -> None:
    sources.replace(PENALTIES, "self.frequency * counts", f"self.frequency * counts * {value}")


def _noise_key(sources: Sources, value: int) -> None:
    sources.replace(NOISE, "mix(mix(seeds) + positions)", f"mix(mix(seeds) + positions + {value})")


def _logprob_shift(sources: Sources, value: float) -> None:
    sources.replace(LOGPROBS, "return Logprobs(chosen.squeeze(1), ", f"return Logprobs(chosen.squeeze(1) * {value}, ")


def _helper_method(sources: Sources, value: str) -> None:
    """A step of the decoder layer becomes a method."""
    sources.replace(
        LLAMA,
        "        hidden = self.self_attn(hidden, positions, ctx)\n"
        "        hidden, residual = self.post_attention_layernorm(hidden, residual)\n",
        f"        hidden, residual = self.{value}(hidden, residual, positions, ctx)\n",
    )
    sources.replace(
        LLAMA,
        "class LlamaModel(",
        f"def {value}(layer, hidden, residual, positions, ctx):\n"
        "    return layer.post_attention_layernorm(layer.self_attn(hidden, positions, ctx), residual)\n\n\n"
        f"LlamaDecoderLayer.{value} = {value}\n\n\nclass LlamaModel(",
    )


def _function_across_files(sources: Sources, value: str) -> None:
    """Two modules share a function of a third."""
    sources.append("tokenspeed_kernel.ops.kvcache.reference", f"def {value}(x):\n    return x")
    for module, old, new in (
        (ROPE, "return _rotate(query, cos, sin)", f"return _rotate({value}(query), cos, sin)"),
        (NORM, "wide = x.float()", f"wide = {value}(x).float()"),
    ):
        sources.replace(module, old, new)
        sources.insert_above(module, f"from tokenspeed_kernel.ops.kvcache.reference import {value}")


def _keyword_argument(sources: Sources, value: str) -> None:
    """A parameter is renamed in its function and where it is called."""
    sources.replace(
        SAMPLER,
        "def __call__(self, logits: Tensor, batch: SamplingBatch) -> Tensor:",
        f"def __call__(self, logits: Tensor, batch: SamplingBatch, {value}: bool = False) -> Tensor:",
    )
    sources.replace(SAMPLER, "        if batch.greedy:\n", f"        if batch.greedy or {value}:\n")


FEATURES: tuple[Feature, ...] = (
    Feature("factor in a layer", (0.5, -0.7, 2.0), _mlp_factor),
    Feature("constant of a kernel", (0.75, 0.25), _gain_constant),
    Feature("factor in a kernel", (0.8, 1.25), _gate_factor, in_kernels=True),
    Feature("expression in a kernel", (0.5, 3.0), _norm_epsilon, in_kernels=True),
    Feature("function in a new file", (0.5, -0.5), _rotation_in_a_new_file),
    Feature("field of a dataclass", (0.5, 2.0), _field_of_the_context),
    Feature("table of a plan", (2.0, 30.0), _table_of_a_plan),
    Feature("embedding kernel", (0.5, 1.5), _embedding_factor, in_kernels=True),
    Feature("property of a class", (0.5, 2.0), _logits_property),
    Feature("kernel of higher priority", (0.5, 0.25), _kernel_of_higher_priority),
    Feature("decorator of a method", (0.5, 3.0), _decorated_method),
    Feature("attention kernel", (0.5, 2.0), _attention_scale, in_kernels=True),
    Feature("collective on all ranks", ("none", "twice"), _collective),
    Feature("penalties", (0.5, 2.0), _penalty_factor),
    Feature("noise of sampling", (1, 5), _noise_key),
    Feature("log-probabilities", (0.5, 2.0), _logprob_shift),
    Feature("step as a method", ("attend", "attend_first"), _helper_method, numeric=False),
    Feature("function across files", ("passed", "kept"), _function_across_files, numeric=False),
    Feature("new parameter", ("strict", "forced"), _keyword_argument, numeric=False),
)
"""In the order in which they are made."""


def numbers(chosen: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """What the features in force say of the numbers that the model gives."""
    numeric = {feature.name for feature in FEATURES if feature.numeric}
    return tuple(sorted((name, value) for name, value in chosen.items() if name in numeric))


def make(chosen: dict[str, Any]) -> Sources:
    """The installed sources with the chosen features."""
    sources = Sources()
    for feature in FEATURES:
        if feature.name in chosen:
            feature.make(sources, chosen[feature.name])
    return sources
