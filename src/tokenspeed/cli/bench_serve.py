"""`ts bench serve`: load on a running server; flags and figures are those of `vllm bench serve`."""

from __future__ import annotations

import argparse
import importlib.util
import math
from pathlib import Path
from typing import Any

from tokenspeed.errors import ConfigError, ResourceError, nearest

METRICS = ("ttft", "tpot", "itl", "e2el")
ACTIVITIES = ("CPU", "GPU", "MEM", "CUDA_PROFILER")
DATASETS = ("random", "sharegpt", "prefix_repetition")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    _add_server_flags(parser.add_argument_group("server"))
    _add_dataset_flags(parser.add_argument_group("prompts"))
    _add_load_flags(parser.add_argument_group("load"))
    _add_result_flags(parser.add_argument_group("results"))
    _add_profile_flags(parser.add_argument_group("profile"))


def run(namespace: argparse.Namespace) -> int:
    """Measure, print the table, save what was asked for; 0 only when every request was answered."""
    require_bench()
    options = _options(namespace)

    import asyncio  # after parsing, so that --help and errors stay fast

    from tokenspeed.bench import report, serve

    outcome = asyncio.run(serve.run(options))
    print(report.table(outcome.summary, options.percentile_metrics, options.metric_percentiles))
    for error in outcome.errors:
        print(f"failed: {error}")
    result = {**outcome.summary, **_pairs("--metadata", namespace.metadata, "=")}
    if namespace.save_detailed:
        result |= outcome.details
    if namespace.save_result or namespace.save_detailed:
        name = namespace.result_filename or report.default_name(outcome.summary)
        path = Path(namespace.result_dir or ".", name)
        report.save(path, result)
        print(f"saved to {path}")
    return 0 if not outcome.summary["failed"] else 1


def require_bench() -> None:
    """Refuse early where the libraries of the benchmarks are not installed.

    Raises:
        ResourceError: with the command that installs them.
    """
    if any(importlib.util.find_spec(name) is None for name in ("aiohttp", "tqdm")):
        raise ResourceError("the benchmarks need aiohttp and tqdm; run `pip install 'tokenspeed[bench]'`")


def _options(namespace: argparse.Namespace) -> Any:
    from tokenspeed.bench.serve import DatasetOptions, ServeOptions

    given = vars(namespace)
    host, port = given["host"], given["port"]
    return ServeOptions(
        dataset=DatasetOptions(
            name=given["dataset_name"],
            path=given["dataset_path"],
            **{name: given[name] for name in given if name.startswith(("random_", "sharegpt_", "prefix_repetition_"))},
        ),
        backend=given["backend"],
        base_url=(given["base_url"] or f"http://{host}:{port}").rstrip("/"),
        endpoint=given["endpoint"],
        header=_pairs("--header", given["header"], "="),
        model=given["model"],
        tokenizer=given["tokenizer"],
        num_prompts=given["num_prompts"],
        num_warmups=given["num_warmups"],
        request_rate=given["request_rate"],
        burstiness=given["burstiness"],
        max_concurrency=given["max_concurrency"],
        seed=given["seed"],
        ignore_eos=given["ignore_eos"],
        sampling={name: given[name] for name in ("temperature", "top_p", "top_k", "min_p") if given[name] is not None},
        goodput=_goodput(given["goodput"]),
        percentile_metrics=_metrics(given["percentile_metrics"]),
        metric_percentiles=_percentiles(given["metric_percentiles"]),
        profile=_profile(namespace),
        progress=not given["disable_tqdm"],
    )


def _add_server_flags(group: Any) -> None:
    group.add_argument(
        "--backend",
        choices=("openai", "vllm", "openai-chat"),
        default="openai",
        help="completions (openai, vllm) or chats (default: %(default)s)",
    )
    group.add_argument("--base-url", metavar="URL", help="address of the server, instead of --host and --port")
    group.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    group.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    group.add_argument("--endpoint", metavar="PATH", help="path of the API (default: that of the backend)")
    group.add_argument(
        "--header",
        nargs="+",
        metavar="NAME=VALUE",
        help="headers of every request; OPENAI_API_KEY in the environment becomes a bearer token",
    )
    group.add_argument("--model", help="name of the model (default: the first that the server names)")
    group.add_argument("--tokenizer", help="directory with tokenizer.json (default: that of --model)")


