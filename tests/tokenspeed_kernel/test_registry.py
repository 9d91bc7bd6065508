from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tokenspeed_kernel.launch import recording
from tokenspeed_kernel.overrides import assignments, override
from tokenspeed_kernel.registry import REGISTRY, Kernel, KernelError, Registry, Request, register_kernel

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
    with pytest.raises(
        KernelError, match=r"norm.scale runs on cpu in float32 \(norm.scale.gpu needs cuda\); choose another"
    ):
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
    registry.withdraw("elsewhere", {"fast": fast.function})
    assert held() == "fast"
    plain = registry.select("norm", "scale", CPU, torch.float32)
    assert plain() == "plain"
    registry.register(kernel("fast", "faster", priority=5))
    assert registry.select("norm", "scale", CPU, torch.float32) is held
    assert held() == "faster"


def test_nobody_holds_a_kernel_that_was_selected_once_and_withdrawn() -> None:
    registry = Registry()
    registry.register(kernel("reference", "plain"))
    fast = kernel("fast", "fast", priority=5)
    registry.register(fast)
    assert registry.select("norm", "scale", CPU, torch.float32) is fast
    registry.withdraw("elsewhere", {"fast": fast.function})
    gone = weakref.ref(fast)
    del fast
    gc.collect()
    assert gone() is None


def test_a_callable_without_a_name_stays_when_a_module_withdraws() -> None:
    registry = Registry()
    registry.register(kernel("reference", "plain"))
    registry.register(Kernel("norm.other.partial", partial(abs, -1), "norm", "other", "partial"))
    registry.withdraw(__name__, {"kernel": kernel})
    assert [known.name for known in registry.kernels()] == ["norm.other.partial"]


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
        "gemm.block_fp8_linear.reference",
        "gemm.linear.reference",
        "kvcache.write_kv.reference",
        "norm.add_rms_norm.reference",
        "norm.rms_norm.reference",
        "rope.apply_rope.reference",
        "rope.rope_and_write_kv.reference",
        "sampling.sample.reference",
    ]


def test_a_kernel_is_refused_below_its_capability_and_outside_its_traits() -> None:
    registry = Registry()
    registry.register(kernel("plain", "plain"))
    registry.register(kernel("new", "new", priority=5, capability=(9, 0), traits={"head_dim": range(1, 129)}))
    request = Request("norm", "scale", torch.device("cuda"), torch.float32, (9, 0), (("head_dim", 64),))
    assert registry.choose(request, None).kernel() == "new"
    assert registry.choose(replace(request, capability=(10, 0)), None).kernel() == "new"
    for asked, reason in (
        (replace(request, capability=(8, 9)), "needs capability 9.0"),
        (replace(request, traits=(("head_dim", 256),)), "needs head_dim 1 to 128"),
        (replace(request, traits=()), "needs head_dim 1 to 128"),
    ):
        choice = registry.choose(asked, None)
        assert choice.kernel() == "plain"
        assert choice.passed_over == (("norm.scale.new", reason),)


def test_a_gpu_that_no_kernel_covers_is_one_sentence() -> None:
    registry = Registry()
    registry.register(kernel("new", "new", capability=(9, 0)))
    request = Request("norm", "scale", torch.device("cuda"), torch.float32, (8, 9))
    with pytest.raises(KernelError) as caught:
        registry.choose(request, None)
    assert str(caught.value) == (
        "no kernel for norm.scale runs on cuda 8.9 in float32 (norm.scale.new needs capability 9.0); "
        "choose another --dtype or --device"
    )


def test_what_is_chosen_comes_with_the_reason() -> None:
    registry = Registry()
    registry.register(kernel("plain", "plain"))
    registry.register(kernel("fast", "fast", priority=5))
    choice = registry.choose(Request("norm", "scale", CPU, torch.float32, None), None)
    assert choice.kernel is registry.select("norm", "scale", CPU, torch.float32)
    assert (choice.kernel.solution, choice.why) == ("fast", "priority 5")
    assert choice.passed_over == (("norm.scale.plain", "has priority 0"),)


def test_an_override_of_a_context_goes_before_a_flag_and_that_before_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = Registry()
    for solution in ("a", "b", "c", "d"):
        registry.register(kernel(solution, solution))

    def chosen() -> Any:
        return registry.select("norm", "scale", CPU, torch.float32)()

    assert chosen() == "a"
    monkeypatch.setenv("TOKENSPEED_KERNEL_NORM_SCALE", "b")
    assert chosen() == "b"
    registry.permit(["norm.scale=c"])
    assert chosen() == "c"
    with override(**{"norm.scale": "d"}):
        assert chosen() == "d"
        with override(**{"norm.other": "a"}):
            assert chosen() == "d"
    assert chosen() == "c"


def test_an_override_that_cannot_be_followed_says_who_asked() -> None:
    registry = Registry()
    registry.register(kernel("plain", "plain"))
    registry.register(kernel("gpu", "gpu", devices=("cuda",)))
    registry.permit(["norm.scale=gpu"])
    with pytest.raises(KernelError, match=r"\(norm.scale.gpu needs cuda\); drop --kernel norm.scale=gpu"):
        registry.select("norm", "scale", CPU, torch.float32)
    with pytest.raises(KernelError, match=r"--kernel norm.scale=fast names no solution; give one of gpu, plain"):
        registry.permit(["norm.scale=fast"])
    with pytest.raises(KernelError, match=r"--kernel norm.shift=gpu names no operation"):
        registry.permit(["norm.shift=gpu"])


def test_what_an_engine_was_started_with_holds_whatever_is_wished_later(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    for mode in ("flag", "variable", "context", "none"):
        for solution in ("a", "b", "c"):
            registry.register(Kernel(f"norm.{mode}.{solution}", lambda: None, "norm", mode, solution))

    def chosen() -> list[str]:
        modes = ("flag", "variable", "context", "none")
        return [registry.select("norm", mode, CPU, torch.float32).solution for mode in modes]

    registry.permit(["norm.flag=b"])
    monkeypatch.setenv("TOKENSPEED_KERNEL_NORM_VARIABLE", "b")
    with override(**{"norm.context": "b"}):
        wishes = registry.overrides.now()
        assert assignments() == ("norm.context=b",)
    registry.overrides.flags.clear()
    registry.permit(["norm.flag=c", "norm.none=c"])
    monkeypatch.setenv("TOKENSPEED_KERNEL_NORM_VARIABLE", "c")
    with override(**{"norm.context": "c"}):
        assert chosen() == ["c", "c", "c", "c"]
        with wishes.resumed():
            assert chosen() == ["b", "b", "b", "a"]
            with override(**{"norm.flag": "c"}):
                assert chosen() == ["c", "b", "b", "a"]
        assert chosen() == ["c", "c", "c", "c"]
    assert assignments() == ()
