"""Running a batch: static buffers, warm-up, captured steps."""
