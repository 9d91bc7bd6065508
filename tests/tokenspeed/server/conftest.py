"""A front process with echo ranks, and the byte-level tokenizer that gives their ids a text."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.waiting import PATIENCE, until
from tokenspeed.runtime.config import Config

ECHO_FRONT = Path(__file__).with_name("echo_front.py")
SPECIAL = ("<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are bytes in the order of GPT-2's alphabet; 256 and 257 are the chat markers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    settings = {
        "chat_template": CHAT_TEMPLATE,
        "eos_token": SPECIAL[1],
        "tokenizer_class": "GPT2TokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 260}))
    return directory


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))


class FrontProcess:
    """A front under test, its status events and its addresses."""

    def __init__(self, run_dir: Path, config: Config, behaviour: dict[str, Any], cwd: Path | None = None) -> None:
        self.run_dir = run_dir
        (run_dir / "config.json").write_bytes(msgspec.json.encode(config))
        (run_dir / "echo.json").write_text(json.dumps(behaviour))
        read_fd, write_fd = os.pipe()
        command = [sys.executable, str(ECHO_FRONT), "--run-dir", str(run_dir), "--status-fd", str(write_fd)]
        with (run_dir / "front.log").open("wb") as log:
            self.process = subprocess.Popen(command, pass_fds=[write_fd], stderr=log, process_group=0, cwd=cwd)
        os.close(write_fd)
        self.status = os.fdopen(read_fd)
        self.events: list[dict[str, Any]] = []
        self.grpc_port = 0
        self.control_url = ""

    def wait_for(self, event: str) -> dict[str, Any]:
        """The next event of this kind; an AssertionError with the front's log when it never comes."""
        for line in self.status:
            self.events.append(json.loads(line))
            if self.events[-1]["event"] == event:
                return self.events[-1]
        raise AssertionError(f"no event {event!r}, but {self.events}; {self.log()}")

    def until_ready(self) -> FrontProcess:
        ready = self.wait_for("ready")
        self.grpc_port, self.control_url = ready["grpc_port"], ready["control_url"]
        return self

    def until_listening(self) -> FrontProcess:
        """The addresses are there before the engine is."""
        detail = self.wait_for("starting")["detail"]
        match = re.fullmatch(r"gRPC on 127\.0\.0\.1:(\d+), control on (http://\S+)", detail)
        assert match is not None, detail
        self.grpc_port, self.control_url = int(match[1]), match[2]
        return self

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(f"127.0.0.1:{self.grpc_port}")

    def received(self, kind: str) -> list[dict[str, Any]]:
        """The messages of this kind that rank 0 got so far."""
        return [message for message in self.received_all() if message["type"] == kind]

    def received_all(self) -> list[dict[str, Any]]:
        """All that rank 0 got so far, and the rank 0s before it."""
        path = self.run_dir / "received.jsonl"
        *lines, _ = (path.read_text() if path.exists() else "").split("\n")
        return [json.loads(line) for line in lines]

    def rank_pid(self, rank: int) -> int:
        return int((self.run_dir / f"rank{rank}.pid").read_text())

    def log(self) -> str:
        return (self.run_dir / "front.log").read_text()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)

    def let_go(self) -> None:
        """Let ranks go on that were told to wait."""
        (self.run_dir / "go").touch()

    def clean_up(self) -> None:
        self.process.kill()
        self.process.wait()
        self.status.close()


@pytest.fixture
def start_front(tokenizer_dir: Path) -> Iterator[Callable[..., FrontProcess]]:
    """Starts fronts: keyword arguments are the echo engine's behaviour."""
    yield from _fronts(tokenizer_dir)


@pytest.fixture(scope="module")
def start_shared_front(tokenizer_dir: Path) -> Iterator[Callable[..., FrontProcess]]:
    """As `start_front`, for a front that serves a whole module."""
    yield from _fronts(tokenizer_dir)


def _fronts(tokenizer_dir: Path) -> Iterator[Callable[..., FrontProcess]]:
    fronts: list[FrontProcess] = []
    with tempfile.TemporaryDirectory(prefix="ts-") as root:

        def start(config: Config | None = None, cwd: Path | None = None, **behaviour: Any) -> FrontProcess:
            run_dir = Path(root) / str(len(fronts))
            run_dir.mkdir()
            behaviour = {"tokenizer_path": str(tokenizer_dir), **behaviour}
            front = FrontProcess(run_dir, config or Config(), behaviour, cwd)
            fronts.append(front)
            return front

        yield start
        for front in fronts:
            front.clean_up()


@pytest.fixture
def generate_request(tokenizer: Tokenizer) -> Callable[..., pb.GenerateRequest]:
    """Builds requests: `generate_request("text", stream=True, temperature=0.5)`."""

    def build(text: str, *, stream: bool = False, request_id: str | None = None, **sampling: Any) -> pb.GenerateRequest:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        return pb.GenerateRequest(
            request_id=uuid.uuid4().hex if request_id is None else request_id,
            tokenized=pb.TokenizedInput(input_ids=ids),
            sampling_params=pb.SamplingParams(**sampling),
            stream=stream,
        )

    return build


@pytest.fixture
def eventually() -> Callable[[Callable[[], Any]], Any]:
    """Waits until a condition is true and returns its value."""
    return until
