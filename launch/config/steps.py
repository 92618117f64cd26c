"""The steps that a run will really make: a run ends on tokens, and techniques may put fewer of them into a step than a whole batch has.

What a technique says of a step, in `batch_plan` and `metrics`, is enough to count its tokens and its FLOPs before there is a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from model.accounting import flops_per_token
from model.presets import GPTConfig
from recipes.technique import Run, Technique, Techniques


class Steps(NamedTuple):
    """`repeats` steps from `number` on, of `tokens` each, of all ranks; `consumed`: by the end of them, with all steps before."""

    number: int
    repeats: int
    tokens: int
    consumed: int
    reported: dict[str, float]  # the techniques' metrics in the first of them


def planned_steps(run: Run, techniques: Techniques, stride: int = 1) -> Iterator[Steps]:
    """Walk over the steps of `run`, from 1 until its tokens are consumed; each technique is asked what it will do.

    stride: how many steps of the same number of tokens are taken at once, at most.
    """
    shaping = [member for member in techniques.members if _shapes_steps(member)]
    number, consumed = 1, 0
    while consumed < run.total_tokens:
        plan = techniques.batch_plan(number)
        techniques.on_step(number)
        reported = techniques.metrics()
        sequences = plan.micro_batch_size * plan.accumulation * run.ranks if plan else run.global_batch_size
        length, rows = reported.get("seq_len", run.shape.seq_len), reported.get("rows_per_sequence", 1)
        tokens = sequences * int(rows) * int(length)
        same = min((member.unchanged(number) for member in shaping), default=stride)
        repeats = max(1, min(stride, same, -(-(run.total_tokens - consumed) // tokens)))
        consumed += repeats * tokens
        techniques.on_length(int(length))
        yield Steps(number, repeats, tokens, consumed, techniques.metrics())
        number += repeats


def steps_to_make(run: Run, techniques: Techniques) -> int:
    """How many steps `run` will make."""
    shaping = Techniques(member for member in techniques.members if _shapes_steps(member))
    number = run.steps
    for steps in planned_steps(run, shaping, stride=run.total_tokens) if shaping.members else ():
        number = steps.number + steps.repeats - 1
    return number


def _shapes_steps(member: Technique) -> bool:
    """Whether `member` has a say in how many tokens a step holds."""
    return type(member).batch_plan is not Technique.batch_plan or "seq_len" in member.metrics()


def trained_flops_per_token(model: GPTConfig, reported: Mapping[str, float]) -> tuple[float, float]:
    """FLOPs of a token in a step of which the techniques report this, and those of all blocks on the same rows.

    What ran counts: `kept_blocks` blocks, on rows of `seq_len` tokens.
    """
    length = int(reported["seq_len"]) if "seq_len" in reported else None
    return flops_per_token(model, length, reported.get("kept_blocks")), flops_per_token(model, length)
