"""Found by Python in every rank of a run under test (its folder is in PYTHONPATH): puts the faults in."""

import os

if "MICS_TEST_FAULTS" in os.environ and "RANK" in os.environ:
    from benchmarks.faults.inject import inject

    inject()
