"""An open reload: commit it, undo it, or go back and forth between old and new."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from tokenspeed_reload.errors import IncompleteUndo, ReloaderError, ReloadError, TransactionClosed, describe
from tokenspeed_reload.interrupts import uninterrupted
from tokenspeed_reload.report import Report
from tokenspeed_reload.undo import UndoLog


class Transaction:
    """What a reload changed, until it is committed or undone.

    As a context manager it commits at the end, and undoes when the block raises.

    Attributes:
        report: what was done.
    """

    def __init__(self, report: Report, log: UndoLog, close: Callable[[bool], None]) -> None:
        self.report = report
        self._log = log
        self._close = close
        self._open = True

    @property
    def is_open(self) -> bool:
        """True until the transaction is committed or undone."""
        return self._open

    def commit(self) -> None:
        """Keep the new code and let go of the old.

        Raises:
            ReloadError: that failed; all was undone.
            IncompleteUndo: the transaction had been swapped, and some of the new state could not be put back.
        """
        self._check("commit")
        with uninterrupted():
            try:
                if not self._log.in_force:
                    self._log.exchange()
                self._close(True)
            except BaseException as error:
                not_undone = self._restore()
                if isinstance(error, Exception) and not isinstance(error, ReloaderError):
                    raise ReloadError("patch", describe(error), not_undone=not_undone) from error
                raise
            self._end()

    def undo(self) -> None:
        """Restore everything that the reload wrote to, as if it had never happened.

        Raises:
            IncompleteUndo: some of it could not be restored; all else was.
        """
        self._check("undo")
        with uninterrupted():
            try:
                if self._log.in_force:
                    self._log.exchange()
            finally:
                self._end()
                self._close(False)

    def swap(self) -> None:
        """Exchange old and new code; the transaction stays open.

        Raises:
            IncompleteUndo: some of it could not be exchanged; all else was.
        """
        self._check("swap")
        with uninterrupted():
            self._log.exchange()

    def _restore(self) -> list[str]:
        """Undo, and tell what failed."""
        try:
            self.undo()
        except IncompleteUndo as error:
            return error.errors
        return []

    def _end(self) -> None:
        self._open = False
        self._log.clear()

    def _check(self, action: str) -> None:
        if not self._open:
            raise TransactionClosed(action)

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            self.undo() if error is not None else self.commit()
