"""What a recipe may claim against its control: the kinds of claim in a `recipe.json`, each a number for one measured quantity.

A claim compares the runs of recipe and control with the same seed, pair by pair. `launch/comparison/verdicts.py` decides whether it
holds, fails or is inconclusive; this file defines what it means.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple


class ClaimKind(NamedTuple):
    """The meaning of the claim `name: x`.

    Attributes:
        measure: the quantity of a run, as `launch/comparison/runs.py` names it: "final_val_loss" (nats per token), "step_seconds" and
            "tokens_per_second" (of the median step), "peak_memory_bytes" (of rank 0), "bytes_sent" (of rank 0, all steps).
        quantity: the same in words.
        scale: what the claim is about: "difference", the mean over seeds of recipe - control, or "ratio", the geometric mean over seeds
            of recipe / control.
        direction: "at most" or "at least".
        sign: the mean is compared with x times this.
        statement: the claim in words, with `{x}`.
    """

    measure: str
    quantity: str
    scale: str
    direction: str
    sign: int
    statement: str

    def bound(self, x: float) -> float:
        """The number that the mean difference, or the mean ratio, is compared with."""
        return self.sign * x

    def says(self, x: float | str) -> str:
        """The claim in words, of a number or of a letter that stands for one."""
        return self.statement.format(x=x if isinstance(x, str) else f"{x:g}")


LOSS, STEP = "final validation loss", "time of a step"
MEMORY, SENT, SPEED = "peak memory of a rank", "bytes that a rank sends", "tokens per second"
CLAIMS: dict[str, ClaimKind] = {
    "loss_within": ClaimKind(
        "final_val_loss", LOSS, "difference", "at most", 1, "the final validation loss is at most {x} above the control's"
    ),
    "loss_lower_by": ClaimKind(
        "final_val_loss", LOSS, "difference", "at most", -1, "the final validation loss is at least {x} below the control's"
    ),
    "step_time_ratio": ClaimKind("step_seconds", STEP, "ratio", "at most", 1, "a step takes at most {x} of the control's time"),
    "peak_memory_ratio": ClaimKind(
        "peak_memory_bytes", MEMORY, "ratio", "at most", 1, "a rank's peak memory is at most {x} of the control's"
    ),
    "bytes_ratio": ClaimKind("bytes_sent", SENT, "ratio", "at most", 1, "a rank sends at most {x} of the control's bytes over the run"),
    "throughput_ratio": ClaimKind("tokens_per_second", SPEED, "ratio", "at least", 1, "at least {x} of the control's tokens per second"),
}

#: The outcome in `results.json` of a claim whose verdict does not count any more.
WITHDRAWN = "withdrawn"
#: Why the verdicts on the loss in `results.json` are withdrawn; above the tables that show them.
NOTICE = (
    "> **The verdicts on the loss are withdrawn.** They were measured with 20 warm-up steps, too few for the control: AdamW on `nano`\n"
    "> (200 steps at 2e-3) ends at a loss of 5.82 with 20 warm-up steps and 5.50 with 80. The verdicts on time, memory and bytes stand.\n\n"
)


def notice(results: Iterable[dict[str, Any]]) -> str:
    """`NOTICE` if a verdict in one of `results`, measurements of recipes, is withdrawn, else nothing."""
    withdrawn = any(one["outcome"] == WITHDRAWN for found in results for one in found.get("claims", ()))
    return NOTICE if withdrawn else ""