def _add_dataset_flags(group: Any) -> None:
    group.add_argument("--dataset-name", choices=DATASETS, default="random", help="default: %(default)s")
    group.add_argument("--dataset-path", metavar="FILE", help="JSON file of ShareGPT's form")
    group.add_argument("--num-prompts", type=int, default=1000, metavar="N", help="default: %(default)s")
    for name, default, text in (
        ("--random-input-len", 1024, "tokens of a prompt"),
        ("--random-output-len", 128, "tokens of an answer"),
        ("--random-prefix-len", 0, "tokens that all prompts start with, in addition"),
        ("--prefix-repetition-prefix-len", 256, "tokens of a prefix"),
        ("--prefix-repetition-suffix-len", 256, "tokens behind it"),
        ("--prefix-repetition-num-prefixes", 10, "different prefixes"),
        ("--prefix-repetition-output-len", 128, "tokens of an answer"),
    ):
        group.add_argument(name, type=int, default=default, metavar="N", help=f"{text} (default: %(default)s)")
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="lengths vary between (1 - R) and (1 + R) times the given ones (default: %(default)s)",
    )
    group.add_argument(
        "--sharegpt-output-len", type=int, metavar="N", help="tokens of an answer (default: as in the file)"
    )


def _add_load_flags(group: Any) -> None:
    group.add_argument(
        "--request-rate",
        type=float,
        default=math.inf,
        metavar="R",
        help="requests a second; inf sends all at once (default: %(default)s)",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="1 is a Poisson process, less is burstier, more is more even (default: %(default)s)",
    )
    group.add_argument("--max-concurrency", type=int, metavar="N", help="requests that are open at once")
    group.add_argument(
        "--num-warmups", type=int, default=0, metavar="N", help="requests before the measured ones (default: 0)"
    )
    group.add_argument("--ignore-eos", action="store_true", help="make every answer as long as it may be")
    group.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s")
    group.add_argument("--top-p", type=float)
    group.add_argument("--top-k", type=int)
    group.add_argument("--min-p", type=float)
    group.add_argument("--seed", type=int, default=0, help="of prompts and arrivals (default: %(default)s)")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def _add_result_flags(group: Any) -> None:
    group.add_argument(
        "--percentile-metrics",
        default=",".join(METRICS),
        metavar="NAMES",
        help="what to tell, separated by commas (default: %(default)s)",
    )
    group.add_argument(
        "--metric-percentiles", default="99", metavar="NUMBERS", help="separated by commas (default: %(default)s)"
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        help="bounds in ms, as in ttft:200 tpot:50 e2el:9000; counts the requests within all of them",
    )
    group.add_argument("--save-result", action="store_true", help="save the figures as JSON")
    group.add_argument("--save-detailed", action="store_true", help="save those of every request too")
    group.add_argument("--result-dir", metavar="DIR", help="where (default: here)")
    group.add_argument("--result-filename", metavar="NAME", help="default: made of backend, rate, model and time")
    group.add_argument("--metadata", nargs="+", metavar="NAME=VALUE", help="entries to add to the JSON")


def _add_profile_flags(group: Any) -> None:
    group.add_argument("--profile", action="store_true", help="have the server profile itself meanwhile")
    group.add_argument(
        "--profile-activities", nargs="+", choices=ACTIVITIES, metavar="NAME", help=f"of {', '.join(ACTIVITIES)}"
    )
    group.add_argument(
        "--profile-num-steps", type=int, metavar="N", help="stop after so many steps (default: with the benchmark)"
    )
    group.add_argument("--profile-output-dir", metavar="DIR", help="where the server writes the profile")


def _profile(namespace: argparse.Namespace) -> dict[str, Any] | None:
    given = {
        "activities": namespace.profile_activities,
        "num_steps": namespace.profile_num_steps,
        "output_dir": namespace.profile_output_dir,
    }
    body = {name: value for name, value in given.items() if value is not None}
    if body and not namespace.profile:
        flag = f"--profile-{next(iter(body)).replace('_', '-')}"
        raise ConfigError(f"{flag} needs --profile; add it, or leave {flag} out")
    if namespace.profile_num_steps is not None and namespace.profile_num_steps < 1:
        raise ConfigError(f"--profile-num-steps must be 1 or more, not {namespace.profile_num_steps}")
    return body if namespace.profile else None


def _goodput(words: list[str] | None) -> dict[str, float]:
    bounds = {}
    for name, text in _pairs("--goodput", words, ":").items():
        if name not in ("ttft", "tpot", "e2el"):
            raise ConfigError(f"--goodput has no {name}{nearest(name, METRICS)}; use ttft, tpot and e2el")
        bounds[name] = _number("--goodput", text)
    return bounds


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(filter(None, (name.strip() for name in text.split(","))))
    for name in names:
        if name not in METRICS:
            raise ConfigError(f"--percentile-metrics has no {name}{nearest(name, METRICS)}; use {','.join(METRICS)}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    return tuple(_number("--metric-percentiles", word) for word in text.split(","))


def _number(flag: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {text!r} is no number") from error


def _pairs(flag: str, words: list[str] | None, separator: str) -> dict[str, str]:
    pairs = [word.partition(separator) for word in words or ()]
    for name, found, _ in pairs:
        if not name or not found:
            raise ConfigError(f"{flag} takes NAME{separator}VALUE, not {name or found!r}")
    return {name: value for name, _, value in pairs}
