"""Calls of the kernels that have tactics, at the sizes that an engine will run, within a tuning window."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from tokenspeed_kernel.registry import Kernel
from tokenspeed_kernel.tactics import Tactics
from tokenspeed_kernel.workloads import Workloads

CONTEXT = 1024
"""Tokens of a sequence that decodes while its kernel is timed."""


def tune_attention(
    tactics: Tactics,
    make: Workloads,
    decode: Kernel,
    extend: Kernel,
    decode_sizes: Sequence[int],
    prefill_sizes: Sequence[int],
    max_context: int,
    progress: Callable[[str], None],
) -> None:
    """Time the tactics of attention where they are not known yet.

    Args:
        tactics: filled; its file is written.
        make: makes the inputs.
        decode: solution of `attention.decode`; one without tactics is called once.
        extend: solution of `attention.extend`.
        decode_sizes: sequences of decode steps; one size of each power of two is timed.
        prefill_sizes: tokens of prefills, likewise.
        max_context: tokens of the longest sequence there can be.
        progress: told each size before it is timed.
    """
    context = min(CONTEXT, max_context)
    with tactics.window():
        for seqs in one_of_each_power(decode_sizes):
            progress(f"decode {seqs}")
            decode.function(*make.decode(seqs, context))
        for tokens in one_of_each_power(prefill_sizes):
            progress(f"prefill {tokens}")
            extend.function(*make.extend(min(tokens, max_context)))


def tune_products(
    tactics: Tactics,
    products: Mapping[str, Callable[[int], object]],
    rows: Sequence[int],
    progress: Callable[[str], None],
) -> None:
    """Time the tactics of products with weights where they are not known yet.

    Args:
        tactics: filled; its file is written.
        products: by size, what computes one for a number of rows.
        rows: of the steps; one count of each power of two is timed.
        progress: told each size before it is timed.
    """
    with tactics.window():
        for size, product in products.items():
            progress(f"product {size}")
            for count in one_of_each_power(rows):
                product(count)


def one_of_each_power(sizes: Sequence[int]) -> Iterator[int]:
    """The largest of the sizes that are rounded up to the same power of two, largest first."""
    seen = set()
    for size in sorted(sizes, reverse=True):
        power = (size - 1).bit_length()
        if power not in seen:
            seen.add(power)
            yield size
