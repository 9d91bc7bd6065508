"""Start a program that ends when its parent does.

`python -m tokenspeed.lifeline PARENT PROGRAM ARGUMENT...`, with the process id of the parent.

The kernel sends SIGKILL when the parent ends, even by kill -9, and goes on with that over `exec`.
The call is Linux's; elsewhere the program is started without it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def tie_to_parent(parent: int) -> None:
    """End this process when its parent, of this process id, ends; now, if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)  # the parent ended before the kernel knew about us


def main() -> None:
    """Tie this process to its parent, then become the program."""
    parent, program, *arguments = sys.argv[1:]
    tie_to_parent(int(parent))
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main()
