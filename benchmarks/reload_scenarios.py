"""The cases of the reloader's tests, through this reloader and its peers.

    python benchmarks/reload_scenarios.py --cache ~/.cache/reload-peers

Each peer is installed with its pinned version into an environment of its own below `--cache`, and gets what it needs:
those that know no users reload every module, providers first; hmr gets an entry file. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parent / "src"
CASES = HERE.parent / "tests" / "tokenspeed_reload"

PINNED = {
    "tokenspeed_reload": None,
    "jurigged": "jurigged==0.6.1",
    "IPython autoreload 2": "ipython==9.18.1",
    "IPython autoreload 3": "ipython==9.18.1",
    "xreload": "xreload==1.1.0",
    "importlib.reload": None,
    "hmr": "hmr==0.7.6.3",
}


def load_cases(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """The cases by file; ids are unique over all of them."""
    return {file.name: json.loads(file.read_text()) for file in sorted(directory.glob("*scenarios.json"))}


def interpreter(requirement: str | None, cache: Path, python: str) -> str:
    """The interpreter of an environment with `requirement`, which is made unless it is there."""
    if requirement is None:
        return python
    environment = cache / requirement.replace("==", "-")
    executable = environment / "bin" / "python"
    if not (environment / "complete").exists():
        subprocess.run([python, "-m", "venv", "--clear", environment], check=True)
        subprocess.run([executable, "-m", "pip", "install", "--quiet", requirement], check=True)
        (environment / "complete").touch()
    return str(executable)


def run(engine: str, cases: list[dict[str, Any]], python: str) -> dict[str, bool]:
    """Which cases hold with `engine`."""
    command = [python, str(HERE / "reload_engines.py"), engine]
    # xreload walks sets of names: what it passes would differ from run to run.
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        command, input=json.dumps(cases), env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{engine} could not be run:\n{done.stderr}")
    result: dict[str, bool] = json.loads(done.stdout)
    return result


def totals(files: dict[str, list[dict[str, Any]]], results: dict[str, dict[str, bool]]) -> str:
    """A table with one row an engine: the cases that hold of each file, and of all."""
    count = sum(len(cases) for cases in files.values())
    lines = [f"| reloader | {' | '.join(f'`{name}`' for name in files)} | all |", "|---" * (len(files) + 2) + "|"]
    for engine, held in results.items():
        cells = [f"{sum(held[case['id']] for case in cases)} of {len(cases)}" for cases in files.values()]
        name = f"{engine} {(PINNED[engine] or '').partition('==')[2]}".strip()
        lines.append(f"| {name} | {' | '.join(cells)} | {sum(held.values())} of {count} |")
    return "\n".join(lines)


def every_case(files: dict[str, list[dict[str, Any]]], results: dict[str, dict[str, bool]]) -> str:
    """A table with one row a case."""
    lines = ["| case | " + " | ".join(results) + " |", "|---" * (len(results) + 1) + "|"]
    for case in (case for cases in files.values() for case in cases):
        lines.append(f"| {case['id']} | {' | '.join('yes' if r[case['id']] else '' for r in results.values())} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare reloaders on before/after cases.")
    parser.add_argument("--cache", type=Path, required=True, help="directory for the environments of the peers")
    parser.add_argument("--python", default=sys.executable, help="interpreter for all of them; hmr needs 3.12")
    parser.add_argument("--cases", type=Path, default=CASES, help="directory with *scenarios.json files")
    parser.add_argument("--engine", action="append", choices=list(PINNED), help="run only this one; may be repeated")
    parser.add_argument("--every-case", action="store_true", help="print each case too")
    arguments = parser.parse_args()
    files = load_cases(arguments.cases)
    cases = [case for file in files.values() for case in file]
    results: dict[str, dict[str, bool]] = {}
    for engine in arguments.engine or PINNED:
        python = interpreter(PINNED[engine], arguments.cache.expanduser(), arguments.python)
        results[engine] = run(engine, cases, python)
        print(f"{engine}: {sum(results[engine].values())} of {len(cases)}", file=sys.stderr)
    print(totals(files, results))
    if arguments.every_case:
        print()
        print(every_case(files, results))
    ours = results.get("tokenspeed_reload", {})
    missed = [name for name, held in ours.items() if not held]
    if missed:
        raise SystemExit(f"tokenspeed_reload fails {', '.join(missed)}.")


if __name__ == "__main__":
    main()
