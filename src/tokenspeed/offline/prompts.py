"""What the methods of `LLM` take: one prompt or several, and parameters for all of them or for each."""

from __future__ import annotations

from collections.abc import Sequence

from tokenspeed.errors import RequestError
from tokenspeed.offline.params import SamplingParams

Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams] | None

WHAT_PROMPTS_ARE = "a prompt must be a text or a list of token ids"


def as_list(prompts: Prompts) -> list[Prompt]:
    """A list of prompts; one prompt becomes a list of one.

    Raises:
        RequestError: when they are neither.
    """
    if isinstance(prompts, str):
        return [prompts]
    try:
        if len(prompts) and not isinstance(prompts[0], str | Sequence):
            return [prompts]  # type: ignore[list-item]
        return list(prompts)  # type: ignore[arg-type]
    except (TypeError, LookupError) as error:
        raise RequestError(f"{WHAT_PROMPTS_ARE}, or a list of such") from error


def one_each(params: Params, count: int) -> list[SamplingParams]:
    """Parameters for each of `count` prompts.

    Raises:
        RequestError: when they are something else, or of another number.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise RequestError("sampling_params must be SamplingParams, or a list of them with one for each prompt")
    if len(params) != count:
        raise RequestError(
            f"there are {count} prompts and {len(params)} sampling parameters; give one, or one for each"
        )
    return list(params)


def token_ids(prompt: Sequence[int]) -> list[int]:
    """A prompt of token ids, whatever kind of sequence it came in.

    Raises:
        RequestError: when something else is in it.
    """
    try:
        return [int(token) for token in prompt]
    except (TypeError, ValueError) as error:
        raise RequestError(WHAT_PROMPTS_ARE) from error
