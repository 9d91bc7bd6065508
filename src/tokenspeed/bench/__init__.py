"""Benchmarks of a running server (`serve`) and of the engine alone (`latency`, `throughput`)."""
