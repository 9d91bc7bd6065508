"""From the gateway's request to what the ranks take, and everything that is refused on the way."""

from __future__ import annotations

import math
import random
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from tokenspeed.errors import RequestError
from tokenspeed.runtime.protocol import EngineInfo, SamplingParams

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would overflow float32."""

LONGEST_STOP_STRING = 4096
"""Characters. The gateway's search takes time quadratic in this: 100,000 of them cost it a second a token."""


@dataclass(frozen=True)
class Accepted:
    """A request that the engine can serve."""

    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    stop: tuple[str, ...]
    stream: bool
    keep_stop_token: bool
    skip_special_tokens: bool


class Intake:
    """Checks requests against one engine and fills in what they leave open."""

    def __init__(self, info: EngineInfo, seed: int) -> None:
        self._info = info
        self._seeds = random.Random(seed)
        self._capacity = min(info.max_model_len, info.num_blocks * info.block_size)

    def accept(self, request: pb.GenerateRequest) -> Accepted:
        """Translate a request.

        Raises:
            RequestError: when it asks for something that is not there, or cannot be served as it is.
        """
        params = request.sampling_params
        _refuse_unsupported(request)
        prompt = list(request.tokenized.input_ids)
        room = self._check_prompt(prompt)
        return Accepted(
            request_id=request.request_id or uuid.uuid4().hex,
            prompt=prompt,
            sampling=self._sampling(params, room),
            stop=_stop_strings(params.stop),
            stream=request.stream,
            keep_stop_token=params.no_stop_trim,
            skip_special_tokens=params.skip_special_tokens,
        )

    def _check_prompt(self, prompt: list[int]) -> int:
        """How many tokens may follow the prompt."""
        if not prompt:
            raise RequestError("the prompt is empty; send at least one token")
        self._check_ids("the prompt", prompt)
        room = self._capacity - len(prompt)
        if room > 0:
            return room
        if len(prompt) >= self._info.max_model_len:
            raise RequestError(
                f"the model's maximum context length is {self._info.max_model_len} tokens, but the prompt "
                f"alone has {len(prompt)}; send at most {self._capacity - 1}"
            )
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, but the KV cache holds {self._capacity}; "
            "shorten it, or start the server with a larger --max-total-tokens"
        )

    def _sampling(self, params: pb.SamplingParams, room: int) -> SamplingParams:
        temperature = self._value(params, "temperature", 1.0)
        if not (math.isfinite(temperature) and temperature >= 0):
            raise RequestError(f"temperature must be 0 or more, not {temperature:g}")
        top_p = self._value(params, "top_p", 1.0)
        if not 0 < top_p <= 1:
            raise RequestError(f"top_p must be above 0 and at most 1, not {top_p:g}")
        top_k = int(self._value(params, "top_k", 0))
        if top_k < -1:
            raise RequestError(f"top_k must be 1 or more, or 0 or -1 for all tokens, not {top_k}")
        max_new = params.max_new_tokens if params.HasField("max_new_tokens") else room
        if max_new < 1:
            raise RequestError("max_new_tokens must be 1 or more")
        if params.min_new_tokens > max_new:
            raise RequestError(f"min_new_tokens {params.min_new_tokens} is above max_new_tokens {max_new}")
        max_new = min(max_new, room)
        return SamplingParams(
            max_new_tokens=max_new,
            min_new_tokens=min(params.min_new_tokens, max_new),
            temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
            top_p=top_p,
            top_k=max(top_k, 0),
            seed=self._seed(params),
            stop_token_ids=self._stop_token_ids(params.stop_token_ids),
            ignore_eos=params.ignore_eos,
        )

    def _value(self, params: pb.SamplingParams, name: str, default: float) -> float:
        """What the request says, else the model's own default, else OpenAI's."""
        if params.HasField(name):
            value: float = getattr(params, name)
            return value
        return self._info.default_sampling.get(name, default)

    def _seed(self, params: pb.SamplingParams) -> int:
        """The request's 64 bits as a signed number, or a fresh seed."""
        bits = params.sampling_seed if params.HasField("sampling_seed") else self._seeds.getrandbits(64)
        return bits - (1 << 64) if bits >> 63 else bits

    def _stop_token_ids(self, ids: Iterable[int]) -> tuple[int, ...]:
        unique = tuple(dict.fromkeys(ids))
        self._check_ids("stop_token_ids", unique)
        return unique

    def _check_ids(self, where: str, ids: Sequence[int]) -> None:
        last = self._info.vocab_size - 1
        if ids and max(ids) > last:
            raise RequestError(f"{where} has the token id {max(ids)}, but the model's ids end at {last}")


def _stop_strings(stop: Iterable[str]) -> tuple[str, ...]:
    unique = tuple(dict.fromkeys(stop))
    if "" in unique:
        raise RequestError("stop strings must not be empty")
    longest = max(map(len, unique), default=0)
    if longest > LONGEST_STOP_STRING:
        raise RequestError(f"a stop string has {longest} characters; send at most {LONGEST_STOP_STRING}")
    return unique


def _refuse_unsupported(request: pb.GenerateRequest) -> None:
    params = request.sampling_params
    unsupported = {
        "n above 1": params.n > 1,
        "min_p": params.min_p != 0,
        "frequency_penalty": params.frequency_penalty != 0,
        "presence_penalty": params.presence_penalty != 0,
        "repetition_penalty": params.HasField("repetition_penalty") and params.repetition_penalty != 1,
        "logit_bias": bool(params.logit_bias),
        "structured output (regex, json_schema, ebnf_grammar, structural_tag)": bool(params.WhichOneof("constraint")),
        "custom_params": bool(params.custom_params.fields),
        "logprobs": request.return_logprob or bool(request.token_ids_logprob),
        "multimodal input": bool(request.mm_inputs.items),
        "disaggregated prefill or encode": request.HasField("kv_bootstrap_info")
        or request.HasField("encode_bootstrap_info"),
        "data_parallel_rank above 0": request.data_parallel_rank > 0,
    }
    for name, asked in unsupported.items():
        if asked:
            raise RequestError(f"this server does not support {name}; leave it out")
