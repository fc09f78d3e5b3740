"""``mics doctor``: what would make a run fail or crawl, found in under a minute on the ranks of the run.

facts.py             what a rank knows about itself, as plain values
machine.py gpus.py interfaces.py   where these come from
meeting.py clocks.py   ranks meet in the launcher's store, before any collective
folders.py compute.py transfers.py   what is measured
examination.py       the order of all this on one rank, each stage with a time limit
checks/              from facts to findings: no process, no network, no clock
report.py command.py  what is printed, and the exit code
"""
