"""What the reply of a reload tells."""

from __future__ import annotations

from tokenspeed.runtime.execution.generation import Generation
from tokenspeed.runtime.reload.reply import success
from tokenspeed_kernel.jit import JitCount
from tokenspeed_reload import Report
from tokenspeed_reload.report import Stale


def test_what_only_the_old_graphs_hold_is_not_stale() -> None:
    node = "tokenspeed.runtime.execution.graphs.base.Node object.function"
    copies = "dict object['_copies'][140138805928928][0]"
    stale = [Stale("m.f", "it was removed", [node, copies]), Stale("m.g", "it was removed", [node, "n.KEPT"])]
    seconds = {"patch": 0.1, "warm": 0.1, "total": 0.2}
    reply = success("id", Report(stale=stale), Generation(1, {}, {}), JitCount(), seconds)
    assert reply["stale"] == [{"definition": "m.g", "why": "it was removed", "held_by": ["n.KEPT"]}]
