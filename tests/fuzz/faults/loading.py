"""Edits that cannot be read, imported or planned."""

from __future__ import annotations

import random

from tests.fuzz.faults.fault import RAISES, Fault, compiles, indent, insert, on_rank, told
from tests.fuzz.sources import MODULES, Sources


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
        if compiles(sources[module]):
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
        lines = f"class Broken_{mark}:\n" + indent(body)
    elif form == 2:
        lines = (
            f"def broken_{mark}(function):\n" + indent(body) + f"\n\n\n@broken_{mark}\ndef after_{mark}():\n    pass"
        )
    else:
        lines = f"def broken_{mark}():\n" + indent(body) + f"\n\n\ndef after_{mark}(x=broken_{mark}()):\n    pass"
    sources.append(module, lines)
    return Fault("exception at import", ("patch",), told(raising, mark), module, rank)


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
    insert(sources, module, name, on_rank(raising, rank))
    return Fault("exception in a plan", ("patch",), told(raising, mark), module, rank)


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
