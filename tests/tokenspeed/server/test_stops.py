from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tokenspeed.errors import RequestError
from tokenspeed.runtime.protocol.reports import RequestOutput, TokenLogprobs
from tokenspeed.server.errors import EngineLost
from tokenspeed.server.stops import StopWatcher, TokenizerFile
from tokenspeed.server.streams import TokenStream, updates


def matched_at(tokenizer: Tokenizer, ids: list[int], *stops: str) -> tuple[int, str] | None:
    """Index of the token that completes a stop string, and the string."""
    watcher = StopWatcher(tokenizer, stops, skip_special_tokens=True)
    for index, token_id in enumerate(ids):
        matched = watcher.feed(token_id)
        if matched is not None:
            return index, matched
    return None


def test_a_stop_string_over_several_tokens_is_found_at_its_last(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three").ids
    assert matched_at(tokenizer, ids, "two") == (6, "two")
    assert matched_at(tokenizer, ids, "x", "e t") == (4, "e t")
    assert matched_at(tokenizer, ids, "four") is None


def test_a_character_over_several_tokens_is_found_when_it_is_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂b").ids
    assert len(ids) == 6
    assert matched_at(tokenizer, ids, "🙂") == (4, "🙂")


def test_special_tokens_are_no_text_when_they_are_skipped(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("a").ids, 256, *tokenizer.encode("b").ids]
    assert matched_at(tokenizer, ids, "ab") == (2, "ab")
    watcher = StopWatcher(tokenizer, ("<|im_start|>",), skip_special_tokens=False)
    assert [watcher.feed(token_id) for token_id in ids] == [None, "<|im_start|>", None]


def test_ids_without_text_are_no_trouble(tokenizer: Tokenizer) -> None:
    assert matched_at(tokenizer, [*tokenizer.encode("a").ids, 9999, *tokenizer.encode("b").ids], "b") is not None


@settings(deadline=None)
@given(st.text("ab ", max_size=20), st.text("ab ", min_size=1, max_size=4))
def test_it_finds_what_a_search_in_the_whole_text_finds(text: str, stop: str) -> None:
    from tokenizers import decoders, models

    letters = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, " ": 2}, merges=[]))
    letters.decoder = decoders.Fuse()
    ids = ["ab ".index(letter) for letter in text]
    found = matched_at(letters, ids, stop)
    assert (found[0] - len(stop) + 1 if found else -1) == text.find(stop)


async def test_a_model_without_tokenizer_refuses_stop_strings(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="stop_token_ids instead"):
        await TokenizerFile(str(tmp_path)).load()


def output(ids: list[int], finish: str | None = None, **fields: Any) -> RequestOutput:
    return RequestOutput(request_id="r", token_ids=ids, finish_reason=finish, **fields)


def test_the_first_tokens_of_an_answer_may_be_spared(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab ab ab").ids
    watcher = StopWatcher(tokenizer, ("ab", "b ab a"), skip_special_tokens=True, not_before=3)
    assert [watcher.feed(token_id) for token_id in ids[:5]] == [None, None, None, None, "ab"]
    across = StopWatcher(tokenizer, ("b a",), skip_special_tokens=True, not_before=3)
    assert [across.feed(token_id) for token_id in ids[:4]] == [None, None, None, "b a"]


def test_a_slow_reader_gets_several_steps_in_one() -> None:
    stream = TokenStream()
    stream.push(output([1, 2], cached_tokens=3), "v1")
    stream.push(output([4], "length"), "v2")
    update = stream.take()
    assert update is not None
    assert (update.token_ids, update.cached_tokens, update.finish_reason) == ([1, 2, 4], 3, "length")
    assert update.weight_version == "v2"
    assert stream.take() is None


def test_tokens_after_a_stop_string_are_dropped_with_their_logprobs(tokenizer: Tokenizer) -> None:
    stream = TokenStream(StopWatcher(tokenizer, ("bc",), skip_special_tokens=True))
    ids = tokenizer.encode("abcd").ids
    logprobs = [TokenLogprobs(-float(token_id), [], []) for token_id in ids]
    assert stream.push(output(ids[:2], logprobs=logprobs[:2])).matched_string is None
    step = stream.push(output(ids[2:], "length", logprobs=logprobs[2:]))
    assert (step.matched_string, step.finish_reason, step.token_ids) == ("bc", "stop", ids[2:3])
    update = stream.take()
    assert update is not None
    assert (update.token_ids, update.logprobs) == (ids[:3], logprobs[:3])


def test_a_stop_token_counts_as_generated() -> None:
    assert TokenStream().push(output([1], "stop", matched_stop=2)).generated == 2


async def test_a_failure_is_raised_to_the_reader() -> None:
    news = asyncio.Event()
    streams = [TokenStream(news=news), TokenStream(news=news)]
    streams[0].push(output([1]))
    streams[1].fail(EngineLost("rank 0 is gone"))
    seen = []
    with pytest.raises(EngineLost, match="rank 0 is gone"):
        async for index, _ in updates(streams, news):
            seen.append(index)
    assert seen == [0]


async def test_answers_come_mixed_until_each_has_ended() -> None:
    news = asyncio.Event()
    streams = [TokenStream(news=news) for _ in range(3)]

    async def speak() -> None:
        for step in range(6):
            for index, stream in enumerate(streams):
                if step <= 2 * index + 1:
                    stream.push(output([step], "length" if step == 2 * index + 1 else None))
            await asyncio.sleep(0)

    speaking = asyncio.create_task(speak())
    answers: list[list[int]] = [[], [], []]
    async for index, update in updates(streams, news):
        answers[index].extend(update.token_ids)
    await speaking
    assert answers == [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]
