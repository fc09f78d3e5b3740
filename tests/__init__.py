"""Tests of mics. Everything distributed runs on the rank pool of `tests.ranks`."""
