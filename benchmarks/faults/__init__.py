"""Faults put into runs of ``mics train``: what is killed, stopped or asked to leave, and at which moment."""
