"""What holds for every test."""

import os

from hypothesis import HealthCheck, settings

# As in a rank: without it a busy machine makes every torch operation on a CPU ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# How long an example takes depends on what else the machine does.
# The examples are the same in every run; `pytest --hypothesis-profile default` looks for new ones.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("untimed")
