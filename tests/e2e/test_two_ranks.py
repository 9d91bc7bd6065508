"""Two ranks say what one says, and meet a fault on one of them together."""

from __future__ import annotations

from tests.e2e.harness import Server, dump

LLAMA = "tokenspeed.runtime.models.llama"
ON_RANK_1 = "\nif torch.distributed.get_rank() == 1:\n    raise RuntimeError('only here')\n"
PROMPTS = ("The three primary colours are", "Item 1", "a b c d e f", "def f(x):")


def test_the_tokens_are_those_of_one_rank(pair: Server, alone: Server) -> None:
    sampled = {"temperature": 0.9, "top_p": 0.8, "seed": 5, "n": 2, "frequency_penalty": 0.7, "max_tokens": 24}
    for prompt in PROMPTS:
        assert pair.text(prompt, max_tokens=32) == alone.text(prompt, max_tokens=32)
        drawn = [server.complete(prompt, **sampled)["choices"] for server in (pair, alone)]
        assert [choice["text"] for choice in drawn[0]] == [choice["text"] for choice in drawn[1]]


def test_a_failure_on_one_rank_undoes_both(pair: Server) -> None:
    before = [pair.text(prompt) for prompt in PROMPTS]
    pair.replace(LLAMA, "return self.mlp(hidden), residual", "return self.mlp(hidden) * -0.7, residual")
    path = pair.edit(LLAMA, lambda text: text + ON_RANK_1)
    reply = pair.reload()
    assert not reply["success"]
    assert (reply["phase"], reply["rank"], reply["file"]) == ("patch", 1, str(path)), dump(reply)
    assert "only here" in reply["error"]
    assert [pair.text(prompt) for prompt in PROMPTS] == before
    path.write_text(path.read_text().replace(ON_RANK_1, ""))
    assert pair.reload()["success"]
    assert [pair.text(prompt) for prompt in PROMPTS] != before
