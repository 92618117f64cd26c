"""Plans the steps of a run. Its length is fixed in tokens, and techniques may use fewer tokens in a step than a whole batch has."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from recipes.technique import RunSettings, StepWork, Techniques, whole_step


class Steps(NamedTuple):
    """Consecutive steps with the same number of tokens."""

    number: int  # of the first step, from 1
    repeats: int
    tokens: int  # of each step, over all ranks
    consumed: int  # tokens of the run after these steps
    work: StepWork  # of the first step
    reported: dict[str, float]  # the techniques' metrics in the first step


def steps_of_run(run: RunSettings, techniques: Techniques, stride: int = 1) -> Iterator[Steps]:
    """Plan the steps of `run` by the techniques' `on_step`, from 1 until the run's tokens are consumed.

    stride: the largest number of steps to yield at once.
    """
    changing = [member for member in techniques.members if member.declaration.changes_tokens]
    number, consumed = 1, 0
    while consumed < run.total_tokens:
        work = techniques.on_step(number, whole_step(run))
        tokens = work.tokens * run.ranks
        repeats = min(stride, -(-(run.total_tokens - consumed) // tokens))
        for member in changing:
            stage = bisect_right(member.stages, number)
            if not member.stages or stage < len(member.stages):
                repeats = min(repeats, member.stages[stage] - number if member.stages else 1)
        consumed += repeats * tokens
        yield Steps(number, repeats, tokens, consumed, work, techniques.metrics())
        number += repeats
