"""How long an engineer waits for an edited layer: a reload against a restart, phase by phase.

    python -m benchmarks.reload_vs_restart [--model smollm2] [--restarts 3] [--reloads 9]

Figures are in seconds: the first start, with its phases, and the medians of restarts and reloads. A restart is measured
from the stop of the running server to the first token of the new one; a reload from the call to the first token after
it, and its phases as the reply gives them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from tests.e2e.harness import Server, dump

LAYER = "tokenspeed.runtime.layers.activation"
GRAPHS = ("--cpu-graphs", "--cudagraph-capture-sizes", "1", "2", "--prefill-graph-max-tokens", "32")
PHASES = ("drain", "read", "patch", "warm", "graphs", "total")


def main() -> None:
    """Measure without and with graphs, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--reloads", type=int, default=9)
    args = parser.parse_args()
    for title, flags in (("eager", ()), ("graphs", GRAPHS)):
        with tempfile.TemporaryDirectory() as scratch:
            server = Server(
                args.model, "--max-model-len", "512", *flags, overlay=Path(scratch, "overlay"), log=Path(scratch, "log")
            )
            try:
                measure(title, server, args.restarts, args.reloads)
            finally:
                server.stop()


def appending(lines: str) -> Callable[[str], str]:
    """An edit that adds `lines` to the end of a file."""
    return lambda text: text + lines


def measure(title: str, server: Server, restarts: int, reloads: int) -> None:
    """Restart and reload one server, and print its figures."""
    start = timed(lambda: first_token(server.start()))
    startup = server.control("GET", "/server_info").json()["engine"]["startup"]
    waits: list[float] = []
    phases: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for number in range(reloads):
        server.edit(LAYER, appending(f"\n# edit {number}\nEDIT_{number} = {number}\n"))

        def wait() -> None:
            reply = server.reload()
            assert reply["success"] and reply["modules"], dump(reply)
            for phase in PHASES:
                phases[phase].append(reply["seconds"][phase])
            first_token(server)

        waits.append(timed(wait))
    restarted = []
    for _ in range(restarts):

        def restart() -> None:
            server.stop()
            first_token(server.start())

        restarted.append(timed(restart))
    print(f"\n{title}: {server.model}")
    print(f"  start to first token   {start:8.2f} s   " + "  ".join(f"{k} {v:.2f}" for k, v in startup.items()))
    print(
        f"  restart, median of {restarts}   {median(restarted):8.2f} s   {min(restarted):.2f} to {max(restarted):.2f}"
    )
    print(f"  reload, median of {reloads}    {median(waits):8.3f} s   {min(waits):.3f} to {max(waits):.3f}")
    print("    by phase             " + "  ".join(f"{phase} {median(phases[phase]):.3f}" for phase in PHASES))
    print(f"  reload / restart       1/{median(restarted) / median(waits):.1f}")


def first_token(server: Server) -> None:
    """Ask for one token."""
    server.complete("Hello", max_tokens=1)


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
