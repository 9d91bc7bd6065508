"""From the gateway's request to what the ranks take, and everything that is refused on the way."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from tokenspeed.errors import RequestError
from tokenspeed.runtime.protocol.sampling import Grammar, GrammarKind, SamplingParams, choice_seed
from tokenspeed.runtime.protocol.state import EngineInfo
from tokenspeed.server.errors import UnsupportedCall
from tokenspeed.server.parameters import MOST_TOP_LOGPROBS, ParameterCheck, check_ids

LONGEST_STOP_STRING = 4096
"""Characters. The gateway's search takes time quadratic in this: 100,000 of them cost it a second a token."""

MOST_STOP_STRINGS = 64
"""The text of each token is searched for all of them."""

LONGEST_GRAMMAR = 1_000_000
"""Characters of its source."""

GRAMMAR_KINDS: dict[str, GrammarKind] = {
    "regex": "regex",
    "json_schema": "json_schema",
    "ebnf_grammar": "ebnf",
    "structural_tag": "structural_tag",
}
"""By the name on the wire."""

MOST_ANSWERS = 128
"""To one request, as in the OpenAI API."""


@dataclass(frozen=True)
class Accepted:
    """A request that the engine can serve."""

    request_id: str
    prompt: list[int]
    answers: tuple[SamplingParams, ...]
    """How each of the answers is sampled: alike but for the seeds."""
    stop: tuple[str, ...]
    stream: bool
    keep_stop_token: bool
    skip_special_tokens: bool

    @property
    def grammar(self) -> Grammar | None:
        """Of all answers."""
        return self.answers[0].grammar


class Intake:
    """Checks requests against one engine and fills in what they leave open.

    `most_open` is how many answers the front takes at a time; None is no limit.
    """

    def __init__(self, info: EngineInfo, seed: int, most_open: int | None = None) -> None:
        self._info = info
        self._seeds = random.Random(seed)
        self._capacity = min(info.max_model_len, info.num_blocks * info.block_size)
        self._parameters = ParameterCheck(info)
        self._most_open = most_open

    def accept(self, request: pb.GenerateRequest) -> Accepted:
        """Translate a request. Cosmetic fields (`original_text`, `spaces_between_special_tokens`) are not read.

        Raises:
            UnsupportedCall: when it asks for something that replies have no field for.
            RequestError: when it asks for something else that is not there, or cannot be served as it is.
        """
        params = request.sampling_params
        _refuse_unsupported(request)
        prompt = list(request.tokenized.input_ids)
        room = self._check_prompt(prompt)
        sampling = msgspec.structs.replace(
            self._parameters.read(params, room), logprobs=_logprobs(request), grammar=_grammar(params)
        )
        seed = params.sampling_seed if params.HasField("sampling_seed") else self._seeds.getrandbits(64)
        return Accepted(
            request_id=request.request_id or uuid.uuid4().hex,
            prompt=prompt,
            answers=tuple(
                msgspec.structs.replace(sampling, seed=choice_seed(seed, index))
                for index in range(self._check_number(params.n))
            ),
            stop=_stop_strings(params.stop),
            stream=request.stream,
            keep_stop_token=params.no_stop_trim,
            skip_special_tokens=params.skip_special_tokens,
        )

    def _check_prompt(self, prompt: list[int]) -> int:
        """How many tokens may follow the prompt."""
        if not prompt:
            raise RequestError("the prompt is empty; send at least one token")
        check_ids("the prompt", prompt, self._info.vocab_size)
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

    def _check_number(self, n: int) -> int:
        """The number of answers; 0 is how the wire leaves it open."""
        if n > MOST_ANSWERS:
            raise RequestError(f"n must be between 1 and {MOST_ANSWERS}, not {n}")
        if self._most_open is not None and n > self._most_open:
            raise RequestError(
                f"n is {n}, but this server takes at most {self._most_open} requests at a time; "
                "lower it, or start the server with a larger --max-queued-requests"
            )
        return max(n, 1)


def _logprobs(request: pb.GenerateRequest) -> int | None:
    """The number of likeliest tokens that come with each token; None where nothing is to come."""
    top = request.top_logprobs_num
    if not 0 <= top <= MOST_TOP_LOGPROBS:
        raise RequestError(f"top_logprobs_num must be between 0 and {MOST_TOP_LOGPROBS}, not {top}")
    if not request.return_logprob:
        return None  # the gateway sends numbers of likeliest tokens for its Responses API without asking for any
    if request.logprob_start_len >= 0 and request.HasField("logprob_start_len"):
        raise UnsupportedCall(
            "replies have no field for log-probabilities of the prompt; leave logprob_start_len out, "
            "or use LLM.logprobs"
        )
    return top


def _grammar(params: pb.SamplingParams) -> Grammar | None:
    constraint = params.WhichOneof("constraint")
    if constraint is None:
        return None
    text: str = getattr(params, constraint)
    if not text.strip():
        raise RequestError(f"{constraint} is empty; give one, or leave it out")
    if len(text) > LONGEST_GRAMMAR:
        raise RequestError(f"{constraint} has {len(text)} characters; send at most {LONGEST_GRAMMAR}")
    return Grammar(kind=GRAMMAR_KINDS[constraint], text=text)


def _stop_strings(stop: Iterable[str]) -> tuple[str, ...]:
    unique = tuple(dict.fromkeys(stop))
    if "" in unique:
        raise RequestError("stop strings must not be empty")
    if len(unique) > MOST_STOP_STRINGS:
        raise RequestError(f"there are {len(unique)} stop strings; send at most {MOST_STOP_STRINGS}")
    longest = max(map(len, unique), default=0)
    if longest > LONGEST_STOP_STRING:
        raise RequestError(f"a stop string has {longest} characters; send at most {LONGEST_STOP_STRING}")
    return unique


def _refuse_unsupported(request: pb.GenerateRequest) -> None:
    params = request.sampling_params
    if request.token_ids_logprob:
        raise UnsupportedCall("replies have no field for token_ids_logprob; use top_logprobs_num instead")
    unsupported = {
        "custom_params": bool(params.custom_params.fields),
        "multimodal input": bool(request.mm_inputs.items),
        "disaggregated prefill or encode": request.HasField("kv_bootstrap_info")
        or request.HasField("encode_bootstrap_info"),
        "data_parallel_rank above 0": request.data_parallel_rank > 0,
    }
    for name, asked in unsupported.items():
        if asked:
            raise RequestError(f"this server does not support {name}; leave it out")
