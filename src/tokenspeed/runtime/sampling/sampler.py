"""From logits to token ids."""

from __future__ import annotations

from torch import Tensor

from tokenspeed.runtime.sampling.batch import LogprobRows, SamplingBatch
from tokenspeed.runtime.sampling.logprobs import Logprobs, token_logprobs
from tokenspeed_kernel.ops.sampling import sample


class Sampler:
    """Bias, penalties, mask, then greedy or temperature, top-k, top-p, min-p and a draw fixed by seed and position.

    A row depends on its own logits and parameters and on the tokens of its own request, on nothing else.
    """

    def __call__(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """One token id a row.

        Args:
            logits: float32 [rows, vocab_size]; not written.
            batch: of as many rows.

        Returns:
            int64 [rows]. Of equal candidates the lowest id is taken.
        """
        if batch.bias is not None:
            logits = batch.bias.apply(logits)
        if batch.penalties is not None:
            logits = batch.penalties.apply(logits)
        if batch.mask is not None:
            logits = batch.mask.apply(logits)
        if batch.greedy:
            return logits.argmax(dim=-1)
        return sample(logits, batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.seeds, batch.positions)

    def logprobs(self, logits: Tensor, token_ids: Tensor, wanted: LogprobRows) -> Logprobs:
        """Log-probabilities of some rows, in the order of `wanted`.

        Args:
            logits: float32 [rows, vocab_size], those that `__call__` got: what is told is the model's own view,
                before bias, penalties and temperature.
            token_ids: int64 [rows], those that `__call__` gave.
        """
        return token_logprobs(logits[wanted.rows], token_ids[wanted.rows], max(wanted.tops))
