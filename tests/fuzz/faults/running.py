"""Edits that fail when the forward pass runs, is captured, or serves."""

from __future__ import annotations

import ast
import random

from tests.fuzz.faults.fault import RAISES, TORCH_RAISES, Fault, edit_function, hot, indent, insert, on_rank, told
from tests.fuzz.features import LLAMA
from tests.fuzz.sources import Sources


def at_warm_up(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """A function of the forward pass raises whenever it is called."""
    module, name = hot(rng, sources)
    raising = rng.choice((*RAISES, *TORCH_RAISES)).format(mark=mark)
    insert(sources, module, name, f"import torch\n{raising}")
    return Fault("exception at warm-up", ("warm",), told(raising, mark), module)


def recursion(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """A function that calls itself."""
    module, name = hot(rng, sources)
    owner, _, method = name.rpartition(".")
    call = f"self.{method}" if owner else method

    def edit(node: ast.FunctionDef) -> None:
        skip = 1 if owner else 0
        args = ", ".join(a.arg for a in node.args.args[skip:])
        keywords = "".join(f", {a.arg}={a.arg}" for a in node.args.kwonlyargs)
        node.body = ast.parse(f"return {call}({args}{keywords})").body

    edit_function(sources, module, name, edit)
    return Fault("endless recursion", ("warm",), "RecursionError", module)


def in_one_batch(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """A failure that only some batches of the warm-up meet."""
    condition = rng.choice(
        ("ctx.max_query_len == 1", "ctx.max_query_len > 1", "ctx.seq_lens.shape[0] > 1", "hidden.shape[0] == 1")
    )
    raising = rng.choice(RAISES).format(mark=mark)
    name = rng.choice(("LlamaAttention.forward", "LlamaDecoderLayer.forward"))
    insert(sources, LLAMA, name, f"if {condition}:\n{indent(raising)}")
    return Fault("exception in one branch", ("warm",), told(raising, mark), LLAMA)


def wrong_result(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """A function gives another shape, type or kind than its callers can use."""
    name = rng.choice(("LlamaAttention.forward", "LlamaMLP.forward", "LlamaDecoderLayer.forward", "LlamaModel.forward"))
    change = rng.choice(("{0}[..., :-1]", "{0}.double()", "None", "[{0}]", "{0}.to('meta')", "{0}.tolist()", "{0}[:0]"))
    if name == "LlamaDecoderLayer.forward":
        whole = change.replace("{0}", "{0}[0]") + ", {0}[1]"
        change = whole if rng.random() < 0.7 else "{0}[0]"

    def edit(node: ast.FunctionDef) -> None:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Return) and inner.value is not None:
                text = ast.unparse(inner.value)
                inner.value = ast.parse(f"({change.format(f'({text})')})", mode="eval").body

    edit_function(sources, LLAMA, name, edit)
    return Fault("wrong shape or type", ("warm", "graphs"))


def while_capturing(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """What an eager step may do and a captured one may not, or a failure in the capture of one size."""
    if rng.random() < 0.5:
        module, name = LLAMA, "LlamaModel.forward"
        body = rng.choice(
            (
                "float(positions.sum().item())",
                "positions.tolist()",
                "if positions.sum() > 0:\n    pass",
                "int(input_ids[0])",
            )
        )
        insert(sources, module, name, body)
        return Fault("step that reads tensors on the host", ("graphs",), module=module, expect="graphs")
    rank = rng.randrange(ranks) if ranks > 1 and rng.random() < 0.5 else None
    size = rng.choice((1, 4, 16, 32, 64))
    raising = rng.choice(RAISES).format(mark=mark)
    module, name = rng.choice(((LLAMA, "LlamaAttention.forward"), (LLAMA, "LlamaDecoderLayer.forward")))
    condition = f"_recorder.get() is not None and hidden.shape[0] == {size}"
    if rank is not None:
        condition += f" and torch.distributed.get_rank() == {rank}"
    imports = "import torch.distributed\nfrom tokenspeed_kernel.launch import _recorder"
    insert(sources, module, name, f"{imports}\nif {condition}:\n{indent(raising)}")
    return Fault("exception at capture", ("graphs",), told(raising, mark), module, rank, expect="graphs")


def at_the_kth_call(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """Code that fails after some calls."""
    raising = rng.choice(RAISES).format(mark=mark)
    rank = rng.randrange(ranks) if ranks > 1 and rng.random() < 0.5 else None
    body = f"CALLS_{mark}_CACHE.append(0)\nif len(CALLS_{mark}_CACHE) > {rng.randrange(5)}:\n{indent(raising)}"
    sources.insert_above(LLAMA, f"CALLS_{mark}_CACHE = []\n\n")
    insert(sources, LLAMA, "LlamaDecoderLayer.forward", on_rank(body, rank))
    return Fault("exception at the k-th call", ("warm", "graphs"), told(raising, mark), LLAMA, rank)


def while_serving(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """A failure in batches that warm-up does not meet: long prompts."""
    raising = rng.choice([r for r in RAISES if "Odd" not in r and "100000" not in r and "1 /" not in r]).format(
        mark=mark
    )
    insert(sources, LLAMA, "LlamaModel.forward", f"if len(input_ids) > 170:\n{indent(raising)}")
    return Fault("exception while it serves", (), expect="commit", serves="forward pass failed")
