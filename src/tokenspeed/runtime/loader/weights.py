"""Streams the weights of a model into it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

from tokenspeed.runtime.layers.base import StoredWeight
from tokenspeed.runtime.loader.dummy import dummy_weights
from tokenspeed.runtime.loader.gguf_file import open_gguf
from tokenspeed.runtime.loader.gguf_weights import gguf_weights
from tokenspeed.runtime.loader.safetensors_weights import safetensors_weights
from tokenspeed.runtime.loader.source import ModelSource
from tokenspeed.runtime.models.base import CausalLM
from tokenspeed_kernel.progress import PROGRESS

Weight = TypeVar("Weight", torch.Tensor, StoredWeight)


def load_weights(
    model: CausalLM,
    source: ModelSource,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Fill the parameters of `model`, one weight at a time.

    Args:
        model: has memory for its parameters; takes its own part of each weight, and converts it.
        source: where the weights are, and in what format.
        seed: of dummy weights.
        device: where dequantised and dummy weights are made.
        dtype: of dummy weights.

    Raises:
        ModelError: for weights that are missing, damaged, or do not fit `model`.
    """
    if source.format == "dummy":
        shapes = {name: slot.shape for name, (_, slot) in model.weight_slots().items()}
        model.load_weights(_marked(dummy_weights(shapes, seed, device, dtype)))
    else:
        model.load_weights(_marked(stored_weights(source, device)))


def _marked(weights: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
    """The same, each of which shows that the load gets on."""
    for name, weight in weights:
        PROGRESS.step(f"load {name}")
        yield name, weight


def checkpoint_weights(source: ModelSource, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of `source` as (Hugging Face name, full tensor), each made when it is asked for.

    Raises:
        ModelError: if `source` is damaged.
    """
    return ((name, weight.narrow(0, 0, weight.shape[0])) for name, weight in stored_weights(source, device))


def stored_weights(source: ModelSource, device: torch.device) -> Iterator[tuple[str, StoredWeight]]:
    """The weights of `source` as (Hugging Face name, weight), of which only what is taken is read and dequantised.

    Raises:
        ModelError: if `source` is damaged.
    """
    if source.format == "gguf":
        return gguf_weights(open_gguf(source.path), source.config, device)
    return safetensors_weights(source.path, source.config.block_fp8)
