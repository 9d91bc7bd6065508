"""In-place, transactional reload of Python modules: what is held follows, users run again, failures leave no trace."""

from tokenspeed_reload.errors import (
    IncompleteUndo,
    ReloaderError,
    ReloadError,
    ReloadInProgress,
    StillRunning,
    TransactionClosed,
    UnknownModules,
    describe,
)
from tokenspeed_reload.failures import chain_of
from tokenspeed_reload.merge import Adapter, LibraryAdapter, Merge
from tokenspeed_reload.records import Change, Origin, Sources, SourceText
from tokenspeed_reload.reloader import RUNS_ONCE, Reloader
from tokenspeed_reload.report import (
    Bodies,
    ChangedKernel,
    Effect,
    NeedsRestart,
    Plan,
    ReloadedModule,
    Report,
    Running,
    Stale,
)
from tokenspeed_reload.transaction import Transaction
from tokenspeed_reload.undo import Participant

__all__ = [
    "RUNS_ONCE",
    "Adapter",
    "Bodies",
    "Change",
    "ChangedKernel",
    "Effect",
    "IncompleteUndo",
    "LibraryAdapter",
    "Merge",
    "NeedsRestart",
    "Origin",
    "Participant",
    "Plan",
    "ReloadError",
    "ReloadInProgress",
    "ReloadedModule",
    "Reloader",
    "ReloaderError",
    "Report",
    "Running",
    "SourceText",
    "Sources",
    "Stale",
    "StillRunning",
    "Transaction",
    "TransactionClosed",
    "UnknownModules",
    "chain_of",
    "describe",
]
