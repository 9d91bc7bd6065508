"""The gRPC service that the gateway speaks: `TokenSpeedScheduler` of smg-grpc-proto."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc as rpc

from tokenspeed.errors import RequestError, TokenSpeedError
from tokenspeed.runtime.protocol.calls import FlushCache, StartProfile, StopProfile
from tokenspeed.server.cache_events import batches
from tokenspeed.server.chunks import TextCuts
from tokenspeed.server.client import EngineClient
from tokenspeed.server.errors import EngineUnavailable, QueueFull, SubscriberTooSlow, UnsupportedCall
from tokenspeed.server.grammars import GrammarCompiler
from tokenspeed.server.info import Description
from tokenspeed.server.journal import Entry
from tokenspeed.server.load_record import LoadRecords
from tokenspeed.server.profiles import ProfileRequest
from tokenspeed.server.replies import aborted, responses
from tokenspeed.server.requests import Accepted, Intake
from tokenspeed.server.stops import StopWatcher, TokenizerFile
from tokenspeed.server.streams import TokenStream
from tokenspeed.server.tokenizer_bundle import chunks, read_bundle

SERVICE_NAME = "tokenspeed.grpc.scheduler.TokenSpeedScheduler"

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
    # A request may be held for minutes; the gateway's pings must not end its connection meanwhile.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
    ("grpc.http2.max_ping_strikes", 0),
)


class EngineNotReady(EngineUnavailable):
    """What everything but health answers until the engine is up."""


class AbortedEarly(Exception):
    """A request was aborted before the engine knew of it."""


class SchedulerServicer(rpc.TokenSpeedSchedulerServicer):
    """The servicer. `open` gives it the engine once that is ready."""

    def __init__(self, client: EngineClient, grammars: GrammarCompiler) -> None:
        self._client = client
        self._grammars = grammars
        self._compiling: dict[str, set[asyncio.Task[bytes]]] = {}
        self._numbers = itertools.count(1)
        self._ready: tuple[Description, Intake, TokenizerFile] | None = None

    def open(self, description: Description, intake: Intake, tokenizer_file: TokenizerFile) -> None:
        self._ready = description, intake, tokenizer_file

    # ---- generation ----

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        entries: list[Entry] = []
        try:
            _, intake, tokenizer_file = self._engine()
            accepted = intake.accept(request)
            news = asyncio.Event()
            watchers = await _stop_watchers(accepted, tokenizer_file)
            cuts = await _text_cuts(accepted, tokenizer_file)
            try:
                grammar = await self._compiled(accepted)
            except AbortedEarly:
                for index in range(len(accepted.answers)):
                    yield aborted(accepted, index)
                return
            streams = [TokenStream(watcher, news) for watcher in watchers]
            entries = self._entries(accepted)
            self._client.submit(entries, streams, grammar)
            async for response in responses(accepted, entries, streams, news, cuts):
                yield response
        except TokenSpeedError as error:
            await _refuse(context, error)
        finally:
            # Reached as well when the client goes away: the engine must not go on for nobody.
            for entry in entries:
                self._client.leave(entry.request_id)

    async def _compiled(self, accepted: Accepted) -> bytes | None:
        """The compiled form of the request's grammar.

        Raises:
            AbortedEarly: when the request is aborted meanwhile.
            TokenSpeedError: when there is none.
        """
        if accepted.grammar is None:
            return None
        self._client.check_open()
        compiling = asyncio.create_task(self._grammars.compile(accepted.grammar))
        same_id = self._compiling.setdefault(accepted.request_id, set())
        same_id.add(compiling)
        try:
            await asyncio.wait([compiling])
            if compiling.cancelled():
                raise AbortedEarly
            return compiling.result()
        finally:
            compiling.cancel()
            same_id.discard(compiling)
            if not same_id:
                self._compiling.pop(accepted.request_id, None)

    def _entries(self, accepted: Accepted) -> list[Entry]:
        """One for each answer. The first computes the prompt, and the others find it in the prefix cache."""
        ids = [f"{accepted.request_id}-{next(self._numbers)}" for _ in accepted.answers]
        return [
            Entry(
                engine_id,
                accepted.request_id,
                accepted.prompt,
                sampling,
                index=index,
                shares_prompt_with=ids[0] if index else None,
            )
            for index, (engine_id, sampling) in enumerate(zip(ids, accepted.answers, strict=True))
        ]

    async def Abort(self, request: pb.AbortRequest, _: grpc.aio.ServicerContext) -> pb.AbortResponse:
        compiling = self._compiling.get(request.request_id, set())
        for task in compiling:
            task.cancel()
        known = self._client.abort(request.request_id) or bool(compiling)
        return pb.AbortResponse(success=known, message="" if known else "no such request is running")

    # ---- state ----

    async def HealthCheck(self, _request: pb.HealthCheckRequest, _: grpc.aio.ServicerContext) -> pb.HealthCheckResponse:
        try:
            self._client.check_health()
        except EngineUnavailable as error:
            return pb.HealthCheckResponse(healthy=False, message=str(error))
        return pb.HealthCheckResponse(healthy=True)

    async def GetModelInfo(
        self, _: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        return (await self._description(context)).model_info()

    async def GetServerInfo(
        self, _: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        description = await self._description(context)
        return description.server_info(self._client.loads, len(self._client.journal))

    async def GetLoads(self, _: pb.GetLoadsRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadsResponse:
        return (await self._description(context)).loads(self._client.loads)

    async def FlushCache(
        self, _: common.FlushCacheRequest, context: grpc.aio.ServicerContext
    ) -> common.FlushCacheResponse:
        try:
            body = await self._client.call(FlushCache)
        except EngineUnavailable as error:
            await _refuse(context, error)
        return common.FlushCacheResponse(success=bool(body.get("success")), message=str(body.get("message", "")))

    # ---- profiling ----

    async def StartProfile(
        self, request: common.StartProfileRequest, context: grpc.aio.ServicerContext
    ) -> common.ProfileResponse:
        try:
            body = await self._client.call(StartProfile, **ProfileRequest.from_proto(request).fields())
        except TokenSpeedError as error:
            await _refuse(context, error)
        return common.ProfileResponse(success=bool(body.get("success")), message=str(body.get("message", "")))

    async def StopProfile(
        self, _: common.StopProfileRequest, context: grpc.aio.ServicerContext
    ) -> common.ProfileResponse:
        try:
            body = await self._client.call(StopProfile)
        except EngineUnavailable as error:
            await _refuse(context, error)
        return common.ProfileResponse(success=bool(body.get("success")), message=str(body.get("message", "")))

    # ---- for gateways ----

    async def GetTokenizer(
        self, _: common.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[common.GetTokenizerChunk]:
        description = await self._description(context)
        try:
            bundle = await asyncio.to_thread(read_bundle, description.engine.tokenizer_path)
        except TokenSpeedError as error:
            await _refuse(context, error)
        for chunk in chunks(bundle):
            yield chunk

    async def SubscribeKvEvents(
        self, request: common.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[common.KvEventBatch]:
        description = await self._description(context)
        if request.start_sequence_number:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, "no history is kept; subscribe from 0 for a snapshot")
        # A subscriber takes a server that keeps silent for dead, and rank 0 may be busy.
        await context.send_initial_metadata(())
        records = LoadRecords(
            lambda: description.loads(self._client.loads).loads[0], self._client.silence, self._client.pending_tokens
        )
        hub = self._client.cache_events
        hub.block_size = description.engine.block_size
        subscription = hub.subscribe()
        try:
            async for batch in batches(subscription, records, early=request.load_records_before_first_batch):
                yield batch
        except TokenSpeedError as error:
            await _refuse(context, error)
        finally:
            hub.leave(subscription)

    def _engine(self) -> tuple[Description, Intake, TokenizerFile]:
        if self._ready is None:
            raise EngineNotReady("the engine is still starting; try again when it is ready")
        return self._ready

    async def _description(self, context: grpc.aio.ServicerContext) -> Description:
        try:
            return self._engine()[0]
        except EngineNotReady as error:
            await _refuse(context, error)


class GrpcServer:
    """The servicer and the standard health service on one loopback port."""

    def __init__(self, scheduler: SchedulerServicer) -> None:
        self._scheduler = scheduler
        self._health = health.aio.HealthServicer()

    async def start(self) -> int:
        """Listen, not serving yet, and return the port."""
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        rpc.add_TokenSpeedSchedulerServicer_to_server(self._scheduler, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        await self.set_serving(False)
        port: int = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return port

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self, grace: float) -> None:
        """End, after up to `grace` seconds for what still runs."""
        await self._server.stop(grace)


async def _stop_watchers(accepted: Accepted, file: TokenizerFile) -> list[StopWatcher | None]:
    """One for each answer; None where the request has no stop strings."""
    if not accepted.stop:
        return [None] * len(accepted.answers)
    tokenizer = await file.load()
    return [
        StopWatcher(
            tokenizer,
            accepted.stop,
            skip_special_tokens=accepted.skip_special_tokens,
            not_before=sampling.min_new_tokens,
        )
        for sampling in accepted.answers
    ]


async def _text_cuts(accepted: Accepted, file: TokenizerFile) -> list[TextCuts | None]:
    """One for each answer that is streamed with log-probabilities; None for others."""
    if not accepted.stream or accepted.answers[0].logprobs is None:
        return [None] * len(accepted.answers)
    try:
        tokenizer = await file.load()
    except RequestError:
        return [None] * len(accepted.answers)  # without a tokenizer a client can only want the ids
    skip = accepted.skip_special_tokens
    return [TextCuts(tokenizer, accepted.stop, skip_special_tokens=skip) for _ in accepted.answers]


async def _refuse(context: grpc.aio.ServicerContext, error: TokenSpeedError) -> NoReturn:
    """End the call with the status that fits, which the gateway turns into an HTTP status."""
    match error:
        case UnsupportedCall():
            code = grpc.StatusCode.UNIMPLEMENTED
        case RequestError():
            code = grpc.StatusCode.INVALID_ARGUMENT
        case QueueFull():
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
        case EngineUnavailable():
            code = grpc.StatusCode.UNAVAILABLE
        case SubscriberTooSlow():
            code = grpc.StatusCode.DATA_LOSS
        case _:
            code = grpc.StatusCode.INTERNAL
    await context.abort(code, str(error))
    raise AssertionError("abort always raises")
