"""In-place, transactional reload of Python modules: what is held follows, users run again, failures leave no trace."""

from tokenspeed_reload.errors import (
    ReloaderError,
    ReloadError,
    ReloadInProgress,
    TransactionClosed,
    UnknownModules,
    describe,
)
from tokenspeed_reload.merge import Adapter, Merge
from tokenspeed_reload.records import Change, Sources, SourceText
from tokenspeed_reload.reloader import RUNS_ONCE, Reloader
from tokenspeed_reload.report import NeedsRestart, Plan, ReloadedModule, Report, Stale
from tokenspeed_reload.transaction import Transaction
from tokenspeed_reload.undo import Participant

__all__ = [
    "RUNS_ONCE",
    "Adapter",
    "Change",
    "Merge",
    "NeedsRestart",
    "Participant",
    "Plan",
    "ReloadError",
    "ReloadInProgress",
    "ReloadedModule",
    "Reloader",
    "ReloaderError",
    "Report",
    "SourceText",
    "Sources",
    "Stale",
    "Transaction",
    "TransactionClosed",
    "UnknownModules",
    "describe",
]
