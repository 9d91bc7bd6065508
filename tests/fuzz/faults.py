"""Edits that break the forward pass, each in one way, on all ranks or on one."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.fuzz.features import ACTIVATION, LINEAR, LLAMA
from tests.fuzz.sources import MODULES, Sources, functions, replace_node

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


def syntax(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """A file that does not compile."""
    module = rng.choice(MODULES)
    wrong = rng.choice(
        (
            f"def {mark}(:",
            f"return {mark!r}",
            f"  indented_{mark} = 1",
            f"x = '{mark}",
            f"x = '''{mark}",
            f"{mark} = (" + "(" * 300,
            f"{mark} = {'9' * 5000}",
            f"{mark} = 'a\udcff'",
            f"{mark} = 'a\x00b'",
            f"from __future__ import {mark}",
            "def f():\n\tif 1:\n        pass",
            f"nonlocal {mark}",
            f"await {mark}",
            f"for {mark} in 1:\n    pass\nbreak",
            f"def f(a, a): return '{mark}'",
        )
    )
    if rng.random() < 0.5:
        sources[module] = sources[module].rstrip("\n") + f"\n{wrong}\n"
    else:
        lines = sources[module].splitlines()
        at = rng.randrange(len(lines) + 1)
        # Within a string or a bracket it may be fine.
        sources[module] = "\n".join([*lines[:at], *wrong.splitlines(), *lines[at:]]) + "\n"
        if _compiles(sources[module]):
            sources[module] += f"\ndef {mark}(:\n"
    return Fault("syntax error", ("read", "patch"), module=module)


def no_such_import(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """An import of what is not there."""
    module = rng.choice(MODULES)
    line = rng.choice(
        (
            f"import {mark}",
            f"from tokenspeed_kernel.registry import {mark}",
            f"from tokenspeed_kernel.ops import {mark}",
            f"import tokenspeed_kernel.ops.{mark}",
            f"from tokenspeed.runtime.layers.{mark} import nothing",
        )
    )
    sources.insert_above(module, line)
    return Fault("import error", ("patch",), mark, module)


def new_file_fails(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """A new module that an edited one imports fails."""
    module = rng.choice([m for m in MODULES if m.startswith("tokenspeed.runtime.layers.")])
    new = f"tokenspeed.runtime.layers.{mark}"
    wrong = rng.choice(
        (f"raise ValueError('{mark}')", f"import {module} as own\n\nown.no_such_{mark}", f"def {mark}(:")
    )
    sources[new] = f"from __future__ import annotations\n\n{wrong}\n"
    sources.insert_above(module, f"import {new}")
    return Fault("new file fails", ("read", "patch"))


def at_import(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """Top-level code that raises, in a module, a class body, a decorator or a default."""
    module = rng.choice(MODULES)
    rank = rng.randrange(ranks) if ranks > 1 and rng.random() < 0.5 else None
    raising = rng.choice(RAISES).format(mark=mark)
    body = raising
    if rank is not None:
        body = f"import torch.distributed\nif torch.distributed.get_rank() == {rank}:\n    {raising}"
    form = rng.randrange(4)
    if form == 0:
        lines = body
    elif form == 1:
        lines = f"class Broken_{mark}:\n" + _indent(body)
    elif form == 2:
        lines = (
            f"def broken_{mark}(function):\n" + _indent(body) + f"\n\n\n@broken_{mark}\ndef after_{mark}():\n    pass"
        )
    else:
        lines = f"def broken_{mark}():\n" + _indent(body) + f"\n\n\ndef after_{mark}(x=broken_{mark}()):\n    pass"
    sources.append(module, lines)
    return Fault("exception at import", ("patch",), _told(raising, mark), module, rank)


def in_a_plan(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """A layer's plan raises."""
    places = (
        ("tokenspeed.runtime.layers.rotary", "RotaryEmbedding.plan"),
        ("tokenspeed.runtime.layers.linear", "Linear.plan"),
        ("tokenspeed.runtime.layers.norm", "RMSNorm.plan"),
        ("tokenspeed_kernel.ops.gemm", "plan_linear"),
    )
    module, name = rng.choice(places)
    rank = rng.randrange(ranks) if ranks > 1 and rng.random() < 0.5 else None
    raising = rng.choice(RAISES).format(mark=mark)
    _insert(sources, module, name, _on_rank(raising, rank))
    return Fault("exception in a plan", ("patch",), _told(raising, mark), module, rank)


