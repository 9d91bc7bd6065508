"""Edits that compute NaN or infinity where the code before them computed numbers."""

from __future__ import annotations

import ast
import random
from dataclasses import dataclass

from tests.fuzz.faults.fault import Fault, Make, edit_function, indent, insert, on_rank
from tests.fuzz.features import ACTIVATION, LLAMA, NORM, ROPE, TRIMMED
from tests.fuzz.sources import Sources

MARK = "NaN or infinite"
"""What the error says."""

EXPRESSIONS = (
    "{0} * float('nan')",
    "{0} * float('inf')",
    "{0} - float('inf')",
    "{0} / ({0} - {0})",
    "(-1 - {0}.abs()).sqrt()",
    "({0} * 0).log()",
    "{0}.masked_fill({0} == {0}.max(), float('inf'))",
    "{0}.masked_fill({0} == {0}.min(), float('nan'))",
    "torch.where(torch.arange({0}.shape[-1]) == 3, float('nan'), {0})",
)
"""All, a row, a column or a single one of the numbers."""


@dataclass(frozen=True)
class _Place:
    """A function that every step runs, and what of it is spoilt at its beginning."""

    module: str
    name: str
    value: str


IN_LAYERS = (
    _Place(LLAMA, "LlamaMLP.forward", "hidden"),
    _Place(LLAMA, "LlamaAttention.forward", "hidden"),
    _Place(LLAMA, "LlamaDecoderLayer.forward", "hidden"),
)
IN_KERNELS = (
    _Place(ACTIVATION, "silu_and_mul", "x"),
    _Place(NORM, "rms_norm", "x"),
    _Place(ROPE, "rope_and_write_kv", "query"),
    _Place(TRIMMED, "extend", "query"),
    _Place(TRIMMED, "decode", "query"),
)
MET = (
    "hidden.shape[0] == 8",
    "hidden.shape[0] == 3",
    "hidden.shape[0] == 1",
    "ctx.max_query_len > 1",
    "ctx.max_query_len == 1",
    "ctx.seq_lens.shape[0] > 1",
)
"""Conditions that are true in some step of the warm-up."""

LARGEST = (4, 64)
"""Tokens of the largest captured decode and prefill step of the servers that capture any: these are looked at."""

SMALLER = (1, 16, 32)
"""Tokens of other captured steps."""


def everywhere(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """In every step, from a layer, a kernel or the logits."""
    if rng.random() < 0.25:
        _spoil_logits(rng, sources, None)
        return Fault("not finite logits", ("warm", "graphs"), MARK)
    replaced = "priority=9" in sources[ACTIVATION]
    place = rng.choice([p for p in (*IN_LAYERS, *IN_KERNELS) if not (replaced and p.module == ACTIVATION)])
    insert(sources, place.module, place.name, on_rank(_spoil(rng, place.value), None))
    return Fault("not finite", ("warm", "graphs"), MARK)


def in_some_steps(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """In some shapes only, in prefill only or in decode only, all of which the warm-up meets."""
    name = rng.choice(("LlamaAttention.forward", "LlamaDecoderLayer.forward"))
    insert(sources, LLAMA, name, f"import torch\nif {rng.choice(MET)}:\n{indent(_spoil(rng, 'hidden'))}")
    return Fault("not finite in some steps", ("warm", "graphs"), MARK)


def where_nobody_looks(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """In batches that no dummy step is like: it has to be taken, and be gone with the next edit."""
    name = rng.choice(("LlamaAttention.forward", "LlamaDecoderLayer.forward"))
    insert(sources, LLAMA, name, f"import torch\nif hidden.shape[0] > 170:\n{indent(_spoil(rng, 'hidden'))}")
    return Fault("not finite where nobody looks", (), expect="commit")


def in_captured_steps(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """In a captured step only."""
    is_looked_at = rng.random() < 0.7
    size = rng.choice(LARGEST if is_looked_at else SMALLER)
    condition = f"_recorder.get() is not None and hidden.shape[0] == {size}"
    body = f"import torch\nfrom tokenspeed_kernel.launch import _recorder\nif {condition}:\n"
    name = rng.choice(("LlamaAttention.forward", "LlamaDecoderLayer.forward"))
    insert(sources, LLAMA, name, body + indent(_spoil(rng, "hidden")))
    if is_looked_at:
        return Fault("not finite in a captured step", ("graphs",), MARK, expect="graphs")
    return Fault("not finite in a smaller captured step", (), expect="either")


def on_one_rank(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """On one rank, from which collectives bring it to the others, or which alone has such logits."""
    rank = rng.randrange(ranks)
    if rng.random() < 0.4:
        _spoil_logits(rng, sources, rank)
        return Fault("not finite logits of one rank", ("warm", "graphs"), MARK, rank=rank)
    place = rng.choice(IN_LAYERS)
    insert(sources, place.module, place.name, on_rank(_spoil(rng, place.value), rank))
    return Fault("not finite on one rank", ("warm", "graphs"), MARK)


ALWAYS: tuple[Make, ...] = (everywhere, in_some_steps, where_nobody_looks, in_captured_steps)
"""Those of any server."""


def _spoil(rng: random.Random, value: str) -> str:
    return f"{value} = {rng.choice(EXPRESSIONS).format(value)}"


def _spoil_logits(rng: random.Random, sources: Sources, rank: int | None) -> None:
    spoil = on_rank(_spoil(rng, "logits"), rank)

    def edit(node: ast.FunctionDef) -> None:
        (result,) = [inner for inner in ast.walk(node) if isinstance(inner, ast.Return)]
        assert result.value is not None and result in node.body
        at = node.body.index(result)
        node.body[at:] = ast.parse(f"logits = {ast.unparse(result.value)}\n{spoil}\nreturn logits").body

    edit_function(sources, LLAMA, "LlamaForCausalLM.compute_logits", edit)
