"""Serves with chosen kernels and edits them: `python -m tests.gpu.dsl_reloading MODEL SCRATCH DEVICE LANGUAGE`.

One operation is chosen by a flag, one by the environment and one by a context manager, which is left before the first
reload. It prints what happened as one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.gpu.reloading import Program


@dataclass(frozen=True)
class Language:
    """What is chosen, and edits of it: module, what stands there, what comes there."""

    flags: tuple[str, ...]
    variables: tuple[str, ...]
    context: tuple[str, ...]
    edits: tuple[tuple[str, str, str], ...]


LANGUAGES = {
    "torch": Language(
        ("attention.decode=reference",),
        ("sampling.sample=reference",),
        ("attention.extend=reference",),
        (
            (
                "tokenspeed_kernel.ops.attention.reference",
                "return out.transpose(1, 2)",
                "return out.transpose(1, 2) * 0.5",
            ),
        ),
    ),
    "fp8": Language(
        (),
        (),
        (),
        (("tokenspeed_kernel.ops.gemm.block_fp8", "full.to(x.dtype), bias", "full.to(x.dtype) * 0.5, bias"),),
    ),
    "gluon": Language(
        ("activation.silu_and_mul=gluon",),
        ("embedding.embedding=reference",),
        ("rope.rope_and_write_kv=reference",),
        (
            (
                "tokenspeed_kernel.ops.activation.gluon",
                "(active * up.to(gl.float32))",
                "(active * up.to(gl.float32) * 0.5)",
            ),
            ("tokenspeed_kernel.ops.norm.triton", "(normal * gain)", "(normal * gain * 0.5)"),
        ),
    ),
    "cute": Language(
        ("norm.rms_norm=cute",),
        ("activation.silu_and_mul=gluon",),
        ("norm.add_rms_norm=cute",),
        (
            (
                "tokenspeed_kernel.ops.norm.cute_kernels",
                "(normal * weight[column].to(cutlass.Float32))",
                "(normal * weight[column].to(cutlass.Float32) * 0.5)",
            ),
        ),
    ),
}
TUNED = ("tokenspeed_kernel.ops.attention.reference", "return out.transpose(1, 2)")
TUNED_KERNEL = "attention.decode.reference"
TACTICS_IMPORT = """from types import MappingProxyType
from tokenspeed_kernel.registry import register_kernel
from tokenspeed_kernel.tactics import TACTICS

CANDIDATES = tuple(MappingProxyType(one) for one in ({"halves": 2}, {"halves": 1}))
"""
TACTICS_USE = f"""
    def run(tactic):
        return out.transpose(1, 2) * (tactic["halves"] / 2)

    return run(TACTICS.pick("{TUNED_KERNEL}", (), CANDIDATES, run))"""


def main(model: Path, scratch: Path, device: str, language: str) -> dict[str, Any]:
    """Serve, edit each kernel, break it, and put it back."""
    chosen = LANGUAGES[language]
    for assignment in chosen.variables:
        operation, _, solution = assignment.partition("=")
        os.environ[f"TOKENSPEED_KERNEL_{operation.replace('.', '_').upper()}"] = solution
    program = Program(model, scratch, device)
    program.config = replace(program.config, kernels=replace(program.config.kernels, kernel=chosen.flags))
    from tokenspeed_kernel.overrides import override

    with override(**dict(assignment.split("=") for assignment in chosen.context)):
        program.start()
    for assignment in chosen.variables:
        operation, _, _ = assignment.partition("=")
        del os.environ[f"TOKENSPEED_KERNEL_{operation.replace('.', '_').upper()}"]
    told: dict[str, Any] = {"original": program.serve("original"), "kernels": kernels(program)}
    told["weights"] = processed(program)
    for number, (module, old, new) in enumerate(chosen.edits):
        edit = told[f"edit {number}"] = {"module": module}

        def reload(tag: str, edit: dict[str, Any] = edit, number: int = number) -> None:
            program.call_reload()
            program.finish()
            edit[tag] = {
                "reply": program.reply(),
                "answers": program.serve(f"{tag}-{number}"),
                "kernels": kernels(program),
                "captured": captured(program),
                "weights": processed(program),
            }

        program.edit(module, old, new)
        reload("changed")
        program.edit(module, "0.5", "no_such_name")
        reload("broken")
        program.restore()
        reload("restored")
    if language == "torch":
        told["tactics"] = lose_a_tactic(program)
    if language == "fp8":
        told["process"] = edit_processing(program)
    return told


def lose_a_tactic(program: Program) -> dict[str, Any]:
    """Give a kernel tactics, have one found, edit the kernel, then take that one away."""
    from tokenspeed_kernel.tactics import TACTICS, source_hash

    module, old = TUNED
    program.edit(module, "from tokenspeed_kernel.registry import register_kernel", TACTICS_IMPORT)
    program.edit(module, old, TACTICS_USE)
    told: dict[str, Any] = {}

    def reload(tag: str) -> None:
        program.call_reload()
        program.finish()
        told[tag] = {"reply": program.reply(), "answers": program.serve(tag)}

    reload("default")
    found = {"tactic": {"halves": 1}, "us": 1.0, "source": source_hash(module)}
    TACTICS.install({f"{TUNED_KERNEL}|": found})
    program.serve("found")
    program.edit(module, "/ 2)", "* 0.5)")
    reload("edited")
    program.edit(module, '{"halves": 2}, {"halves": 1}', '{"halves": 2}, {"halves": 3}')
    reload("lost")
    program.restore()
    reload("without tactics")
    return told


def edit_processing(program: Program) -> dict[str, Any]:
    """Edit the function that brought weights into the form of the kernels."""
    program.edit("tokenspeed_kernel.ops.gemm.block_fp8", "scales.float().t()", "2 * scales.float().t()")
    program.call_reload()
    program.finish()
    return {"reply": program.reply(), "answers": program.serve("process"), "weights": processed(program)}


def processed(program: Program) -> list[int]:
    """Where the weights are that a layer processed once."""
    layers = [vars(module).get("packed") or () for module in program.loop.executor.model.modules()]
    return [weight.data_ptr() for packed in layers for weight in packed]


def kernels(program: Program) -> list[str]:
    """Names of the kernels that the layers hold."""
    from tokenspeed_kernel.registry import Kernel

    executor = program.loop.executor
    held = [value for module in executor.model.modules() for value in vars(module).values()]
    return sorted({kernel.name for kernel in (*held, executor.sample_kernel) if isinstance(kernel, Kernel)})


def captured(program: Program) -> list[str]:
    """What the largest graphs launch: on a CPU kernels by name, on a GPU functions with their modules."""
    generation = program.loop.executor.generation
    nodes = [node for graphs in (generation.decode, generation.prefill) for node in graphs[max(graphs)].nodes]
    return sorted({f"{getattr(node.function, '__module__', '')} {node.name}" for node in nodes})


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])))
