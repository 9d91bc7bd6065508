"""Building blocks of models: each stores sizes and weights when built, and chooses its kernels in `plan`."""
