"""Weights of a Hugging Face directory: one safetensors file, or several with an index."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tokenspeed.errors import ModelError
from tokenspeed.runtime.loader.layout import INDEX, SINGLE

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FP8 = torch.float8_e4m3fn
Shards = Mapping[Path, frozenset[str] | None]
"""Each file with the names that the index expects in it; None takes what is there."""


def find_shards(directory: Path) -> Shards:
    """The weight files of `directory`, all of which exist.

    Raises:
        ModelError: if there are none, one is missing, or the index is damaged.
    """
    if (directory / SINGLE).is_file():
        return {directory / SINGLE: None}
    index = directory / INDEX
    if not index.is_file():
        found = "only PyTorch .bin files; convert them" if any(directory.glob("*.bin")) else "no weights; add"
        raise ModelError(f"{directory} has {found} {SINGLE}, or give --load-format dummy")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names: dict[Path, set[str]] = {}
        for name, file in weight_map.items():
            names.setdefault(directory / file, set()).add(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is damaged ({error!r}); download it again") from error
    if missing := sorted(path.name for path in names if not path.is_file()):
        raise ModelError(f"{directory} lacks {', '.join(missing)}, which {INDEX} names; download it again")
    return {path: frozenset(names[path]) for path in sorted(names)}


def safetensors_weights(directory: Path, block_fp8: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight as (name, full tensor), file by file in the order of the bytes.

    With `block_fp8` the weights of linear layers have to be float8, and else no weight may be. The tensors are views
    of the mapped file: what is not used is not read.

    Raises:
        ModelError: for a file that is damaged or lacks a tensor, or a type that is not supported.
    """
    for path, expected in find_shards(directory).items():
        try:
            yield from _read(path, expected, block_fp8)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is damaged ({error}); download it again") from error
        except (RuntimeError, MemoryError) as error:  # it could not be mapped
            raise ModelError(f"{path} cannot be mapped ({error}); free memory or use smaller shards") from error


def _read(path: Path, expected: frozenset[str] | None, block_fp8: bool) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt", device="cpu") as file:
        names = file.offset_keys()
        if expected is not None and (missing := sorted(expected - set(names))):
            raise ModelError(f"{path} lacks {missing[0]}, which {INDEX} puts there; download it again")
        for name in names:
            if expected is not None and name not in expected:
                continue
            tensor = file.get_tensor(name)
            if block_fp8 and name.endswith("_proj.weight"):
                if tensor.dtype != _FP8:
                    raise ModelError(f"{path} has {name} as {tensor.dtype}, not fp8 as config.json; download it again")
            elif tensor.dtype not in _DTYPES:
                raise ModelError(f"{path} has {name} as {tensor.dtype}; use a bfloat16 checkpoint")
            yield name, tensor
