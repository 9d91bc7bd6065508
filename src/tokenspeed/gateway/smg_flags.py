"""SMG's own flags, as its help tells them: which there are, how many values each takes, and which are not for users."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tokenspeed.errors import ConfigError

LAUNCH = (sys.executable, "-m", "smg", "launch")

ENGINE = "ts serve starts the one engine that it serves; run `smg launch` yourself to put several behind one address"
ONCE = "a request that the engine aborted must not run a second time"
SILENCE = "a healthy engine is silent for as long as a reload or a pause holds its requests"
PLAIN = "ts serve speaks plain HTTP; put a proxy with the certificate in front of it"

REFUSED = {
    "--backend": ENGINE,
    "--worker-urls": ENGINE,
    "--zmq-engine-count": ENGINE,
    "--pd-disaggregation": ENGINE,
    "--epd-disaggregation": ENGINE,
    "--encode": ENGINE,
    "--prefill": ENGINE,
    "--decode": ENGINE,
    "--disable-retries": ONCE,
    "--retry-max-retries": ONCE,
    "--retry-initial-backoff-ms": ONCE,
    "--retry-max-backoff-ms": ONCE,
    "--retry-backoff-multiplier": ONCE,
    "--retry-jitter-factor": ONCE,
    "--disable-circuit-breaker": SILENCE,
    "--cb-failure-threshold": SILENCE,
    "--cb-success-threshold": SILENCE,
    "--cb-timeout-duration-secs": SILENCE,
    "--cb-window-duration-secs": SILENCE,
    "--worker-wedge-secs": SILENCE,
    "--worker-stale-secs": SILENCE,
    "--worker-stall-secs": SILENCE,
    "--worker-overload-protection": SILENCE,
    "--disable-worker-overload-protection": SILENCE,
    "--health-failure-threshold": SILENCE,
    "--worker-overload-shed": SILENCE,
    "--worker-overload-waiting-requests": SILENCE,
    "--worker-overload-token-usage": SILENCE,
    "--rl-control-timeout-secs": "a reload is waited for as long as it takes; give `ts reload-forward` its --timeout",
    "--shutdown-grace-period-secs": "give --drain-timeout",
    "--worker-startup-check-interval": "ts serve starts the gateway when the engine is ready",
    "--tls-cert-path": PLAIN,
    "--tls-key-path": PLAIN,
}
"""Flags that `ts serve` sets itself, or that contradict what it sets, and why or what to give instead."""


@dataclass(frozen=True)
class GatewayFlag:
    """One flag of SMG. `nargs` is what argparse calls it: a number of values, or `*` or `+` for many."""

    names: tuple[str, ...]
    nargs: int | str


def gateway_flags() -> list[GatewayFlag]:
    """The flags of the installed SMG; none where it cannot be asked, which the start tells then."""
    environment = {**os.environ, "COLUMNS": "10000", "NO_COLOR": "1"}
    done = subprocess.run([*LAUNCH, "--help"], capture_output=True, text=True, check=False, env=environment)
    lines = re.findall(r"^  (--.*)$", done.stdout, re.MULTILINE) if done.returncode == 0 else []
    return [_flag(line) for line in lines]


def check_gateway_flags(flags: Sequence[str]) -> None:
    """Have SMG's own parser read `flags`, so that a wrong value is told before an engine starts.

    Raises:
        ConfigError: with what SMG says.
    """
    done = subprocess.run([*LAUNCH, *flags, "--help"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip().rpartition("error: ")[2].removeprefix("argument ")
        raise ConfigError(f"the gateway refuses {reason}")  # the values may be secret


def _flag(line: str) -> GatewayFlag:
    """`--a X, --b X  help` is a flag of two names and one value."""
    invocation = line.partition("  ")[0]
    spellings = re.split(r", (?=-)", invocation)
    names = tuple(spelling.partition(" ")[0] for spelling in spellings)
    return GatewayFlag(names, _nargs(spellings[-1].partition(" ")[2]))


def _nargs(values: str) -> int | str:
    if values.endswith("...]"):
        return "*" if values.startswith("[") else "+"
    return len(values.split())
