"""Edits that break the forward pass, each in one way, on all ranks or on one."""

from __future__ import annotations

from tests.fuzz.faults import loading, not_finite, ranks, running
from tests.fuzz.faults.fault import Fault, Make

ALWAYS: tuple[Make, ...] = (
    loading.syntax,
    loading.no_such_import,
    loading.new_file_fails,
    loading.at_import,
    loading.in_a_plan,
    loading.missing_file,
    loading.missing_name,
    running.at_warm_up,
    running.recursion,
    running.in_one_batch,
    running.wrong_result,
    running.while_capturing,
    running.at_the_kth_call,
    running.while_serving,
    *not_finite.ALWAYS,
)
"""Faults of any server."""

ACROSS_RANKS: tuple[Make, ...] = (
    ranks.at_warm_up_on_one_rank,
    ranks.collective_of_one_rank,
    ranks.ranks_that_differ,
    not_finite.on_one_rank,
)
"""Faults that take several ranks."""

COSTLY: tuple[Make, ...] = (running.while_serving,)
"""Those of any server that cost the processes of several ranks: a step that fails beside others."""

DEADLY: tuple[Make, ...] = (ranks.endless_loop, ranks.death)
"""Faults that cost the processes of the ranks."""

RANKS_MEET_NOWHERE: tuple[Make, ...] = (loading.at_import, loading.in_a_plan)
"""Faults that one rank meets where no other waits for it."""

__all__ = ["ACROSS_RANKS", "ALWAYS", "COSTLY", "DEADLY", "RANKS_MEET_NOWHERE", "Fault", "Make"]
