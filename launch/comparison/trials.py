"""Plans the runs of an experiment: control and recipe with the same flags and seeds.

A run is named after a hash of everything that affects its numbers. A control that several recipes share, or a recipe that is another's
control, is therefore run only once, and existing runs are reused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from data_pipeline.errors import DataError
from launch.config.explain import memory_of
from launch.config.flags import suggested_flags
from launch.config.hardware import device_type, gpus
from launch.config.run_config import RunConfig, resolve
from launch.errors import UsageError
from launch.training.engine import check_device
from launch.training.run_json import INCIDENTAL
from recipes.registry import ROOT, Recipe

#: The fraction of a GPU's memory, or of the host's free memory, that interleaved runs may use.
FILLED = 0.75
#: Memory that a process uses on a GPU before it allocates anything.
CUDA_CONTEXT = 600 * 2**20
#: Memory of a rank on a CPU before it builds a model: Python, torch and DeepSpeed.
PROCESS = 400 * 2**20
#: Keys of a resolved run that do not affect its numbers, and the seed, which is in the name itself.
NOT_HASHED = {*INCIDENTAL, "run_name", "runs_dir", "recipe", "config_file", "preset", "data", "seed", "save_every", "keep"}


@dataclass(frozen=True)
class Trial:
    """One run of an experiment.

    flags: of `launch/pretrain.py`, without the run's name and folder. config: what they resolve to.
    """

    name: str
    flags: tuple[str, ...]
    config: RunConfig

    @property
    def seed(self) -> int:
        return self.config.seed


@dataclass(frozen=True)
class Experiment:
    """The runs of a recipe and of its control; entry i of both has the same seed."""

    recipe: Recipe
    control: tuple[Trial, ...]
    own: tuple[Trial, ...]


class CannotRun(Exception):
    """A recipe or its control cannot be run here; the message says what it needs."""


def plan_experiment(recipe: Recipe, flags: Sequence[str], seeds: Iterable[int], ranks: int) -> Experiment:
    """The runs of a recipe and of its control, both with the recipe's suggested flags, which `flags` override.

    Raises:
        CannotRun: this machine lacks what one of them needs, or the flags are refused.
        DataError: the corpus is missing or damaged.
    """
    both = [*suggested_flags(recipe, length_given="--steps" in flags or "--tokens" in flags), *flags]
    seeds = list(seeds)

    def trials(config: str) -> tuple[Trial, ...]:
        return tuple(_trial(str(ROOT / config), [*both, "--seed", str(seed)], ranks) for seed in seeds)

    return Experiment(recipe, trials(recipe.control), trials(recipe.config))


def _trial(config_file: str, flags: list[str], ranks: int) -> Trial:
    flags = ["--deepspeed_config", config_file, "--save_every", "0", *flags]
    try:
        config, _ = resolve(flags, ranks)
        check_device(config)
    except DataError:
        raise
    except UsageError as reason:
        raise CannotRun(reason.faults[0].removeprefix(f"{ROOT}/")) from None
    if config.lacks:
        raise CannotRun(config.lacks[0].removeprefix(f"{ROOT}/"))
    numbers = {key: value for key, value in config.as_json().items() if key not in NOT_HASHED}
    numbers["corpus"] = config.corpus.fingerprint
    key = hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()[:8]
    return Trial(f"{Path(config_file).stem}-{key}-seed{config.seed}", tuple(flags), config)


def fitting_groups(trials: Sequence[Trial], at_once: int | None) -> list[list[Trial]]:
    """`trials` in groups of runs that are interleaved: of `at_once` runs, or of as many as fit in memory by their plans."""
    device = device_type()
    on_gpu = device == "cuda"
    free = min((gpu.total_memory for gpu in gpus()), default=0) if on_gpu else psutil.virtual_memory().available
    # On GPUs each rank has its own memory; on a CPU all ranks share it.
    peaks = [memory_of(trial.config, trial.config.model_config, device)["peak"] for trial in trials]
    largest = max(
        peak + CUDA_CONTEXT if on_gpu else trial.config.ranks * (peak + PROCESS) for trial, peak in zip(trials, peaks, strict=True)
    )
    size = at_once or max(1, int(FILLED * free // largest))
    return [list(trials[start : start + size]) for start in range(0, len(trials), size)]


def in_order(experiments: Iterable[Experiment]) -> list[list[Trial]]:
    """The distinct runs of each seed: each control is followed by the recipes that are compared with it."""
    seeds: dict[int, dict[str, Trial]] = {}
    for experiment in sorted(experiments, key=lambda experiment: experiment.control[0].name):
        for trial in (*experiment.control, *experiment.own):
            seeds.setdefault(trial.seed, {}).setdefault(trial.name, trial)
    return [list(trials.values()) for trials in seeds.values()]
