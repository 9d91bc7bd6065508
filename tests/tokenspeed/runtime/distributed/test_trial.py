"""Edited code on a spare communicator: whatever one rank does there, all of them come out and serve on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from tests.tokenspeed.runtime.distributed.ranks import Rank, connected_ranks, on_every_rank
from tokenspeed.runtime.distributed.errors import CollectiveBroken, culprit, is_victim
from tokenspeed.runtime.distributed.vote import Ballot, Verdict, Vote

Step = Callable[[Rank], Any]
FAILURES = 20


@pytest.fixture(params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[list[Rank]]:
    # A Unix socket's path may have about 100 characters; pytest's own folders are longer.
    with connected_ranks(request.param, Path(mkdtemp(prefix="ts-"))) as made:
        yield made


def total(rank: Rank, numel: int = 4, dtype: torch.dtype = torch.float32) -> list[float]:
    """The sum over the ranks of each one's number."""
    mine = torch.full((numel,), rank.channel.rank + 1, dtype=dtype)
    reduced: list[float] = rank.group.all_reduce(mine).tolist()
    return reduced


def gathered(rank: Rank) -> list[float]:
    joined: list[float] = rank.group.all_gather_last(torch.full((1, 2), float(rank.channel.rank))).tolist()
    return joined


def as_served(rank: Rank) -> None:
    """What the serving code calls in the phase."""
    total(rank)
    total(rank, 8)
    gathered(rank)


def phase(rank: Rank, step: Step) -> Verdict:
    """One phase of a reload on one rank, without the rest of the engine."""
    me, vote = rank.channel.rank, Vote(rank.channel)
    ballot = Ballot(rank=me)
    try:
        with rank.group.trial("warm", vote) as agreement:
            step(rank)
    except BaseException as error:
        ballot = Ballot(rank=me, error={"error": str(error)}, is_victim=is_victim(error, me), culprit=culprit(error))
    else:
        assert agreement is not None
        ballot = Ballot(rank=me, collectives=len(agreement.made), like_before=agreement.like_before)
    return vote.cast(ballot)


def blamed(ranks: list[Rank], step: Step) -> tuple[int, str]:
    """The rank that the verdict of all ranks names, and its error."""
    verdicts = on_every_rank(ranks, lambda rank: phase(rank, step))
    assert len({str(verdict) for verdict in verdicts}) == 1, verdicts
    verdict = verdicts[0]
    assert isinstance(verdict, Verdict)
    failed = verdict.failed
    assert failed is not None and failed.error is not None, verdict
    return (failed.rank if failed.culprit is None else failed.culprit), failed.error["error"]


def serve_and_reload(ranks: list[Rank]) -> None:
    """The serving communicator works, and so does a new spare, as `World.renew_spare` makes it."""
    count = len(ranks)
    expected = [float(sum(range(1, count + 1)))] * 4
    assert on_every_rank(ranks, total) == [expected] * count
    on_every_rank(ranks, lambda rank: rank.group.discard())
    assert on_every_rank(ranks, Rank.make_spare) == [None] * count
    reload(ranks)


def reload(ranks: list[Rank]) -> None:
    """A phase of an edit that calls what the serving code calls."""
    for verdict in on_every_rank(ranks, lambda rank: phase(rank, as_served)):
        assert isinstance(verdict, Verdict) and verdict.failed is None


def remember_as_served(ranks: list[Rank]) -> None:
    def serve(rank: Rank) -> None:
        with rank.group.recording("warm"):
            as_served(rank)

    assert on_every_rank(ranks, serve) == [None] * len(ranks)


def test_a_trial_leaves_the_serving_communicator_alone_and_changes_places_with_it(ranks: list[Rank]) -> None:
    serve_and_reload(ranks)
    everybody = [float(rank.channel.rank) for rank in ranks for _ in range(2)]
    for _ in range(3):
        before = [rank.group.serving for rank in ranks]
        spares = [rank.group.spare for rank in ranks]
        reload(ranks)
        assert [rank.group.serving for rank in ranks] == before
        on_every_rank(ranks, lambda rank: rank.group.promote({}))
        assert [rank.group.serving for rank in ranks] == spares
        assert [rank.group.spare for rank in ranks] == before
        assert on_every_rank(ranks, gathered) == [[everybody]] * len(ranks)


def test_a_tensor_may_have_gaps(ranks: list[Rank]) -> None:
    def reduce(rank: Rank) -> list[list[float]]:
        whole = torch.arange(8.0).reshape(4, 2)
        rank.group.all_reduce(whole[:, 0])
        values: list[list[float]] = whole.tolist()
        return values

    count = len(ranks)
    expected = [[row * 2.0 * count, row * 2.0 + 1] for row in range(4)]
    assert on_every_rank(ranks, reduce) == [expected] * count


def before_it(rank: Rank) -> None:
    raise ValueError("my own fault")


