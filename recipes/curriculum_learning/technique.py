"""Sequence-length curriculum: training begins on short sequences, which grow to the model's full length.

    deepspeed launch/pretrain.py --recipe recipes/curriculum_learning

Li et al., The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for Training GPT Models, arXiv 2108.06084, section 4.
DeepSpeed dropped the section after 0.19.6; its scheduler, which decides the length here too, it still ships.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from recipes.technique import Declaration, Run, StepPlan, Technique

#: "auto": the share of the run's steps of whole batches that the curriculum takes, a little more than for the paper's GPT-2 of 1.5 B
#: parameters (110 of 300 thousand steps).
AUTO_SHARE = 0.4
#: The largest number of lengths of a schedule.
MANY_LENGTHS = 100_000


def length_at(step: int, section: dict[str, Any]) -> int:
    """The length at optimizer step `step` (from 1) by a resolved section: what DeepSpeed's CurriculumScheduler computes.

    floor(min + (max - min) (step / total)^(1 / degree)), rounded down to `difficulty_step`, at least the first multiple of it that is not
    below min, at most max; or for `fixed_discrete` the entry of `difficulty` whose `max_step` has not passed.
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
    schedule = section["schedule_config"]
    if section["schedule_type"] == "fixed_discrete":
        firsts, lengths = [1, *(last + 1 for last in schedule["max_step"])], schedule["difficulty"]
        return [stage for stage, before in zip(zip(firsts, lengths, strict=True), [None, *lengths], strict=False) if stage[1] != before]
    found = [(1, length_at(1, section))]
    while (length := found[-1][1]) < section["max_difficulty"]:
        step = first_step_above(length, section)
        found.append((step, length_at(step, section)))
    return found


def first_step_above(length: int, section: dict[str, Any]) -> int:
    """The first step of a resolved `fixed_linear` or `fixed_root` section whose length is above `length`, which is below the last."""
    schedule = section["schedule_config"]
    last, degree = schedule["total_curriculum_step"], schedule.get("root_degree", 1)
    target = length - length % schedule["difficulty_step"] + schedule["difficulty_step"]
    share = (target - section["min_difficulty"]) / max(1, section["max_difficulty"] - section["min_difficulty"])
    near = math.floor(last * min(1, max(0, share)) ** degree)
    steps = range(max(1, near - 64), min(last, near + 64) + 1)  # the inverse of the formula, but for its rounding
    if not steps or length_at(steps[0], section) > length or length_at(steps[-1], section) <= length:
        steps = range(1, last + 1)
    return steps[bisect_right(steps, length, key=lambda step: length_at(step, section))]  # lengths never fall


def section_of_metric(metric: dict[str, Any], mode: str = "truncate") -> dict[str, Any]:
    """The section that means what a seqlen metric of `data_efficiency` does: DeepSpeed's Data Efficiency library, which publishes a
    length and leaves it to the user's loop to `mode` the sequences, has the same schedules there."""
    indexed = ("index_to_sample_path", "index_to_metric_path", "difficulty_type", "clustering_type")  # where to find short samples
    return {"curriculum_type": "seqlen", "mode": mode} | {key: value for key, value in metric.items() if key not in indexed}


METRICS = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics"


