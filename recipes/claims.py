"""The claims that a recipe can make against its control: a number for one measured quantity on one testbed.

A claim compares the runs of recipe and control with the same seed, pair by pair. `launch/comparison/verdicts.py` decides whether it
holds, fails or is inconclusive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Measure -> its name in `launch.comparison.runs.Run.measures`, and in words. The final validation loss is in nats per token. Memory is
#: that of rank 0, and so are the bytes sent.
MEASURES = {
    "loss": ("final_val_loss", "final validation loss"),
    "step_time": ("step_seconds", "mean time per step"),
    "peak_memory": ("peak_memory_bytes", "peak memory per rank"),
    "bytes": ("bytes_sent", "number of bytes sent per rank over the run"),
}
#: Question -> the claim in words, and as a formula. "ratio" is about the geometric mean over seeds of recipe / control, all others about
#: the mean of recipe - control.
QUESTIONS = {
    "equal": ("the {what} differs from the control's by at most {x}", "{what} = control ± {x}"),
    "within": ("the {what} is at most {x} above the control's", "{what} ≤ control + {x}"),
    "lower_by": ("the {what} is at least {x} below the control's", "{what} ≤ control − {x}"),
    "ratio": ("the {what} is at most {x} times the control's", "{what} ≤ {x} × control"),
}
#: The largest margins of claims about the loss; wider ones would be meaningless.
LARGEST_MARGIN = {"equal": 0.01, "within": 0.05}


@dataclass(frozen=True)
class Claim:
    """One claim of a recipe on a testbed.

    Attributes:
        measure: a key of `MEASURES`.
        question: a key of `QUESTIONS`; "ratio" for every measure but the loss.
        number: nats per token for the loss, else the ratio.
    """

    measure: str
    question: str
    number: float

    def __post_init__(self) -> None:
        for name, value, allowed in (("measure", self.measure, MEASURES), ("question", self.question, QUESTIONS)):
            if value not in allowed:
                raise ValueError(f"'{name}' is {value!r}; allowed are {', '.join(allowed)}")
        if (self.scale == "ratio") == (self.measure == "loss"):
            raise ValueError(f"'question' is {self.question!r} for {self.measure!r}; ratios are for all measures but the loss")
        if not 0 <= self.number < 1e9 or (self.scale == "ratio" and not self.number):
            raise ValueError(f"'number' is {self.number!r}; it must be a number, at least 0 and for a ratio above 0")
        if self.number > LARGEST_MARGIN.get(self.question, self.number):
            raise ValueError(f"'number' is {self.number:g} for {self.question!r}; allowed are at most {LARGEST_MARGIN[self.question]:g}")

    @property
    def scale(self) -> str:
        """ "difference" or "ratio"."""
        return "ratio" if self.question == "ratio" else "difference"

    @property
    def bounds(self) -> tuple[float, float]:
        """The claim is true for differences or ratios between these; -inf or 0, and inf, where it has no bound."""
        if self.scale == "ratio":
            return 0.0, self.number
        low = -self.number if self.question == "equal" else -math.inf
        return low, -self.number if self.question == "lower_by" else self.number

    @property
    def key(self) -> str:
        """The measure's name in `Run.measures`."""
        return MEASURES[self.measure][0]

    @property
    def label(self) -> str:
        """The claim in short, e.g. "loss ≤ control + 0.03"."""
        return QUESTIONS[self.question][1].format(what=self.measure.replace("_", " "), x=f"{self.number:g}")

    def __str__(self) -> str:
        return QUESTIONS[self.question][0].format(what=MEASURES[self.measure][1], x=f"{self.number:g}")
