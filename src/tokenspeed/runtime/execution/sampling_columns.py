"""How the rows of a step are sampled, as the device reads it."""

from __future__ import annotations

from typing import Any

import numpy as np

from tokenspeed.runtime.execution.inputs import StepInputs
from tokenspeed.runtime.scheduler.batch import Batch
from tokenspeed.runtime.scheduler.request import Request

Column = np.ndarray[Any, Any]
_NAMES = ("temperature", "top_p", "min_p", "top_k", "seeds")


class SamplingColumns:
    """Fills the arrays that `tokenspeed_kernel.ops.sampling.sample` reads; most steps sample the same requests."""

    plain: bool
    """Whether these arrays are all that the sampling of the last step's requests needs."""

    def __init__(self) -> None:
        self.plain = True
        self._requests: list[Request] = []
        self._columns: dict[str, Column] = {}

    def fill(self, host: StepInputs[Column], batch: Batch) -> None:
        """Write one entry for each row that samples; the entries behind them are greedy."""
        rows = [index for index, row in enumerate(batch.rows) if row.samples]
        count = len(rows)
        host.sample_rows[:count] = rows
        host.last_tokens[:count] = host.query_start[1 : len(batch.rows) + 1][rows] - 1
        host.sample_positions[:count] = host.seq_lens[: len(batch.rows)][rows]
        self._refresh([batch.rows[index].request for index in rows])
        for name in _NAMES:
            getattr(host, name)[:count] = self._columns[name]
        _pad(host, count)

    def fill_dummy(self, host: StepInputs[Column]) -> None:
        """Write what samples every row greedily."""
        host.sample_rows[:] = np.arange(len(host.sample_rows))
        host.sample_positions[:] = 1
        _pad(host, 0, keep_rows=True)

    def _refresh(self, requests: list[Request]) -> None:
        if self._columns and requests == self._requests:
            return
        params = [request.sampling for request in requests]
        self._requests = requests
        self.plain = all(p.plain for p in params)
        self._columns = {
            "temperature": np.array([p.temperature for p in params], dtype=np.float32),
            "top_p": np.array([p.top_p for p in params], dtype=np.float32),
            "min_p": np.array([p.min_p for p in params], dtype=np.float32),
            "top_k": np.array([p.top_k for p in params], dtype=np.int64),
            # Modulo 2**64, as signed numbers.
            "seeds": np.array([(p.seed + 2**63) % 2**64 - 2**63 for p in params], dtype=np.int64),
        }


def _pad(host: StepInputs[Column], count: int, keep_rows: bool = False) -> None:
    host.temperature[count:] = 0
    host.top_p[count:] = 1
    host.min_p[count:] = 0
    host.top_k[count:] = 0
    host.seeds[count:] = 0
    if not keep_rows:
        host.last_tokens[count:] = 0
        host.sample_rows[count:] = 0
        host.sample_positions[count:] = 0
