"""The learning rate as a pure function of tokens: nothing to save, nothing to get out of step after a resume."""

from __future__ import annotations

import math


def warmup_cosine(tokens: int, lr: float, min_lr: float, warmup_tokens: int, total_tokens: int) -> float:
    """Linear warm-up, then cosine decay, over tokens (GPT-3, arXiv 2005.14165, appendix B).

    Args:
        tokens: tokens consumed when the step is done, its own included; so the first step of a warm-up of w steps has lr / w
            and the last step of the run has min_lr.
        lr: the peak, reached at `warmup_tokens`.
        min_lr: the value at `total_tokens` and after it.
    """
    if tokens < warmup_tokens:
        return lr * tokens / warmup_tokens
    if tokens >= total_tokens:
        return min_lr
    progress = (tokens - warmup_tokens) / (total_tokens - warmup_tokens)
    return min_lr + (lr - min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
