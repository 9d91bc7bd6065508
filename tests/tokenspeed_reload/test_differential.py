"""Every case of `cases/`: what is held shows what a fresh interpreter shows, or the report names it."""

from __future__ import annotations

import ast
import contextlib
import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.tokenspeed_reload.differential import HELPERS, Case, fresh_look, load_cases, look
from tokenspeed_reload import ReloadError, Report

CASES = load_cases(Path(__file__).parent / "cases")


def start(project, case: Case) -> dict[str, Any]:
    for name, text in case.before.items():
        project.write_module(name, text)
    project.watch(*case.packages)
    for name in case.first:
        project.load(name)
    held: dict[str, Any] = dict(HELPERS)
    exec(case.hold, held)
    return held


def edit(project, case: Case) -> list[str]:
    """Write the edited files, and tell what a fresh interpreter shows of them."""
    for name, text in case.after.items():
        project.write_module(name, text)
    for name in case.gone:
        project.root.joinpath(*name.split(".")).with_suffix(".py").unlink()
    project.reloader.uninstall()
    try:
        return fresh_look(case, project.root)
    finally:
        project.reloader.install()
        importlib.invalidate_caches()


def named(report: Report) -> str:
    """Everything that a report says of what could not follow."""
    return " ".join([s.definition for s in report.stale] + [n.what for n in report.needs_restart] + report.notes)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_what_is_held_shows_what_a_fresh_interpreter_shows(project, case, picture):
    held = start(project, case)
    expected = edit(project, case)
    before = picture(held, case.first)
    try:
        transaction = project.reloader.reload()
    except ReloadError as error:
        assert expected[0].startswith("fails:"), error
        assert picture(held, case.first) == before
        return
    shown = picture(held, case.first)
    transaction.swap()
    assert picture(held, case.first) == before
    transaction.swap()
    assert picture(held, case.first) == shown
    transaction.commit()
    said = named(transaction.report)
    for name in case.reported:
        assert name in said
    if not case.reported:
        assert look(case.checks, held) == expected
    assert project.reload().objects_patched == 0


@pytest.mark.parametrize("case", CASES[::4], ids=[case.name for case in CASES[::4]])
def test_a_failure_at_any_write_leaves_no_trace(project, case, picture, broken_writes):
    held = start(project, case)
    edit(project, case)
    before = picture(held, case.first)
    for _ in broken_writes():
        with contextlib.suppress(ReloadError):
            project.reloader.reload().undo()
        assert picture(held, case.first) == before


@pytest.mark.parametrize("case", CASES[1::8], ids=[case.name for case in CASES[1::8]])
def test_a_failure_of_any_statement_leaves_no_trace(project, case, picture):
    """The edited modules raise after each of their statements, the last module first."""
    held = start(project, case)
    edit(project, case)
    before = picture(held, case.first)
    for name, text in reversed(case.after.items()):
        ends = [node.end_lineno for node in ast.parse(text).body]
        for end in ends[:: max(1, len(ends) // 3)]:
            lines = text.splitlines()
            lines.insert(end, "raise RuntimeError('stop')")
            project.write_module(name, "\n".join(lines))
            if name.removesuffix(".__init__") in case.first:
                with pytest.raises(ReloadError):
                    project.reloader.reload()
            assert picture(held, case.first) == before
        project.write_module(name, text)
