"""What a training step will cost and whether it will fit, from arithmetic alone.

Nothing here starts a process group. The engine takes its formulas from here, so that what is predicted and
what is built cannot drift apart.
"""
