"""Compares runs as controlled experiments: sides, pairs of a recipe and its control, what differs, figures and verdicts.

A side is a set of runs of one configuration with different seeds. A pair is a side with its control; a number of the one is compared with
the number of the other of the same seed. `Comparison` holds everything that the page and `report.json` say.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from launch.comparison.runs import Run
from launch.comparison.verdicts import Verdict, judge, paired_interval
from launch.run.errors import UsageError
from launch.run.folder import INCIDENTAL
from launch.run.json_lines import dotted
from recipes.claims import CLAIMS
from recipes.registry import ROOT, Recipe, read_recipe, recipe_names

Role = Literal["control", "recipe", "run"]


@dataclass(frozen=True, eq=False)
class Side:
    """Runs of one configuration, in the order of their seeds.

    name: of its engine JSON, with a setting in which it differs where several sides have the same. Made of file names: to be escaped.
    role: "control" where it is the control of any pair, "recipe" where claims are judged of it, else "run".
    """

    name: str
    role: Role
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Difference:
    """A setting, or a circumstance, that is not the same in all runs of a pair.

    key: dotted path in `run.json`. control, other: the value on each side, None where there is none; where runs of one side differ, a text
    that has each value with its seeds.
    """

    key: str
    control: Any
    other: Any


@dataclass(frozen=True)
class Spread:
    """Numbers of several seeds; entry i of `values` is that of seed i of `seeds`.

    mean: None without values; +inf where a run diverged, whose loss is +inf. deviation: of the sample, None with fewer than two finite values.
    low, high: of a side the least and the greatest value; of a paired difference or ratio the two-sided 95% interval of the mean, None with
    fewer than two pairs.
    """

    seeds: tuple[int, ...]
    values: tuple[float, ...]
    mean: float | None
    deviation: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Figure:
    """One number of the runs of a pair, on both sides.

    difference: other - control, of the seeds that both have, its mean the arithmetic one; ratio: other / control, its mean the geometric
    one. None without pairs; the ratio also where a value is not above 0, and of losses.
    """

    control: Spread
    other: Spread
    difference: Spread | None
    ratio: Spread | None


@dataclass(frozen=True)
class Pair:
    """A side and its control.

    recipe: whose claims are judged; None: there are only figures. seeds: that both have. figures: by name, as `Run.measures` names them, and
    "seconds_to_reach" and "tokens_to_reach", the time and the tokens until the validation loss was first at or below the mean of the control's
    final ones, by linear interpolation between evaluations. verdicts: one for each claim, in the order of the recipe.
    """

    control: Side
    side: Side
    recipe: Recipe | None
    differences: tuple[Difference, ...]
    seeds: tuple[int, ...]
    figures: dict[str, Figure]
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True)
class Absent:
    """A recipe that was not run, and why."""

    recipe: str
    reason: str


@dataclass(frozen=True)
class Comparison:
    """All that is compared.

    marks: why it would have been refused without --force, in sentences; what they touch is no experiment. remarks: what a reader must know
    of how runs were paired. What concerns one run alone is in its own remarks.
    """

    sides: tuple[Side, ...]
    pairs: tuple[Pair, ...]
    marks: tuple[str, ...]
    absent: tuple[Absent, ...]
    remarks: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """What `report.json` holds: plain numbers, null for one that is not finite; no curves."""
        raise NotImplementedError
