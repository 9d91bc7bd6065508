"""What rank 0 tells the front of the code that serves, so that other ranks can run it whatever the disk holds."""

from __future__ import annotations

from collections.abc import Callable

from tokenspeed.runtime.protocol.reports import CallReply, Committed
from tokenspeed.runtime.protocol.state import ModuleCode
from tokenspeed_kernel.tactics import TACTICS
from tokenspeed_reload import Reloader, SourceText


class CommittedCode:
    """Tells each recorded module once for each source that it runs."""

    def __init__(self, reloader: Reloader, generation: Callable[[], int], send: Callable[[Committed], None]):
        self.reloader = reloader
        self.generation = generation
        self.send = send
        self._told: dict[str, SourceText] = {}

    def tell(self, reply: CallReply | None = None) -> None:
        """Tell what has not been told yet.

        Args:
            reply: of the reload that has just committed.
        """
        records = list(self.reloader.records.modules.values())
        news = [record for record in records if self._told.get(record.name) is not record.source]
        self._told.update({record.name: record.source for record in news})
        forgotten = sorted(self._told.keys() - {record.name for record in records})
        for name in forgotten:
            del self._told[name]
        modules = {
            record.name: ModuleCode(path=record.source.path, data=record.source.data, origin=record.origin)
            for record in news
        }
        self.send(
            Committed(
                generation=self.generation(),
                modules=modules,
                forgotten=forgotten,
                reply=reply,
                tactics=TACTICS.in_use(),
            )
        )

    def tell_imports(self) -> None:
        """Tell the modules that were imported since; costs nothing where there are none."""
        if len(self.reloader.records.modules) != len(self._told):
            self.tell()
