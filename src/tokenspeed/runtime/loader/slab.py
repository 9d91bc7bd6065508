"""Memory that can be had again by its file descriptor after its process has ended.

On a CPU that is an anonymous file of the kernel's (memfd_create). On a GPU it is an allocation of the driver's virtual
memory management that can be exported as a file descriptor (cuMemExportToShareableHandle): the driver frees it when
nobody maps it any more and all its descriptors are closed. That differs from CUDA's older IPC, where the memory goes
with the process that allocated it, so that a process with a context of its own would have to live on for it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor


class SlabError(Exception):
    """Memory of this kind cannot be had; the message is a clause that says why."""


class Slab(Protocol):
    """`size` bytes, mapped into this process."""

    def descriptors(self) -> list[int]:
        """New file descriptors that bring the memory to another process, in the order that `open_slab` wants."""

    def bytes(self, offset: int, length: int) -> Tensor:
        """uint8 [length] on the slab's device: a view with a storage of its own, valid until `close`."""

    def close(self) -> None:
        """Let go of the memory; no tensor of it may be used from here on."""


def make_slab(device: torch.device, size: int) -> Slab:
    """New memory, of any content.

    Raises:
        SlabError: this machine has none that can be handed on.
    """
    if device.type == "cpu":
        host = HostSlab(size)
        host.make()
        return host
    gpu = DeviceSlab(size, device)
    gpu.make()
    return gpu


def open_slab(device: torch.device, size: int, descriptors: Sequence[int]) -> Slab:
    """Memory that another process made. The descriptors remain the caller's.

    Raises:
        SlabError: it cannot be had.
    """
    if device.type == "cpu":
        host = HostSlab(size)
        host.open(descriptors[0])
        return host
    gpu = DeviceSlab(size, device)
    gpu.open(descriptors[0])
    return gpu


class HostSlab:
    """Memory of the machine; a `Slab`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._descriptor = -1
        self._map: mmap.mmap | None = None

    def make(self) -> None:
        """Raises SlabError."""
        if not hasattr(os, "memfd_create"):
            raise SlabError("this system has no anonymous files")
        try:
            self._descriptor = os.memfd_create("tokenspeed-weights")
            os.ftruncate(self._descriptor, self.size)
        except OSError as error:
            raise SlabError(f"the system gives no anonymous file: {error.strerror}") from error
        self._attach()

    def open(self, descriptor: int) -> None:
        """Raises SlabError."""
        self._descriptor = os.dup(descriptor)
        if os.fstat(descriptor).st_size != self.size:
            raise SlabError("its size is another one")
        self._attach()

    def descriptors(self) -> list[int]:
        return [os.dup(self._descriptor)]

    def bytes(self, offset: int, length: int) -> Tensor:
        assert self._map is not None, "made or opened"
        return torch.frombuffer(self._map, dtype=torch.uint8, count=length, offset=offset)

    def close(self) -> None:
        # The mapping goes with the last tensor of it.
        self._map = None
        os.close(self._descriptor)

    def _attach(self) -> None:
        try:
            self._map = mmap.mmap(self._descriptor, self.size)
        except OSError as error:
            raise SlabError(f"the anonymous file cannot be mapped: {error.strerror}") from error


class DeviceSlab:
    """Memory of one GPU; a `Slab`."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.device = device
        self._driver: Any = None
        self._descriptor = -1
        self._address = 0
        self._mapped = 0

    def make(self) -> None:
        """Raises SlabError."""
        self._load()
        driver = self._driver
        wanted = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        (handle,) = self._call("cuMemCreate", self._mapped, self._properties(), 0)
        try:
            (self._descriptor,) = self._call("cuMemExportToShareableHandle", handle, wanted, 0)
            self._attach(handle)
        finally:
            driver.cuMemRelease(handle)  # the mapping and the descriptor hold the memory from here on

    def open(self, descriptor: int) -> None:
        """Raises SlabError."""
        self._load()
        wanted = self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        (handle,) = self._call("cuMemImportFromShareableHandle", descriptor, wanted)
        self._descriptor = os.dup(descriptor)
        try:
            self._attach(handle)
        finally:
            self._driver.cuMemRelease(handle)

    def descriptors(self) -> list[int]:
        return [os.dup(self._descriptor), *_device_files()]

    def bytes(self, offset: int, length: int) -> Tensor:
        return torch.as_tensor(_Span(self._address + offset, length), device=self.device)

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self._call("cuMemUnmap", self._address, self._mapped)
        self._call("cuMemAddressFree", self._address, self._mapped)
        os.close(self._descriptor)

    def _load(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise SlabError("cuda-bindings is not installed; install tokenspeed[gpu]") from error
        self._driver = driver
        torch.cuda.synchronize(self.device)  # the context is there from here on
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        (granularity,) = self._call("cuMemGetAllocationGranularity", self._properties(), least)
        self._mapped = -(-self.size // granularity) * granularity

    def _location(self) -> Any:
        location = self._driver.CUmemLocation()
        location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = self.device.index
        return location

    def _properties(self) -> Any:
        driver = self._driver
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        properties.location = self._location()
        return properties

    def _attach(self, handle: Any) -> None:
        access = self._driver.CUmemAccessDesc()
        access.location = self._location()
        access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        try:
            (address,) = self._call("cuMemAddressReserve", self._mapped, 0, 0, 0)
            self._call("cuMemMap", address, self._mapped, 0, handle, 0)
            self._call("cuMemSetAccess", address, self._mapped, [access], 1)
        except SlabError:
            os.close(self._descriptor)  # or the memory would stay
            raise
        self._address = int(address)

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        """What a function of the driver gives besides its code."""
        code, *values = getattr(self._driver, name)(*arguments)
        if code != self._driver.CUresult.CUDA_SUCCESS:
            raise SlabError(f"{name} says {code.name}")
        return tuple(values)


class _Span:
    """Part of a GPU's memory, in the form in which torch takes over what it did not allocate."""

    def __init__(self, address: int, length: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _device_files() -> list[int]:
    """The GPUs' files, opened: without persistence mode a GPU may be shut down, and its memory with it, once the last
    process that has its file open ends."""
    found = []
    for path in sorted(Path("/dev").glob("nvidia[0-9]*"))[:32]:
        with suppress(OSError):
            found.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    return found
