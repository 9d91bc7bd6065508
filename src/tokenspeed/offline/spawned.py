"""An engine whose ranks are processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import zmq

from tokenspeed.runtime.config import Config
from tokenspeed.runtime.protocol.calls import Stop, ToEngine
from tokenspeed.runtime.protocol.message import Message
from tokenspeed.runtime.protocol.reports import Failed, Ready, ToFront
from tokenspeed.runtime.protocol.state import EngineInfo, ReloadStatus, Sign
from tokenspeed.server.calls import WAITING_STATES
from tokenspeed.server.errors import EngineLost
from tokenspeed.server.judge import Judge, in_start
from tokenspeed.server.link import bind_address
from tokenspeed.server.ranks import FAILED_MESSAGE_GRACE, RANK_COMMAND
from tokenspeed_kernel.overrides import assignments

POLL_MS = 200
"""Longest wait before the processes are looked at."""

EXIT_TIMEOUT_S = 10.0
"""Seconds that the ranks get to leave after `Stop`."""


class SpawnedEngine:
    """Ranks as `ts serve` starts them, and the sockets to rank 0.

    The kernel ends the ranks when the thread that started them ends.
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._config = config
        self._run_dir = run_dir
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._victims: dict[int, EngineLost] = {}
        """What ranks said that others left."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)
        self._sign_decoder = msgspec.msgpack.Decoder(Sign)
        self._serves = False
        self._reloads = False

    def start(self) -> EngineInfo:
        """See `Engine`."""
        config = following_contexts(self._config)
        (self._run_dir / "config.json").write_bytes(msgspec.json.encode(config))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._to_rank0 = self._open(zmq.PUSH, "to_rank0")
        self._from_ranks = self._open(zmq.PULL, "from_rank0")
        self._signs = self._open(zmq.PULL, "signs")
        self._judge = Judge(self._config.parallel.tensor_parallel_size, self._limit, self._pid)
        lifeline = (sys.executable, "-m", "tokenspeed.lifeline", str(os.getpid()))
        for rank in range(self._config.parallel.tensor_parallel_size):
            command = [*lifeline, *RANK_COMMAND, "--run-dir", str(self._run_dir), "--rank", str(rank)]
            # A process group of its own: Ctrl-C reaches this process only.
            self._ranks.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0))
        while True:
            for message in self.receive():
                if isinstance(message, Ready):
                    self._serves = True
                    return message.info

    def send(self, message: ToEngine) -> None:
        """See `Engine`."""
        with suppress(zmq.Again):  # rank 0 has hung up, which `receive` tells
            self._to_rank0.send(self._encoder.encode(message), zmq.NOBLOCK)

    def receive(self) -> Sequence[Message]:
        """See `Engine`."""
        messages = self._read(POLL_MS)
        if not messages and (self._victims or any(rank.poll() is not None for rank in self._ranks)):
            # A rank that ends by itself has mostly said why.
            messages = self._read(int(FAILED_MESSAGE_GRACE * 1000))
            if not messages:
                for rank in self._ranks:
                    rank.poll()
                raise self._loss()
        while self._signs.poll(0):
            self._judge.hear(self._sign_decoder.decode(self._signs.recv()))
        lost = self._judge.look()
        if lost is not None:
            raise lost if self._serves else in_start(lost)
        return messages

    def close(self) -> None:
        """See `Engine`."""
        self.send(Stop())
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        for rank in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                rank.wait(max(0.0, deadline - time.monotonic()))
        for rank in self._ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
        self._ranks.clear()
        self._victims.clear()
        self._to_rank0.close(linger=0)
        self._from_ranks.close(linger=0)
        self._signs.close(linger=0)
        self._context.term()

    def _open(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        # No high-water mark: a send never blocks, and nothing is dropped.
        socket.set_hwm(0)
        socket.bind(bind_address(self._run_dir, name))
        return socket

    def _read(self, wait_ms: int) -> list[Message]:
        messages: list[Message] = []
        if self._from_ranks.poll(wait_ms):
            while self._from_ranks.poll(0):
                message = self._decoder.decode(self._from_ranks.recv())
                if isinstance(message, Failed):
                    self._failed(message)
                    continue
                if isinstance(message, ReloadStatus):
                    self._reloads = message.state not in WAITING_STATES
                messages.append(message)
        return messages

    def _failed(self, message: Failed) -> None:
        error = EngineLost(message.message, rank=message.rank, exit_code=message.exit_code)
        if not message.is_victim:
            raise error
        self._victims[message.rank] = error

    def _limit(self) -> float:
        """Seconds that the ranks may stand still now."""
        if not self._serves:
            return self._config.serve.start_timeout
        return self._config.reload.reload_rank_timeout if self._reloads else self._config.serve.step_timeout

    def _pid(self, rank: int) -> int:
        return self._ranks[rank].pid

    def _loss(self) -> EngineLost:
        """Who ended first; a rank that others left is not it, if one of these is known."""
        ended = {rank: code for rank, p in enumerate(self._ranks) if (code := p.returncode) is not None}
        culprits = ended.keys() - self._victims.keys()
        if not culprits and self._victims:
            return next(iter(self._victims.values()))
        rank = min(culprits)
        code = ended[rank]
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return EngineLost(f"rank {rank} ended with {how}; see its messages above", rank=rank)


def following_contexts(config: Config) -> Config:
    """`config` with the kernels that an `override` around the caller asks for, which ranks cannot see."""
    kernel = (*(config.kernels.kernel or ()), *assignments())
    return replace(config, kernels=replace(config.kernels, kernel=kernel or None))
