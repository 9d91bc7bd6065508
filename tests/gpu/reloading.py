"""Serves, edits its own forward pass and reloads it: `python -m tests.gpu.reloading MODEL SCRATCH DEVICE`.

It runs in a process of its own, since the reloader has to see every module when it is first loaded. It prints what
happened as one line of JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from tokenspeed.hook import install_reloader
from tokenspeed.runtime.config import (
    CacheOptions,
    Config,
    GraphOptions,
    KernelOptions,
    ModelOptions,
    ReloadOptions,
    SchedulerOptions,
)

LAYER = "tokenspeed.runtime.layers.activation"
LAYER_RESULT = "return silu_and_mul(gate_up, kernel=self.kernel)"
KERNELS = {
    "cuda": ("tokenspeed_kernel.ops.activation.triton", "active * up.to(tl.float32)"),
    "cpu": ("tokenspeed_kernel.ops.activation.reference", "silu(gate) * up"),
}
"""A kernel for each device, and the product in it."""
PROMPTS = [[(11 * i + 5 * j) % 900 + 1 for j in range(3 + 7 * i)] for i in range(6)]


class Program:
    """One rank with a reloader, fed from here."""

    def __init__(self, model: Path, scratch: Path, device: str):
        self.scratch = scratch
        self.overlay = scratch / "overlay"
        self.config = Config(
            model=ModelOptions(model=str(model), device=device, max_model_len=256),
            scheduler=SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=64),
            cache=CacheOptions(max_total_tokens=4096),
            graphs=GraphOptions(
                cpu_graphs=device == "cpu", cudagraph_capture_sizes=(1, 4, 8), prefill_graph_max_tokens=32
            ),
            kernels=KernelOptions(tune_kernels=False),
            reload=ReloadOptions(allow_reload_forward=True, reload_overlay=str(self.overlay)),
        )
        self.calls = 0

    def start(self) -> None:
        """Build the engine behind the reloader's hook."""
        self.overlay.mkdir(parents=True)
        reloader = install_reloader(str(self.overlay))
        from tests.engine import MemoryOutbox, MemoryStream
        from tokenspeed.runtime.distributed.channel import Channel
        from tokenspeed.runtime.engine.process import build
        from tokenspeed.runtime.engine.startup import Startup

        self.stream, self.outbox = MemoryStream(), MemoryOutbox()
        startup = Startup(self.config, Channel(0, 1, self.scratch), self.outbox)  # type: ignore[arg-type]
        self.loop = build(startup, self.stream, reloader)

    def submit(self, tag: str, tokens: int = 24) -> None:
        """Queue every prompt."""
        from tokenspeed.runtime.protocol.calls import Submit
        from tokenspeed.runtime.protocol.sampling import SamplingParams

        sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
        self.stream.messages += [
            Submit(request_id=f"{tag}{index}", prompt=prompt, sampling=sampling) for index, prompt in enumerate(PROMPTS)
        ]

    def call_reload(self) -> None:
        """Send a `reload_forward`."""
        from tokenspeed.runtime.protocol.calls import Reload

        self.calls += 1
        self.stream.messages.append(Reload(call=self.calls, id=f"edit {self.calls}"))

    def finish(self) -> None:
        """Serve until nothing is left."""
        self.loop._stopped = False
        while self.loop.turn():
            pass

    def answers(self, tag: str) -> list[list[int]]:
        """Ids of the requests of `tag`; every one has to have ended by its length."""
        from tokenspeed.runtime.protocol.reports import Outputs

        found: dict[str, list[int]] = {}
        ended = {}
        for message in self.outbox.sent:
            for output in message.outputs if isinstance(message, Outputs) else ():
                found.setdefault(output.request_id, []).extend(output.token_ids)
                if output.finish_reason:
                    ended[output.request_id] = output.finish_reason
        names = [f"{tag}{index}" for index in range(len(PROMPTS))]
        assert [ended.get(name) for name in names] == ["length"] * len(names), ended
        return [found[name] for name in names]

    def reply(self) -> dict[str, Any]:
        """The answer to the last call."""
        from tokenspeed.runtime.protocol.reports import CallReply

        bodies = [message.body for message in self.outbox.sent if isinstance(message, CallReply)]
        assert len(bodies) == self.calls
        return bodies[-1]

    def serve(self, tag: str, tokens: int = 24) -> list[list[int]]:
        """Answers to all prompts."""
        self.submit(tag, tokens)
        self.finish()
        return self.answers(tag)

    def reload_under_load(self, tag: str, tokens: int = 24) -> tuple[list[list[int]], list[list[int]], dict[str, Any]]:
        """Reload while requests run and others come: answers of those before, of those after, the reply."""
        self.submit(f"{tag}-before", tokens)
        self.loop._stopped = False
        for _ in range(6):
            self.loop.turn()
        self.call_reload()
        self.loop.turn()
        self.submit(f"{tag}-after", tokens)
        self.finish()
        return self.answers(f"{tag}-before"), self.answers(f"{tag}-after"), self.reply()

    def edit(self, module: str, old: str, new: str) -> None:
        """Put an edited copy of the module's file into the overlay."""
        package, *rest = module.split(".")
        # The module's own `__file__` may be in the overlay.
        source = Path(str(importlib.import_module(package).__file__)).parent.joinpath(*rest).with_suffix(".py")
        target = self.overlay.joinpath(package, *rest).with_suffix(".py")
        target.parent.mkdir(parents=True, exist_ok=True)
        text = target.read_text() if target.exists() else source.read_text()
        assert old in text, f"{old!r} is not in {source}"
        target.write_text(text.replace(old, new))

    def restore(self) -> None:
        """Take the edits back."""
        for path in self.overlay.rglob("*.py"):
            path.unlink()


def main(model: Path, scratch: Path, device: str) -> dict[str, Any]:
    """Edit a kernel, a layer, break both, and put everything back."""
    program = Program(model, scratch, device)
    program.start()
    told: dict[str, Any] = {"original": program.serve("original")}
    kernel, old = KERNELS[device]
    new = f"{old} * 0.5"

    def reload(tag: str) -> None:
        before, after, reply = program.reload_under_load(tag)
        told[tag] = {"before": before, "after": after, "reply": reply, "alone": program.serve(f"{tag}-alone")}
        told[tag]["generation"] = program.loop.executor.generation.number
        told[tag]["memory"] = reserved(device)

    program.edit(kernel, old, new)
    reload("kernel")
    program.edit(kernel, new, new.replace("0.5", "undefined_name"))
    reload("broken kernel")
    program.edit(kernel, "undefined_name", "0.5")
    program.edit(LAYER, LAYER_RESULT, f"{LAYER_RESULT} * 2")
    reload("layer")
    program.edit(
        LAYER, f"{LAYER_RESULT} * 2", f"{LAYER_RESULT} * int(gate_up.numel() and gate_up.sum().isnan().item() + 2)"
    )
    reload("reads on the host")
    program.restore()
    reload("restored")
    for number in range(4):
        program.edit(kernel, old, new)
        reload(f"kernel again {number}")
        program.restore()
        reload(f"restored again {number}")
    return told


def reserved(device: str) -> int:
    """Bytes that torch holds on the GPU."""
    import torch

    return torch.cuda.memory_reserved() if device == "cuda" else 0


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])))
