"""What an edit breaks, and the means to break it."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.fuzz.features import ACTIVATION, LINEAR, LLAMA
from tests.fuzz.sources import Sources, functions, replace_node

HOT = (
    (LLAMA, "LlamaAttention.forward"),
    (LLAMA, "LlamaMLP.forward"),
    (LLAMA, "LlamaDecoderLayer.forward"),
    (LLAMA, "LlamaModel.forward"),
    (LLAMA, "LlamaForCausalLM.forward"),
    (LLAMA, "LlamaForCausalLM.compute_logits"),
    ("tokenspeed.runtime.layers.activation", "SiluAndMul.forward"),
    ("tokenspeed.runtime.layers.attention", "PagedAttention.forward"),
    ("tokenspeed.runtime.layers.embedding", "VocabParallelEmbedding.forward"),
    ("tokenspeed.runtime.layers.embedding", "VocabParallelEmbedding.logits"),
    (LINEAR, "Linear.project"),
    (LINEAR, "QKVParallelLinear.forward"),
    (LINEAR, "RowParallelLinear.forward"),
    ("tokenspeed.runtime.layers.norm", "RMSNorm.forward"),
    ("tokenspeed.runtime.layers.rotary", "RotaryEmbedding.forward"),
    ("tokenspeed_kernel.ops.activation", "silu_and_mul"),
    ("tokenspeed_kernel.ops.activation.reference", "silu_and_mul"),
    ("tokenspeed_kernel.ops.attention.trimmed", "decode"),
    ("tokenspeed_kernel.ops.attention.trimmed", "extend"),
    ("tokenspeed_kernel.ops.embedding.reference", "embedding"),
    ("tokenspeed_kernel.ops.kvcache.reference", "write_kv"),
    ("tokenspeed_kernel.ops.norm.reference", "add_rms_norm"),
    ("tokenspeed_kernel.ops.rope.reference", "rope_and_write_kv"),
)
"""What every warm-up of a Llama on a CPU runs."""


RAISES = (
    "raise ValueError('{mark}')",
    "raise SystemExit('{mark}')",
    "raise KeyboardInterrupt('{mark}')",
    "raise MemoryError('{mark}')",
    "raise StopIteration('{mark}')",
    "raise GeneratorExit('{mark}')",
    "raise BaseException('{mark}')",
    "raise ExceptionGroup('{mark}', [ValueError(1), KeyError(2)])",
    "raise type('Odd', (Exception,), {{'__str__': lambda error: 1 / 0, '__doc__': '{mark}'}})()",
    "raise ValueError('{mark} \\udcff \\x00')",
    "raise ValueError('{mark} ' * 100000)",
    "raise TimeoutError('{mark}') from KeyError('cause')",
    "assert not '{mark}', '{mark}'",
    "name_{mark}",
    "(0).attribute_{mark}",
    "{{}}['{mark}']",
    "import no_such_module_{mark}",
    "1 / len('{mark}'[:0])",
)
"""What fails with the mark in it, as far as the error has a text."""


TORCH_RAISES = (
    "torch.zeros(3) @ torch.zeros(4)",
    "torch.zeros(2, dtype=torch.int64) @ torch.zeros(2)",
    "torch.empty(2**58)",
    "torch.zeros(3).view(2)",
    "torch.zeros(3)[5]",
    "bytearray(2**60)",
    "(lambda f: f(f))(lambda f: f(f))",
    "torch.zeros(1, device='cuda')",
    "torch.ops.aten.no_such_operator()",
)
"""What a CPU fails with by itself."""


@dataclass(frozen=True)
class Fault:
    """What an edit breaks, and what the reply has to say."""

    kind: str
    phases: tuple[str, ...]
    mark: str = ""
    """Has to be in the reply's error."""
    module: str = ""
    """Whose file the reply has to name."""
    rank: int | None = None
    """The rank that fails first; None where it is rank 0's turn to tell, or anybody's."""
    expect: str = "fail"
    """`fail`, `commit` for code that warm-up does not meet, or `either`."""
    serves: str = ""
    """Has to be in the errors of the requests that meet it."""


Make = Callable[[random.Random, Sources, str, int], Fault]
"""Edits the sources; called with a mark and the number of ranks."""


def hot(rng: random.Random, sources: Sources) -> tuple[str, str]:
    """A function that runs in a warm-up of these sources."""
    replaced = "priority=9" in sources[ACTIVATION]
    return rng.choice([place for place in HOT if not (replaced and place[0] == ACTIVATION)])


def told(raising: str, mark: str) -> str:
    """What the error's text must have: an error whose text cannot be made has its type only."""
    if raising.startswith("raise type('Odd'"):
        return "Odd"
    return mark if mark in raising and not raising.startswith("1 /") else ""


def insert(sources: Sources, module: str, name: str, body: str) -> None:
    """Put `body` at the beginning of a function."""

    def edit(node: ast.FunctionDef) -> None:
        at = 1 if ast.get_docstring(node) is not None else 0
        node.body[at:at] = ast.parse(body).body

    edit_function(sources, module, name, edit)


def edit_function(sources: Sources, module: str, name: str, edit: Callable[[ast.FunctionDef], None]) -> None:
    """Change a function of a module in place."""
    node = dict(functions(ast.parse(sources[module])))[name]
    edit(node)
    sources[module] = replace_node(sources[module], node, ast.fix_missing_locations(node))


def on_rank(body: str, rank: int | None) -> str:
    """`body` for one rank, or for all; torch is imported before it."""
    return "import torch\n" + body if rank is None else f"import torch\n{_if_rank(body, rank)}"


def at_top(body: str, rank: int | None) -> str:
    """`body` at the top level of a module, for one rank or for all."""
    return body if rank is None else f"import torch\n{_if_rank(body, rank)}"


def _if_rank(body: str, rank: int) -> str:
    return f"import torch.distributed\nif torch.distributed.get_rank() == {rank}:\n{indent(body)}"


def indent(body: str) -> str:
    """One level deeper."""
    return "\n".join("    " + line for line in body.splitlines())


def compiles(text: str) -> bool:
    """Whether a module of this text can be compiled."""
    try:
        compile(text, "text", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
