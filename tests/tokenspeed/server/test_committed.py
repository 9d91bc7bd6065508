"""The code that is kept for ranks to come, from the message of a rank to the import hook of another one."""

from __future__ import annotations

from pathlib import Path

from tokenspeed.rank import Before, committed
from tokenspeed.runtime.protocol.reports import Committed
from tokenspeed.runtime.protocol.state import ModuleCode
from tokenspeed.server.committed import CommittedCode
from tokenspeed_reload import Origin, SourceText

TACTICS = {"gemm.linear|8": {"tactic": {"block": 64}, "us": 0.0, "source": ""}}


def module(text: str) -> ModuleCode:
    return ModuleCode(path="/overlay/m.py", data=text.encode(), origin="/installed/m.py")


def test_what_was_told_last_reaches_other_ranks(tmp_path: Path) -> None:
    code = CommittedCode()
    code.take(Committed(generation=0, modules={name: module("X = 1") for name in "ac"} | {"b": module("Y = 1")}))
    code.take(Committed(generation=1, modules={"a": module("X = 2")}, forgotten=["c"], tactics=TACTICS))
    code.write(tmp_path)
    assert committed(tmp_path) == Before(
        1,
        {
            "a": Origin(SourceText("/overlay/m.py", b"X = 2"), "/installed/m.py"),
            "b": Origin(SourceText("/overlay/m.py", b"Y = 1"), "/installed/m.py"),
        },
        TACTICS,
    )


def test_where_nothing_is_recorded_nothing_is_kept(tmp_path: Path) -> None:
    CommittedCode().write(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert committed(tmp_path) is None
