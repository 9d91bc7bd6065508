"""Ctrl-C waits for the end of a step, once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tokenspeed.offline.engine import interrupt_later


@pytest.fixture(autouse=True)
def heeded() -> Iterator[None]:
    """A shell starts what runs in its background with SIGINT ignored."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, usual)


def test_a_ctrl_c_comes_after_the_block() -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt), interrupt_later():
        os.kill(os.getpid(), signal.SIGINT)
        steps.append("finished")
    assert steps == ["finished"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_comes_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), interrupt_later():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the second one did not interrupt")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
