"""What clients of the OpenAI API may ask of the sampler, on the bundled model behind the gateway."""

from __future__ import annotations

import re
from typing import Any

import openai
import pytest

from tests.e2e.harness import HTTP, Server
from tests.waiting import PATIENCE


@pytest.fixture
def client(smollm2: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, server: Server, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": "Name a colour."}]
    return client.chat.completions.create(model=server.served, messages=messages, max_tokens=12, **options)


def test_answers_of_one_seed_are_several_and_the_first_is_the_only_one(smollm2: Server, client: openai.OpenAI) -> None:
    several = [choice.message.content for choice in chat(client, smollm2, n=3, seed=7).choices]
    (alone,) = chat(client, smollm2, seed=7).choices
    assert several[0] == alone.message.content
    assert len(set(several)) == 3
    assert several == [choice.message.content for choice in chat(client, smollm2, n=3, seed=7).choices]


def test_streamed_answers_say_the_same_with_the_same_logprobs(smollm2: Server, client: openai.OpenAI) -> None:
    options = {"n": 2, "seed": 11, "logprobs": True, "top_logprobs": 3}
    whole = chat(client, smollm2, **options).choices
    texts, logprobs = ["", ""], [[], []]
    for chunk in chat(client, smollm2, stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
    assert texts == [choice.message.content for choice in whole]
    for streamed, choice in zip(logprobs, whole, strict=True):
        assert [entry.token for entry in streamed] == [entry.token for entry in choice.logprobs.content]
        assert [entry.logprob for entry in streamed] == pytest.approx(
            [entry.logprob for entry in choice.logprobs.content], abs=1e-3
        )


def test_logprobs_are_of_the_likeliest_tokens_first(smollm2: Server, client: openai.OpenAI) -> None:
    (choice,) = chat(client, smollm2, temperature=0, logprobs=True, top_logprobs=5).choices
    content = choice.logprobs.content
    assert "".join(entry.token for entry in content).startswith(choice.message.content)
    for entry in content:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 5
        assert values == sorted(values, reverse=True)
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, values[0])
        assert max(values) <= 0


def test_only_the_likeliest_token_is_left_by_a_min_p_of_one(smollm2: Server, client: openai.OpenAI) -> None:
    (greedy,) = chat(client, smollm2, temperature=0).choices
    (drawn,) = chat(client, smollm2, temperature=1.5, seed=3, extra_body={"min_p": 1.0}).choices
    assert drawn.message.content == greedy.message.content


@pytest.mark.parametrize(
    "options",
    [{"frequency_penalty": 2.0, "presence_penalty": 2.0}, {"extra_body": {"repetition_penalty": 2.0}}],
)
def test_penalties_keep_an_answer_from_repeating_itself(
    smollm2: Server, client: openai.OpenAI, options: dict[str, Any]
) -> None:
    def distinct(**options: Any) -> float:
        options.setdefault("extra_body", {})["ignore_eos"] = True
        prompt = "one two one two one two one two"
        answer = client.completions.create(model=smollm2.served, prompt=prompt, temperature=0, max_tokens=40, **options)
        words = re.findall(r"\w+", answer.choices[0].text)
        return len(set(words)) / len(words)

    assert distinct() < 0.2
    assert distinct(**options) > 0.6


def test_generate_tells_logprobs_and_what_computed_them(smollm2: Server) -> None:
    parameters = {"max_new_tokens": 4, "temperature": 0, "n": 2}
    body = {"model": smollm2.served, "text": "The capital of France is", "sampling_params": parameters}
    reply = HTTP.post(f"{smollm2.url}/generate", json={**body, "return_logprob": True}, timeout=PATIENCE)
    answers = reply.json()
    assert len(answers) == 2
    for answer in answers:
        told = answer["meta_info"]["output_token_logprobs"]
        assert [int(token_id) for _, token_id, *_ in told] == answer["output_ids"]
        assert all(logprob < 0 for logprob, *_ in told)
        assert answer["meta_info"]["weight_version"] == "default"
