"""The learning rate over a run."""

import math


def learning_rate_share(step: int, *, num_steps: int, warmup_steps: int, final_share: float) -> float:
    """Share of the highest learning rate: a straight rise, then half a cosine down to the final share.

    ``step`` counts from 0. The first step is not zero (it would be wasted); the last one is the final share.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    done = (step - warmup_steps) / max(1, num_steps - 1 - warmup_steps)
    return final_share + (1.0 - final_share) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
