"""Requests to batches: pure Python, device-free, the same on every rank."""

from tokenspeed.runtime.scheduler.batch import UNKNOWN_ID, Batch, Row
from tokenspeed.runtime.scheduler.limits import SchedulerLimits
from tokenspeed.runtime.scheduler.request import Request, RequestState
from tokenspeed.runtime.scheduler.scheduler import Scheduler

__all__ = ["UNKNOWN_ID", "Batch", "Request", "RequestState", "Row", "Scheduler", "SchedulerLimits"]
