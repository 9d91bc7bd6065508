"""The tokens of one request as penalties need them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class TokenHistory:
    """Int64 arrays, so that a step copies them and does not walk them.

    `prompt_ids` has each id of the prompt once, `answer_ids` every token of the answer.
    """

    __slots__ = ("answer_ids", "prompt_ids")

    def __init__(self, prompt: Sequence[int], answer: Sequence[int] = ()) -> None:
        self.prompt_ids = array("q", dict.fromkeys(prompt))
        self.answer_ids = array("q", answer)
