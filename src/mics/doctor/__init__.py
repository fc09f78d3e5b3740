"""``mics doctor``: what would make a run fail or crawl, found in under a minute on the ranks of the run.

- ``facts``, ``survey``: what ranks know about themselves, as plain values.
- ``machine``, ``gpus``, ``interfaces``: where these come from.
- ``meeting``, ``clocks``, ``doors``: ranks meet in the launcher's store, before any collective.
- ``folders``, ``compute``, ``transfers``: what is measured.
- ``examination``: the order of all this on one rank, each stage with a time limit.
- ``checks``: from facts to findings, without a process, a network or a clock.
- ``report``, ``command``: what is printed, and the exit code.
- ``settings``, ``start``: the settings of the run; ranks where no launcher made any.
"""
