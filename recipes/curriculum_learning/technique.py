"""Sequence-length curriculum: training begins on short sequences, which grow to the model's full length.

    deepspeed launch/pretrain.py --recipe recipes/curriculum_learning

Li et al., The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for Training GPT Models, arXiv 2108.06084, section 4.
DeepSpeed dropped the section after 0.19.6.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from recipes.technique import Declaration, RunForTechniques, StepWork, Technique, without_auto

#: "auto": the share of the run's steps of whole batches that the curriculum takes, a little more than for the paper's GPT-2 of 1.5 B
#: parameters (110 of 300 thousand steps).
AUTO_SHARE = 0.4
#: The keys of `schedule_config`, by `schedule_type`.
ALLOWED = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
}


def length_at(step: int, section: dict[str, Any]) -> int:
    """The length at optimizer step `step` (from 1) by a resolved section: what DeepSpeed's CurriculumScheduler computes.

    floor(min + (max - min) (step / total)^(1 / degree)), rounded down to a multiple of `difficulty_step`, at least min rounded up to one,
    at most max; for `fixed_discrete`, the entry of `difficulty` whose `max_step` has not passed.
    """
    schedule, least, most = section["schedule_config"], section["min_difficulty"], section["max_difficulty"]
    if section["schedule_type"] == "fixed_discrete":
        return int(schedule["difficulty"][bisect_left(schedule["max_step"], step)])
    degree = schedule.get("root_degree", 1) if section["schedule_type"] == "fixed_root" else 1
    multiple = schedule["difficulty_step"]
    length = math.floor(min(1, step / schedule["total_curriculum_step"]) ** (1 / degree) * (most - least) + least)
    return int(min(max(length - length % multiple, -(-least // multiple) * multiple), most))


def stages(section: dict[str, Any]) -> list[tuple[int, int]]:
    """(first step, length) of every length that a resolved section goes through, in order; a compiled model compiles as many shapes."""
    return _stages(json.dumps(section))


@cache
def _stages(text: str) -> list[tuple[int, int]]:
    """`stages`, kept: a schedule of millions of lengths takes seconds."""
    section = json.loads(text)
    schedule = section["schedule_config"]
    if section["schedule_type"] == "fixed_discrete":
        firsts, lengths = [1, *(last + 1 for last in schedule["max_step"])], schedule["difficulty"]
        return [stage for stage, before in zip(zip(firsts, lengths, strict=True), [None, *lengths], strict=False) if stage[1] != before]
    found, steps = [(1, length_at(1, section))], range(1, schedule["total_curriculum_step"] + 1)
    while (length := found[-1][1]) < section["max_difficulty"]:
        step = steps[bisect_right(steps, length, key=lambda step: length_at(step, section))]  # lengths never fall
        found.append((step, length_at(step, section)))
    return found


class CurriculumLearning(Technique):
    """DeepSpeed's documented `"curriculum_learning": {"enabled": true, "curriculum_type": "seqlen", ...}`, and `"mode"`.

    min_difficulty, max_difficulty: the first and the last length, in tokens; "auto" is an eighth of the model's and all of it.
    schedule_type: "fixed_linear", "fixed_root" (with `root_degree`) or "fixed_discrete" (`difficulty` and `max_step`, lists of which the
        second is one shorter).
    schedule_config.total_curriculum_step: optimizer steps until the last length; "auto" is 0.4 of the run's steps of whole batches.
    schedule_config.difficulty_step: lengths are multiples of it; "auto" is 8, which tensor cores need; fewer shapes are compiled.
    mode: "truncate" keeps the first tokens of each sequence and leaves the rest out, so that early steps hold fewer tokens (the paper's
        way); "reshape" cuts each sequence into rows of that length, so that a step keeps its tokens, except for a remainder shorter
        than a row.

    The length of the run and the learning rate are functions of tokens. Evaluation is at full length.
    """

    declaration = Declaration(
        section="curriculum_learning",
        keys={
            "curriculum_type": {"types": ["string"], "enum": ["seqlen"]},
            "min_difficulty": {"types": ["integer"], "minimum": 1, "auto": "reported"},
            "max_difficulty": {"types": ["integer"], "minimum": 1, "auto": "reported"},
            "schedule_type": {"types": ["string"], "enum": ["fixed_linear", "fixed_root", "fixed_discrete"]},
            "schedule_config": {
                "types": ["object"],
                "keys": {
                    "total_curriculum_step": {"types": ["integer"], "minimum": 1, "auto": "reported"},
                    "difficulty_step": {"types": ["integer"], "minimum": 1, "auto": "reported"},
                    "root_degree": {"types": ["number"]},
                    "difficulty": {"types": ["array"], "items": ["integer"]},
                    "max_step": {"types": ["array"], "items": ["integer"]},
                },
            },
            "mode": {"types": ["string"], "enum": ["truncate", "reshape"]},
        },
        other_places=("data_efficiency.data_sampling.curriculum_learning.curriculum_metrics",),
        changes_tokens=True,
    )

    def __init__(self, section: dict[str, Any], run: RunForTechniques):
        self.seq_len, self.steps, self.ranks_per_row = run.shape.seq_len, run.steps, run.ranks_per_row
        self.section = self._resolved(section)
        self.reshapes = section.get("mode") == "reshape"
        self.stages, lengths = zip(*stages(self.section), strict=True)
        shapes = len({*lengths, self.seq_len})
        self.notes = (
            f"curriculum_learning: sequences of {lengths[0]} to {lengths[-1]} tokens, the last from step {self.stages[-1]:,} on; "
            f"{shapes} lengths with that of the evaluation, and a compiled model compiles as many shapes",
        )
        if self.section["schedule_type"] == "fixed_discrete" and without_auto(section).keys() & {"min_difficulty", "max_difficulty"}:
            self.notes += ("curriculum_learning: min_difficulty and max_difficulty have no effect with fixed_discrete",)

    def _resolved(self, section: dict[str, Any]) -> dict[str, Any]:
        """The section with all values. Raises ValueError, see `Technique.__init__`."""
        kind = section.get("schedule_type", "fixed_linear")
        name = "'curriculum_learning.schedule_config"
        if stray := [key for key in section.get("schedule_config", {}) if key not in ALLOWED[kind]]:
            raise ValueError(f"{name}.{stray[0]}' has no effect with {kind}, whose keys are {', '.join(ALLOWED[kind])}; leave it out")
        section, given = without_auto(section), without_auto(section.get("schedule_config", {}))
        if kind == "fixed_discrete":
            lengths, ends = given.get("difficulty", []), given.get("max_step", [])
            rises = sorted(lengths) == lengths and all(before < end for before, end in pairwise([0, *ends]))
            if not rises or len(lengths) != len(ends) + 1 or not 1 <= lengths[0] <= lengths[-1] <= self.seq_len:
                raise ValueError(
                    f"{name}.difficulty' is {lengths} and max_step {ends}; fixed_discrete needs lengths from 1 to seq_len,"
                    f" {self.seq_len}, that do not fall, and one rising step fewer, such as [64, 128, 256] and [100, 200]"
                )
            schedule = {"difficulty": [int(length) for length in lengths], "max_step": [int(end) for end in ends]}
            return {"min_difficulty": lengths[0], "max_difficulty": lengths[-1], "schedule_type": kind, "schedule_config": schedule}
        if kind == "fixed_root" and given.get("root_degree", 0) <= 0:
            raise ValueError(f"{name}.root_degree' must be a number above 0 for fixed_root; write one, such as 2 for the square root")
        most = section.get("max_difficulty", self.seq_len)
        multiple = given.get("difficulty_step", math.gcd(math.lcm(8, self.ranks_per_row), most))
        least = section.get("min_difficulty", max(multiple, most // 8 // multiple * multiple))
        if most > self.seq_len:
            raise ValueError(f"'curriculum_learning.max_difficulty' is {most}, above seq_len, {self.seq_len}; lower it, or raise --seq_len")
        if most % multiple:
            raise ValueError(f"{name}.difficulty_step' is {multiple}, which does not divide max_difficulty, {most}; write a divisor of it")
        if least > most:
            raise ValueError(f"'curriculum_learning.min_difficulty' is {least}, above max_difficulty, {most}; lower it")
        schedule = {"total_curriculum_step": given.get("total_curriculum_step", max(1, round(AUTO_SHARE * self.steps)))}
        schedule |= {"difficulty_step": multiple} | ({"root_degree": given["root_degree"]} if kind == "fixed_root" else {})
        return {"min_difficulty": least, "max_difficulty": most, "schedule_type": kind, "schedule_config": schedule}

    def on_step(self, step: int, work: StepWork) -> StepWork:
        self.length = length_at(step, self.section)
        return work._replace(seq_len=self.length, rows_per_sequence=self.seq_len // self.length if self.reshapes else 1)

    def on_batch(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, T + 1) -> (B, length + 1), or -> (B k, length + 1) with k = T // length rows of each sequence."""
        if self.length >= self.seq_len:
            return tokens
        if not self.reshapes:
            return tokens[:, : self.length + 1]
        # Rows of one sequence overlap by a token, the last target of one being the first input of the next: no target comes twice.
        return tokens.unfold(1, self.length + 1, self.length).flatten(0, 1)

    def metrics(self) -> dict[str, float]:
        """The length, and the number of rows per sequence if sequences are reshaped."""
        rows: dict[str, float] = {"rows_per_sequence": self.seq_len // self.length} if self.reshapes else {}
        return {"seq_len": self.length} | rows
