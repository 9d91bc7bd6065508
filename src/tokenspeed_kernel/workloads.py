"""Inputs of operations as a model's steps give them: what is timed at start-up and in benchmarks is real work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one rank's part of a model."""

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    block_size: int


@dataclass(frozen=True)
class Workloads:
    """Makes arguments of operations, in the order of their kernels; numbers are random, cached ones scattered."""

    shape: ModelShape
    device: torch.device
    dtype: torch.dtype

    def random(self, *shape: int) -> Tensor:
        """Normal numbers."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def paged(self, seqs: int, context: int, spare: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Key pool, value pool, block tables and lengths of sequences of `context` tokens; the tables are wider by
        `spare` blocks, as those of captured steps are."""
        shape = self.shape
        width = -(-context // shape.block_size)
        pool = seqs * width + 1, shape.block_size, shape.kv_heads, shape.head_dim
        tables = torch.zeros(seqs, width + spare, dtype=torch.int32, device=self.device)
        tables[:, :width] = torch.randperm(seqs * width, device=self.device).add_(1).view(seqs, width)
        lengths = torch.full((seqs,), context, dtype=torch.int32, device=self.device)
        return self.random(*pool), self.random(*pool), tables, lengths

    def qkv(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value heads, as views of one product."""
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        parts = self.random(tokens, heads + 2 * kv_heads, self.shape.head_dim).split((heads, kv_heads, kv_heads), 1)
        return parts[0], parts[1], parts[2]

    def add_rms_norm(self, tokens: int) -> tuple[Any, ...]:
        """For `norm.add_rms_norm`."""
        size = self.shape.hidden_size
        return self.random(tokens, size), self.random(tokens, size), self.random(size), 1e-6

    def rope_and_write_kv(self, tokens: int, normalise: bool) -> tuple[Any, ...]:
        """For `rope.rope_and_write_kv`."""
        positions = torch.arange(tokens, device=self.device)
        cos_sin = torch.randn(tokens, self.shape.head_dim, device=self.device)
        keys, values, _, _ = self.paged(1, tokens)
        head_dim = self.shape.head_dim
        norms = (self.random(head_dim), self.random(head_dim)) if normalise else (None, None)
        return positions, *self.qkv(tokens), cos_sin, keys, values, positions, *norms, 1e-6

    def silu_and_mul(self, tokens: int) -> tuple[Any, ...]:
        """For `activation.silu_and_mul`."""
        return (self.random(tokens, 2 * self.shape.intermediate_size),)

    def decode(self, seqs: int, context: int, spare: int = 0) -> tuple[Any, ...]:
        """For `attention.decode`."""
        query, _, _ = self.qkv(seqs)
        return query, *self.paged(seqs, context, spare), self.shape.head_dim**-0.5

    def extend(self, tokens: int, cached: int = 0, spare: int = 0) -> tuple[Any, ...]:
        """For `attention.extend`: one sequence."""
        query, _, _ = self.qkv(tokens)
        start = torch.tensor([0, tokens], dtype=torch.int32, device=self.device)
        return query, *self.paged(1, tokens + cached, spare), start, tokens, self.shape.head_dim**-0.5

    def linear(self, tokens: int, in_size: int, out_size: int) -> tuple[Any, ...]:
        """For `gemm.linear`."""
        return self.random(tokens, in_size), self.random(out_size, in_size) * 0.02, None

    def block_fp8_linear(self, tokens: int, in_size: int, out_size: int) -> tuple[Any, ...]:
        """For `gemm.block_fp8_linear`; both sizes are whole blocks."""
        weight = self.random(out_size, in_size).to(torch.float8_e4m3fn)
        scales = torch.full((in_size // 128, out_size // 128), 0.02, device=self.device)
        return self.random(tokens, in_size), weight, scales, None, out_size

    def sample(self, rows: int, temperature: float, top_k: int, top_p: float) -> tuple[Any, ...]:
        """For `sampling.sample`."""
        index = torch.arange(rows, device=self.device)
        logits = 2 * torch.randn(rows, self.shape.vocab_size, device=self.device)
        heat, p, off = (torch.full((rows,), value, device=self.device) for value in (temperature, top_p, 0.0))
        return logits, heat, torch.full_like(index, top_k), p, off, index, index
