"""The real front process, started with echo ranks in place of the engine's."""

import sys
from pathlib import Path

from tokenspeed.server.process import main

if __name__ == "__main__":
    sys.exit(main(rank_command=(sys.executable, str(Path(__file__).with_name("echo_rank.py")))))
