"""TokenSpeed beside other engines on a CPU: same type, threads, prompts and lengths, in one run.

    python -m benchmarks.cpu_serving [--dtype float32] [--threads 2] [--rounds 3] [--concurrency 1 8]

Each round starts each engine once, in a process of its own, one after the other, so that noise meets all alike. All
samples are printed: seconds from the start of the process to the first token, seconds to the first token of a warm
engine, and tokens a second of as many greedy answers at once as --concurrency says. `tokenspeed` is `LLM`, `ts-serve`
is a server with its gateway, spoken to over HTTP; `vllm` and `llama-cpp` run where they are installed.

The default model is SmolLM2-135M with its weights rounded to --checkpoint-dtype, the type in which it was published.
llama-cpp reads the GGUF file as it is, whose weights have 4 bits, and answers one prompt at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np

ENGINES = {
    "tokenspeed": "torch",
    "ts-serve": "smg",
    "transformers": "transformers",
    "vllm": "vllm",
    "llama-cpp": "llama_cpp",
}
"""Name of each engine, and the module that it needs."""

Prompts = list[list[int]]


class Engine(Protocol):
    """Answers prompts greedily with exactly `count` tokens each."""

    def answer(self, prompts: Prompts, count: int) -> float:
        """Compute all answers; the time (`time.perf_counter`) of the first token."""
        ...


def main() -> None:
    """Run all rounds and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="Hugging Face directory, or smollm2")
    parser.add_argument("--checkpoint-dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=3, help="of one round")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--one", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        measure(args)
        return
    installed = [name for name in args.engines if importlib.util.find_spec(ENGINES[name])]
    for name in set(args.engines) - set(installed):
        print(f"{name} is not installed, and left out")
    with tempfile.TemporaryDirectory() as scratch:
        directory = checkpoint(args.model, args.checkpoint_dtype, Path(scratch))
        samples = [{"engine": name, **run_one(name, directory, args)} for _ in range(args.rounds) for name in installed]
    report(installed, samples, args)


def checkpoint(model: str, dtype: str, scratch: Path) -> Path:
    """A Hugging Face directory; the bundled model is written to `scratch` as one, with weights of `dtype`."""
    if model != "smollm2":
        return Path(model)
    import torch
    from safetensors.torch import save_file

    from tokenspeed.runtime.config import ModelOptions
    from tokenspeed.runtime.loader.source import resolve
    from tokenspeed.runtime.loader.weights import checkpoint_weights

    source = resolve(ModelOptions(model=model), print)
    assert source.tokenizer_dir is not None
    shutil.copytree(source.tokenizer_dir, scratch, dirs_exist_ok=True)
    shutil.copy(source.path, scratch / "model.gguf")
    config = json.loads((scratch / "config.json").read_text())
    (scratch / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    weights = checkpoint_weights(source, torch.device("cpu"))
    save_file({name: w.to(getattr(torch, dtype)).contiguous() for name, w in weights}, scratch / "model.safetensors")
    return scratch


def run_one(name: str, directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One round of one engine, in a process of its own."""
    flags = ["--one", name, "--model", str(directory), "--dtype", args.dtype, "--threads", str(args.threads)]
    flags += ["--input-len", str(args.input_len), "--output-len", str(args.output_len), "--samples", str(args.samples)]
    flags += ["--concurrency", *map(str, args.concurrency)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(args.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "STARTED": str(time.time()),
    }
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.cpu_serving", *flags],
        env=environment, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    sample: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    print(f"{name:<13}", json.dumps(sample), flush=True)
    return sample


def measure(args: argparse.Namespace) -> None:
    """Start one engine, measure, and print the samples as one line of JSON."""
    numbers = iter(range(10**6))

    def prompts(count: int) -> Prompts:
        """Prompts that nobody has seen, the same in every engine."""
        rng = np.random.default_rng(next(numbers))
        drawn: Prompts = rng.integers(1000, 40000, size=(count, args.input_len)).tolist()
        return drawn

    with OPENERS[args.one](Path(args.model), args) as engine:
        engine.answer(prompts(1), 1)
        told: dict[str, Any] = {"start_s": round(time.time() - float(os.environ["STARTED"]), 2)}
        for concurrency in args.concurrency:
            engine.answer(prompts(concurrency), 4)
            rates, firsts = [], []
            for _ in range(args.samples):
                asked = prompts(concurrency)
                started = time.perf_counter()
                first = engine.answer(asked, args.output_len)
                rates.append(round(concurrency * args.output_len / (time.perf_counter() - started), 1))
                firsts.append(round((first - started) * 1000, 1))
            told |= {f"tok_s_{concurrency}": rates, f"ttft_ms_{concurrency}": firsts}
    print(json.dumps(told))


def report(engines: Sequence[str], samples: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    """Medians over all rounds."""
    columns: dict[str, Callable[[dict[str, Any]], list[float]]] = {"start s": lambda sample: [sample["start_s"]]}
    for n in args.concurrency:
        columns[f"tok/s at {n}"] = lambda sample, n=n: sample[f"tok_s_{n}"]  # type: ignore[misc]
        columns[f"TTFT ms at {n}"] = lambda sample, n=n: sample[f"ttft_ms_{n}"]  # type: ignore[misc]
    print(
        f"\nmedians: {args.dtype}, {args.threads} threads, {args.input_len} tokens in, {args.output_len} out, "
        f"checkpoint in {args.checkpoint_dtype}"
    )
    print(f"{'':<13}" + "".join(f"{column:>15}" for column in columns))
    for name in engines:
        own = [sample for sample in samples if sample["engine"] == name]
        values = [median([value for sample in own for value in pick(sample)]) for pick in columns.values()]
        print(f"{name:<13}" + "".join(f"{value:>15.1f}" for value in values))


# ---- engines ----


@contextmanager
def open_tokenspeed(model: Path, args: argparse.Namespace) -> Iterator[Engine]:
    from tokenspeed import LLM, SamplingParams

    with LLM(str(model), dtype=args.dtype, max_model_len=1024) as llm:

        class Local:
            def answer(self, prompts: Prompts, count: int) -> float:
                stream = llm.stream(prompts, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
                next(stream)
                first = time.perf_counter()
                for _ in stream:
                    pass
                return first

        yield Local()


@contextmanager
def open_ts_serve(model: Path, args: argparse.Namespace) -> Iterator[Engine]:
    from tests.e2e.harness import Server
    from tokenspeed.bench.client import Client
    from tokenspeed.bench.datasets import Sample
    from tokenspeed.bench.tokenizers import find_tokenizer

    tokenizer = find_tokenizer(str(model))
    with tempfile.TemporaryDirectory() as scratch:
        server = Server(str(model), "--dtype", args.dtype, "--max-model-len", "1024", log=Path(scratch, "log")).start()

        class Http:
            def answer(self, prompts: Prompts, count: int) -> float:
                return asyncio.run(self.ask(prompts, count))

            async def ask(self, prompts: Prompts, count: int) -> float:
                samples = [Sample(tokenizer.decode(prompt), len(prompt), count) for prompt in prompts]
                body = {"temperature": 0.0, "ignore_eos": True}
                async with Client(server.url, "openai", "/v1/completions", {}) as client:
                    asked = [client.generate(server.served, sample, body) for sample in samples]
                    results = await asyncio.gather(*asked)
                assert all(result.output_len == count for result in results), results
                return min(result.started + result.ttft for result in results)

        try:
            yield Http()
        finally:
            server.stop()


@contextmanager
def open_transformers(model: Path, args: argparse.Namespace) -> Iterator[Engine]:
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, args.dtype))

    class Clock(StoppingCriteria):  # called after each token
        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, ids: Any, scores: Any, **_: Any) -> Any:
            self.times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

    class Generate:
        @torch.inference_mode()
        def answer(self, prompts: Prompts, count: int) -> float:
            ids, clock = torch.tensor(prompts), Clock()
            loaded.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                pad_token_id=0,
                stopping_criteria=[clock],
            )
            return clock.times[0]

    yield Generate()


@contextmanager
def open_vllm(model: Path, args: argparse.Namespace) -> Iterator[Engine]:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(str(model), dtype=args.dtype, max_model_len=1024, enforce_eager=True, disable_log_stats=False)

    class Vllm:
        def answer(self, prompts: Prompts, count: int) -> float:
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            asked = [{"prompt_token_ids": prompt} for prompt in prompts]
            started = time.perf_counter()
            outputs = llm.generate(asked, params, use_tqdm=False)
            # It does not stream, but keeps the figure.
            return started + min(output.metrics.first_token_latency for output in outputs)

    yield Vllm()


@contextmanager
def open_llama_cpp(model: Path, args: argparse.Namespace) -> Iterator[Engine]:
    from llama_cpp import Llama  # type: ignore[import-not-found]

    llm = Llama(str(model / "model.gguf"), n_ctx=1024, n_threads=args.threads, verbose=False)

    class LlamaCpp:
        def answer(self, prompts: Prompts, count: int) -> float:
            first = 0.0
            for prompt in prompts:
                for _, _token in zip(range(count), llm.generate(prompt, temp=0.0), strict=False):
                    first = first or time.perf_counter()
            return first

    yield LlamaCpp()


OPENERS: dict[str, Callable[[Path, argparse.Namespace], Any]] = {
    "tokenspeed": open_tokenspeed,
    "ts-serve": open_ts_serve,
    "transformers": open_transformers,
    "vllm": open_vllm,
    "llama-cpp": open_llama_cpp,
}


if __name__ == "__main__":
    main()
