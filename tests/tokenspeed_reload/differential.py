"""Cases as text: programs before and after an edit, what is held, and what must equal a fresh interpreter.

A file in `cases/` holds cases of this form; `[m after]` gives the edited text of module `m`, and a module that
exists only after the edit has no other part. `[fresh hold]` stands for `[hold]` in the fresh run. Each line
under `[check]` is an expression. `[reported]` names definitions that CPython cannot bring up to date: the report
has to name them, and the checks then need not agree.
"""

from __future__ import annotations

import importlib
import linecache
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ADDRESS = re.compile(r"0x[0-9a-f]+")


def catches(function: Callable[[], Any], kind: type[BaseException]) -> bool:
    """True when calling `function` raises `kind`."""
    try:
        function()
    except kind:
        return True
    return False


def raised_line(function: Callable[[], Any]) -> int | None:
    """The line on which the ValueError of `function` was raised."""
    try:
        function()
    except ValueError as error:
        return traceback.extract_tb(error.__traceback__)[-1].lineno
    return None


HELPERS: dict[str, Any] = {"catches": catches, "raised_line": raised_line}
"""What the code of a case may call."""


@dataclass
class Case:
    """One program and one edit."""

    name: str
    before: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    hold: str = ""
    fresh_hold: str = ""
    checks: list[str] = field(default_factory=list)
    reported: list[str] = field(default_factory=list)

    @property
    def packages(self) -> list[str]:
        """The top-level names of its modules."""
        return list(dict.fromkeys(name.split(".")[0] for name in (*self.before, *self.after)))

    @property
    def first(self) -> list[str]:
        """The modules that are imported before the edit."""
        return [name.removesuffix(".__init__") for name in self.before]


def load_cases(directory: Path) -> list[Case]:
    """All cases of a directory; those in `py312.txt` need that version."""
    cases: list[Case] = []
    for file in sorted(directory.glob("*.txt")):
        newest = re.fullmatch(r"py3(\d+)", file.stem)
        if newest and sys.version_info < (3, int(newest[1])):
            continue
        for text in re.split(r"^== ", file.read_text(), flags=re.MULTILINE)[1:]:
            cases.append(parse_case(text))
    return cases


def parse_case(text: str) -> Case:
    """One case from its text."""
    title, _, rest = text.partition("\n")
    case = Case(title.strip())
    parts = re.split(r"^\[([\w.]+(?: after| gone)?|fresh hold)\]\n", rest, flags=re.MULTILINE)
    for head, body in zip(parts[1::2], parts[2::2], strict=True):
        body = body.strip("\n") + "\n"
        if head == "hold":
            case.hold = body
        elif head == "fresh hold":
            case.fresh_hold = body
        elif head == "check":
            case.checks = body.splitlines()
        elif head == "reported":
            case.reported = body.split()
        elif head.endswith(" after"):
            case.after[head.removesuffix(" after")] = body
        elif head.endswith(" gone"):
            case.gone.append(head.removesuffix(" gone"))
        else:
            case.before[head] = body
    return case


def look(checks: list[str], scope: dict[str, Any]) -> list[str]:
    """What each expression shows, or how it fails."""
    shown = []
    for check in checks:
        try:
            shown.append(ADDRESS.sub("0x", repr(eval(check, scope))))
        except Exception as error:
            shown.append(f"{type(error).__name__}: {ADDRESS.sub('0x', str(error))}")
    return shown


def fresh_look(case: Case, root: Path) -> list[str]:
    """What a fresh interpreter would show: the modules are imported anew, beside the live ones."""

    def ours() -> list[str]:
        return [n for n in sys.modules if n.split(".")[0] in case.packages]

    saved = {name: sys.modules.pop(name) for name in ours()}
    lines = dict(linecache.cache)
    for path in [p for p in linecache.cache if p.startswith(str(root))]:
        del linecache.cache[path]
    importlib.invalidate_caches()
    scope = dict(HELPERS)
    try:
        for name in case.first:
            importlib.import_module(name)
        exec(case.fresh_hold or case.hold, scope)
        return look(case.checks, scope)
    except Exception as error:
        return [f"fails: {type(error).__name__}: {error}"]
    finally:
        for name in ours():
            del sys.modules[name]
        sys.modules.update(saved)
        linecache.cache.clear()
        linecache.cache.update(lines)
