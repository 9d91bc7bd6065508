"""`ts bench latency`: one batch, again and again, without a server."""

from __future__ import annotations

import argparse
from pathlib import Path

from tokenspeed.cli.bench_engine import add_engine_flags, engine_settings
from tokenspeed.cli.bench_serve import require_bench


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    group = parser.add_argument_group("batch")
    for name, default, text in (
        ("--input-len", 32, "tokens of a prompt"),
        ("--output-len", 128, "tokens of an answer"),
        ("--batch-size", 8, "prompts"),
        ("--num-iters-warmup", 10, "batches before the measured ones"),
        ("--num-iters", 30, "measured batches"),
    ):
        group.add_argument(name, type=int, default=default, metavar="N", help=f"{text} (default: %(default)s)")
    add_engine_flags(parser, group)


def run(namespace: argparse.Namespace) -> int:
    """Measure and print."""
    require_bench()
    model, settings, own = engine_settings(namespace)

    from tokenspeed.bench import latency, report  # after parsing, so that --help and errors stay fast

    output = own.pop("output_json")
    result = latency.run(model, settings, progress=not own.pop("disable_tqdm"), **own)
    print(f"Avg latency: {result['avg_latency']:.4f} seconds")
    for percentile, seconds in result["percentiles"].items():
        print(f"{percentile}% percentile latency: {seconds:.4f} seconds")
    if output is not None:
        report.save(Path(output), result)
    return 0
