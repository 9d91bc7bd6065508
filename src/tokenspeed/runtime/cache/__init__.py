"""The KV cache: its memory, who holds which blocks, and the prefix index."""
