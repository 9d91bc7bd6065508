"""Which packages are the forward pass: the code that `ts reload-forward` executes again in a running server."""

FORWARD_PACKAGES = (
    "tokenspeed.runtime.models",
    "tokenspeed.runtime.layers",
    "tokenspeed.runtime.moe",
    "tokenspeed.runtime.sampling",
    "tokenspeed_kernel.ops",
    "tokenspeed_kernel.thirdparty",
)

WATCHED_PACKAGES = ("tokenspeed.runtime", "tokenspeed.grammar", "tokenspeed_kernel")
"""Where an edit is noticed; outside the forward packages it is reported as needing a restart."""

BUILDS_ONCE = ("materialize", "slots", "load", "process")
"""Functions of the forward packages that run at start-up only: an edit is patched, what they built stays."""

START_UP_MODULES = (
    "tokenspeed.runtime.cache.pool",
    "tokenspeed.runtime.engine.kernels",
    "tokenspeed.runtime.engine.startup",
    "tokenspeed.runtime.loader",
)
"""Where the functions that start-up runs are called from."""

COMMITTED_FILE = "committed.msgpack"
"""In the directory of ranks that replace others: the protocol's `Committed` with every module, which they run whatever
the disk holds."""
