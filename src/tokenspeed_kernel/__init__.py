"""Kernels by family, their registry, and the one place through which they are launched."""
