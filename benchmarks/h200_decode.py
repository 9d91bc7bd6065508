"""Decode steps, time to first token, graphs and start-up of the Qwen3-8B shape on one GPU, beside transformers.

    python benchmarks/h200_decode.py --out figures.json [--checkpoint DIR] [--transformers]

The weights are random; only their shape matters. With --checkpoint a real checkpoint of that shape (16 GB) is
written to DIR, and a fresh process starts up from it. docs/benchmarks.md tells how to read the figures.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

PROCESS_STARTED = time.time()

import torch  # noqa: E402

from tokenspeed.runtime.config import CacheOptions, Config, GraphOptions, ModelOptions, SchedulerOptions  # noqa: E402
from tokenspeed.runtime.distributed.channel import Channel  # noqa: E402
from tokenspeed.runtime.engine.control import ControlQueue  # noqa: E402
from tokenspeed.runtime.engine.grammars import Grammars  # noqa: E402
from tokenspeed.runtime.engine.loop import EngineLoop  # noqa: E402
from tokenspeed.runtime.engine.outbox import Outbox  # noqa: E402
from tokenspeed.runtime.engine.profiler import Profiler  # noqa: E402
from tokenspeed.runtime.engine.startup import Startup  # noqa: E402
from tokenspeed.runtime.engine.stream import Stream  # noqa: E402
from tokenspeed.runtime.protocol.blackbox import BlackBox  # noqa: E402
from tokenspeed.runtime.protocol.calls import Stop, Submit  # noqa: E402
from tokenspeed.runtime.protocol.reports import Outputs, RequestOutput  # noqa: E402
from tokenspeed.runtime.protocol.sampling import SamplingParams  # noqa: E402
from tokenspeed.runtime.protocol.state import Loads  # noqa: E402
from tokenspeed.runtime.scheduler.batch import Batch, Row  # noqa: E402
from tokenspeed.runtime.scheduler.request import Request  # noqa: E402

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "tie_word_embeddings": False},
    "qwen3-0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
                   "num_key_value_heads": 8, "tie_word_embeddings": True},
}  # fmt: skip
COMMON = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "torch_dtype": "bfloat16",
    "eos_token_id": 151645, "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip

BANDWIDTH = 4.3e12
"""Bytes a second that a copy moves on an H200, read and written together."""
CONTEXT = 1000
BATCHES = (1, 16, 64, 256)


@dataclass
class Inbox:
    """What the engine is told; it stops where it would wait for more."""

    messages: list[Any] = field(default_factory=list)

    def receive(self, directives: Sequence[Any], wait_s: float | None) -> list[Any]:
        """See `tokenspeed.runtime.engine.stream.Stream`."""
        received = [*self.messages, *directives]
        self.messages.clear()
        return received if received or wait_s == 0 else [Stop()]


@dataclass
class Sink:
    """What the engine says, with the time of each output."""

    outputs_seen: list[tuple[float, RequestOutput]] = field(default_factory=list)

    def send(self, message: Any) -> None:
        """Keep outputs, drop the rest."""
        if isinstance(message, Outputs):
            self.outputs(message.outputs, message.loads)

    def outputs(self, outputs: list[RequestOutput], loads: Loads) -> None:
        """Keep them."""
        self.outputs_seen.extend((time.perf_counter(), output) for output in outputs)

    def reply(self, call: Any, body: dict[str, Any]) -> None:
        """Nobody asked."""


class Engine:
    """One rank in this process."""

    def __init__(self, config: Config, run_dir: Path):
        self.inbox, self.sink = Inbox(), Sink()
        self.startup = Startup(config, Channel(0, 1, run_dir), cast(Outbox, self.sink))

    def start(self) -> Engine:
        """Load, measure, capture."""
        self.startup.run()
        self.executor, self.scheduler = self.startup.executor, self.startup.scheduler
        channel, source, outbox = self.startup.channel, self.startup.source, cast(Outbox, self.sink)
        self.loop = EngineLoop(
            channel,
            cast(Stream, self.inbox),
            outbox,
            self.scheduler,
            self.executor,
            ControlQueue(self.scheduler, outbox, None),
            Profiler(channel, outbox, self.startup.device.type),
            Grammars(source.tokenizer_dir, source.config.vocab_size, source.config.eos_token_ids),
            BlackBox(0, channel.run_dir),
            overlap=True,
        )
        return self

    def submit(self, name: str, prompt: list[int], tokens: int) -> None:
        """Queue a greedy request that runs to its length."""
        sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
        self.inbox.messages.append(Submit(request_id=name, prompt=prompt, sampling=sampling))

    def finish(self) -> None:
        """Run until nothing is left."""
        self.loop._stopped = False
        while self.loop.turn():
            pass


def prompt(seed: int, count: int) -> list[int]:
    """Ids that share no prefix with those of another seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(100, 150_000, (count,), generator=generator).tolist()


