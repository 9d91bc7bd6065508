"""The ranks of one engine: how they exchange tensors and messages, and vote."""
