"""What one step tells the attention layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ForwardContext:
    """Where the tokens of a step belong. Block 0 of the pools is scratch: padding is written there."""

    kv: Sequence[tuple[Tensor, Tensor]]
    """For each layer the key and the value pool, each [num_blocks, block_size, local_kv_heads, head_dim],
    contiguous and filled with finite numbers at the start."""
    slot_mapping: Tensor
    """int64 [num_tokens]: block * block_size + offset of each token."""
    block_tables: Tensor
    """int32 [num_seqs, width]; eager steps pass the width that their longest sequence needs."""
    seq_lens: Tensor
    """int32 [num_seqs]: tokens of each sequence after this step; 0 for a padding row."""
    query_start: Tensor
    """int32 [num_seqs + 1]: where each sequence's tokens of this step begin; a padding row has none."""
    max_query_len: int
    """Bound of the tokens of one sequence in this step. 1 says decode: token i belongs to sequence i."""
    logits_rows: Tensor
    """int64 [num_seqs]: index of the token whose logits are wanted."""
