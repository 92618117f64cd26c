"""What a recipe may claim against its control: the kinds of claim in a `recipe.json`, each a number for one measured quantity.

A claim compares the runs of recipe and control with the same seed, pair by pair. `launch/comparison/verdicts.py` says of it that it
holds, that it fails, or that it cannot be told; this file says what it means, and imports nothing.
"""

from __future__ import annotations

from typing import NamedTuple


class ClaimKind(NamedTuple):
    """What the claim `name: x` says.

    Attributes:
        measure: the quantity of a run, as `launch/comparison/runs.py` names it: "final_val_loss" (nats a token), "step_seconds" (the median
            step), "peak_memory_bytes" (of rank 0), "bytes_sent" (of rank 0, all steps).
        scale: "difference" (recipe - control) or "ratio" (recipe / control), of which the mean over the pairs is claimed to be
        direction: "at most" or "at least"
        sign: the number x times this.
        statement: the claim in words, with `{x}`.
    """

    measure: str
    scale: str
    direction: str
    sign: int
    statement: str

    def bound(self, x: float) -> float:
        """What the mean difference, or the mean ratio, is held against."""
        return self.sign * x

    def says(self, x: float | str) -> str:
        """The claim in words, of a number or of a letter that stands for one."""
        return self.statement.format(x=x if isinstance(x, str) else f"{x:g}")


CLAIMS: dict[str, ClaimKind] = {
    "loss_within": ClaimKind("final_val_loss", "difference", "at most", 1, "the final validation loss is at most {x} above the control's"),
    "loss_lower_by": ClaimKind(
        "final_val_loss", "difference", "at most", -1, "the final validation loss is at least {x} below the control's"
    ),
    "step_time_ratio": ClaimKind("step_seconds", "ratio", "at most", 1, "a step takes at most {x} of the control's time"),
    "peak_memory_ratio": ClaimKind("peak_memory_bytes", "ratio", "at most", 1, "a rank's peak of memory is at most {x} of the control's"),
    "bytes_ratio": ClaimKind("bytes_sent", "ratio", "at most", 1, "a rank sends at most {x} of the control's bytes over the run"),
    "throughput_ratio": ClaimKind("tokens_per_second", "ratio", "at least", 1, "tokens a second are at least {x} of the control's"),
}
