"""The errors of a reload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from tokenspeed_reload.report import Running

Phase = Literal["read", "patch"]


def describe(error: BaseException) -> str:
    """The error as "Type: message", in text that every encoding of Unicode takes.

    The class may be an edited one: that its message cannot be made must not hide the error itself.
    """
    name = type(error).__name__
    try:
        message = str(error)
    except BaseException as second:
        message = f"(its message cannot be made: {type(second).__name__})"
    return f"{name}: {message}".removesuffix(": ").encode("utf-8", "backslashreplace").decode()


class ReloaderError(Exception):
    """Root of what the reloader raises; the message is one sentence for the person who edits."""


class UnknownModules(ReloaderError):
    """A call named modules that cannot be reloaded; nothing was touched.

    Attributes:
        names: their names, in the order of the call.
        reasons: for each name, why it cannot.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.names = list(reasons)
        self.reasons = dict(reasons)
        told = ", ".join(f"{name} ({why})" for name, why in self.reasons.items())
        super().__init__(f"name only modules that are loaded and belong to the recorded packages, not {told}")


class IncompleteUndo(ReloaderError):
    """Some of what a reload wrote could not be exchanged; all the rest was.

    Attributes:
        errors: what failed, as "Type: message".
    """

    def __init__(self, errors: Sequence[BaseException]) -> None:
        self.errors = [describe(error) for error in errors]
        told = "; ".join(dict.fromkeys(self.errors))
        super().__init__(f"restart the program: some state could not be exchanged ({told})")


class ReloadError(ReloaderError):
    """A reload that failed and was undone.

    Attributes:
        phase: "read" (nothing had been touched) or "patch".
        module: the module that failed, or None.
        file: the source file of the failing line, or None.
        line: its line number, starting at 1, or None.
        text: the line itself without its indentation, or None.
        error: the cause as "Type: message".
        not_undone: what kept the undo from being complete, as "Type: message"; empty as a rule.
    """

    def __init__(
        self,
        phase: Phase,
        error: str,
        *,
        module: str | None = None,
        file: str | None = None,
        line: int | None = None,
        text: str | None = None,
        not_undone: Sequence[str] = (),
    ) -> None:
        self.phase = phase
        self.module = module
        self.file = file
        self.line = line
        self.text = text
        self.error = error
        where = f" ({file}:{line}: {text})" if file and line else f" ({file})" if file else ""
        self.not_undone = list(not_undone)
        told = "; ".join(dict.fromkeys(self.not_undone))
        after = f"; restart the program, since the undo could not restore all ({told})" if told else ""
        super().__init__(f"{module or 'reload'}: {error}{where}{after}")


class StillRunning(ReloadError):
    """Another thread did not leave code that was to be replaced; nothing was changed.

    Attributes:
        running: where that thread is.
    """

    def __init__(self, running: Sequence[Running], waited_s: float) -> None:
        self.running = list(running)
        places = ", ".join(f"{r.what} (line {r.line}, {r.where})" for r in self.running)
        super().__init__("patch", f"code that was edited still runs after {waited_s:g} s, try again later: {places}")


class TransactionClosed(ReloaderError):
    """`commit`, `undo` or `swap` was called on a transaction that had ended."""

    def __init__(self, action: str) -> None:
        super().__init__(f"cannot {action}: this reload was already committed or undone")


class ReloadInProgress(ReloaderError):
    """A second reload was started before the first was committed or undone."""

    def __init__(self) -> None:
        super().__init__("commit or undo the open reload before starting another one")
