"""Random edits, valid and broken, against a running server under load.

    python -m benchmarks.reload_fuzz [--seed 0] [--first 0] [--count 1000] [--ranks 2] [--cpu-graphs]

A tiny random model is served on a CPU while clients of many kinds ask it all the time. Each edit changes the overlay
and is sent with `reload_forward`; each has an expectation of its own. After each one the server must be as it was
before, or as one that starts with the edited files: probes, sent alone, are compared in every bit of their
log-probabilities, every request must end in a permitted way with its number of tokens, and no KV block may be left.
Figures are printed as JSON. What must not happen is printed with the edit as a diff, the reply and the server's log,
and with the arguments that make that edit again; it ends the run, unless --keep-going starts a new server behind it.
Memory of each process is told each hundred edits; that of one that lives for long has to be flat.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.e2e.conftest import GRAPHS, SMALL
from tests.fuzz.campaign import Campaign, Finding, Result, Settings
from tests.fuzz.program import Kinds
from tests.tiny import tiny_llama


def main() -> int:
    """Run one campaign; 1 where it found something."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first edit; what came before is started with"
    )
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cpu-graphs", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--across-ranks", action=argparse.BooleanOptionalAction, default=True,
                        help="break one rank where its peers wait for it")  # fmt: skip
    parser.add_argument("--deadly", type=float, default=0.0, help="share of the broken edits that cost a process")
    parser.add_argument("--rank-timeout", type=float, default=20.0, help="the server's --reload-rank-timeout")
    parser.add_argument("--fresh-every", type=int, default=50, help="commits between comparisons with a fresh server")
    parser.add_argument("--keep-going", action="store_true", help="go on with a new server behind a finding")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds after which something hangs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        flags = (*SMALL, *(GRAPHS if args.cpu_graphs else ()), "--tensor-parallel-size", str(args.ranks))
        flags += ("--reload-rank-timeout", str(args.rank_timeout))
        settings = Settings(
            seed=args.seed,
            model=str(tiny_llama(Path(scratch, "model"))),
            flags=flags,
            kinds=Kinds(args.ranks, args.cpu_graphs, args.across_ranks, args.deadly),
            first=args.first,
            count=args.count,
            clients=args.clients,
            limit_s=args.limit,
            fresh_every=args.fresh_every,
        )
        result = Result()
        findings = 0
        try:
            while settings.count > 0 and (args.keep_going or not findings):
                found, settings = run(settings, Path(scratch, str(settings.first)), result)
                findings += found
        finally:
            if result.steps:
                print(json.dumps({"findings": findings, **result.summary()}, indent=1))
                growing = [life.role for life in result.lives() if not life.is_flat]
                if growing:
                    print(f"memory grows with each edit: {', '.join(growing)}")
                findings += len(growing)
    return min(findings, 1)


def run(settings: Settings, folder: Path, result: Result) -> tuple[bool, Settings]:
    """One campaign up to its first finding, which is printed: whether there was one, and what is left to do."""
    folder.mkdir()
    try:
        Campaign(settings, folder, lambda line: print(line, flush=True), result).run()
    except Finding as finding:
        print(finding, flush=True)
        done = finding.number + 1 - settings.first
        return True, replace(settings, first=finding.number + 1, count=settings.count - done)
    return False, replace(settings, count=0)


if __name__ == "__main__":
    sys.exit(main())
