"""What the documents tell people to type, typed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import Server

ROOT = Path(__file__).parent.parent.parent
ADDRESS = "http://127.0.0.1:8000"


def blocks(name: str, language: str) -> list[str]:
    """The code blocks of a document in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL)


def run(command: list[str]) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["README.md", "docs/getting-started.md"])
def test_the_first_question(smollm2: Server, name: str) -> None:
    (block,) = [block for block in blocks(name, "bash") if block.startswith("curl")]
    assert "Paris" in run(["bash", "-c", block.replace(ADDRESS, smollm2.url)])


def test_the_openai_client(smollm2: Server) -> None:
    (block,) = blocks("docs/getting-started.md", "python")
    assert len(run([sys.executable, "-c", block.replace(ADDRESS, smollm2.url)])) > 5


def test_the_offline_api() -> None:
    (block,) = blocks("docs/api.md", "python")
    printed = run([sys.executable, "-W", "error", "-c", block])
    assert "The capital of France is" in printed and "Paris" in printed
    assert "logprob=-" in printed


def test_the_benchmark(smollm2: Server) -> None:
    (block,) = [block for block in blocks("docs/getting-started.md", "bash") if "ts bench" in block]
    command = re.sub(r"^pip install.*$", "", block, flags=re.MULTILINE).replace(
        "ts bench", "python -m tokenspeed.cli.main bench"
    )
    command = command.replace("--num-prompts 50", "--num-prompts 8").strip() + f" --base-url {smollm2.url}"
    assert re.search(r"Successful requests: +8", run(["bash", "-c", command]))


def test_a_profile(smollm2: Server) -> None:
    (block,) = [block for block in blocks("docs/api.md", "bash") if "start_profile" in block]
    assert '"status":"success"' in run(["bash", "-c", block.replace(ADDRESS, smollm2.url)]).replace(" ", "")
    assert smollm2.text("Hello")
    smollm2.control("POST", "/stop_profile")
