"""`ts kernels`: which kernels there are, which ones a start would select, what was tuned, and why."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from tokenspeed.cli.parser import Parser
from tokenspeed.errors import ConfigError, TokenSpeedError

REPORT = "tokenspeed.runtime.engine.kernel_report"
"""Run in a process of its own, since it imports torch."""


def configure(parser: Parser) -> None:
    """Add the flags of `ts serve` that decide about kernels, and --json."""
    parser.usage = "ts kernels [MODEL] [options]"
    parser.add_argument(
        "model", nargs="?", default="", metavar="MODEL", help="whose sizes and type decide (default: none)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where they would run")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="type of activations"
    )
    parser.add_argument("--attention-backend", default="auto", metavar="NAME", help="as for ts serve")
    parser.add_argument("--kernel", nargs="+", metavar="OPERATION=SOLUTION", help="as for ts serve")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(namespace: argparse.Namespace) -> int:
    """Print the report."""
    told = ask(namespace)
    print(json.dumps(told, indent=2) if namespace.json else "\n".join(lines(told)))
    return 0


def ask(namespace: argparse.Namespace) -> dict[str, Any]:
    """The report for these flags.

    Raises:
        TokenSpeedError: what the report says it cannot do.
    """
    from tokenspeed.runtime.config import Config, KernelOptions, ModelOptions, validate

    model = ModelOptions(model=namespace.model, device=namespace.device, dtype=namespace.dtype, load_format="dummy")
    kernels = KernelOptions(
        attention_backend=namespace.attention_backend, kernel=tuple(namespace.kernel) if namespace.kernel else None
    )
    validate(Config(model=model, kernels=kernels))
    options = json.dumps({"model": vars(model), "kernels": vars(kernels)})
    done = subprocess.run(
        [sys.executable, "-m", REPORT, options],
        capture_output=True,
        text=True,
        env={**os.environ, "TOKENSPEED_TRITON": "1"},
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["the list of kernels cannot be made; see `ts env`"]
        error = ConfigError(last[0]) if done.returncode == ConfigError.exit_code else TokenSpeedError(last[0])
        error.exit_code = done.returncode
        raise error
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def lines(told: Mapping[str, Any]) -> Iterator[str]:
    """The report for people."""
    capability = told["capability"]
    where = told["device"] + (f" {capability[0]}.{capability[1]}" if capability else "")
    yield f"On {where} in {told['dtype']}, heads of {told['head_dim']}; * marks what a start would select."
    for operation, entry in told["operations"].items():
        yield ""
        yield operation + ("" if entry["selected"] else f": {entry['why']}")
        for solution in entry["solutions"]:
            is_selected = solution["solution"] == entry["selected"]
            why = entry["why"] if is_selected else solution["passed_over"]
            yield f"  {'*' if is_selected else ' '} {solution['solution']:<12} {why}".rstrip()
    yield ""
    if told["tactics"]:
        yield f"Tuned, from {told['tactics_file']}:"
        for key, tuned in told["tactics"].items():
            tactic = ", ".join(f"{name} {value}" for name, value in tuned["tactic"].items())
            yield f"  {key}: {tuned['us']:.1f} us with {tactic}"
    else:
        yield "Nothing is tuned on this machine: kernels take their default tactics."
    yield from told["notes"]
