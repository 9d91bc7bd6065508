"""The load that goes with KV cache events, so that a gateway need not ask for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

TICK = 0.1
"""Seconds after which a changed load is told without any event."""

HEARTBEAT = 1.0
"""Seconds after which an unchanged one is."""

RESOLUTION = 0.005
"""Share of the KV cache by which its use must change to be told."""


class LoadRecords:
    """The records of one subscriber, numbered.

    `loads` gives what `GetLoads` answers now. `silence` are the seconds for which rank 0 says nothing although it
    has work and nothing holds it; None when that cannot be told. `pending` are the tokens of prompts of which no
    answer has begun.
    """

    def __init__(
        self,
        loads: Callable[[], pb.SchedulerLoad],
        silence: Callable[[], float | None],
        pending: Callable[[], int],
    ) -> None:
        self._loads = loads
        self._silence = silence
        self._pending = pending
        self._sample = 0
        self._last: tuple[Any, ...] = ()
        self._told = 0.0

    def due(self) -> bool:
        """Whether a record is to be sent by itself."""
        return time.monotonic() - self._told >= HEARTBEAT or self._core(self._make()) != self._last

    def next(self, *, load_only: bool) -> common.EngineLoad:
        """The record of this moment."""
        record = self._make()
        self._last = self._core(record)
        self._told = time.monotonic()
        self._sample += 1
        record.sample = self._sample
        record.load_only = load_only
        return record

    def _make(self) -> common.EngineLoad:
        load, silence = self._loads(), self._silence()
        return common.EngineLoad(
            running_requests=load.num_running_reqs,
            waiting_requests=load.num_waiting_reqs,
            waiting_uncached_tokens=load.num_waiting_uncached_tokens,
            token_usage=load.token_usage,
            active_token_usage=load.active_token_usage,
            gen_throughput=load.gen_throughput,
            max_running_requests=load.max_running_requests,
            cache_hit_rate=load.cache_hit_rate,
            num_used_tokens=load.num_used_tokens,
            max_total_num_tokens=load.max_total_num_tokens,
            engine_silence_ms=None if silence is None else int(silence * 1000),
            engine_reports_steps=True,
            prefill_pending_tokens=self._pending(),
        )

    @staticmethod
    def _core(record: common.EngineLoad) -> tuple[Any, ...]:
        """What routing depends on, as coarse as it needs to be."""
        return (
            record.running_requests,
            record.waiting_requests,
            record.waiting_uncached_tokens,
            record.prefill_pending_tokens,
            round(record.token_usage / RESOLUTION),
            round(record.active_token_usage / RESOLUTION),
            record.engine_silence_ms // 1000 if record.HasField("engine_silence_ms") else None,
        )
