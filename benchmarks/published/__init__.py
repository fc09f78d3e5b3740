"""The published experiments at their own settings: `python -m benchmarks.published --help`.

rows.py says what the documents say, predict.py what the planner makes of it, and emulate.py what one GPU
measures as rank 0. trillion.py runs the largest model whole, ablations.py takes mechanisms away. page.py and
pictures.py make docs/published.md of the dated results.
"""
