"""A running stack of the real SMG and a front without an engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.waiting import PATIENCE, until


class RunningStack:
    """The process of `run_stack.py` and everything that it started."""

    def __init__(self, process: subprocess.Popen[bytes], directory: Path) -> None:
        self.process = process
        self.directory = directory
        self.url = ""
        self._seen: dict[int, psutil.Process] = {}

    @property
    def stdout(self) -> str:
        return (self.directory / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.directory / "stderr").read_text()

    @property
    def run_dir(self) -> Path:
        (path,) = self.directory.glob("tokenspeed-*")
        return path

    def until_ready(self) -> RunningStack:
        """Wait for the ready line."""
        until(lambda: self.stdout.endswith("\n") or self.process.poll() is not None)
        assert self.process.poll() is None, self.stderr
        self.url = self.stdout.split(" at ")[1].split(",")[0]
        self.children()
        return self

    def children(self) -> dict[int, psutil.Process]:
        """Every process that was ever seen below this one."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            self._seen.setdefault(child.pid, child)
        return self._seen

    def child(self, word: str) -> psutil.Process:
        """The child whose command line has `word`."""
        (found,) = [child for child in self.children().values() if any(word in part for part in child.cmdline())]
        return found

    def wait(self) -> int:
        """Its exit code; nothing that it started may be left."""
        code = self.process.wait(PATIENCE)
        until(lambda: not any(child.is_running() and is_alive(child) for child in self._seen.values()))
        return code

    def ask(self, text: str, **more: Any) -> httpx.Response:
        """One chat request."""
        body = {"model": "stand-in", "messages": [{"role": "user", "content": text}], **more}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=PATIENCE)

    def held(self, requests: int) -> None:
        """Wait until so many requests are held."""
        until(lambda: len(list(self.run_dir.glob("held-*"))) == requests)

    def release(self) -> None:
        """Let held requests go."""
        (self.run_dir / "release").touch()


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what SMG reads: a tokenizer of one token a byte, and a chat template."""
    path = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 258}
    (path / "config.json").write_text(json.dumps(config))
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(names | {"chat_template": template}))
    return path


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Callable[..., RunningStack]]:
    """`start(BEHAVIOUR, FLAG...)` starts a stack on a free port."""
    started: list[RunningStack] = []

    def start(behaviour: str, *flags: str, nohup: bool = False) -> RunningStack:
        command = ["nohup"] if nohup else []
        command += [sys.executable, str(Path(__file__).with_name("run_stack.py")), behaviour, str(model)]
        command += ["--host", "127.0.0.1", *([] if "--port" in flags else ["--port", "0"]), *flags]
        with (tmp_path / "stdout").open("wb") as out, (tmp_path / "stderr").open("wb") as err:
            process = subprocess.Popen(command, stdout=out, stderr=err, env={**os.environ, "TMPDIR": str(tmp_path)})
        started.append(RunningStack(process, tmp_path))
        return started[-1]

    yield start
    for stack in started:
        if stack.process.poll() is None:
            stack.process.send_signal(signal.SIGKILL)
            stack.wait()
