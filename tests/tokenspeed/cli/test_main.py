"""The command line as a process: help, errors, exit codes, and what its start-up imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tokenspeed
from tokenspeed.cli.main import COMMANDS


def ts(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokenspeed.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_no_command_prints_the_help_and_exits_1() -> None:
    done = ts()
    assert done.returncode == 1
    assert done.stdout == ts("--help").stdout
    assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    done = ts(command, "--help")
    assert done.returncode == 0
    assert f"ts {command}" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["serve", "reload-forward"])
def test_help_says_that_reloading_is_for_development_only(command: str) -> None:
    text = " ".join(ts(command, "--help").stdout.split())
    assert "development only" in text
    assert "benchmark a final change on a freshly started server" in text


def test_version() -> None:
    assert ts("version").stdout == ts("--version").stdout == ts("-V").stdout == f"{tokenspeed.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["serv"], "ts: there is no command serv; did you mean serve?; see `ts --help`"),
        (["serve", "m", "--max-num-seq", "3"], "no flag --max-num-seq; did you mean --max-num-seqs?"),
        (["serve", "m", "--max-num-seq=3"], "no flag --max-num-seq; did you mean --max-num-seqs?"),
        (["serve", "m", "--zzz"], "ts serve: there is no flag --zzz\n"),
        (["serve", "m", "--tool-call-parse", "qwen"], "no flag --tool-call-parse; did you mean --tool-call-parser?"),
        (["serve", "m", "--chunked-prefill-size", "8"], "no flag --chunked-prefill-size; --max-num-batched-tokens"),
        (["serve", "m", "--worker-urls", "grpc://a:1"], "--worker-urls is not for `ts serve`: ts serve starts the one"),
        (["serve", "m", "--tool-call-parser"], "ts serve: --tool-call-parser: expected 1 argument"),
        (["serve", "smollm2", "--queue-size", "x"], "the gateway refuses --queue-size: invalid int"),
        (["serve", "m", "--port", "x"], "ts serve: --port: invalid int value: 'x'"),
        (["serve", "m", "--port"], "ts serve: --port: expected one argument"),
        (["serve", "m", "--dtype", "int4"], "ts serve: --dtype: invalid choice: 'int4'"),
        (["serve", "m", "n"], "ts serve: the argument n is one too many"),
        (["serve", "m", "--model", "n"], "ts serve: the model is given twice"),
        (["serve"], "ts serve: there is no model to serve"),
        (["serve", "m", "--reload-overlay", "x"], "--reload-overlay needs --allow-reload-forward"),
        (["reload-forward", "--timeout", "0"], "ts reload-forward: --timeout must be above 0 and at most"),
        (["reload-forward", "--url", "localhost"], "is not a URL; give one like http://127.0.0.1:8000"),
        (["version", "--json"], "ts version: there is no flag --json"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_exit_code_2(arguments: list[str], sentence: str) -> None:
    done = ts(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["version"],
        ["serve", "--help"],
        ["serve", "m", "--zzz"],
        ["serve", "/no/such/model"],
        ["reload-forward", "--help"],
    ],
)
def test_start_up_imports_only_the_standard_library(arguments: list[str]) -> None:
    program = """
import sys
before = set(sys.modules)
from tokenspeed.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
roots = {name.partition(".")[0] for name in set(sys.modules) - before}
foreign = roots - sys.stdlib_module_names - {"tokenspeed"}
print("foreign:", *sorted(foreign))
print("slow:", *sorted({"asyncio", "http.client"} & set(sys.modules)))
"""
    command = [sys.executable, "-c", program, *arguments]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[-2:] == ["foreign:", "slow:"]


def test_env_works_without_an_installation(tmp_path: Path) -> None:
    (tmp_path / "tokenspeed").symlink_to(Path(tokenspeed.__file__).parent)
    program = f"import sys; sys.path[:] = [{str(tmp_path)!r}, *[p for p in sys.path if 'site-packages' not in p]]"
    program += "; from tokenspeed.cli.main import main; sys.exit(main(['env']))"
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=False, env={})
    assert done.returncode == 0, done.stderr
    assert tokenspeed.__version__ in done.stdout


def test_env_names_python_torch_and_the_packages() -> None:
    done = ts("env")
    assert done.returncode == 0
    names = [line.split("  ")[0] for line in done.stdout.splitlines()]
    assert {"python", "torch", "NVIDIA driver", "ulimit open files", "smg", "tokenspeed"} <= set(names)
