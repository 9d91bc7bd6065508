"""What ranks in processes of their own are told."""

from __future__ import annotations

from tokenspeed.offline.spawned import following_contexts
from tokenspeed.runtime.config import Config, KernelOptions, ModelOptions
from tokenspeed_kernel.overrides import override


def test_ranks_follow_the_overrides_around_their_caller_before_flags() -> None:
    config = Config(model=ModelOptions(model="m"), kernels=KernelOptions(kernel=("norm.rms_norm=triton",)))
    assert following_contexts(config) == config
    with override(**{"norm.rms_norm": "reference", "gemm.linear": "reference"}):
        told = following_contexts(config)
    assert told.kernels.kernel == ("norm.rms_norm=triton", "norm.rms_norm=reference", "gemm.linear=reference")
    assert following_contexts(Config()).kernels.kernel is None
