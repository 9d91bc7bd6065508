"""The reload-forward transaction over all ranks."""