def usual_multiple(most: int) -> int:
    """The default of `difficulty_step` for lengths up to `most`: 8, which tensor cores need, or the largest divisor of it that divides
    `most`; a larger one where there would be too many lengths."""
    if most <= 8 * MANY_LENGTHS:
        return math.gcd(8, most)
    return next((multiple for multiple in range(-(-most // MANY_LENGTHS), 10**6) if most % multiple == 0), most)


class CurriculumLearning(Technique):
    """DeepSpeed's documented `"curriculum_learning": {"enabled": true, "curriculum_type": "seqlen", ...}`, and `"mode"`.

    A metric `seqlen`, `seqlen_truncate` or `seqlen_reshape` among the `curriculum_metrics` of `data_efficiency` means the same.

    min_difficulty, max_difficulty: the first and the last length, in tokens; "auto" is an eighth of the model's and all of it.
    schedule_type: "fixed_linear", "fixed_root" (with `root_degree`) or "fixed_discrete" (`difficulty` and `max_step`, lists of which the
        second is one shorter).
    schedule_config.total_curriculum_step: optimizer steps until the last length; "auto" is 0.4 of the run's steps of whole batches.
    schedule_config.difficulty_step: lengths are multiples of it; "auto" is 8, which tensor cores need; fewer shapes are compiled.
    mode: "truncate" keeps the first tokens of each sequence and leaves the rest out, so that early steps hold fewer tokens (the paper's
        way); "reshape" cuts each sequence into rows of that length, so that a step keeps its tokens, except for a remainder shorter
        than a row.

    The run ends on tokens and the learning rate follows tokens. Evaluation is at full length.
    """

    declaration = Declaration(
        section="curriculum_learning",
        keys={
            "curriculum_type": {"types": ["string"], "enum": ["seqlen"]},
            "min_difficulty": {"types": ["integer"], "minimum": 1, "auto": True},
            "max_difficulty": {"types": ["integer"], "minimum": 1, "auto": True},
            "schedule_type": {"types": ["string"], "enum": ["fixed_linear", "fixed_root", "fixed_discrete"]},
            "schedule_config": {
                "types": ["object"],
                "keys": {
                    "total_curriculum_step": {"types": ["integer"], "minimum": 1, "auto": True},
                    "difficulty_step": {"types": ["integer"], "minimum": 1, "auto": True},
                    "root_degree": {"types": ["number"]},
                    "difficulty": {"types": ["array"], "items": ["integer"]},
                    "max_step": {"types": ["array"], "items": ["integer"]},
                },
            },
            "mode": {"types": ["string"], "enum": ["truncate", "reshape"]},
        },
        other_forms={
            f"{METRICS}.seqlen": section_of_metric,
            f"{METRICS}.seqlen_truncate": section_of_metric,
            f"{METRICS}.seqlen_reshape": partial(section_of_metric, mode="reshape"),
        },
        changes_tokens=True,
    )

    def __init__(self, section: dict[str, Any], run: Run):
        self.seq_len, self.steps = run.shape.seq_len, run.steps
        self.section = self._resolved(section)
        self.reshapes = section.get("mode") == "reshape"
        self._scheduler: Any = None
        self.stages, lengths = zip(*stages(self.section), strict=True)
        shapes = len({*lengths, self.seq_len})
        self.notes = (
            f"curriculum_learning: sequences of {lengths[0]} to {lengths[-1]} tokens, the last from step {self.stages[-1]:,} on; "
            f"{shapes} lengths with that of the evaluation, and a compiled model compiles as many shapes",
        )

    def _resolved(self, section: dict[str, Any]) -> dict[str, Any]:
        """The section with all values. Raises ValueError, see `Technique.__init__`."""

        def value(key: str, default: Any, place: dict[str, Any] = section) -> Any:
            return default if place.get(key, "auto") == "auto" else place[key]

        kind = section.get("schedule_type", "fixed_linear")
        given = section.get("schedule_config", {})
        name = "'curriculum_learning.schedule_config"
        most = value("max_difficulty", self.seq_len)
        if kind == "fixed_discrete":
            lengths, ends = given.get("difficulty"), given.get("max_step")
            if not lengths or ends is None or len(lengths) != len(ends) + 1:
                raise ValueError(
                    f"{name}.difficulty' has {len(lengths or ())} lengths and max_step {len(ends or ())} steps; fixed_discrete needs one"
                    ' step less than lengths, such as "difficulty": [64, 128, 256], "max_step": [100, 200]'
                )
            if falls := [pair for pair in pairwise([0, *ends]) if pair[1] <= pair[0]]:
                raise ValueError(f"{name}.max_step' has {falls[0][1]} after {falls[0][0]}; the steps must rise from 1 on")
            if falls := [pair for pair in pairwise(lengths) if pair[1] < pair[0]]:  # DeepSpeed's engine would stay at the longest
                raise ValueError(f"{name}.difficulty' falls from {falls[0][0]} to {falls[0][1]}; the lengths must not fall")
            if wrong := [length for length in lengths if not 1 <= length <= self.seq_len]:
                raise ValueError(f"{name}.difficulty' has {wrong[0]}; allowed are lengths from 1 to the model's seq_len, {self.seq_len}")
            if stray := [key for key in ("total_curriculum_step", "difficulty_step", "root_degree") if key in given]:
                raise ValueError(f"{name}.{stray[0]}' means nothing for fixed_discrete; leave it out, or choose fixed_linear or fixed_root")
            schedule = {"difficulty": [int(length) for length in lengths], "max_step": [int(end) for end in ends]}
            return {"min_difficulty": min(lengths), "max_difficulty": max(lengths), "schedule_type": kind, "schedule_config": schedule}
        if stray := [key for key in ("difficulty", "max_step") if key in given]:
            raise ValueError(f"{name}.{stray[0]}' means nothing for {kind}; leave it out, or choose fixed_discrete")
        if kind == "fixed_root" and "root_degree" not in given:
            raise ValueError(f"{name}.root_degree' is missing, and fixed_root needs it; add it, such as 2 for the square root")
        if kind == "fixed_root" and given["root_degree"] <= 0:
            raise ValueError(f"{name}.root_degree' is {given['root_degree']}; allowed are numbers above 0, such as 2 for the square root")
        if kind == "fixed_linear" and "root_degree" in given:
            raise ValueError(f"{name}.root_degree' means nothing for fixed_linear; leave it out, or choose fixed_root")
        multiple = value("difficulty_step", usual_multiple(most), given)
        least = value("min_difficulty", max(multiple, most // 8 // multiple * multiple))
        if most > self.seq_len:
            raise ValueError(
                f"'curriculum_learning.max_difficulty' is {most}, but the model has positions for {self.seq_len} tokens; lower it, or raise"
                " --seq_len"
            )
        if most % multiple:
            raise ValueError(
                f"{name}.difficulty_step' is {multiple}, which does not divide max_difficulty, {most}; write a divisor of it, such as"
                f" {math.gcd(multiple, most)}"
            )
        if (most - least) // multiple > MANY_LENGTHS:
            raise ValueError(
                f"{name}.difficulty_step' is {multiple}, which makes {(most - least) // multiple:,} lengths of {least} to {most}; write a"
                " larger divisor of max_difficulty"
            )
        if least > most:
            raise ValueError(f"'curriculum_learning.min_difficulty' is {least}, above max_difficulty, {most}; lower it")
        schedule = {"total_curriculum_step": value("total_curriculum_step", max(1, round(AUTO_SHARE * self.steps)), given)}
        schedule |= {"difficulty_step": multiple} | ({"root_degree": given["root_degree"]} if kind == "fixed_root" else {})
        return {"min_difficulty": least, "max_difficulty": most, "schedule_type": kind, "schedule_config": schedule}

    def attach(self, engine: Any, collectives: Any) -> None:
        # Here, because the import takes a second, and --explain does without.
        from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

        self._scheduler = CurriculumScheduler(self.section)

    def on_step(self, step: int, plan: StepPlan) -> StepPlan:
        if self._scheduler:
            # After the last stage DeepSpeed's formula continues, and overflows for a small degree.
            self.length = int(self._scheduler.get_difficulty(min(step, self.stages[-1])))
        else:
            self.length = length_at(step, self.section)
        return plan._replace(seq_len=self.length, rows_per_sequence=self.seq_len // self.length if self.reshapes else 1)

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
