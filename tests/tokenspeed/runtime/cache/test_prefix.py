from __future__ import annotations

import os
import subprocess
import sys

from tokenspeed.runtime.cache.prefix import DigestChain, PrefixIndex


def filled(index: PrefixIndex, token_ids: list[int], first_block: int) -> DigestChain:
    """Insert all full blocks of a sequence as blocks `first_block`, `first_block` + 1, ..."""
    chain = DigestChain()
    index.match(chain, token_ids, 0)
    for position in range(len(token_ids) // index.block_size):
        index.insert(chain, token_ids, position, first_block + position)
    return chain


def find(index: PrefixIndex, token_ids: list[int]) -> list[int]:
    return index.match(DigestChain(), token_ids, len(token_ids) // index.block_size)


def test_the_longest_common_run_of_full_blocks_is_found() -> None:
    index = PrefixIndex(2)
    filled(index, [1, 2, 3, 4, 5], 10)
    assert find(index, [1, 2, 3, 4, 5, 6]) == [10, 11]
    assert find(index, [1, 2, 3, 9]) == [10]
    assert find(index, [1]) == []
    assert find(index, [3, 4]) == [], "a block is found only behind what came before it"


def test_no_more_than_the_wanted_blocks_are_found() -> None:
    index = PrefixIndex(1)
    filled(index, [1, 2, 3], 1)
    assert index.match(DigestChain(), [1, 2, 3], 2) == [1, 2]


def test_the_first_block_with_a_content_stays() -> None:
    index = PrefixIndex(2)
    filled(index, [1, 2], 10)
    filled(index, [1, 2], 20)
    assert find(index, [1, 2]) == [10]
    assert 10 in index
    assert 20 not in index


def test_an_evicted_block_hides_those_behind_it_until_it_is_back() -> None:
    index = PrefixIndex(1)
    chain = filled(index, [1, 2, 3], 1)
    index.evict(2)
    index.evict(2)
    assert find(index, [1, 2, 3]) == [1]
    index.insert(chain, [1, 2, 3], 1, 7)
    assert find(index, [1, 2, 3]) == [1, 7, 3]


def test_what_was_computed_before_a_clear_is_never_inserted() -> None:
    index = PrefixIndex(1)
    chain = filled(index, [1], 1)
    index.clear()
    index.insert(chain, [1, 2], 1, 2)
    assert find(index, [1, 2]) == []
    assert 2 not in index


def test_a_chain_that_is_matched_again_after_a_reset_takes_the_new_seed() -> None:
    index = PrefixIndex(1)
    chain = filled(index, [1, 2], 1)
    index.reset(1, "v1")
    assert index.match(chain, [1, 2], 2) == []
    index.insert(chain, [1, 2], 0, 5)
    index.insert(chain, [1, 2], 1, 6)
    assert find(index, [1, 2]) == [5, 6], "a fresh chain agrees with it"


def test_digests_depend_on_generation_and_weight_version() -> None:
    seeds = [(0, ""), (1, ""), (0, "1"), (1, "1"), (11, "")]
    digests = set()
    for generation, weight_version in seeds:
        index = PrefixIndex(1)
        index.reset(generation, weight_version)
        digests.add(filled(index, [1], 1).digests[0])
    assert len(digests) == len(seeds)


def test_digests_are_the_same_in_every_process() -> None:
    code = (
        "from tokenspeed.runtime.cache.prefix import DigestChain, PrefixIndex\n"
        "chain = DigestChain(); index = PrefixIndex(2); index.reset(3, 'step-7')\n"
        "index.match(chain, [1, 2, 3, 4], 0); index.insert(chain, [1, 2, 3, 4], 1, 1)\n"
        "print(b''.join(chain.digests).hex())"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1
