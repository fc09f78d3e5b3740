"""`python -m benchmarks.published`."""

import sys

from benchmarks.published.command import main

sys.exit(main())
