"""What a reload costs in a process full of objects: torch and transformers imported, a model built.

Usage: python benchmarks/reload_speed.py [--lines N] [--rounds N] [--objects N]

One function of a module of N lines is edited in each round. Prints the medians in milliseconds of what one module
costs (plan, execute, merge: under 50 ms is the aim) and, apart from that, of the pass over all objects of the process.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tokenspeed_reload import Reloader, Report

PART = """
@functools.lru_cache
def cached_{0}(x):
    return helper_{0}(x) + {0}


def helper_{0}(x, scale=SCALE):
    values = [x * scale + i for i in range({0} % 7 + 1)]
    total = 0
    for value in values:
        if value > {0}:
            total += value
        else:
            total -= value
    return total


class Layer_{0}:
    size = {0}

    def __init__(self, width):
        self.width = width
        self.table = {{"a": width, "b": self.size}}

    def forward(self, x):
        return helper_{0}(x) * self.width + cached_{0}(x)

    @property
    def area(self):
        return self.width * self.size


"""


def module_text(lines: int, edit: int) -> str:
    """A module of that many lines or a little more, in which `edit` is a number in one function."""
    parts = [f"import functools\n\nSCALE = 2\n\n\ndef edited(x):\n    return x + {edit}\n"]
    count = len(parts[0].splitlines())
    while count < lines:
        parts.append(PART.format(len(parts)))
        count += len(parts[-1].splitlines())
    return "".join(parts)


def fill(objects: int) -> object:
    """Make the process a large one: libraries, a model, and what else is needed for that many objects."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=24, num_attention_heads=4, vocab_size=1000
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    rest = objects - len(gc.get_objects())
    return model, [{"name": str(i), "items": [i]} for i in range(max(0, rest) // 2)]


def measure(root: Path, lines: int, rounds: int) -> list[tuple[float, Report]]:
    """Total seconds and the report of each round."""
    path = root / "speed_module.py"
    path.write_text(module_text(lines, 0))
    sys.path.insert(0, str(root))
    reloader = Reloader(packages=["speed_module"])
    reloader.install()
    __import__("speed_module")
    module = sys.modules["speed_module"]
    held = module.edited
    found = []
    for edit in range(1, rounds + 1):
        path.write_text(module_text(lines, edit))
        started = time.process_time()
        report = reloader.reload_and_commit()
        found.append((time.process_time() - started, report))
        assert held(1) == 1 + edit and report.objects_patched == 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--lines", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--objects", type=int, default=1_100_000)
    args = parser.parse_args()
    kept = fill(args.objects)
    gc.collect()
    gc.freeze()
    gc.unfreeze()
    print(f"{len(gc.get_objects()):,} objects, a module of {args.lines} lines")
    with tempfile.TemporaryDirectory() as root:
        rounds = measure(Path(root), args.lines, args.rounds)
    for name in ("plan", "execute", "merge", "scan"):
        print(f"{name:8} {1000 * statistics.median(report.seconds.get(name, 0.0) for _, report in rounds):7.1f} ms")
    module = statistics.median(sum(r.seconds.get(n, 0.0) for n in ("plan", "execute", "merge")) for _, r in rounds)
    print(f"{'module':8} {1000 * module:7.1f} ms")
    print(f"{'total':8} {1000 * statistics.median(seconds for seconds, _ in rounds):7.1f} ms")
    del kept


if __name__ == "__main__":
    main()
