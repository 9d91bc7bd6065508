"""One rank process: start-up, the loop, the control queue."""