def median_ms(run: Callable[[], None], repeats: int = 20) -> float:
    """Device time of `run`, by events."""
    times = []
    for _ in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[3:])


def decode_batch(rows: int, context: int, block_size: int) -> Batch:
    """Rows whose last of `context` tokens is computed, each in blocks of its own."""
    each = -(-context // block_size)
    made = []
    for index in range(rows):
        request = Request(str(index), [1], SamplingParams(max_new_tokens=1, temperature=0.0))
        blocks = list(range(1 + index * each, 1 + (index + 1) * each))
        made.append(Row(request, context - 1, 1, True, [index + 5], None, blocks, ()))
    return Batch(made, rows, rows, rows)


def decode_steps(engine: Engine) -> list[dict[str, float]]:
    """Replays of the decode graphs, against the time that reading weights and KV takes."""
    executor, pool = engine.executor, engine.executor.pool
    config = executor.model.config
    weights = sum(p.numel() * p.element_size() for p in executor.model.parameters())
    if not config.tie_embeddings:
        weights -= config.vocab_size * config.hidden_size * 2
    token_bytes = pool.shape.block_bytes // pool.shape.block_size
    for keys, values in pool.layers:
        keys.normal_()
        values.normal_()
    figures = []
    for rows in BATCHES:
        if rows > executor.buffers.limits.max_rows:
            continue
        batch = decode_batch(rows, CONTEXT, pool.shape.block_size)
        executor.run(batch)
        ms = median_ms(graph_of(engine, batch).replay)
        moved = weights + rows * CONTEXT * token_bytes
        floor = moved / BANDWIDTH * 1e3
        figures.append({"batch": rows, "ms": ms, "floor_ms": floor, "ratio": ms / floor, "GB/s": moved / ms / 1e6})
    return figures


def served_steps(engine: Engine) -> list[dict[str, float]]:
    """Whole turns of the engine while it decodes: the time of a step, and what of it the host computes."""
    figures = []
    for rows in BATCHES:
        if rows > engine.executor.buffers.limits.max_rows:
            continue
        for index in range(rows):
            # Those that are prefilled first have to be there still when the last one is.
            engine.submit(f"s{rows}-{index}", prompt(rows * 1000 + index, CONTEXT - 60), 80 + rows)
        turns, waits = time_turns(engine, rows)
        figures.append(
            {
                "batch": rows,
                "step_ms": statistics.median(turns) * 1e3,
                "host_ms": statistics.median(t - w for t, w in zip(turns, waits, strict=True)) * 1e3,
            }
        )
    return figures


def time_turns(engine: Engine, rows: int) -> tuple[list[float], list[float]]:
    """Seconds of each turn that launches a decode step of all requests, and seconds that it waited for the device."""
    executor = engine.executor
    launch = executor.launch
    turns: list[float] = []
    waits: list[float] = []
    seen: dict[str, Any] = {"wait": 0.0, "decode": False}

    def timed(batch: Batch) -> Any:
        seen["decode"] = batch.is_decode and len(batch.rows) == rows
        pending = launch(batch)
        wait = pending.wait

        def timed_wait() -> Any:
            began = time.perf_counter()
            result = wait()
            seen["wait"] += time.perf_counter() - began
            return result

        pending.wait = timed_wait  # type: ignore[method-assign]
        return pending

    executor.launch = timed  # type: ignore[method-assign]
    engine.loop._stopped = False
    while True:
        seen.update(wait=0.0, decode=False)
        began = time.perf_counter()
        if not engine.loop.turn():
            break
        if seen["decode"]:
            turns.append(time.perf_counter() - began)
            waits.append(seen["wait"])
    executor.launch = launch  # type: ignore[method-assign]
    return turns[5:-5], waits[5:-5]


def first_tokens(engine: Engine, lengths: Sequence[int]) -> list[dict[str, float]]:
    """From the submission of one request on an idle engine to its first token, in milliseconds."""
    figures = []
    for length in lengths:
        times = []
        for repeat in range(8):
            engine.submit(f"t{length}-{repeat}", prompt(77_000 + length * 10 + repeat, length), 1)
            engine.sink.outputs_seen.clear()
            began = time.perf_counter()
            engine.finish()
            times.append((engine.sink.outputs_seen[0][0] - began) * 1e3)
        figures.append({"prompt": length, "ttft_ms": statistics.median(times[1:]), "first_ms": times[0]})
    return figures


def capture_seconds(engine: Engine) -> dict[str, Any]:
    """A second generation of all graphs, as a reload captures it."""
    marks: list[tuple[str, float]] = []
    began = time.perf_counter()
    reserved = torch.cuda.memory_reserved()
    generation = engine.executor.capture(1, lambda label: marks.append((label, time.perf_counter())))
    ended = time.perf_counter()
    switch = next((at for label, at in marks if label.startswith("prefill")), ended)
    return {
        "decode_graphs": len(generation.decode),
        "decode_seconds": switch - began,
        "prefill_graphs": len(generation.prefill),
        "prefill_seconds": ended - switch,
        "nodes": {size: graph.num_nodes for size, graph in generation.decode.items() if size in BATCHES},
        "pool_growth_mib": (torch.cuda.memory_reserved() - reserved) / 2**20,
    }


def kernel_times(engine: Engine) -> list[dict[str, Any]]:
    """Microseconds of each kernel in one replay, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    executor = engine.executor
    block_size = executor.buffers.block_size
    bucket = executor.plan.largest_prefill
    figures = []
    for batch in (
        decode_batch(1, CONTEXT, block_size),
        decode_batch(64, CONTEXT, block_size),
        one_prompt(engine, bucket),
    ):
        graph = graph_of(engine, batch)
        executor.run(batch)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(4):
                graph.replay()
            torch.cuda.synchronize()
        totals: dict[str, list[float]] = {}
        for event in profiler.events():
            if event.device_time:
                totals.setdefault(event.name[:60], []).append(event.device_time)
        longest = sorted(totals.items(), key=lambda item: -sum(item[1]))[:12]
        kernels = {name: f"{sum(times) / 4:.1f} us in {len(times) // 4}" for name, times in longest}
        figures.append({"graph": graph.label, "sum_us": sum(map(sum, totals.values())) / 4, "kernels": kernels})
    return figures


def one_prompt(engine: Engine, tokens: int) -> Batch:
    """One prompt of so many tokens."""
    ids = prompt(tokens, tokens)
    request = Request("p", ids, SamplingParams(max_new_tokens=1, temperature=0.0))
    blocks = list(range(1, 2 + tokens // engine.executor.buffers.block_size))
    return Batch([Row(request, 0, tokens, True, ids, None, blocks, ())], tokens, 0, 1)


def graph_of(engine: Engine, batch: Batch) -> Any:
    """The graph that serves `batch`; its inputs are those of the last step that ran."""
    generation = engine.executor.generation
    found = generation.decode_graph(len(batch.rows)) if batch.is_decode else generation.prefill_graph(batch.num_tokens)
    assert found is not None
    return found[1]


def prefill_graphs(engine: Engine) -> list[dict[str, float]]:
    """Replays of the larger prefill graphs with one prompt, against the time that its products take."""
    executor = engine.executor
    config = executor.model.config
    per_token = 2 * (sum(p.numel() for p in executor.model.parameters()) - 2 * config.vocab_size * config.hidden_size)
    figures = []
    for bucket in [size for size in executor.generation.prefill if size >= 512][::3]:
        executor.run(one_prompt(engine, bucket))
        ms = median_ms(executor.generation.prefill[bucket].replay)
        figures.append({"tokens": bucket, "ms": ms, "TFLOP/s": bucket * per_token / ms / 1e9})
    return figures


def model_directory(directory: Path, shape: str) -> Path:
    """A directory with config.json and a tokenizer that nobody reads."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**COMMON, **SHAPES[shape]}))
    (directory / "tokenizer.json").write_text("{}")
    return directory


def write_checkpoint(directory: Path, shape: str) -> None:
    """Random weights of `shape` as a sharded safetensors checkpoint."""
    from safetensors.torch import save_file

    from tokenspeed.runtime.distributed.group import Group
    from tokenspeed.runtime.models.config import ModelConfig
    from tokenspeed.runtime.models.registry import build_model

    config = ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))
    slots = build_model(config, Group.solo()).weight_slots()
    shard: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}
    size = number = 0
    for index, (name, (_, slot)) in enumerate(slots.items()):
        tensor = torch.empty(slot.shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
        shard[name] = (tensor.fill_(1) if name.endswith("norm.weight") else tensor).cpu()
        size += shard[name].nbytes
        if size > 4 << 30 or index == len(slots) - 1:
            number += 1
            file = f"model-{number:05d}.safetensors"
            save_file(shard, directory / file)
            weight_map |= dict.fromkeys(shard, file)
            shard, size = {}, 0
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def config_for(model: Path, load_format: str, prefill_tokens: int | None) -> Config:
    """Defaults of a server, but for a length that leaves room."""
    return Config(
        model=ModelOptions(model=str(model), device="cuda", load_format=load_format, max_model_len=8192),
        scheduler=SchedulerOptions(max_num_seqs=256, max_num_batched_tokens=2048),
        cache=CacheOptions(enable_prefix_caching=True),
        graphs=GraphOptions(prefill_graph_max_tokens=prefill_tokens),
    )


def startup_only(model: Path) -> dict[str, Any]:
    """Start up in this process and tell the phases."""
    imports = time.time() - PROCESS_STARTED
    with tempfile.TemporaryDirectory() as run_dir:
        engine = Engine(config_for(model, "auto", None), Path(run_dir)).start()
    startup = engine.startup
    return {
        "imports": imports,
        "phases": startup.seconds,
        "kernels_compiled": startup.jit.compiled,
        "process": time.time() - PROCESS_STARTED,
    }


def transformers_step(directory: Path) -> dict[str, float]:
    """Milliseconds a token of `generate` at batch 1 with the same shape and context."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).eval()
    torch.set_default_dtype(torch.float32)
    ids = torch.tensor([prompt(1, CONTEXT)], device="cuda")
    times = []
    for tokens in (33, 1, 33):
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return {"token_ms": (times[2] - times[1]) / 32 * 1e3, "first_ms": times[1] * 1e3}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="file for all figures, as JSON")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--checkpoint", type=Path, help="directory for a checkpoint to start up from")
    parser.add_argument("--transformers", action="store_true", help="measure transformers too")
    parser.add_argument("--startup-only", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.startup_only:
        print(json.dumps(startup_only(args.startup_only)))
        return 0
    figures: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "shape": args.shape}
    with tempfile.TemporaryDirectory() as scratch:
        directory = model_directory(Path(scratch) / args.shape, args.shape)
        engine = Engine(config_for(directory, "dummy", None), Path(scratch)).start()
        figures["startup_dummy"] = {**engine.startup.seconds, "kernels_compiled": engine.startup.jit.compiled}
        figures["kv_tokens"] = engine.executor.pool.usable_blocks * engine.executor.pool.shape.block_size
        for name, measure in (
            ("decode", decode_steps),
            ("prefill", prefill_graphs),
            ("kernels", kernel_times),
            ("graphs", capture_seconds),
            ("ttft", lambda e: first_tokens(e, (1000, 2000))),
            ("served", served_steps),
        ):
            figures[name] = measure(engine)
            report(name, figures[name])
            save(args.out, figures)
        # The engine's parts know each other; the collector ends them, but for what start-up has frozen.
        del engine
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()
        if args.transformers:
            figures["transformers"] = transformers_step(directory)
            report("transformers", figures["transformers"])
            torch.cuda.empty_cache()
    if args.checkpoint:
        write_checkpoint(model_directory(args.checkpoint, args.shape), args.shape)
        torch.cuda.empty_cache()
        for name in ("startup_cold_kernels", "startup_warm"):
            done = subprocess.run(
                [sys.executable, __file__, "--startup-only", str(args.checkpoint)], capture_output=True, text=True
            )
            if done.returncode:
                print(done.stderr[-3000:])
                return 1
            figures[name] = json.loads(done.stdout.splitlines()[-1])
            report(name, figures[name])
    save(args.out, figures)
    return 0


def report(name: str, value: Any) -> None:
    """One line for each row of figures."""
    rows = value if isinstance(value, list) else [value]
    for row in rows:
        print(f"{name:22}", json.dumps(rounded(row)), flush=True)


def rounded(value: Any) -> Any:
    """Three decimals are enough."""
    if isinstance(value, float):
        return round(value, 3)
    return {key: rounded(item) for key, item in value.items()} if isinstance(value, dict) else value


def save(path: Path | None, figures: dict[str, Any]) -> None:
    """Write what is known so far."""
    if path is not None:
        path.write_text(json.dumps(rounded(figures) | {"raw": figures}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
