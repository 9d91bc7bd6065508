from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tokenspeed_kernel.launch import recording
from tokenspeed_kernel.registry import REGISTRY, Kernel, KernelError, Registry, register_kernel

CPU = torch.device("cpu")


def kernel(solution: str, result: Any, **fields: Any) -> Kernel:
    return Kernel(f"norm.scale.{solution}", lambda: result, "norm", "scale", solution, **fields)


def test_the_highest_priority_that_covers_device_and_type_is_selected() -> None:
    registry = Registry()
    registry.register(kernel("reference", "any"))
    registry.register(kernel("half", "half", priority=5, dtypes=(torch.bfloat16,)))
    registry.register(kernel("gpu", "gpu", priority=9, devices=("cuda",)))
    assert registry.select("norm", "scale", CPU, torch.float32)() == "any"
    assert registry.select("norm", "scale", CPU, torch.bfloat16)() == "half"
    assert registry.select("norm", "scale", torch.device("cuda", 0), torch.bfloat16)() == "gpu"


def test_equal_priorities_are_settled_by_name_whatever_the_order_of_registration() -> None:
    for order in (("a", "b"), ("b", "a")):
        registry = Registry()
        for solution in order:
            registry.register(kernel(solution, solution))
        assert registry.select("norm", "scale", CPU, torch.float32)() == "a"


def test_an_error_names_what_is_registered_and_what_to_do() -> None:
    registry = Registry()
    registry.register(kernel("gpu", "gpu", devices=("cuda",)))
    with pytest.raises(KernelError, match=r"norm.scale runs on cpu in torch.float32 \(norm.scale.gpu\); choose"):
        registry.select("norm", "scale", CPU, torch.float32)
    with pytest.raises(KernelError, match="none is registered"):
        registry.select("norm", "absent", CPU, torch.float32)


def test_a_kernel_that_was_handed_out_runs_what_was_registered_later_under_its_name() -> None:
    registry = Registry()
    registry.register(kernel("reference", "old"))
    held = registry.select("norm", "scale", CPU, torch.float32)
    registry.register(kernel("reference", "new", priority=3))
    assert held() == "new"
    assert held.priority == 3
    assert registry.select("norm", "scale", CPU, torch.float32) is held
    assert len(registry.kernels()) == 1


def test_a_withdrawn_kernel_is_not_chosen_and_comes_back_as_the_same_object() -> None:
    registry = Registry()
    registry.register(kernel("reference", "plain"))
    fast = kernel("fast", "fast", priority=5)
    registry.register(fast)
    held = registry.select("norm", "scale", CPU, torch.float32)
    assert registry.other_choices() == {}
    registry.withdraw("elsewhere", {"fast": fast.function})
    assert held() == "fast"
    plain = registry.select("norm", "scale", CPU, torch.float32)
    assert plain() == "plain"
    assert registry.other_choices() == {"norm.scale": ("norm.scale.fast", "norm.scale.reference")}
    registry.register(kernel("fast", "faster", priority=5))
    assert registry.select("norm", "scale", CPU, torch.float32) is held
    assert (held(), registry.other_choices()) == ("faster", {})


def test_a_choice_without_a_kernel_is_told() -> None:
    registry = Registry()
    registry.register(kernel("reference", "plain"))
    registry.select("norm", "scale", CPU, torch.float32)
    registry.register(Kernel("norm.other.partial", partial(abs, -1), "norm", "other", "partial"))
    registry.withdraw(__name__, {"kernel": kernel})
    assert [known.name for known in registry.kernels()] == ["norm.other.partial"]
    assert registry.other_choices() == {"norm.scale": ("norm.scale.reference", None)}


def test_restore_undoes_new_names_and_changed_functions() -> None:
    registry = Registry()
    registry.register(kernel("reference", "old"))
    held = registry.select("norm", "scale", CPU, torch.float32)
    before = registry.snapshot()
    registry.register(kernel("reference", "new"))
    registry.register(kernel("fast", "fast", priority=9))
    after = registry.snapshot()
    registry.restore(before)
    assert held() == "old"
    assert registry.select("norm", "scale", CPU, torch.float32) is held
    registry.restore(after)
    assert held() == "new"
    assert registry.select("norm", "scale", CPU, torch.float32)() == "fast"


def test_a_call_is_one_launch_under_the_name_of_the_kernel() -> None:
    seen = []

    class Watch:
        def launch(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
            seen.append((name, args, kwargs))
            return function(*args, **kwargs)

    with recording(Watch()):
        assert Kernel("double", lambda x, times: x * times)(4, times=2) == 8
    assert seen == [("double", (4,), {"times": 2})]


def test_the_decorator_returns_the_function_and_names_it_by_family_mode_and_solution() -> None:
    before = REGISTRY.snapshot()
    try:

        def triple(x: int) -> int:
            return 3 * x

        assert register_kernel("norm", "triple", solution="odd")(triple) is triple
        assert REGISTRY.select("norm", "triple", CPU, torch.float32).name == "norm.triple.odd"
    finally:
        REGISTRY.restore(before)


def test_importing_one_family_registers_a_reference_for_every_operation() -> None:
    import tokenspeed_kernel.ops.norm  # noqa: F401

    assert [kernel.name for kernel in REGISTRY.kernels() if kernel.solution == "reference"] == [
        "activation.silu_and_mul.reference",
        "attention.decode.reference",
        "attention.extend.reference",
        "embedding.embedding.reference",
        "gemm.linear.reference",
        "kvcache.write_kv.reference",
        "norm.add_rms_norm.reference",
        "norm.rms_norm.reference",
        "rope.apply_rope.reference",
        "rope.rope_and_write_kv.reference",
        "sampling.sample.reference",
    ]
