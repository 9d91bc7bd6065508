"""What the front tells about its engine: model, server and load, for the gateway and for people."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
from google.protobuf import struct_pb2, timestamp_pb2
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

import tokenspeed
from tokenspeed.runtime.config import Config
from tokenspeed.runtime.protocol.state import FIRST_WEIGHT_VERSION, EngineInfo, Loads


@dataclass(frozen=True)
class Description:
    """A ready engine. Every method takes what changes while it runs."""

    config: Config
    engine: EngineInfo
    control_url: str
    started: float = field(default_factory=time.time)

    @property
    def served_model_name(self) -> str:
        return self.config.model.served_model_name or self.config.model.model

    @property
    def cache_tokens(self) -> int:
        return self.engine.num_blocks * self.engine.block_size

    def model_info(self) -> pb.GetModelInfoResponse:
        engine = self.engine
        return pb.GetModelInfoResponse(
            model_path=engine.model_path,
            tokenizer_path=engine.tokenizer_path,
            served_model_name=self.served_model_name,
            model_type=engine.model_type,
            architectures=engine.architectures,
            max_context_length=engine.max_model_len,
            max_req_input_len=min(engine.max_model_len, self.cache_tokens) - 1,
            vocab_size=engine.vocab_size,
            eos_token_ids=engine.eos_token_ids,
            pad_token_id=-1 if engine.pad_token_id is None else engine.pad_token_id,
            bos_token_id=-1 if engine.bos_token_id is None else engine.bos_token_id,
            weight_version=FIRST_WEIGHT_VERSION,
            default_sampling_params_json=self._sampling_defaults(),
            model_dtype=engine.dtype,
        )

    def server_info(self, loads: Loads, active: int) -> pb.GetServerInfoResponse:
        arguments = struct_pb2.Struct()
        arguments.update(self._arguments())
        return pb.GetServerInfoResponse(
            server_args=arguments,
            active_requests=active,
            is_paused=loads.paused,
            uptime_seconds=time.time() - self.started,
            max_total_num_tokens=self.cache_tokens,
            tokenspeed_version=tokenspeed.__version__,
            start_time=timestamp_pb2.Timestamp(seconds=int(self.started)),
        )

    def loads(self, loads: Loads) -> pb.GetLoadsResponse:
        total = loads.total_blocks or self.engine.num_blocks
        active = loads.used_blocks / total
        usage = (loads.used_blocks + loads.cached_blocks) / total
        queried = loads.prefix_queried_tokens
        rank = pb.SchedulerLoad(
            dp_rank=0,
            num_running_reqs=loads.running,
            num_waiting_reqs=loads.waiting,
            num_total_reqs=loads.running + loads.waiting,
            num_used_tokens=(loads.used_blocks + loads.cached_blocks) * self.engine.block_size,
            max_total_num_tokens=self.cache_tokens,
            max_running_requests=self.config.scheduler.max_num_seqs,
            num_waiting_uncached_tokens=loads.waiting_tokens,
            token_usage=usage,
            active_token_usage=active,
            cache_hit_rate=loads.prefix_hit_tokens / queried if queried else 0.0,
            utilization=loads.running / self.config.scheduler.max_num_seqs,
            memory=pb.MemoryMetrics(token_capacity=self.cache_tokens),
            queues=pb.QueueMetrics(
                waiting=0 if loads.paused else loads.waiting, paused=loads.waiting if loads.paused else 0
            ),
        )
        aggregate = pb.AggregateMetrics(
            total_running_reqs=loads.running,
            total_waiting_reqs=loads.waiting,
            total_reqs=loads.running + loads.waiting,
            avg_token_usage=usage,
            avg_utilization=rank.utilization,
        )
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=tokenspeed.__version__,
            dp_rank_count=1,
            loads=[rank],
            aggregate=aggregate,
        )

    def as_json(self, loads: Loads, generation: int) -> dict[str, Any]:
        return {
            "version": tokenspeed.__version__,
            "uptime": round(time.time() - self.started, 3),
            "generation": generation,
            "server_args": self._arguments(),
            "engine": msgspec.to_builtins(self.engine),
            "loads": msgspec.to_builtins(loads),
        }

    def _sampling_defaults(self) -> str:
        """The model's own defaults, which the gateway sends back where a client leaves them open."""
        own = self.engine.default_sampling
        named = {name: int(value) if name == "top_k" else value for name, value in own.items()}
        return json.dumps(named) if named else ""

    def _arguments(self) -> dict[str, Any]:
        """Named settings only, so that no secret of the configuration is told."""
        config = self.config
        return {
            "rl.control_url": self.control_url,
            "model_path": self.engine.model_path,
            "served_model_name": self.served_model_name,
            "tp_size": self.engine.tensor_parallel_size,
            "dp_size": 1,
            "pp_size": 1,
            "max_model_len": self.engine.max_model_len,
            "max_num_seqs": config.scheduler.max_num_seqs,
            "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
            "block_size": self.engine.block_size,
            "enable_prefix_caching": config.cache.enable_prefix_caching,
            "allow_reload_forward": config.reload.allow_reload_forward,
            "weight_version": FIRST_WEIGHT_VERSION,
        }
