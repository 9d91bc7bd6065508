"""Decode steps by the number of ranks, and how long it takes to replace ranks.

    python -m benchmarks.ranks_decode [--shape qwen3-8b] [--ranks 1 2] [--batches 1 16 64 256] [--context 1000]

The weights are random; only their shape matters. A step is the difference between long and one-token answers to the
same prompts, over its steps, as a program with `LLM` sees it. A loss is the time from the kill of the last rank, while
a request runs, to the end of that request; it takes the wheels of the front (grpcio, smg-grpc-proto). `--shape tiny` is
for a try on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from tokenizers import Tokenizer, models

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1000},
}  # fmt: skip
COMMON = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "torch_dtype": "bfloat16", "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
STEPS = 128


def main() -> None:
    """Measure each number of ranks, and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="qwen3-8b")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--context", type=int, default=1000, help="tokens of a prompt")
    parser.add_argument("--no-loss", action="store_true", help="replace no ranks")
    args = parser.parse_args()
    print("ms        " + "".join(f"{f'batch {batch}':>12}" for batch in args.batches) + f"{'start':>12}{'loss':>12}")
    with tempfile.TemporaryDirectory(prefix="ts-") as scratch:
        model = Path(scratch, "model")
        model.mkdir()
        (model / "config.json").write_text(json.dumps({**COMMON, **SHAPES[args.shape]}))
        Tokenizer(models.WordLevel({"word": 0}, unk_token="word")).save(str(model / "tokenizer.json"))
        for ranks in args.ranks:
            started = time.perf_counter()
            steps, ready = decode_steps(model, ranks, args.batches, args.context)
            lost = [] if args.no_loss else [loss(model, ranks, Path(scratch, f"run{ranks}"))]
            figures = [*steps, ready - started, *lost]
            print(f"{ranks} ranks   " + "".join(f"{1000 * seconds:12.2f}" for seconds in figures), flush=True)


def decode_steps(model: Path, ranks: int, batches: list[int], context: int) -> tuple[list[float], float]:
    """Seconds of one step of each batch, and when the model was ready."""
    from tokenspeed import LLM, SamplingParams

    # The prompts are in the cache when they are timed.
    with LLM(
        str(model),
        load_format="dummy",
        tensor_parallel_size=ranks,
        max_num_seqs=max(batches),
        max_model_len=context + 2 * STEPS,
        max_num_batched_tokens=2048,
    ) as llm:
        ready = time.perf_counter()
        prompts = [[(7 * i + 13 * j) % 900 + 1 for j in range(context)] for i in range(max(batches))]

        def seconds(batch: int, tokens: int) -> float:
            params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            started = time.perf_counter()
            llm.generate(prompts[:batch], params)
            return time.perf_counter() - started

        steps = []
        for batch in batches:
            seconds(batch, STEPS)
            whole, first = (median(seconds(batch, tokens) for _ in range(3)) for tokens in (STEPS + 1, 1))
            steps.append((whole - first) / STEPS)
        return steps, ready


def loss(model: Path, ranks: int, run_dir: Path) -> float:
    """Seconds from the kill of the last rank to the end of the request that ran."""
    import psutil

    from tests.gpu.serving import Server, finish
    from tokenspeed.runtime.config import Config, ModelOptions, ParallelOptions, SchedulerOptions

    config = Config(
        model=ModelOptions(model=str(model), load_format="dummy", max_model_len=1024),
        scheduler=SchedulerOptions(max_num_seqs=16),
        parallel=ParallelOptions(tensor_parallel_size=ranks),
    )
    server = Server(config, run_dir, run_dir.with_name(f"overlay{ranks}")).start()
    try:
        stream = server.begin("runs", range(1, 50), max_new_tokens=500, temperature=0.0, ignore_eos=True)
        next(stream)
        children = psutil.Process(server.process.pid).children(recursive=True)
        last = [child.pid for child in children if "tokenspeed.rank" in child.cmdline()][-1]
        started = time.perf_counter()
        os.kill(last, signal.SIGKILL)
        finish(stream)
        return time.perf_counter() - started
    finally:
        server.stop()


if __name__ == "__main__":
    main()
