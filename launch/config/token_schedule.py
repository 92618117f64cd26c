"""The project's own schedules: the learning rate as a pure function of the run's tokens, so that there is nothing to save."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from launch.config.deepspeed_schema import Rules
from launch.config.flags import MAX_LR, MAX_TOKENS

#: The share of the distance from the final rate to the peak that is left, as a function of the share of the decay that is done.
DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "linear": lambda done: 1.0 - done,
    "1-sqrt": lambda done: 1.0 - math.sqrt(done),
}
STABLE_DECAY = "WarmupStableDecayTokens"
_PARAMS: Rules = {
    "min_lr": {"types": ["number"], "minimum": 0, "maximum": MAX_LR, "auto": True},
    "warmup_steps": {"types": ["integer"], "minimum": 0, "auto": True},
    "total_tokens": {"types": ["integer"], "minimum": 1, "maximum": MAX_TOKENS, "auto": True},
}
#: The parameters of each schedule. All begin with a linear warm-up.
#:
#: - `WarmupCosineTokens` decays from the warm-up to the end, along a cosine (GPT-3, arXiv 2005.14165, appendix B).
#: - `WarmupLinearTokens` decays from the warm-up to the end, along a line, by default to zero (arXiv 2502.15938).
#: - `WarmupStableDecayTokens` keeps the peak until the last `decay_fraction` of the run's tokens (WSD: MiniCPM, arXiv 2404.06395,
#:   section 4; `"1-sqrt"`: arXiv 2405.18392, section 3).
TOKEN_SCHEDULES: dict[str, Rules] = {
    "WarmupCosineTokens": _PARAMS,
    "WarmupLinearTokens": _PARAMS,
    STABLE_DECAY: {
        **_PARAMS,
        "decay_fraction": {"types": ["number"], "above": 0, "maximum": 1, "auto": True},
        "decay_shape": {"enum": list(DECAYS), "auto": True},
    },
}


class TokenSchedule(NamedTuple):
    """Linear warm-up, then the peak, then a decay.

    Attributes:
        lr: the peak.
        min_lr: the rate at `total_tokens` and after it.
        warmup_tokens: where the warm-up ends.
        decay_tokens: where the decay begins.
        total_tokens: where it ends.
        decay: a key of `DECAYS`.
    """

    lr: float
    min_lr: float
    warmup_tokens: int
    decay_tokens: int
    total_tokens: int
    decay: str

    def rate(self, tokens: int) -> float:
        """The learning rate of the step that ends after `tokens` tokens of the run.

        So the first step of a warm-up of w steps has lr / w, and the last step of the run has min_lr.
        """
        if tokens < self.warmup_tokens:
            return self.lr * tokens / self.warmup_tokens
        if tokens >= self.total_tokens:
            return self.min_lr
        if self.warmup_tokens < self.decay_tokens and tokens <= self.decay_tokens:
            return self.lr
        done = (tokens - self.decay_tokens) / (self.total_tokens - self.decay_tokens)
        return self.min_lr + (self.lr - self.min_lr) * DECAYS[self.decay](done)


def token_schedule(scheduler: dict[str, Any], lr: float, tokens_per_step: int) -> TokenSchedule | None:
    """The schedule of a resolved `scheduler` section; None if it is one of DeepSpeed's.

    Args:
        lr: the run's peak.
        tokens_per_step: of a step with the whole batch.
    """
    kind, params = scheduler["type"], scheduler["params"]
    if kind not in TOKEN_SCHEDULES:
        return None
    warmup, total = params["warmup_steps"] * tokens_per_step, params["total_tokens"]
    start, decay = warmup, "cosine"
    if kind == "WarmupLinearTokens":
        decay = "linear"
    elif kind == STABLE_DECAY:
        start, decay = max(warmup, total - round(params["decay_fraction"] * total)), params["decay_shape"]
    return TokenSchedule(lr, params["min_lr"], warmup, start, total, decay)
