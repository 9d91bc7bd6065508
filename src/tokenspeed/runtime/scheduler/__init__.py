"""Requests to batches: pure Python, device-free, the same on every rank."""
