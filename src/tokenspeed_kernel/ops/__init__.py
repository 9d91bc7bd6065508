"""Operations of the forward pass by family; importing any of them registers the kernels of all."""

from tokenspeed_kernel import thirdparty
from tokenspeed_kernel.ops import activation, attention, embedding, gemm, kvcache, norm, rope, sampling

__all__ = ["activation", "attention", "embedding", "gemm", "kvcache", "norm", "rope", "sampling", "thirdparty"]
