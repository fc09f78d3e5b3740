"""``python -m mics`` is ``mics``."""

import sys

from mics.cli import main

if __name__ == "__main__":
    sys.exit(main())
