"""Entry of the front process: `python -m tokenspeed.server --run-dir DIR --status-fd N`."""

import sys

from tokenspeed.server.process import main

if __name__ == "__main__":
    sys.exit(main())
