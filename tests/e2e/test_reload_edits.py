"""Kinds of edits that engineers make in the forward packages, against a server that was started with the edit."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import SMALL
from tests.e2e.harness import Server, dump

LLAMA = "tokenspeed.runtime.models.llama"
ROTARY = "tokenspeed.runtime.layers.rotary"
CONTEXT = "tokenspeed.runtime.layers.context"
ATTENTION = "tokenspeed.runtime.layers.attention"
ROPE = "tokenspeed_kernel.ops.rope.reference"
ACTIVATION = "tokenspeed_kernel.ops.activation.reference"
MLP_RESULT = "return self.mlp(hidden), residual"
SILU = "    return silu(gate) * up\n"
PROMPTS = ("The three primary colours are", "x", "word " * 60)


@pytest.fixture
def server(alone: Server) -> Iterator[Server]:
    """The server with the installed code before and after the test, and with the same answers."""
    before = texts(alone)
    yield alone
    for path in alone.overlay.rglob("*.py"):  # type: ignore[union-attr]
        path.unlink()
    reply = alone.reload()
    assert reply["success"], dump(reply)
    assert reply["stale"] == [], dump(reply)
    assert alone.reload()["modules"] == []
    assert texts(alone) == before


def texts(server: Server) -> list[str]:
    return [server.text(prompt, ignore_eos=True) for prompt in PROMPTS]


def named(reply: dict[str, object]) -> list[str]:
    assert reply["success"], dump(reply)
    return [item["what"] for item in reply["needs_restart"]]  # type: ignore[attr-defined]


def notes_on(path: Path, reply: dict[str, Any]) -> list[str]:
    """The notes that name a file; other tests of the same server may have left some about theirs."""
    return [note for note in reply["notes"] if str(path) in note]


def test_files_of_the_overlay_that_nothing_reads_are_named(server: Server) -> None:
    assert server.overlay is not None
    misplaced = server.overlay / "llama.py"
    misplaced.write_text("X = 1\n")
    (note,) = notes_on(misplaced, server.reload())
    assert "laid out as the packages" in note
    server.replace(ACTIVATION, SILU, "    return silu(gate) - up\n")
    assert notes_on(misplaced, server.reload())


def test_the_command_and_the_log_tell_where_an_edit_failed_and_what_serves(server: Server) -> None:
    path = server.replace(ACTIVATION, SILU, "    return silu(gate) * upp\n")
    command = [sys.executable, "-m", "tokenspeed.cli.main", "reload-forward", "--url", server.url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    line = path.read_text().splitlines().index(SILU.rstrip("\n").replace("up", "upp")) + 1
    lines = done.stderr.splitlines()
    first = lines.index("not reloaded in phase warm on rank 0: NameError: name 'upp' is not defined")
    assert lines[first + 1 : first + 3] == [f"  {path}:{line}: return silu(gate) * upp", "  on the way:"]
    assert lines[-2:] == [
        f"    {path}:{line} in silu_and_mul: return silu(gate) * upp",
        "undone; the old code serves on",
    ]
    assert (done.returncode, done.stdout) == (1, "")
    assert f"not reloaded: failed in warm on rank 0: NameError: name 'upp' is not defined ({path}" in server.output()
    server.replace(ACTIVATION, "upp", "up.neg()")
    assert server.reload()["success"]
    assert re.search(r"INFO .*reload \w+: reloaded tokenspeed_kernel\.ops\.activation\.reference and", server.output())


def test_answers_are_those_of_a_start_with_the_same_files(server: Server, tiny_model: Path, tmp_path: Path) -> None:
    before = texts(server)
    # A function moves to a new file and gets a default argument; a constant, a decorator and a field are new.
    moved = server.overlay_path(ROPE).with_name("turn.py")
    server.edit(ROPE, lambda text: text.split("\n\n\ndef _rotate")[0].replace("import torch\n", "") + "\n")
    server.replace(
        ROPE, "from tokenspeed_kernel.registry", "from .turn import _rotate\nfrom tokenspeed_kernel.registry"
    )
    moved.write_text(
        "import torch\n\n\ndef _rotate(x, cos, sin, gain=0.5):\n    first, second = x.float().chunk(2, dim=-1)\n"
        "    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype) * gain\n"
    )
    server.replace(ACTIVATION, SILU, "    return silu(gate) * up * GAIN\n\n\nGAIN = 0.75\n")
    server.edit(CONTEXT, lambda text: text + "    extra: float = 0.5\n")
    server.replace(
        ATTENTION, "        keys, values = ctx", "        query = query * ctx.extra\n        keys, values = ctx"
    )
    half = "def half(f):\n    return lambda *args: f(*args) * 0.5\n\n\nclass LlamaMLP"
    server.replace(LLAMA, "class LlamaMLP", half)
    server.replace(
        LLAMA, "    def forward(self, hidden: Tensor) -> Tensor:", "    @half\n    def forward(self, hidden):"
    )
    reply = server.reload()
    assert named(reply) == [], dump(reply)
    assert reply["stale"] == [], dump(reply)
    # Once more, with the new default, constant and field only.
    moved.write_text(moved.read_text().replace("gain=0.5", "gain=-0.5"))
    server.replace(ACTIVATION, "GAIN = 0.75", "GAIN = 0.25")
    server.replace(CONTEXT, "extra: float = 0.5", "extra: float = 2.0")
    assert named(server.reload()) == []
    after = texts(server)
    assert after != before
    fresh = Server(str(tiny_model), *SMALL, overlay=server.overlay, log=tmp_path / "log").start()
    try:
        assert texts(fresh) == after
    finally:
        fresh.stop()


def test_edits_of_plans_and_their_tables_land(server: Server, tiny_model: Path, tmp_path: Path) -> None:
    before = texts(server)
    server.replace(ROTARY, "base = 1.0 / self.theta**exponents", "base = _stretch() / self.theta**exponents")
    server.edit(ROTARY, lambda text: text + "\n\ndef _stretch() -> float:\n    return 2.0\n")
    assert named(server.reload()) == []
    server.replace(ROTARY, "return 2.0", "return 30.0")
    assert named(server.reload()) == []
    after = texts(server)
    assert after != before
    fresh = Server(str(tiny_model), *SMALL, overlay=server.overlay, log=tmp_path / "log").start()
    try:
        assert texts(fresh) == after
    finally:
        fresh.stop()


def test_a_plan_that_fails_is_undone(server: Server) -> None:
    before = texts(server)
    path = server.replace(ROTARY, "base = 1.0 / self.theta**exponents", "base = 5.0 / (self.theta - self.theta)")
    server.edit(ROTARY, lambda text: text.replace("return base\n", "raise ValueError('no base')\n"))
    reply = server.reload()
    assert (reply["success"], reply["phase"], reply["file"]) == (False, "patch", str(path)), dump(reply)
    assert texts(server) == before


def test_a_kernel_of_higher_priority_is_taken(server: Server) -> None:
    before = texts(server)
    kernel = '@register_kernel("activation", "silu_and_mul", solution="half", priority={})\n'
    body = "def half(x: Tensor) -> Tensor:\n    return x.chunk(2, dim=-1)[1] * 0.5\n"
    server.edit(ACTIVATION, lambda text: text + "\n\n" + kernel.format(-1) + body)
    assert named(server.reload()) == []
    assert texts(server) == before
    server.replace(ACTIVATION, "priority=-1", "priority=9")
    assert named(server.reload()) == []
    assert texts(server) != before
    server.replace(ACTIVATION, kernel.format(9), "")
    assert named(server.reload()) == []
    assert texts(server) == before


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("return self.mlp(hidden) * (no_name if len(ctx.seq_lens) > 1 else 1), residual", "no_name"),
        ("raise type('Odd', (Exception,), {'__str__': lambda error: 1 / 0})()", "Odd"),
        ("raise ValueError('\\udcff')", "udcff"),
        ("return self.forward(hidden, residual, positions, ctx)", "RecursionError"),
    ],
)
def test_an_error_is_found_before_requests_meet_it(server: Server, result: str, words: str) -> None:
    path = server.replace(LLAMA, MLP_RESULT, result)
    reply = server.reload()
    assert (reply["success"], reply["phase"], reply["file"]) == (False, "warm", str(path)), dump(reply)
    assert words in reply["error"]
    assert len(reply["trace"]) <= 32
