"""What is told of the errors of others."""

from __future__ import annotations

import pytest

from tokenspeed.errors import LONGEST_CAUSE, cause_of


class Odd(Exception):
    def __str__(self) -> str:
        raise SystemExit


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("too long"), "ValueError: too long"),
        (SystemExit(), "SystemExit"),
        (ValueError("\udcff"), "ValueError: \\udcff"),
        (Odd(), "Odd: (its message cannot be made: SystemExit)"),
        (ValueError("x" * 10**6), "ValueError: " + "x" * (LONGEST_CAUSE - len("ValueError: ")) + "..."),
    ],
)
def test_a_cause_can_be_sent_to_anybody(error: BaseException, told: str) -> None:
    assert cause_of(error) == told
    cause_of(error).encode()
