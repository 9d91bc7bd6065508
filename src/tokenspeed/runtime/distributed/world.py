"""The process groups of one engine."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch

from tokenspeed.runtime.distributed.communicator import Communicator
from tokenspeed.runtime.distributed.group import Group

COLLECTIVE_TIMEOUT = timedelta(minutes=5)
"""How long a rank waits for the others in one collective. An idle rank waits in the message stream, not in one."""


def join(rank: int, size: int, run_dir: Path, device: torch.device) -> Group:
    """Meet the other ranks and return the tensor-parallel group.

    One rank alone needs no torch.distributed. The ranks find each other through a file in `run_dir`, so that
    no port is taken.
    """
    if size == 1:
        return Group.solo()
    # One machine: without this gloo looks up the host's name, which may resolve to nothing.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = torch.distributed.FileStore(str(run_dir / "store"), size)
    on_gpu = device.type == "cuda"
    torch.distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if on_gpu else None,
    )
    process_group = torch.distributed.group.WORLD
    assert process_group is not None
    return Group("tp", rank, size, Communicator(process_group, size))


def leave() -> None:
    """End the process groups, where there are any."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
