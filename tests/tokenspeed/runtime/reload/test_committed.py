"""What the front is told of the code that serves."""

from __future__ import annotations

from tokenspeed.runtime.protocol.reports import CallReply, Committed
from tokenspeed.runtime.protocol.state import ModuleCode
from tokenspeed.runtime.reload.committed import CommittedCode
from tokenspeed_reload import Reloader, SourceText
from tokenspeed_reload.records import ModuleRecord


def record(reloader: Reloader, name: str, text: str) -> None:
    """As the import hook does it."""
    source = SourceText(f"/overlay/{name}.py", text.encode())
    code = compile(text, source.path, "exec")
    reloader.records.add(ModuleRecord(name, source, code, f"/installed/{name}.py"))


def test_each_source_of_each_module_is_told_once() -> None:
    reloader, sent = Reloader(packages=["a"]), list[Committed]()
    code = CommittedCode(reloader, lambda: 5, sent.append)
    record(reloader, "a", "X = 1")
    code.tell()
    assert sent.pop() == Committed(
        generation=5, modules={"a": ModuleCode(path="/overlay/a.py", data=b"X = 1", origin="/installed/a.py")}
    )
    code.tell_imports()
    assert sent == []
    record(reloader, "b", "Y = 1")
    code.tell_imports()
    assert set(sent.pop().modules) == {"b"}
    record(reloader, "a", "X = 2")
    reply = CallReply(call=1, body={"success": True})
    code.tell(reply)
    told = sent.pop()
    assert told.reply == reply
    assert {name: module.data for name, module in told.modules.items()} == {"a": b"X = 2"}
    reloader.records.forget("b")
    code.tell()
    assert sent.pop().forgotten == ["b"]
    code.tell_imports()
    assert sent == []