def after_it(rank: Rank) -> None:
    total(rank)
    raise ValueError("my own fault")


@pytest.mark.parametrize("fail", [before_it, after_it])
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_fails_frees_those_that_wait_for_it(ranks: list[Rank], fail: Step, who: int) -> None:
    def step(rank: Rank) -> None:
        if rank.channel.rank == who:
            fail(rank)
        as_served(rank)

    assert blamed(ranks, step) == (who, "my own fault")
    serve_and_reload(ranks)


def test_code_that_swallows_errors_does_not_go_on_alone(ranks: list[Rank]) -> None:
    def step(rank: Rank) -> None:
        if rank.channel.rank == 1:
            raise ValueError("my own fault")
        for _ in range(3):
            try:
                total(rank)
            except Exception:
                continue

    assert blamed(ranks, step) == (1, "my own fault")
    serve_and_reload(ranks)


def skip(rank: Rank) -> None:
    total(rank)
    gathered(rank)


def skip_the_last(rank: Rank) -> None:
    total(rank)
    total(rank, 8)


def call_twice(rank: Rank) -> None:
    total(rank)
    as_served(rank)


def call_one_more(rank: Rank) -> None:
    as_served(rank)
    gathered(rank)


def other_shape(rank: Rank) -> None:
    total(rank, 5)
    total(rank, 8)
    gathered(rank)


def other_type(rank: Rank) -> None:
    total(rank, dtype=torch.float64)
    total(rank, 8)
    gathered(rank)


def other_order(rank: Rank) -> None:
    gathered(rank)
    total(rank)
    total(rank, 8)


OUT_OF_STEP = [skip, skip_the_last, call_twice, call_one_more, other_shape, other_type, other_order]


@pytest.mark.parametrize("wrong", OUT_OF_STEP)
@pytest.mark.parametrize("who", [0, 1])
def test_unlike_collectives_are_noticed_before_they_run(ranks: list[Rank], wrong: Step, who: int) -> None:
    remember_as_served(ranks)
    rank, error = blamed(ranks, lambda rank: wrong(rank) if rank.channel.rank == who else as_served(rank))
    assert rank == who, error
    assert "the same ones in the same order" in error
    serve_and_reload(ranks)


def test_calls_that_are_only_captured_are_compared_at_the_end(ranks: list[Rank]) -> None:
    """Nobody waits for a captured collective, so each rank goes its way; a graph of unlike ones would block later."""

    def capture(rank: Rank) -> Verdict:
        vote = Vote(rank.channel)
        with rank.group.trial("graphs", vote, runs=False) as agreement:
            assert agreement is not None
            for call in ("all_reduce float32 [4]", "all_gather float32 [1, 2]")[: 1 + (rank.channel.rank != 1)]:
                agreement.agree(call)
        return vote.cast(Ballot(rank=rank.channel.rank, calls=agreement.checksum))

    for verdict in on_every_rank(ranks, capture):
        assert isinstance(verdict, Verdict)
        assert (verdict.failed, verdict.out_of_step, verdict.odd) == (None, 1, None)


def test_an_edit_of_all_ranks_may_call_what_it_likes(ranks: list[Rank]) -> None:
    remember_as_served(ranks)
    for verdict in on_every_rank(ranks, lambda rank: phase(rank, other_order)):
        assert isinstance(verdict, Verdict) and verdict.failed is None


def test_the_same_fault_on_all_ranks_is_the_lowest_ranks(ranks: list[Rank]) -> None:
    for _ in range(5):
        assert blamed(ranks, after_it) == (0, "my own fault")
    serve_and_reload(ranks)


def test_a_communicator_closes_although_nobody_comes(ranks: list[Rank]) -> None:
    """One rank gives a collective up and closes; the other learns that it waits in vain."""

    class GivenUp(Exception):
        pass

    def give_up() -> None:
        raise GivenUp

    communicator = ranks[0].group.spare
    assert communicator is not None
    with pytest.raises(GivenUp), communicator.guarded(give_up):
        communicator.all_reduce(torch.ones(4))
    communicator.close()
    with pytest.raises(CollectiveBroken):
        communicator.all_reduce(torch.ones(4))
    others = ranks[1:]
    for rank in others:
        rank.group.discard()
    serve_and_reload(ranks)


def test_nothing_is_left_of_many_failed_trials(ranks: list[Rank]) -> None:
    def step(rank: Rank) -> None:
        if rank.channel.rank == 1:
            raise ValueError("my own fault")
        as_served(rank)

    def held() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))

    def fail_once() -> None:
        assert blamed(ranks, step) == (1, "my own fault")
        serve_and_reload(ranks)

    fail_once()
    before = held()
    for _ in range(FAILURES):
        fail_once()
    # Each trial has several sockets and threads; what else this process does may open a few meanwhile.
    assert all(now < then + FAILURES for now, then in zip(held(), before, strict=True)), (before, held())
