"""The steps that a run will make. A run has a number of tokens, and techniques may put fewer tokens into a step than a whole batch has."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from recipes.technique import Run, StepPlan, Techniques, whole_step


class Steps(NamedTuple):
    """`repeats` steps from `number` on, of `tokens` tokens each over all ranks; `consumed`: the run's tokens after them."""

    number: int
    repeats: int
    tokens: int
    consumed: int
    plan: StepPlan  # of the first of them
    reported: dict[str, float]  # the techniques' metrics in the first of them


def planned_steps(run: Run, techniques: Techniques, stride: int = 1) -> Iterator[Steps]:
    """Plan the steps of `run` by the techniques' `on_step`, from 1 until the run's tokens are consumed.

    stride: how many steps with the same number of tokens are taken at once, at most.
    """
    changing = [member for member in techniques.members if member.declaration.changes_tokens]
    number, consumed = 1, 0
    while consumed < run.total_tokens:
        plan = techniques.on_step(number, whole_step(run))
        tokens = plan.tokens * run.ranks
        repeats = min(stride, -(-(run.total_tokens - consumed) // tokens))
        for member in changing:
            stage = bisect_right(member.stages, number)
            if not member.stages or stage < len(member.stages):
                repeats = min(repeats, member.stages[stage] - number if member.stages else 1)
        consumed += repeats * tokens
        yield Steps(number, repeats, tokens, consumed, plan, techniques.metrics())
        number += repeats
