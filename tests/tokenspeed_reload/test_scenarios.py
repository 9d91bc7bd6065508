"""Every before/after case, run as data: the edit lands, an undo leaves no trace, nothing drifts."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.tokenspeed_reload.differential import HELPERS
from tokenspeed_reload import ReloadError

CASES = [
    case for file in sorted(Path(__file__).parent.glob("*scenarios.json")) for case in json.loads(file.read_text())
]


def start(project, case) -> dict[str, Any]:
    names = list(case["before"])
    for name, text in case["before"].items():
        project.write_module(name, text)
    project.watch(*names)
    held: dict[str, Any] = dict(HELPERS)
    for name in names:
        project.load(name)
    exec(case["hold"], held)
    return held


def edit(project, case, keep_stamp) -> None:
    for name, text in case["after"].items():
        path = project.root / f"{name}.py"
        if case.get("same_size_same_mtime"):
            keep_stamp(path, text)
        else:
            project.write_module(name, text)


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_the_edit_reaches_what_is_held(project, case, keep_stamp, picture):
    held = start(project, case)
    names = list(case["before"])
    before = picture(held, names)
    report = project.reload()
    assert (report.modules, report.objects_patched, report.stale) == ([], 0, [])
    assert picture(held, names) == before
    edit(project, case, keep_stamp)
    try:
        transaction = project.reloader.reload()
    except ReloadError:  # some edits are broken; what holds then is in the case
        assert picture(held, names) == before
        assert eval(case["expect"], held)
        return
    after = picture(held, names)
    for _ in range(2):
        transaction.swap()
        assert picture(held, names) == before
        transaction.swap()
        assert picture(held, names) == after
    transaction.commit()
    assert eval(case["expect"], held)
    assert project.reloader.changed() == []
    assert project.reload().objects_patched == 0


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_undo_leaves_no_trace(project, case, keep_stamp, picture, broken_writes):
    held = start(project, case)
    names = list(case["before"])
    before = picture(held, names)
    edit(project, case, keep_stamp)
    with contextlib.suppress(ReloadError):
        project.reloader.reload().undo()
    assert picture(held, names) == before
    for _ in broken_writes() if CASES.index(case) % 4 == 0 else ():
        with contextlib.suppress(ReloadError):
            project.reloader.reload().undo()
        assert picture(held, names) == before
