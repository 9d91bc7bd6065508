"""The code that the ranks run, kept for the ranks that may have to replace them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tokenspeed.forward import COMMITTED_FILE
from tokenspeed.runtime.protocol.reports import Committed
from tokenspeed.runtime.protocol.state import ModuleCode


class CommittedCode:
    """Every module of the last committed generation, as rank 0 tells it; empty where reloads are not permitted."""

    def __init__(self) -> None:
        self._generation = 0
        self._modules: dict[str, ModuleCode] = {}
        self._tactics: dict[str, Any] = {}

    def take(self, message: Committed) -> None:
        """Note what serves from now on."""
        self._generation = message.generation
        self._tactics = message.tactics
        self._modules.update(message.modules)
        for name in message.forgotten:
            self._modules.pop(name, None)

    def write(self, directory: Path) -> None:
        """Leave it for the ranks that are about to start in `directory`."""
        if self._modules:
            whole = Committed(generation=self._generation, modules=self._modules, tactics=self._tactics)
            (directory / COMMITTED_FILE).write_bytes(msgspec.msgpack.encode(whole))
