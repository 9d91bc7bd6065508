"""Everything here needs a CUDA device, but for what runs on a CPU too; nothing needs the gateway or a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import InProcessEngine
from tests.gpu.models import write_model
from tokenspeed.runtime.config import Config, KernelOptions, ModelOptions


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    without_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if here in item.path.parents and not _runs_on_cpu(item):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(without_gpu)


def _runs_on_cpu(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    return callspec is not None and callspec.params.get("device") == "cpu"


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """For what runs on both: the GPU, and a CPU everywhere."""
    name: str = request.param
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return name


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny(model_type, dtype)` is a directory with a small random model."""
    made: dict[tuple[str, str], Path] = {}

    def make(model_type: str = "qwen3", dtype: str = "bfloat16") -> Path:
        if (model_type, dtype) not in made:
            made[model_type, dtype] = write_model(tmp_path_factory.mktemp(model_type), model_type, dtype)
        return made[model_type, dtype]

    return make


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., InProcessEngine]]:
    """`start(model, group=options, …)` is an engine on the GPU; its memory is given back at the end."""
    engines: list[InProcessEngine] = []

    def begin(model: Path, **groups: Any) -> InProcessEngine:
        options = ModelOptions(model=str(model), device="cuda", **groups.pop("model_options", {}))
        run_dir = tmp_path_factory.mktemp("run")
        groups.setdefault("kernels", KernelOptions(tune_kernels=False))
        engines.append(InProcessEngine(Config(model=options, **groups), run_dir).start())
        return engines[-1]

    yield begin
    engines.clear()
    torch.cuda.empty_cache()
