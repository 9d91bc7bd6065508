"""Captured steps: what they are to the engine, and the recorded ones of a CPU."""
