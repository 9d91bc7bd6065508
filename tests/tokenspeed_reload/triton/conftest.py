"""A driver of an sm_90 device that is not there: kernels are compiled for it, and a launch does nothing."""

from __future__ import annotations

import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

# Every kernel file starts with this.
HEAD = "import triton\nimport triton.language as tl\n"


class Pointer:
    """An argument that stands for a tensor in device memory."""

    def __init__(self, dtype: str = "float32") -> None:
        self.dtype = dtype

    def data_ptr(self) -> int:
        return 16


class Driver:
    """What Triton asks of a driver."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.utils = SimpleNamespace(
            load_binary=lambda *args: (1, 1, 0, 0, 1024),
            unload_module=lambda *args: None,
            get_device_properties=lambda device: {"max_shared_mem": 232448},
        )
        self.launcher_cls = lambda src, metadata: lambda *args: None

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Device:
    """Compiles and launches kernels, and notes the names of those that had to be compiled."""

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def run(self, kernel: Any, *args: Any, **options: Any) -> Any:
        """Launch `kernel` on one program; returns the compiled kernel."""
        return kernel[(1,)](*args, **options)

    def fresh(self) -> list[str]:
        """The kernels that were compiled since the last call."""
        found, self.compiled = self.compiled, []
        return sorted(found)


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    device = Device()

    def listener(*, src: Any, cache_hit: bool, **rest: Any) -> None:
        if not cache_hit:
            device.compiled.append(src.fn.__name__)

    triton.runtime.driver.set_active(Driver(GPUTarget("cuda", 90, 32)))
    triton.knobs.compilation.listener = listener
    yield device
    triton.knobs.compilation.listener = None


@pytest.fixture
def write(project: Any) -> Any:
    """Write a module of kernels, with the imports that all have."""

    def write(name: str, text: str) -> None:
        project.write_module(name, HEAD + textwrap.dedent(text))

    return write


@pytest.fixture
def pointer() -> type[Pointer]:
    return Pointer
