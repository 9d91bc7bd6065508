"""Whether the ranks still do the same: a checksum of all steps so far, which rank 0 sends with every list of messages.

Ranks that differ would wait in collectives for each other, or mix up the requests' tokens, and nothing would tell why.
"""

from __future__ import annotations

import zlib
from array import array

from tokenspeed.errors import TokenSpeedError
from tokenspeed.runtime.scheduler.batch import Batch, StepResult


class RanksDiffer(TokenSpeedError):
    """A rank has not computed what rank 0 has."""


class StepDigest:
    """Checksum of the batches that a rank has computed and of the ids that it sampled, in order.

    `value` is the checksum, 32 bits, and `steps` the number of steps in it.
    """

    def __init__(self) -> None:
        self.value = 0
        self.steps = 0

    def add(self, batch: Batch, result: StepResult) -> None:
        """Take one step in."""
        # The last block of a request is its own, and tells which one it is.
        blocks = [row.block_table[-1] for row in batch.rows]
        starts = [row.start for row in batch.rows]
        numbers = array("q", [batch.num_tokens, batch.num_decode_rows, *blocks, *starts, *result.token_ids])
        self.value = zlib.crc32(numbers, self.value)
        self.steps += 1

    def check(self, of_rank_0: int, rank: int) -> None:
        """Compare with the checksum that rank 0 had when it sent its messages.

        Raises:
            RanksDiffer: they are not equal.
        """
        if of_rank_0 != self.value:
            raise RanksDiffer(
                f"rank {rank} has not computed what rank 0 has in the {self.steps} steps so far; "
                "look for what differs by rank, time or hash order in the forward pass"
            )
