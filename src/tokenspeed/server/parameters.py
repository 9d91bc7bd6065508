"""The sampling parameters of a request: what they may be, and what stands in for those that are left open."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from tokenspeed.errors import RequestError
from tokenspeed.runtime.protocol.sampling import SamplingParams
from tokenspeed.runtime.protocol.state import EngineInfo

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would overflow float32."""

LARGEST_PENALTY = 2.0
"""Of presence and frequency, either way, as in the OpenAI API."""

LARGEST_BIAS = 100.0
"""Either way, as in the OpenAI API: it all but forbids or forces a token."""

REPETITION_RANGE = (0.01, 100.0)
"""Far wider than what is of use, and safe in float32."""

LONGEST_ID = 20
"""Digits of a token id: longer ones need not be read to be out of range."""

MOST_TOP_LOGPROBS = 128
"""Likeliest tokens that come with each token; the OpenAI API has 20."""


class ParameterCheck:
    """Reads sampling parameters for one engine."""

    def __init__(self, info: EngineInfo) -> None:
        self._info = info

    def read(self, params: pb.SamplingParams, room: int) -> SamplingParams:
        """Translate them, all but seed, number of answers and stop strings. `room` tokens may follow the prompt.

        Raises:
            RequestError: when they are out of range or contradict each other.
        """
        temperature = self._number(params, "temperature", 1.0, 0.0, math.inf)
        top_k = int(self._number(params, "top_k", 0, -1, math.inf))
        max_new, min_new = _lengths(params, room)
        stop_token_ids = tuple(dict.fromkeys(params.stop_token_ids))
        check_ids("stop_token_ids", stop_token_ids, self._info.vocab_size)
        if min_new and len({*stop_token_ids, *self._info.eos_token_ids}) >= self._info.vocab_size:
            raise RequestError("stop_token_ids has every token, so min_new_tokens cannot be reached; drop one of them")
        return SamplingParams(
            max_new_tokens=max_new,
            min_new_tokens=min_new,
            temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
            top_p=self._top_p(params),
            top_k=max(top_k, 0),
            min_p=self._number(params, "min_p", 0.0, 0.0, 1.0),
            presence_penalty=self._number(params, "presence_penalty", 0.0, -LARGEST_PENALTY, LARGEST_PENALTY),
            frequency_penalty=self._number(params, "frequency_penalty", 0.0, -LARGEST_PENALTY, LARGEST_PENALTY),
            repetition_penalty=self._number(params, "repetition_penalty", 1.0, *REPETITION_RANGE),
            logit_bias=self._logit_bias(params.logit_bias),
            stop_token_ids=stop_token_ids,
            ignore_eos=params.ignore_eos,
        )

    def _value(self, params: pb.SamplingParams, name: str, default: float) -> float:
        """What the request says, else the model's own default, else `default`."""
        if params.HasField(name):
            value: float = getattr(params, name)
            return value
        return self._info.default_sampling.get(name, default)

    def _number(self, params: pb.SamplingParams, name: str, default: float, least: float, most: float) -> float:
        value = self._value(params, name, default)
        if math.isfinite(value) and least <= value <= most:
            return value
        bounds = f"{least:g} or more" if most == math.inf else f"between {least:g} and {most:g}"
        raise RequestError(f"{name} must be {bounds}, not {value:g}")

    def _top_p(self, params: pb.SamplingParams) -> float:
        top_p = self._value(params, "top_p", 1.0)
        if not 0 < top_p <= 1:
            raise RequestError(f"top_p must be above 0 and at most 1, not {top_p:g}")
        return top_p

    def _logit_bias(self, sent: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
        """By token id; the wire has the ids as text."""
        bias: dict[int, float] = {}
        for key, value in sent.items():
            if not (key.isascii() and key.isdigit() and len(key) <= LONGEST_ID):
                raise RequestError(f"logit_bias has the key {key!r}; its keys are token ids")
            if not abs(value) <= LARGEST_BIAS:
                raise RequestError(f"logit_bias must be between -100 and 100, not {value:g}")
            token_id = int(key)
            if token_id in bias:
                raise RequestError(f"logit_bias has the token id {token_id} twice")
            bias[token_id] = value
        check_ids("logit_bias", list(bias), self._info.vocab_size)
        return tuple(sorted((token_id, value) for token_id, value in bias.items() if value))


def check_ids(where: str, ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids that the model does not have.

    Raises:
        RequestError: with the largest of them.
    """
    if ids and max(ids) >= vocab_size:
        raise RequestError(f"{where} has the token id {max(ids)}, but the model's ids end at {vocab_size - 1}")


def _lengths(params: pb.SamplingParams, room: int) -> tuple[int, int]:
    """Most and least new tokens; more than there is room for is cut to that."""
    most = params.max_new_tokens if params.HasField("max_new_tokens") else room
    if most < 1:
        raise RequestError("max_new_tokens must be 1 or more")
    if params.min_new_tokens > most:
        raise RequestError(f"min_new_tokens {params.min_new_tokens} is above max_new_tokens {most}")
    if params.min_new_tokens > room:
        raise RequestError(f"min_new_tokens is {params.min_new_tokens}, but only {room} tokens may follow this prompt")
    return min(most, room), params.min_new_tokens
