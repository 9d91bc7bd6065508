"""What holds for every test."""

import os

# As in a rank: without it a busy machine makes every torch operation on a CPU ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
