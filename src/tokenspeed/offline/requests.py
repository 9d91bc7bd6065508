"""From prompts and parameters to requests, by the very checks that a server makes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import msgspec
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from tokenspeed.errors import RequestError
from tokenspeed.offline.params import SamplingParams
from tokenspeed.runtime.protocol import sampling
from tokenspeed.runtime.protocol.state import EngineInfo
from tokenspeed.server.parameters import MOST_TOP_LOGPROBS
from tokenspeed.server.requests import Intake

SAME_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "regex",
)
RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "ebnf": "ebnf_grammar"}

CONSTRAINTS = ("regex", "json_schema", "ebnf", "structural_tag")
"""The wire has room for one of them, and would keep the last one without a word."""


class OfflineIntake:
    """Turns what users say into what ranks take."""

    def __init__(self, info: EngineInfo, seed: int) -> None:
        self._intake = Intake(info, seed)

    def accept(self, prompt: Sequence[int], params: SamplingParams) -> list[sampling.SamplingParams]:
        """The parameters of each of the `n` answers.

        Raises:
            RequestError: when the request cannot be served as it is.
        """
        request = _request(prompt, params)
        if params.n < 1:
            raise RequestError(f"n must be 1 or more, not {params.n}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and not (isinstance(value, int) and 0 <= value <= MOST_TOP_LOGPROBS):
                raise RequestError(f"{name} must be between 0 and {MOST_TOP_LOGPROBS}, not {value}")
        first, *others = self._intake.accept(request).answers
        return [msgspec.structs.replace(first, prompt_logprobs=params.prompt_logprobs), *others]


def _request(prompt: Sequence[int], params: SamplingParams) -> pb.GenerateRequest:
    constraints = [name for name in CONSTRAINTS if getattr(params, name) is not None]
    if len(constraints) > 1:
        raise RequestError(f"an answer follows one grammar, not {' and '.join(constraints)}; leave all but one out")
    fields = {name: getattr(params, name) for name in SAME_NAMES}
    fields |= {theirs: getattr(params, ours) for ours, theirs in RENAMED.items()}
    try:
        fields["json_schema"], fields["structural_tag"] = _json(params.json_schema), _json(params.structural_tag)
        sampling = pb.SamplingParams(
            **{name: value for name, value in fields.items() if value is not None},
            n=params.n,
            stop=params.stops,
            stop_token_ids=params.stop_token_ids,
            skip_special_tokens=params.skip_special_tokens,
        )
        if params.seed is not None:
            sampling.sampling_seed = params.seed % 2**64
        if params.logit_bias:
            sampling.logit_bias.update({str(token): value for token, value in params.logit_bias.items()})
        return pb.GenerateRequest(
            request_id="offline",
            tokenized=pb.TokenizedInput(input_ids=prompt),
            sampling_params=sampling,
            return_logprob=params.logprobs is not None,
            top_logprobs_num=params.logprobs or 0,
        )
    except (TypeError, ValueError, AttributeError) as error:  # a value of the wrong type, or out of its range
        raise RequestError(f"the request has a value that cannot be right: {error}") from error


def _json(value: str | Mapping[str, object] | None) -> str | None:
    return json.dumps(value) if isinstance(value, Mapping) else value
