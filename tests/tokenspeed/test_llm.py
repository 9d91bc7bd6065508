"""`LLM` on a tiny model: the real engine in this process, and ranks of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tests.e2e.harness import installed_path
from tests.tiny import tiny_llama
from tests.waiting import PATIENCE
from tokenspeed import LLM, SamplingParams
from tokenspeed.errors import ConfigError, ModelError, RequestError, TokenSpeedError

SMALL = {"max_num_seqs": 8, "max_total_tokens": 2048}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["The capital of France is", "One, two, three,", "Water boils at"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llm-model"))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), **SMALL) as llm:
        yield llm


def test_texts_and_token_ids_get_the_same_answers(llm: LLM) -> None:
    by_text = llm.generate(PROMPTS, GREEDY)
    assert [g.prompt for g in by_text] == PROMPTS
    by_ids = llm.generate([g.prompt_token_ids for g in by_text], GREEDY)
    assert [g.token_ids for g in by_ids] == [g.token_ids for g in by_text]
    assert all(len(g.token_ids) == 12 and g.outputs[0].finish_reason == "length" for g in by_text)
    for alone, among in zip(PROMPTS, by_text, strict=True):
        assert llm.generate(alone, GREEDY)[0].token_ids == among.token_ids
    assert llm.generate(by_text[0].prompt_token_ids, GREEDY)[0].text == by_text[0].text
    assert llm.generate([]) == []


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    lengths = [3, 1, 7]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    answers = llm.generate(PROMPTS, params)
    assert [len(g.token_ids) for g in answers] == lengths
    assert len(llm.generate("x")[0].token_ids) <= 16
    with pytest.raises(RequestError, match="3 prompts and 2 sampling parameters"):
        llm.generate(PROMPTS, params[:2])


def test_a_stream_says_what_generate_says(llm: LLM) -> None:
    whole = llm.generate(PROMPTS, GREEDY)
    text, ids = [""] * 3, [[], [], []]  # type: ignore[var-annotated]
    for delta in llm.stream(PROMPTS, GREEDY):
        text[delta.index] += delta.text
        ids[delta.index] += delta.token_ids
    assert text == [g.text for g in whole]
    assert ids == [g.token_ids for g in whole]


def test_two_streams_can_be_read_in_turns(llm: LLM) -> None:
    whole = [g.token_ids for g in llm.generate(PROMPTS[:2], GREEDY)]
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2]]
    pairs = list(zip(*streams, strict=True))
    assert [[token for pair in pairs for token in pair[i].token_ids] for i in range(2)] == whole


def test_results_come_in_the_order_in_which_they_end(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, n=2, ignore_eos=True) for n in (9, 2, 5)]
    assert [g.index for g in llm.as_completed(PROMPTS, params)] == [1, 2, 0]


def test_leaving_a_stream_frees_what_it_held(llm: LLM) -> None:
    whole_cache = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for _ in range(3):
        for delta in llm.stream(["a"] * 8, whole_cache):
            if len(delta.token_ids):
                break
    (answer,) = llm.generate("a", whole_cache)
    assert len(answer.prompt_token_ids) + len(answer.token_ids) == llm.info.max_model_len


def test_a_stop_string_ends_the_answer_and_the_work(llm: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (free,) = llm.generate(PROMPTS[0], long)
    word = free.text[len(free.text) // 2 :][:4]
    (stopped,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=word))
    assert stopped.text == free.text[: free.text.find(word)]
    assert stopped.outputs[0].finish_reason == "stop" and stopped.outputs[0].stop_reason == word
    assert len(stopped.token_ids) < 40
    held = SamplingParams(temperature=0, max_tokens=40, min_tokens=40, ignore_eos=True, stop=word)
    assert len(llm.generate(PROMPTS[0], held)[0].token_ids) == 40


def test_a_seed_fixes_every_answer(llm: LLM) -> None:
    def draw(seed: int | None, n: int = 4) -> list[list[int]]:
        params = SamplingParams(seed=seed, n=n, max_tokens=8, ignore_eos=True)
        return [output.token_ids for output in llm.generate("x", params)[0].outputs]

    assert draw(1) == draw(1)
    assert draw(1)[0] == draw(1, n=1)[0]
    assert len({tuple(ids) for ids in draw(1)}) == 4
    assert draw(None) != draw(None)


def test_a_chat_is_the_answer_to_its_template(llm: LLM) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    (answer,) = llm.chat(chat, GREEDY)
    assert answer.prompt == text
    assert answer.token_ids == llm.generate(text, GREEDY)[0].token_ids
    both = llm.chat([chat, chat[1:]], GREEDY)
    assert both[0].token_ids == answer.token_ids and both[1].token_ids != answer.token_ids
    assert llm.chat([], GREEDY) == []


def test_logprobs_are_those_of_transformers(llm: LLM, model: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2)
    for answer, of_prompt in zip(llm.generate(PROMPTS, params), llm.logprobs(PROMPTS, top=3), strict=True):
        ids = [*answer.prompt_token_ids, *answer.token_ids]
        with torch.inference_mode():
            expected = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        told = [*of_prompt, *(answer.outputs[0].logprobs or [])]
        assert told[0] is None and len(told) == len(ids)
        for position, (token, at) in enumerate(zip(ids, told, strict=True)):
            if at is None:
                continue
            row = expected[position - 1]
            assert at.token_id == token and at.logprob == pytest.approx(row[token].item(), abs=2e-3)
            top = row.topk(len(at.top))
            assert list(at.top) == top.indices.tolist()
            assert list(at.top.values()) == pytest.approx(top.values.tolist(), abs=2e-3)


def test_penalties_and_biases_reach_the_sampler(llm: LLM) -> None:
    forced = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logit_bias={42: 100})
    assert llm.generate("x", forced)[0].token_ids == [42] * 4
    varied = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, repetition_penalty=100.0)
    ids = llm.generate("x", varied)[0].token_ids
    assert len(set(ids)) == 40


def test_requests_that_cannot_be_served_are_refused_before_any_begins(llm: LLM) -> None:
    for prompt, params, reason in (
        ([], None, "empty"),
        ("", None, "empty"),
        ([49152], None, "token id 49152"),
        ([1] * 512, None, "maximum context length"),
        ([-1], None, "cannot be right"),
        (["x", None], None, "text or a list of token ids"),
        ("x", SamplingParams(temperature=-1), "temperature"),
        ("x", SamplingParams(top_p=0), "top_p"),
        ("x", SamplingParams(max_tokens=0), "max_new_tokens"),
        ("x", SamplingParams(max_tokens=-1), "cannot be right"),
        ("x", SamplingParams(n=0), "n must be"),
        ("x", SamplingParams(logprobs=-1), "logprobs"),
        ("x", SamplingParams(stop=""), "stop strings"),
        ("x", SamplingParams(stop=5), "cannot be right"),  # type: ignore[arg-type]
        ("x", SamplingParams(n="two"), "cannot be right"),  # type: ignore[arg-type]
        ("x", SamplingParams(prompt_logprobs="all"), "prompt_logprobs"),  # type: ignore[arg-type]
        ("x", SamplingParams(logit_bias=[5]), "cannot be right"),  # type: ignore[arg-type]
        ("x", SamplingParams(json_schema={"enum": {1}}), "cannot be right"),
        ("x", SamplingParams(regex="a", json_schema={}), "regex and json_schema"),
        ("x", {"temperature": 0}, "must be SamplingParams"),
        ("x", [SamplingParams()] * 2, "1 prompts and 2"),
        (5, None, "text or a list of token ids"),
        ({"prompt": "x"}, None, "text or a list of token ids"),
    ):
        given = prompt if prompt else [prompt]
        with pytest.raises(RequestError, match=reason):
            llm.generate(["x", *given] if isinstance(given, list) and prompt == [] else given, params)  # type: ignore[arg-type,list-item]
    assert llm.generate("x", GREEDY)[0].token_ids


def test_a_closed_one_can_be_opened_again(model: Path) -> None:
    llm = LLM(str(model), **SMALL)
    first = llm.generate(PROMPTS, GREEDY)
    half = llm.stream(PROMPTS, GREEDY)
    next(half)
    llm.close()
    llm.close()
    with pytest.raises(TokenSpeedError, match="closed"):
        llm.generate("x")
    with llm:
        with pytest.raises(TokenSpeedError, match="closed before this answer"):
            list(half)
        assert [g.token_ids for g in llm.generate(PROMPTS, GREEDY)] == [g.token_ids for g in first]


def test_settings_that_cannot_work_are_told() -> None:
    for settings, reason in (
        ({"max_model_length": 5}, "no setting max_model_length; did you mean max_model_len"),
        ({"port": 8000}, "no setting port"),
        ({"dtype": "float31"}, "dtype must be one of"),
        ({"max_num_seqs": "many"}, "max_num_seqs: Expected `int`"),
        ({"max_num_seqs": 0}, "--max-num-seqs must be 1 or more"),
        ({"reload_overlay": "x"}, "needs --allow-reload-forward"),
    ):
        with pytest.raises(ConfigError, match=reason):
            LLM("smollm2", **settings)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="does not exist"):
        LLM("/no/such/model")


def test_without_the_flag_a_reload_is_refused(llm: LLM) -> None:
    assert llm.reload_forward()["code"] == "not_enabled"
    assert llm.reload_forward(mode="never")["code"] == "bad_request"
    assert llm.reload_forward(timeout_s=0)["code"] == "bad_request"


RELOADING = """
    import shutil, sys
    from pathlib import Path
    from tokenspeed import LLM, SamplingParams
    from tokenspeed.errors import TokenSpeedError

    model, overlay, source, ranks = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    edited = overlay / "tokenspeed/runtime/layers/activation.py"
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(model, max_num_seqs=8, max_total_tokens=2048, allow_reload_forward=True, reload_overlay=str(overlay),
             tensor_parallel_size=ranks, reload_rank_timeout=20) as llm:
        before = llm.generate("x", greedy)[0].token_ids
        assert llm.reload_forward()["modules"] == []

        edited.parent.mkdir(parents=True)
        edited.write_text(source.read_text().replace("return silu_and_mul(", "return -1.5 * silu_and_mul("))
        stream = llm.stream("x", greedy)
        begun = next(stream).token_ids
        reply = llm.reload_forward(id="first")
        assert reply["success"] and reply["generation"] == 1 and reply["id"] == "first", reply
        assert begun + [token for delta in stream for token in delta.token_ids] == before
        after = llm.generate("x", greedy)[0].token_ids
        assert after != before

        edited.write_text(edited.read_text().replace("return -1.5 *", "raise RuntimeError('broken') #"))
        reply = llm.reload_forward()
        assert not reply["success"] and reply["phase"] == "warm" and "broken" in reply["error"], reply
        assert llm.generate("x", greedy)[0].token_ids == after

        if ranks == 1:  # what the warm-up does not run fails later, and ends no other request
            guard = "assert gate_up.shape[0] <= 8, 'too many tokens'; return silu_and_mul("
            edited.write_text(source.read_text().replace("return silu_and_mul(", guard))
            assert llm.reload_forward()["success"]
            try:
                llm.generate("word " * 20, greedy)
            except TokenSpeedError as error:
                assert "prompt 0 failed" in str(error) and "too many tokens" in str(error), error
            else:
                raise AssertionError("the answer should have failed")
            reasons = {g.index: g.outputs[0].finish_reason for g in llm.as_completed(["word " * 20, "x"], greedy)}
            assert reasons[0] == "error", reasons
            assert llm.generate("x", greedy)[0].token_ids == before

        shutil.copyfile(source, edited)
        assert llm.reload_forward()["success"]
        assert llm.generate("x", greedy)[0].token_ids == before

        if ranks > 1:  # what cannot be undone in place ends the ranks; the program starts others
            loop = "        while __import__('torch').distributed.get_rank() == 1: pass\\n"
            passage = "        return silu_and_mul("
            edited.write_text(source.read_text().replace(passage, loop + passage))
            try:
                llm.reload_forward()
            except TokenSpeedError as error:
                assert "rank 1 has not got on for 20 s" in str(error), error
                assert error.file == str(edited) and error.text == loop.strip(), error
            else:
                raise AssertionError("the reload should have ended the ranks")
            shutil.copyfile(source, edited)
            llm.open()
            assert llm.generate("x", greedy)[0].token_ids == before
    print("done")
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_edit_reloads(model: Path, tmp_path: Path, ranks: int) -> None:
    source = installed_path("tokenspeed.runtime.layers.activation")
    arguments = [str(model), str(tmp_path / "overlay"), str(source), str(ranks)]
    command = [sys.executable, "-c", textwrap.dedent(RELOADING), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.returncode == 0 and "done" in result.stdout, result.stdout + result.stderr


def test_two_ranks_answer_as_one_and_leave_nothing_behind(llm: LLM, model: Path) -> None:
    before = set(psutil.Process().children())
    with LLM(str(model), tensor_parallel_size=2, **SMALL) as two:
        new = [child for child in psutil.Process().children() if child not in before]
        ranks = [child for child in new if "tokenspeed.rank" in child.cmdline()]
        assert len(ranks) == 2
        assert two.info.tensor_parallel_size == 2
        alone = [g.token_ids for g in llm.generate(PROMPTS, GREEDY)]
        assert [g.token_ids for g in two.generate(PROMPTS, GREEDY)] == alone
        ranks[0].kill()
        with pytest.raises(TokenSpeedError, match=r"rank . ended with|did not answer"):
            two.generate(PROMPTS, GREEDY)
        with pytest.raises(TokenSpeedError, match="closed"):
            two.generate("x")
    assert not any(rank.is_running() for rank in ranks)


def test_importing_brings_no_torch_and_none_of_the_engine() -> None:
    script = """
        import sys
        import tokenspeed
        from tokenspeed import LLM, SamplingParams
        SamplingParams(max_tokens=3)
        engine = ("tokenspeed.runtime", "tokenspeed_kernel")
        heavy = [name for name in sys.modules if name == "torch" or name.startswith(engine)]
        assert not heavy, heavy
        try:
            tokenspeed.LMM
        except AttributeError:
            print("done")
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert result.stdout == "done\n", result.stderr
