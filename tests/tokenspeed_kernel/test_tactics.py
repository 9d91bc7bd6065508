"""The table of tactics: when it is filled, what is kept in its file, and what is not taken from one."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tokenspeed_kernel import tactics as module
from tokenspeed_kernel.tactics import Tactic, Tactics, source_hash, tactics_file
from tokenspeed_kernel.tuning import one_of_each_power

CANDIDATES = ({"block": 16}, {"block": 32}, {"block": 64})


class Timed(Tactics):
    """Times by a table instead of a GPU; None stands for a tactic that does not run."""

    costs: Mapping[int, float | None] = {16: 3.0, 32: 1.0, 64: None}

    def _time(self, tactic: Tactic, run: object) -> float | None:
        self.notes.append(f"timed {tactic['block']}")
        return self.costs[tactic["block"]]


def run(tactic: Tactic) -> None:
    """The kernel."""


def pick(table: Tactics, *bucket: object) -> int:
    return table.pick("norm.scale.triton", bucket, CANDIDATES, run)["block"]


def test_outside_a_window_the_default_is_taken_and_nothing_is_timed() -> None:
    table = Timed()
    assert pick(table, 8) == 16
    assert (table.found, table.notes) == ({}, [])


def test_in_a_window_the_fastest_that_runs_is_found_once_a_bucket() -> None:
    table = Timed()
    with table.window():
        assert [pick(table, 8), pick(table, 8), pick(table, 16)] == [32, 32, 32]
    assert len(table.notes) == 2 * len(CANDIDATES)
    assert pick(table, 8) == 32
    assert pick(table, 99) == 16


def test_the_default_stays_where_nothing_runs() -> None:
    table = Timed()
    table.costs = dict.fromkeys((16, 32, 64))
    with table.window():
        assert pick(table, 8) == 16


def test_the_next_start_takes_what_the_file_holds(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "tactics.json"
    first = Timed(file)
    with first.window():
        pick(first, 8)
    second = Timed()
    second.load(file)
    with second.window():
        assert pick(second, 8) == 32
    assert second.notes == []


def test_another_rank_takes_what_it_is_given_without_a_window() -> None:
    first, other = Timed(), Timed()
    with first.window():
        pick(first, 8)
    assert pick(other, 8) == 16
    other.install(json.loads(json.dumps(first.export())))
    assert (pick(other, 8), pick(other, 16)) == (32, 16)
    assert other.notes == []


def test_a_default_that_was_taken_before_the_window_does_not_stay() -> None:
    table = Timed()
    assert pick(table, 8) == 16
    with table.window():
        assert pick(table, 8) == 32
    assert pick(table, 8) == 32


@pytest.mark.parametrize("change", ["source", "candidates"])
def test_what_was_found_for_other_code_is_timed_again(tmp_path: Path, change: str) -> None:
    file = tmp_path / "tactics.json"
    table = Timed(file)
    with table.window():
        pick(table, 8)
    content = json.loads(file.read_text())
    (entry,) = content["tactics"].values()
    if change == "source":
        entry["source"] = "another"
    else:
        entry["tactic"] = {"block": 1024}
    file.write_text(json.dumps(content))
    again = Timed()
    again.load(file)
    with again.window():
        assert pick(again, 8) == 32
    assert len(again.notes) == len(CANDIDATES)


def test_a_rank_that_replaces_another_takes_what_that_one_used_although_its_code_was_edited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = Timed()
    with first.window():
        assert [pick(first, 8), pick(first, 16)] == [32, 32]
    monkeypatch.setattr(module, "source_hash", lambda name: "edited")
    assert pick(first, 8) == 32
    assert pick(first, 99) == 16
    second = Timed()
    second.install(json.loads(json.dumps(first.in_use())))
    assert [pick(second, size) for size in (8, 16, 99)] == [pick(first, size) for size in (8, 16, 99)] == [32, 32, 16]
    assert second.notes == []


def test_an_edit_keeps_tactics_and_takes_new_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Timed()
    with table.window():
        assert pick(table, 8) == 32
    assert pick(table, 99) == 16
    monkeypatch.setattr(module, "source_hash", lambda name: "edited")
    monkeypatch.setattr(sys.modules[__name__], "CANDIDATES", ({"block": 128}, {"block": 32}, {"block": 16}))
    table.look_again()
    assert [pick(table, 8), pick(table, 99)] == [32, 128]
    assert table.lost() == []


def test_a_tactic_that_an_edit_removed_falls_back_and_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Timed()
    with table.window():
        assert [pick(table, size) for size in (8, 16, 24)] == [32, 32, 32]
    before = CANDIDATES

    def list_now(*blocks: int) -> None:
        monkeypatch.setattr(sys.modules[__name__], "CANDIDATES", tuple({"block": block} for block in blocks))
        table.look_again()

    list_now(16, 64)
    assert [pick(table, size) for size in (8, 16, 24, 99)] == [16, 16, 16, 16]
    (said,) = table.lost()
    assert said.startswith("norm.scale.triton no longer lists the tactic that was tuned for (8); (16) and 1 more; ")
    table.look_again()
    assert (pick(table, 8), table.lost()) == (16, [])
    # As after an undo.
    monkeypatch.setattr(sys.modules[__name__], "CANDIDATES", before)
    table.look_again()
    assert (pick(table, 8), table.lost()) == (32, [])
    list_now(64, 16)
    assert pick(table, 8) == 64
    assert len(table.lost()) == 1
    # The next start times it again.
    with table.window():
        assert pick(table, 8) == 16


def test_a_kernel_whose_arguments_changed_takes_its_default() -> None:
    table = Timed()
    with table.window():
        pick(table, 8)
    renamed = ({"rows": 4}, {"rows": 8})
    assert table.pick("norm.scale.triton", (8,), renamed, run) == {"rows": 4}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"format": 1}', '{"format": 9, "machine": {}, "tactics": {}}', '{"tactics": 3}', "\x00"],
)
def test_a_file_that_is_broken_or_of_another_machine_is_left_aside_with_a_note(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tactics.json"
    file.write_text(text)
    table = Timed()
    table.load(file)
    assert table.found == {}
    (note,) = table.notes
    assert str(file) in note
    table.notes.clear()
    with table.window():
        assert pick(table, 8) == 32
    assert json.loads(file.read_text())["tactics"]


def test_bytes_that_are_no_text_and_entries_that_are_no_tactics_are_left_aside(tmp_path: Path) -> None:
    file = tmp_path / "tactics.json"
    file.write_bytes(b"\xff\xfe\x00")
    table = Timed()
    table.load(file)
    file.write_text(json.dumps({"format": 1, "machine": module.machine(), "tactics": {"a": {"tactic": {"b": "x"}}}}))
    table.load(file)
    assert (len(table.notes), table.found) == (2, {})


def test_a_directory_that_cannot_be_written_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    table = Timed(tmp_path / "taken" / "tactics.json")
    with table.window():
        assert pick(table, 8) == 32
    assert "cannot be kept" in table.notes[-1]


def test_the_file_is_in_the_cache_that_the_user_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSPEED_CACHE", str(tmp_path))
    assert tactics_file().parent == tmp_path / "tactics"
    monkeypatch.delenv("TOKENSPEED_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert tactics_file().parent == tmp_path / "xdg" / "tokenspeed" / "tactics"


def test_the_hash_is_that_of_the_modules_source() -> None:
    assert source_hash(__name__) == source_hash(__name__)
    assert source_hash(__name__) != source_hash(module.__name__)
    assert source_hash("no.such.module")


def test_one_size_of_each_power_of_two_is_tuned() -> None:
    assert list(one_of_each_power([1, 2, 4, 8, 16, 24, 32, 40, 64, 256])) == [256, 64, 32, 16, 8, 4, 2, 1]
    assert list(one_of_each_power([])) == []
