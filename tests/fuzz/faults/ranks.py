"""Edits by which ranks part, or which cost their processes."""

from __future__ import annotations

import ast
import random

from tests.fuzz.faults.fault import RAISES, TORCH_RAISES, Fault, at_top, edit_function, hot, insert, on_rank, told
from tests.fuzz.features import LINEAR, LLAMA
from tests.fuzz.sources import Sources


def at_warm_up_on_one_rank(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """The same on one rank, whose peers go on until they wait for it."""
    module, name = hot(rng, sources)
    rank = rng.randrange(ranks)
    raising = rng.choice((*RAISES, *TORCH_RAISES)).format(mark=mark)
    insert(sources, module, name, on_rank(raising, rank))
    return Fault("exception at warm-up on one rank", ("warm",), told(raising, mark), module, rank)


def collective_of_one_rank(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """One rank leaves a collective out, makes one too many, or another one than its peers."""
    rank = rng.randrange(ranks)
    body = rng.choice(
        (
            "return self.project(x, None)",
            "self.group.all_reduce(x.clone())",
            "self.group.all_gather_last(x.clone())",
            "return self.group.all_reduce(self.project(x, None)[..., :-1])",
            "return self.group.all_reduce(self.project(x, None).double())",
            "return self.group.all_gather_last(self.project(x, None))",
        )
    )
    insert(sources, LINEAR, "RowParallelLinear.forward", on_rank(body, rank))
    return Fault("collective of one rank", ("warm", "graphs"))


def ranks_that_differ(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """One rank computes other logits than its peers, and would choose other tokens."""
    rank = rng.randrange(ranks)
    body = rng.choice(("hidden = hidden * 2", "hidden = hidden + 1e-3", "hidden = hidden.flip(-1)"))
    name = "LlamaForCausalLM.compute_logits"

    def edit(node: ast.FunctionDef) -> None:
        (result,) = [inner for inner in ast.walk(node) if isinstance(inner, ast.Return)]
        assert result.value is not None
        text = f"logits = {ast.unparse(result.value)}\n{on_rank(body.replace('hidden', 'logits'), rank)}\nreturn logits"
        node.body = ast.parse(text).body

    edit_function(sources, LLAMA, name, edit)
    return Fault("ranks that differ", ("warm", "graphs"))


def endless_loop(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """Code that never ends, on all ranks or one: the ranks have to be replaced."""
    module, name = hot(rng, sources)
    rank = rng.randrange(ranks) if ranks > 1 and rng.random() < 0.7 else None
    body = rng.choice(("while True:\n    pass", "import time\nwhile True:\n    time.sleep(0.01)"))
    if rng.random() < 0.3:
        sources.append(module, at_top(body, rank))
        return Fault("endless loop at import", ("patch",), rank=rank)
    insert(sources, module, name, on_rank(body, rank))
    return Fault("endless loop", ("warm", "graphs"), rank=rank)


def death(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """Code that ends its process, on all ranks or one."""
    module, name = hot(rng, sources)
    rank = rng.randrange(ranks) if ranks > 1 and rng.random() < 0.7 else None
    body = rng.choice(
        (
            "import os\nos._exit(3)",
            "import os\nos._exit(0)",
            "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
            "import ctypes\nctypes.string_at(0)",
            "import os\nos.abort()",
        )
    )
    if rng.random() < 0.3:
        sources.append(module, at_top(body, rank))
        return Fault("death at import", ("patch",), rank=rank)
    insert(sources, module, name, on_rank(body, rank))
    return Fault("death", ("warm", "graphs"), rank=rank)
