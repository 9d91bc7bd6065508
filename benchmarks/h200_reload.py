"""What an edit of a running server costs on a GPU, by its kind, beside a restart, at rest and under load.

    python -m benchmarks.h200_reload [--model DIR] [--rounds 10] [--clients 64] [--seconds 60] [-- flags of ts serve]

Without --model the server has the shape of Qwen3-8B with dummy weights; only the shape matters. **First token** is the
time from the call of `reload_forward` to the end of a request of one token that is sent when the call is answered: the
first token that only the new code can give. Each round multiplies by another number, so that Triton's cache on the disk
has no kernel of it. A restart is timed from the stop of the same server to its first token. Under load each client
streams one answer after the other; a time without reloads is compared with one for each mode, in which every kind of
edit is made once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.e2e.harness import Server, dump, installed_path

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "torch_dtype": "bfloat16",
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
PHASES = ("drain", "read", "patch", "warm", "graphs", "total")
PROMPT_WORDS, ANSWER_TOKENS = 100, 200

Change = tuple[str, str, str]
"""A module, a text in it, and what takes its place; `FACTOR` stands for a number close to one."""
NORM = ("tokenspeed_kernel.ops.norm.triton", "scale = tl.rsqrt(", "scale = FACTOR * tl.rsqrt(")
DECODE = (
    "tokenspeed_kernel.ops.attention.triton_decode",
    'score = tl.dot(q, k, input_precision="ieee") * scale',
    'score = tl.dot(q, k, input_precision="ieee") * scale * FACTOR',
)
LAYER = (
    "tokenspeed.runtime.layers.activation",
    "return silu_and_mul(gate_up, kernel=self.kernel)",
    "return silu_and_mul(gate_up, kernel=self.kernel) * FACTOR",
)
MODEL = (
    "tokenspeed.runtime.models.qwen3",
    "self.o_proj(self.attention(query, ctx))",
    "self.o_proj(self.attention(query, ctx)) * FACTOR",
)
SAMPLER = (
    "tokenspeed.runtime.sampling.sampler",
    "return logits.argmax(dim=-1)",
    "return (logits * FACTOR).argmax(dim=-1)",
)
EDITS: dict[str, tuple[Change, ...]] = {
    "RMSNorm kernel": (NORM,),
    "attention kernel": (DECODE,),
    "layer": (LAYER,),
    "model file": (MODEL,),
    "sampler": (SAMPLER,),
    "three files": (NORM, LAYER, MODEL),
}


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of a model (default: the Qwen3-8B shape with dummy weights)")
    parser.add_argument("--rounds", type=int, default=10, help="reloads of each kind")
    parser.add_argument("--edits", nargs="+", choices=tuple(EDITS), default=list(EDITS), metavar="EDIT")
    parser.add_argument("--clients", type=int, default=64, help="running requests; 0 measures no load")
    parser.add_argument("--seconds", type=float, default=60, help="how long each load lasts")
    parser.add_argument("flags", nargs="*", help="passed on to ts serve (default: --device cuda)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ts-") as scratch:
        flags = args.flags or ["--device", "cuda"]
        if args.model is None:
            args.model, flags = str(qwen3_8b(Path(scratch, "model"))), [*flags, "--load-format", "dummy"]
        server = Server(args.model, *flags, overlay=Path(scratch, "overlay"), log=Path(scratch, "log"))
        try:
            print(f"start to first token: {first_start(server):.1f} s (compiles and tunes what no start did before)")
            at_rest(server, args.edits, args.rounds)
            print(f"restart to first token: {restart(server):.1f} s", flush=True)
            if args.clients:
                under_load(server, args.edits, args.clients, args.seconds)
        finally:
            server.stop()


def qwen3_8b(directory: Path) -> Path:
    """Configuration and tokenizer of the shape; each id is a word, so that each token is a chunk of a stream."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(QWEN3_8B))
    words = {f"w{number}": number for number in range(QWEN3_8B["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return directory


# ---- at rest ----


def at_rest(server: Server, edits: Sequence[str], rounds: int) -> None:
    """The table of edits while nothing else runs."""
    print(f"\nms, medians of {rounds}" + "".join(f"{n:>9}" for n in (*PHASES, "first", "worst")) + "  graphs, compiles")
    for name in edits:
        replies, firsts = [], []
        for _ in range(rounds):
            write(server, EDITS[name])
            started = time.perf_counter()
            replies.append(checked(server.reload()))
            first_token(server)
            firsts.append(time.perf_counter() - started)
        phases = [median(reply["seconds"][phase] for reply in replies) for phase in PHASES]
        figures = "".join(f"{1000 * value:9.0f}" for value in (*phases, median(firsts), max(firsts)))
        print(f"{name:18}{figures}  {graphs(replies)}", flush=True)


def write(server: Server, changes: Sequence[Change]) -> None:
    """Put the changes into the overlay, with a number that no kernel was compiled with."""
    for module, old, new in changes:
        text = installed_path(module).read_text()
        assert old in text, f"{old!r} is not in {module}"
        path = server.overlay_path(module)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace(old, new.replace("FACTOR", repr(1 + random.random() / 1000))))


def graphs(replies: Sequence[dict[str, Any]]) -> str:
    """What became of the graphs, and how much was compiled."""
    told = replies[-1]["graphs"]
    compiled = median(reply["jit"]["compiled"] for reply in replies)
    seconds = median(reply["jit"]["seconds"] for reply in replies)
    return f"{told['how']} {told['decode']}+{told['prefill']}, {compiled:.0f} in {1000 * seconds:.0f} ms"


def checked(reply: dict[str, Any]) -> dict[str, Any]:
    """The reply of a reload that has to succeed."""
    assert reply["success"] and reply["modules"], dump(reply)
    return reply


def first_token(server: Server) -> None:
    """Ask for one token."""
    server.complete(prompt(), max_tokens=1)


def prompt() -> str:
    """A prompt that no cache has."""
    return " ".join(f"w{random.randrange(1, 250)}" for _ in range(PROMPT_WORDS))


def first_start(server: Server) -> float:
    """Seconds from the start of the process to the first token."""
    started = time.perf_counter()
    server.start()
    first_token(server)
    return time.perf_counter() - started


def restart(server: Server) -> float:
    """Seconds from the stop of the server to the first token of the next one."""
    started = time.perf_counter()
    server.stop()
    server.start()
    first_token(server)
    return time.perf_counter() - started


# ---- under load ----


@dataclass
class Load:
    """What the clients saw."""

    tokens: int = 0
    answers: int = 0
    gaps: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def under_load(server: Server, edits: Sequence[str], clients: int, seconds: float) -> None:
    """The table of loads: without reloads, and with one of each kind in each mode."""
    columns = ("tokens/s", "answers", "lost", "longest gap, ms", "held, ms", "total, ms")
    print(f"\n{clients} clients, {seconds:.0f} s   " + "".join(f"{name:>17}" for name in columns))
    for mode in (None, "keep", "wait"):
        load, replies = asyncio.run(loaded(server, edits if mode else (), clients, seconds, mode))
        held, total = (spread([reply["seconds"][name] for reply in replies]) for name in ("held", "total"))
        figures = (
            f"{load.tokens / seconds:.0f}",
            load.answers,
            len(load.lost),
            milliseconds(max(load.gaps)),
            held,
            total,
        )
        print(f"{mode or 'no reload':20}" + "".join(f"{figure:>17}" for figure in figures), flush=True)
        for error in load.lost[:3]:
            print(f"  lost: {error}")


def milliseconds(seconds: float) -> str:
    """For a table."""
    return f"{1000 * seconds:.0f}"


def spread(values: Sequence[float]) -> str:
    """Median and worst of some seconds, in milliseconds."""
    return f"{milliseconds(median(values))} / {milliseconds(max(values))}" if values else "-"


async def loaded(
    server: Server, edits: Sequence[str], clients: int, seconds: float, mode: str | None
) -> tuple[Load, list[dict[str, Any]]]:
    """Run the clients, and make the edits in their time."""
    load, replies = Load(), []
    name = server.served
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as http:
        end = time.perf_counter() + seconds
        tasks = [asyncio.create_task(stream(http, server.url, name, end, load)) for _ in range(clients)]
        for edit in edits:
            await asyncio.sleep(seconds / (len(edits) + 1))
            write(server, EDITS[edit])
            replies.append(checked(await asyncio.to_thread(server.reload, mode=mode)))
        await asyncio.gather(*tasks)
    return load, replies


async def stream(http: httpx.AsyncClient, url: str, model: str, end: float, load: Load) -> None:
    """One client: answers until the end of the load."""
    body = {"model": model, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "stream": True, "temperature": 0.7}
    while time.perf_counter() < end:
        chunks, latest, reason = 0, 0.0, None
        async with http.stream("POST", f"{url}/v1/completions", json={**body, "prompt": prompt()}) as reply:
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                choice = (event.get("choices") or [{}])[0]
                reason = choice.get("finish_reason") or reason
                if choice.get("text"):
                    now = time.perf_counter()
                    load.gaps.extend([now - latest] if chunks else [])
                    chunks, latest = chunks + 1, now
        load.tokens += chunks
        load.answers += 1
        if reason != "length":
            load.lost.append(f"status {reply.status_code}, {chunks} tokens, ended by {reason}")


if __name__ == "__main__":
    main()
