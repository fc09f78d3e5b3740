"""The fitted constants of the planner: these five, for all clusters and all systems, and no others.

Everything else is on a data sheet (`clusters.py`; latencies of links are on none and are round figures),
counted (bytes and FLOPs of `shapes.py` and `memory.py`), measured by itself (`MOVED_SHARE` of `setting.py`),
or a limit that somebody chose. ``benchmarks/planner_accuracy.py`` shows what the five come to.
"""

from __future__ import annotations

from typing import Final, Literal

Kernels = Literal["current", "2022"]
"""Whose kernels compute: those of today, or those that the published results were made with."""

MATRIX_EFFICIENCY: Final = 0.72
"""Share of the data sheet's peak that wide matrices reach in a training step with the libraries of today.

Source: 16 step times of gpt-3.6b on one H200 (benchmarks/results/hiding_h200_2026-11-15.md). Alone, large
matrices reach more: 75 to 85% of an A100's 312 TFLOP/s.
"""
MATRIX_EFFICIENCY_2022: Final = 0.62
"""The same with the libraries of 2021 and 2022.

Source: 175B and 1.06T on p4de (169 and 176 TFLOP/s), where nothing but computation counts: 10% more here are
9% more there.
"""
NETWORK_EFFICIENCY: Final = 0.85
"""Share of the data sheet's bandwidth that collectives over EFA get.

Source: ZeRO-3 before its optimisation, where nothing hides the network: RoBERTa-50B and 100B (89 and 62
TFLOP/s) change by 3 to 4% with 10% of it.
"""
NETWORK_LATENCY: Final = 30e-6
"""Seconds of one hop over EFA.

Source: weak scaling of ZeRO-3 from 128 to 512 GPUs (72%), RoBERTa-10B before (73 TFLOP/s), BERT-15B (2.82).
"""
HOST_SECONDS: Final = 0.3e-3
"""What the host took to decide about one parameter in ZeRO-3 before its optimisation.

Source: RoBERTa-10B before (73 TFLOP/s). It counts least of the five: 0.1% for 10% of it.
"""
