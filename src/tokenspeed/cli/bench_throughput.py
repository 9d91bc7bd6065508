"""`ts bench throughput`: many prompts at once, without a server."""

from __future__ import annotations

import argparse
from pathlib import Path

from tokenspeed.cli.bench_engine import add_engine_flags, engine_settings
from tokenspeed.cli.bench_serve import require_bench


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    group = parser.add_argument_group("prompts")
    group.add_argument("--dataset-name", choices=("random", "sharegpt"), default="random", help="default: %(default)s")
    group.add_argument("--dataset-path", metavar="FILE", help="JSON file of ShareGPT's form")
    group.add_argument("--num-prompts", type=int, default=1000, metavar="N", help="default: %(default)s")
    group.add_argument(
        "--input-len", type=int, default=1024, metavar="N", help="of random prompts (default: %(default)s)"
    )
    group.add_argument(
        "--output-len", type=int, metavar="N", help="tokens of an answer (default: 128, with sharegpt as in the file)"
    )
    add_engine_flags(parser, group)


def run(namespace: argparse.Namespace) -> int:
    """Measure and print."""
    require_bench()
    model, settings, own = engine_settings(namespace)

    from tokenspeed.bench import report, throughput  # after parsing, so that --help and errors stay fast

    output = own.pop("output_json")
    result = throughput.run(model, settings, seed=settings.get("seed", 0), progress=not own.pop("disable_tqdm"), **own)
    print(
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, {result['output_tokens_per_second']:.2f} output tokens/s"
    )
    if output is not None:
        report.save(Path(output), result)
    return 0
