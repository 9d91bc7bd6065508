"""Reloads over several ranks: the code of rank 0 on all of them, and a fault of one undone on all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.harness import installed_path
from tests.tiny import tiny_llama
from tokenspeed import LLM, SamplingParams
from tokenspeed_reload.gone import FORGOTTEN

LLAMA = "tokenspeed.runtime.models.llama"
EXTRA = "tokenspeed.runtime.models.extra"
SAMPLER = "tokenspeed.runtime.sampling.sampler"
LINEAR = "tokenspeed.runtime.layers.linear"
ACTIVATION = "tokenspeed_kernel.ops.activation.reference"
PRODUCT = "return silu(gate) * up"
REDUCE = "self.group.all_reduce(self.project(x, self.bias if self.group.rank == 0 else None))"
MLP = "return self.mlp(hidden), residual"
FORWARD = "        hidden, residual = self.input_layernorm(hidden, residual)\n"
RANK = "torch.distributed.get_rank()"
PROMPTS = ("The three primary colours are", "Item 1", "a b c d e f g h i j k l m n o p q r s t u v w x y z")
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)


class Edited:
    """Ranks whose forward pass is edited in an overlay."""

    def __init__(self, llm: LLM, overlay: Path):
        self.llm = llm
        self.overlay = overlay
        self.at_start: list[Any] | None = None

    def path(self, module: str) -> Path:
        return self.overlay / Path(*module.split(".")).with_suffix(".py")

    def write(self, module: str, old: str, new: str) -> Path:
        """The installed module with one passage replaced."""
        text = installed_path(module).read_text()
        assert old in text
        path = self.path(module)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace(old, new))
        return path

    def revert(self, module: str) -> None:
        self.write(module, "", "")

    def reload(self, **call: Any) -> dict[str, Any]:
        return self.llm.reload_forward(**call)

    def answers(self) -> list[Any]:
        """Tokens and log-probabilities of prompts that are sent alone."""
        generations = [self.llm.generate(prompt, PARAMS)[0] for prompt in PROMPTS]
        return [(g.token_ids, g.prompt_logprobs, g.outputs[0].logprobs) for g in generations]

    def fails(self, phase: str, rank: int) -> dict[str, Any]:
        """Reload an edit that fails, and see that nothing is left of it."""
        before = self.answers()
        reply = self.reload()
        assert not reply["success"] and reply["undone"], reply
        assert (reply["phase"], reply["rank"]) == (phase, rank), reply
        assert self.answers() == before
        return reply


GRAPHS: dict[str, Any] = {
    "cpu_graphs": True,
    "cudagraph_capture_sizes": (1, 4),
    "prefill_graph_max_tokens": 64,
}


@pytest.fixture(scope="module", params=["eager", "graphs", "three"])
def edited(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edited]:
    folder = tmp_path_factory.mktemp(request.param)
    ranks = 3 if request.param == "three" else 2
    model = tiny_llama(folder / "model", num_heads=6, num_kv_heads=ranks)
    settings = {} if request.param == "eager" else GRAPHS
    with LLM(
        str(model),
        max_num_seqs=8,
        max_total_tokens=2048,
        enable_prefix_caching=False,
        allow_reload_forward=True,
        reload_overlay=str(folder / "overlay"),
        tensor_parallel_size=ranks,
        **settings,
    ) as llm:
        yield Edited(llm, folder / "overlay")


@pytest.fixture(autouse=True)
def goes_on(edited: Edited) -> Iterator[None]:
    """After each test the unedited code commits, and answers as at the start."""
    if edited.at_start is None:
        edited.at_start = edited.answers()
    yield
    for module in (LINEAR, LLAMA, SAMPLER, ACTIVATION):
        edited.revert(module)
    reply = edited.reload()
    assert reply["success"], reply
    assert edited.answers() == edited.at_start


def on_rank(rank: int, statement: str, condition: str = "True") -> str:
    return f"        if {RANK} == {rank} and {condition}:\n            {statement}\n"


@pytest.mark.parametrize("edited", ["graphs", "three"], indirect=True)
def test_kernels_are_swapped_on_all_ranks_or_on_none(edited: Edited) -> None:
    seen = [edited.answers()]

    def reload(how: str) -> dict[str, Any]:
        reply = edited.reload()
        assert reply["success"] and reply["graphs"]["how"] == how, reply
        seen.append(edited.answers())
        assert seen[-1] not in seen[:-1]
        return reply

    for factor in (0.5, 0.25):
        edited.write(ACTIVATION, PRODUCT, f"{PRODUCT} * {factor}")
        reload("swapped")
    edited.write(ACTIVATION, PRODUCT, f"{PRODUCT} * missing")
    assert edited.reload()["phase"] == "warm"
    assert edited.answers() == seen[-1]
    # One rank has more to do than to run another body.
    only_one = f"{PRODUCT} * 0.75\n\n\nif __import__('torch').distributed.get_rank() == 1:\n    EXTRA = 1\n"
    edited.write(ACTIVATION, PRODUCT, only_one)
    assert any("EXTRA has another value" in note for note in reload("recaptured")["notes"])
    edited.write(ACTIVATION, PRODUCT, only_one.replace("0.75", "0.125"))
    reload("swapped")


@pytest.mark.parametrize("edited", ["graphs"], indirect=True)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_in_the_patch_of_one_rank(edited: Edited, rank: int) -> None:
    path = edited.write(
        LLAMA, "class LlamaMLP", f"if {RANK} == {rank}:\n    raise ValueError('here')\n\n\nclass LlamaMLP"
    )
    reply = edited.fails("patch", rank)
    assert (reply["file"], reply["text"]) == (str(path), "raise ValueError('here')")


@pytest.mark.parametrize(("where", "rank"), [("before", 0), ("after", 1)])
def test_a_fault_in_the_warm_up_of_one_rank(edited: Edited, where: str, rank: int) -> None:
    fault = on_rank(rank, "raise ValueError('here')")
    mlp = "        hidden = self.mlp(hidden)\n"
    body = fault + mlp if where == "before" else mlp + fault
    path = edited.write(LLAMA, f"        {MLP}\n", f"{body}        return hidden, residual\n")
    reply = edited.fails("warm", rank)
    assert (reply["file"], reply["text"]) == (str(path), "raise ValueError('here')")
    assert reply["error"] == "ValueError: here"


@pytest.mark.parametrize("edited", ["graphs"], indirect=True)
def test_a_fault_inside_a_collective_of_one_rank(edited: Edited) -> None:
    path = edited.write(
        LINEAR, REDUCE, f"self.group.all_reduce(self.project(x, None).to('meta' if {RANK} == 1 else 'cpu'))"
    )
    reply = edited.fails("warm", 1)
    assert reply["file"] == str(path) and "'meta'" in reply["text"]


@pytest.mark.parametrize("edited", ["graphs"], indirect=True)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_in_the_capture_of_one_rank(edited: Edited, rank: int) -> None:
    path = edited.write(LLAMA, FORWARD, on_rank(rank, "raise ValueError('here')", "hidden.shape[0] == 64") + FORWARD)
    reply = edited.fails("graphs", rank)
    assert (reply["file"], reply["text"]) == (str(path), "raise ValueError('here')")


PARTIAL = "self.project(x, None)"
OUT_OF_STEP = {
    "skips": "{partial} if {rank} == 1 else {reduce}",
    "calls twice": "self.group.all_reduce({reduce} if {rank} == 1 else {partial})",
    "another shape": "self.group.all_reduce({partial}.view((-1, 2) if {rank} == 1 else (-1, 64))).view(-1, 64)",
    "another type": "self.group.all_reduce({partial}.to(torch.float64 if {rank} == 1 else x.dtype)).to(x.dtype)",
    "another one": "self.group.all_gather_last(x)[..., :64] if {rank} == 1 else {reduce}",
}


@pytest.mark.parametrize("edited", ["graphs"], indirect=True)
@pytest.mark.parametrize("edit", OUT_OF_STEP)
def test_collectives_of_one_rank_that_are_out_of_step(edited: Edited, edit: str) -> None:
    wrong = OUT_OF_STEP[edit].format(rank=RANK, partial=PARTIAL, reduce=f"self.group.all_reduce({PARTIAL})")
    edited.write(LINEAR, REDUCE, wrong)
    reply = edited.fails("warm", 1)
    assert "the same ones in the same order" in reply["error"], reply


def test_every_rank_runs_the_bytes_that_rank_0_read(edited: Edited) -> None:
    """Rank 1 finds other files than rank 0 read: the first module that it executes overwrites the other."""
    before = edited.answers()
    other = edited.write(LLAMA, MLP, "return self.mlp(hidden) * 0.25, residual")
    wanted = other.read_text()
    swap = f"\nif {RANK} == 1:\n    __import__('pathlib').Path({str(other)!r}).write_text('raise ValueError')\n"
    edited.write(LINEAR, "class Linear(Layer)", f"{swap}\n\nclass Linear(Layer)")
    reply = edited.reload()
    assert reply["success"] and other.read_text() == "raise ValueError", reply
    after = edited.answers()
    assert after != before
    other.write_text(wanted)
    edited.revert(LINEAR)
    assert edited.reload()["success"]
    assert edited.answers() == after


@pytest.mark.parametrize("edited", ["graphs"], indirect=True)
def test_an_edit_may_branch_on_the_rank(edited: Edited) -> None:
    before = edited.answers()
    edited.write(LLAMA, MLP, f"return self.mlp(hidden * (1 if {RANK} == 0 else -1)), residual")
    assert edited.reload()["success"]
    assert edited.answers() != before


@pytest.mark.parametrize("edited", ["graphs"], indirect=True)
@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (LLAMA, "self.lm_head.logits(hidden)", "self.lm_head.logits(hidden) * (1 if {rank} == 0 else 1.01)"),
        (
            SAMPLER,
            "return logits.argmax(dim=-1)",
            "return logits.argmax(dim=-1) + __import__('torch').distributed.get_rank()",
        ),
    ],
    ids=["logits", "ids"],
)
def test_ranks_that_would_part(edited: Edited, module: str, old: str, new: str) -> None:
    edited.write(module, old, new.format(rank=RANK))
    reply = edited.fails("warm", 1)
    assert "rank 1 computes other logits or samples other ids" in reply["error"]


def run_dir_of(edited: Edited) -> Path:
    """The run directory of these ranks; others may run below this process."""
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess, OSError, ValueError, IndexError):
            command = child.cmdline()
            path = Path(command[command.index("--run-dir") + 1])
            if str(edited.overlay) in (path / "config.json").read_text():
                return path
    raise AssertionError("the ranks are gone")


@pytest.mark.parametrize("edited", ["graphs"], indirect=True)
def test_a_spare_that_cannot_be_made_refuses_the_next_reload_only(edited: Edited) -> None:
    meeting = run_dir_of(edited) / "store"
    away = meeting.rename(meeting.with_name("away"))
    meeting.mkdir()
    before = edited.answers()
    edited.write(LLAMA, MLP, "return self.mlp(absent), residual")
    reply = edited.reload()  # it leaves its communicators in any state, so that the next one needs others
    assert (reply["success"], reply["phase"]) == (False, "warm") and "absent" in reply["error"], reply
    edited.revert(LLAMA)
    edited.write(LLAMA, MLP, "return self.mlp(hidden) * 0.5, residual")
    reply = edited.reload()
    assert (reply["success"], reply["code"], reply["phase"]) == (False, "failed", "queue")
    assert "no spare communicator can be made" in reply["error"] and "nothing was changed" in reply["error"]
    assert edited.answers() == before
    meeting.rmdir()
    away.rename(meeting)
    assert edited.reload()["success"]
    assert edited.answers() != before
    edited.revert(LLAMA)
    assert edited.reload()["success"]
    assert edited.answers() == before


@pytest.mark.parametrize("edited", ["graphs"], indirect=True)
def test_what_is_said_of_files_is_said_once_and_where_nothing_else_changed(edited: Edited) -> None:
    stray, extra = edited.path("tokenspeed.runtime.model.llama"), edited.path(EXTRA)
    for path in (stray, extra):
        path.parent.mkdir(parents=True, exist_ok=True)
    stray.write_text("")
    extra.write_text("FACTOR = 1.0\n")
    edited.write(LLAMA, "import torch\n", "import torch\nfrom tokenspeed.runtime.models import extra\n")
    reply = edited.reload()
    assert reply["success"] and any(str(stray) in note for note in reply["notes"]), reply
    extra.unlink()
    reply = edited.reload()
    assert reply["modules"] == [] and any(str(stray) in note for note in reply["notes"]), reply
    assert any("models.extra is gone" in note for note in reply["notes"]), reply
    edited.revert(LLAMA)
    reply = edited.reload()
    assert not any(str(stray) in note for note in reply["notes"]), reply
    assert any("models.extra is gone" in note for note in reply["notes"]), reply
    edited.write(LLAMA, "import torch\n", "import torch\n\n")
    reply = edited.reload()
    assert reply["success"] and not any(str(stray) in note for note in reply["notes"]), reply
    assert [note for note in reply["notes"] if "extra" in note] == [FORGOTTEN.format(EXTRA)], reply
    edited.revert(LLAMA)
    reply = edited.reload()
    assert reply["success"] and not any("extra" in note or str(stray) in note for note in reply["notes"]), reply
    stray.unlink()
