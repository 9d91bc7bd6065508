"""What a client is told of its request: chunks while it streams, and one completion for each answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from tokenspeed.errors import TokenSpeedError
from tokenspeed.runtime.protocol.reports import TokenLogprobs
from tokenspeed.server.chunks import Chunk, TextCuts, Unsent
from tokenspeed.server.journal import Entry
from tokenspeed.server.requests import Accepted
from tokenspeed.server.streams import TokenStream, Update, updates


async def responses(
    accepted: Accepted,
    entries: Sequence[Entry],
    streams: Sequence[TokenStream],
    news: asyncio.Event,
    cuts: Sequence[TextCuts | None],
) -> AsyncIterator[pb.GenerateResponse]:
    """All responses to one request.

    While it streams, those of its answers come mixed, each with the index of its answer. Otherwise there is one
    for each answer, in order: the gateway numbers them as they come. A stop token counts as generated, but is
    sent only on request. `cuts` says of each answer where it may be cut into chunks, None that it may be anywhere.

    Raises:
        TokenSpeedError: when one of the answers cannot be finished.
    """
    generated = [0] * len(entries)
    unsent = [Unsent(cut) for cut in cuts]
    held: list[pb.GenerateResponse] = []
    async for index, update in updates(streams, news):
        if update.finish_reason == "error":
            raise TokenSpeedError(update.error or "the engine could not go on with this request")
        entry, new = entries[index], list(update.token_ids)
        if update.matched_token is not None and accepted.keep_stop_token:
            new.append(update.matched_token)
        generated[index] += update.generated
        if accepted.stream:
            for token_ids, logprobs in _chunks(accepted, unsent[index], new, update):
                chunk = pb.GenerateStreamChunk(
                    token_ids=token_ids,
                    prompt_tokens=len(accepted.prompt),
                    completion_tokens=generated[index],
                    cached_tokens=entry.cached_tokens,
                    output_logprobs=_logprobs(token_ids, logprobs),
                    index=index,
                    weight_version=update.weight_version,
                )
                yield pb.GenerateResponse(request_id=accepted.request_id, chunk=chunk)
        if update.finish_reason is not None:
            complete = _complete(accepted, entry, update, generated[index])
            response = pb.GenerateResponse(request_id=accepted.request_id, complete=complete)
            if accepted.stream:
                yield response
            else:
                held.append(response)
    for response in sorted(held, key=lambda each: each.complete.index):
        yield response


def aborted(accepted: Accepted, index: int) -> pb.GenerateResponse:
    """The only response to an answer that was aborted before the engine knew of it."""
    complete = pb.GenerateComplete(finish_reason="abort", prompt_tokens=len(accepted.prompt), index=index)
    return pb.GenerateResponse(request_id=accepted.request_id, complete=complete)


def _chunks(accepted: Accepted, unsent: Unsent, token_ids: list[int], update: Update) -> list[Chunk]:
    """The chunks to send now that these tokens have come."""
    chunks = [unsent.add(token_ids, update.logprobs)]
    if update.finish_reason is not None:
        hidden = update.matched_string is not None and not accepted.keep_stop_token
        chunks += unsent.rest(stopped=hidden)
    return [chunk for chunk in chunks if chunk[0]]


def _complete(accepted: Accepted, entry: Entry, last: Update, completion_tokens: int) -> pb.GenerateComplete:
    output_ids = list(entry.tokens)
    matched: dict[str, Any] = {}
    if last.matched_token is not None:
        matched["matched_token_id"] = last.matched_token
        if accepted.keep_stop_token:
            output_ids.append(last.matched_token)
    if last.matched_string is not None:
        matched["matched_stop_str"] = last.matched_string
    return pb.GenerateComplete(
        output_ids=output_ids,
        finish_reason=last.finish_reason,
        prompt_tokens=len(accepted.prompt),
        completion_tokens=completion_tokens,
        cached_tokens=entry.cached_tokens,
        output_logprobs=_logprobs(output_ids, entry.logprobs),
        index=entry.index,
        weight_version=last.weight_version,
        **matched,
    )


def _logprobs(token_ids: Sequence[int], found: Sequence[TokenLogprobs]) -> pb.OutputLogProbs | None:
    """Those of the tokens that are sent; None where none were asked for."""
    if not found:
        return None
    sent = found[: len(token_ids)]
    top = [pb.TopLogProbs(values=each.top_logprobs, token_ids=each.top_ids) for each in sent if each.top_ids]
    return pb.OutputLogProbs(token_logprobs=[each.logprob for each in sent], token_ids=token_ids, top_logprobs=top)
