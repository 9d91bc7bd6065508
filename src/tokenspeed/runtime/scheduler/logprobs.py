"""Which log-probabilities of a step belong to which request, and what its outputs tell of them."""

from __future__ import annotations

import msgspec

from tokenspeed.runtime.protocol.reports import RequestOutput, TokenLogprobs
from tokenspeed.runtime.scheduler.batch import Batch, StepLogprobs
from tokenspeed.runtime.scheduler.request import Request


def by_request(batch: Batch, logprobs: StepLogprobs | None) -> dict[str, TokenLogprobs]:
    """Keep what is known of prompts with their requests; what belongs to the sampled ids, by request id."""
    if logprobs is None:
        return {}
    for index, found in logprobs.prompt.items():
        row = batch.rows[index]
        if row.request.prompt_logprobs is not None:
            row.request.prompt_logprobs[row.start + 1 : row.start + 1 + len(found)] = found
    requests = [row.request for row in batch.rows if row.samples]
    return {requests[index].request_id: found for index, found in logprobs.sampled.items()}


def with_logprobs(output: RequestOutput, request: Request, sampled: TokenLogprobs | None) -> RequestOutput:
    """The output with what was asked for; the prompt's go out once."""
    prompt, request.prompt_logprobs = request.prompt_logprobs, None
    return msgspec.structs.replace(output, logprobs=[] if sampled is None else [sampled], prompt_logprobs=prompt)
