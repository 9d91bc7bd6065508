"""Random weights for a model of which only the shape matters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch

STD = 0.02
_SEED_BYTES = 7  # torch takes 64-bit seeds with sign


def dummy_weights(
    shapes: Mapping[str, tuple[int, ...]], seed: int, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of `shapes` as (name, full tensor on `device`): normal with deviation 0.02, norms and scales 1.

    A tensor follows from `seed`, its name and its shape alone, so that the model is the same however it is
    sharded. CPU and GPU draw different numbers.
    """
    generator = torch.Generator(device)
    for name, shape in shapes.items():
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if name.endswith(("norm.weight", "weight_scale_inv")):
            yield name, tensor.fill_(1.0)
            continue
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator.manual_seed(int.from_bytes(digest[:_SEED_BYTES], "big"))
        yield name, tensor.normal_(0.0, STD, generator=generator)