def at_warm_up(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """A function of the forward pass raises whenever it is called."""
    module, name = _hot(rng, sources)
    raising = rng.choice((*RAISES, *TORCH_RAISES)).format(mark=mark)
    _insert(sources, module, name, f"import torch\n{raising}")
    return Fault("exception at warm-up", ("warm",), _told(raising, mark), module)


def at_warm_up_on_one_rank(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """The same on one rank, whose peers go on until they wait for it."""
    module, name = _hot(rng, sources)
    rank = rng.randrange(ranks)
    raising = rng.choice((*RAISES, *TORCH_RAISES)).format(mark=mark)
    _insert(sources, module, name, _on_rank(raising, rank))
    return Fault("exception at warm-up on one rank", ("warm",), _told(raising, mark), module, rank)


def recursion(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """A function that calls itself."""
    module, name = _hot(rng, sources)
    owner, _, method = name.rpartition(".")
    call = f"self.{method}" if owner else method

    def edit(node: ast.FunctionDef) -> None:
        skip = 1 if owner else 0
        args = ", ".join(a.arg for a in node.args.args[skip:])
        keywords = "".join(f", {a.arg}={a.arg}" for a in node.args.kwonlyargs)
        node.body = ast.parse(f"return {call}({args}{keywords})").body

    _edit(sources, module, name, edit)
    return Fault("endless recursion", ("warm",), "RecursionError", module)


def in_one_batch(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """A failure that only some batches of the warm-up meet."""
    condition = rng.choice(
        ("ctx.max_query_len == 1", "ctx.max_query_len > 1", "ctx.seq_lens.shape[0] > 1", "hidden.shape[0] == 1")
    )
    raising = rng.choice(RAISES).format(mark=mark)
    name = rng.choice(("LlamaAttention.forward", "LlamaDecoderLayer.forward"))
    _insert(sources, LLAMA, name, f"if {condition}:\n{_indent(raising)}")
    return Fault("exception in one branch", ("warm",), _told(raising, mark), LLAMA)


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

    _edit(sources, LLAMA, name, edit)
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
        _insert(sources, module, name, body)
        return Fault("step that reads tensors on the host", ("graphs",), module=module, expect="graphs")
    rank = rng.randrange(ranks) if ranks > 1 and rng.random() < 0.5 else None
    size = rng.choice((1, 4, 16, 32, 64))
    raising = rng.choice(RAISES).format(mark=mark)
    module, name = rng.choice(((LLAMA, "LlamaAttention.forward"), (LLAMA, "LlamaDecoderLayer.forward")))
    condition = f"_recorder.get() is not None and hidden.shape[0] == {size}"
    if rank is not None:
        condition += f" and torch.distributed.get_rank() == {rank}"
    imports = "import torch.distributed\nfrom tokenspeed_kernel.launch import _recorder"
    _insert(sources, module, name, f"{imports}\nif {condition}:\n{_indent(raising)}")
    return Fault("exception at capture", ("graphs",), _told(raising, mark), module, rank, expect="graphs")


def at_the_kth_call(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """Code that fails after some calls."""
    raising = rng.choice(RAISES).format(mark=mark)
    rank = rng.randrange(ranks) if ranks > 1 and rng.random() < 0.5 else None
    body = f"CALLS_{mark}_CACHE.append(0)\nif len(CALLS_{mark}_CACHE) > {rng.randrange(5)}:\n{_indent(raising)}"
    sources.insert_above(LLAMA, f"CALLS_{mark}_CACHE = []\n\n")
    _insert(sources, LLAMA, "LlamaDecoderLayer.forward", _on_rank(body, rank))
    return Fault("exception at the k-th call", ("warm", "graphs"), _told(raising, mark), LLAMA, rank)


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
    _insert(sources, LINEAR, "RowParallelLinear.forward", _on_rank(body, rank))
    return Fault("collective of one rank", ("warm", "graphs"))


def ranks_that_differ(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """One rank computes other logits than its peers, and would choose other tokens."""
    rank = rng.randrange(ranks)
    body = rng.choice(("hidden = hidden * 2", "hidden = hidden + 1e-3", "hidden = hidden.flip(-1)"))
    name = "LlamaForCausalLM.compute_logits"

    def edit(node: ast.FunctionDef) -> None:
        (result,) = [inner for inner in ast.walk(node) if isinstance(inner, ast.Return)]
        assert result.value is not None
        text = (
            f"logits = {ast.unparse(result.value)}\n{_on_rank(body.replace('hidden', 'logits'), rank)}\nreturn logits"
        )
        node.body = ast.parse(text).body

    _edit(sources, LLAMA, name, edit)
    return Fault("ranks that differ", ("warm", "graphs"))


def not_a_number(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """NaN and infinity, which nothing refuses yet."""
    value = rng.choice(("float('nan')", "float('inf')", "-float('inf')"))
    sources.replace(LLAMA, "self.mlp(hidden)", f"self.mlp(hidden) * {value}")
    return Fault("numbers that are none", (), expect="either")


def while_serving(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """A failure in batches that warm-up does not meet: long prompts."""
    raising = rng.choice([r for r in RAISES if "Odd" not in r and "100000" not in r and "1 /" not in r]).format(
        mark=mark
    )
    _insert(sources, LLAMA, "LlamaModel.forward", f"if len(input_ids) > 170:\n{_indent(raising)}")
    return Fault("exception while it serves", (), expect="commit", serves="forward pass failed")


def missing_file(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """A module that would move to a file which is not there."""
    sources.replace(
        "tokenspeed_kernel.ops.rope.reference",
        "from tokenspeed_kernel.ops.norm.reference",
        f"from tokenspeed_kernel.ops.norm.{mark}",
    )
    return Fault("missing file", ("patch",), mark, "tokenspeed_kernel.ops.rope.reference")


def missing_name(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """A function that others use is renamed where it stands, and nowhere else."""
    module, old = rng.choice(
        (
            ("tokenspeed_kernel.ops.norm.reference", "rms_norm"),
            ("tokenspeed_kernel.ops.kvcache.reference", "write_kv"),
            ("tokenspeed_kernel.ops.norm", "plan_add_rms_norm"),
            ("tokenspeed.runtime.layers.base", "empty_parameter"),
            ("tokenspeed.runtime.sampling.logprobs", "token_logprobs"),
            ("tokenspeed.runtime.sampling.batch", "SamplingBatch"),
        )
    )
    for word in ("def ", "class "):
        sources[module] = (
            sources[module].replace(f"{word}{old}(", f"{word}{mark}(").replace(f"{word}{old}:", f"{word}{mark}:")
        )
    return Fault("missing name", ("patch", "warm"), old)


def endless_loop(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """Code that never ends, on all ranks or one: the ranks have to be replaced."""
    module, name = _hot(rng, sources)
    rank = rng.randrange(ranks) if ranks > 1 and rng.random() < 0.7 else None
    body = rng.choice(("while True:\n    pass", "import time\nwhile True:\n    time.sleep(0.01)"))
    if rng.random() < 0.3:
        sources.append(module, _at_top(body, rank))
        return Fault("endless loop at import", ("patch",), rank=rank)
    _insert(sources, module, name, _on_rank(body, rank))
    return Fault("endless loop", ("warm", "graphs"), rank=rank)


def death(rng: random.Random, sources: Sources, mark: str, ranks: int) -> Fault:
    """Code that ends its process, on all ranks or one."""
    module, name = _hot(rng, sources)
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
        sources.append(module, _at_top(body, rank))
        return Fault("death at import", ("patch",), rank=rank)
    _insert(sources, module, name, _on_rank(body, rank))
    return Fault("death", ("warm", "graphs"), rank=rank)


ALWAYS: tuple[Make, ...] = (
    syntax,
    no_such_import,
    new_file_fails,
    at_import,
    in_a_plan,
    at_warm_up,
    recursion,
    in_one_batch,
    wrong_result,
    while_capturing,
    at_the_kth_call,
    not_a_number,
    missing_file,
    missing_name,
    while_serving,
)
"""Faults of any server."""

ACROSS_RANKS: tuple[Make, ...] = (at_warm_up_on_one_rank, collective_of_one_rank, ranks_that_differ)
"""Faults that take several ranks."""

DEADLY: tuple[Make, ...] = (endless_loop, death)
"""Faults that cost the processes of the ranks."""


def _hot(rng: random.Random, sources: Sources) -> tuple[str, str]:
    """A function that runs in a warm-up of these sources."""
    replaced = "priority=9" in sources[ACTIVATION]
    return rng.choice([place for place in HOT if not (replaced and place[0] == ACTIVATION)])


def _told(raising: str, mark: str) -> str:
    """What the error's text must have: an error whose text cannot be made has its type only."""
    if raising.startswith("raise type('Odd'"):
        return "Odd"
    return mark if mark in raising and not raising.startswith("1 /") else ""


def _insert(sources: Sources, module: str, name: str, body: str) -> None:
    """Put `body` at the beginning of a function."""

    def edit(node: ast.FunctionDef) -> None:
        at = 1 if ast.get_docstring(node) is not None else 0
        node.body[at:at] = ast.parse(body).body

    _edit(sources, module, name, edit)


def _edit(sources: Sources, module: str, name: str, edit: Callable[[ast.FunctionDef], None]) -> None:
    node = dict(functions(ast.parse(sources[module])))[name]
    edit(node)
    sources[module] = replace_node(sources[module], node, ast.fix_missing_locations(node))


def _on_rank(body: str, rank: int | None) -> str:
    return "import torch\n" + body if rank is None else f"import torch\n{_if_rank(body, rank)}"


def _at_top(body: str, rank: int | None) -> str:
    return body if rank is None else f"import torch\n{_if_rank(body, rank)}"


def _if_rank(body: str, rank: int) -> str:
    return f"import torch.distributed\nif torch.distributed.get_rank() == {rank}:\n{_indent(body)}"


def _indent(body: str) -> str:
    return "\n".join("    " + line for line in body.splitlines())


def _compiles(text: str) -> bool:
    try:
        compile(text, "text", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
