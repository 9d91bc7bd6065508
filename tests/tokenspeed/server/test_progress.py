"""Which silence of a rank is told."""

from __future__ import annotations

import pytest

from tokenspeed.server.errors import EngineUnavailable
from tokenspeed.server.progress import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.busy = False

    def __call__(self) -> float:
        return self.now

    def progress(self, size: int = 1) -> Progress:
        return Progress(size, 10.0, lambda: self.busy, self)


def test_who_is_asked_nothing_need_not_speak() -> None:
    clock = Clock()
    progress = clock.progress()
    clock.now += 1000
    progress.check()


def test_silence_counts_from_the_first_question_that_was_not_answered() -> None:
    clock = Clock()
    progress = clock.progress()
    for _ in range(5):
        progress.asked()
        clock.now += 2.5
    with pytest.raises(EngineUnavailable, match="rank 0 has given no sign of life for 12 s"):
        progress.check()
    progress.heard()
    progress.check()
    progress.asked()
    clock.now += 9
    progress.check()


def test_every_rank_has_to_speak_for_itself() -> None:
    clock = Clock()
    progress = clock.progress(3)
    progress.asked()
    progress.heard(0)
    progress.heard(1)
    clock.now += 11
    with pytest.raises(EngineUnavailable, match="rank 2"):
        progress.check()
    progress.heard(2)
    progress.check()


def test_a_busy_rank_has_more_time_but_not_all_of_it() -> None:
    clock = Clock()
    progress = clock.progress()
    progress.asked()
    clock.busy = True
    clock.now += 90
    progress.check()
    clock.now += 20
    with pytest.raises(EngineUnavailable):
        progress.check()
