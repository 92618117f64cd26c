"""The runs of an experiment: control and recipe on a testbed, or with flags of the user, with the same seeds.

A run is named after a hash of everything that affects its numbers: its settings, its corpus, the code that trains it, the versions of the
packages, and the kind of machine. A control that several recipes share, or a recipe that is another's control, is therefore run only once,
and existing runs are reused.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from launch.config.explain import memory_of
from launch.config.flags import as_words, suggested_flags, without
from launch.config.hardware import cpu_instructions, device_type, gpus
from launch.config.run_config import SCRATCH, RunConfig, resolve
from launch.errors import UsageError
from launch.formats.files import read_json
from launch.formats.metrics import read_run_json
from launch.training.run_folder.provenance import machine, versions
from launch.training.run_folder.run_json import changes_numbers
from model.presets import FIELDS
from recipes.registry import ROOT, Flags, Ladder, Recipe, Testbed, make_techniques, read_recipes, technique_classes

#: The fraction of a GPU's memory, or of the host's free memory, that interleaved runs may use.
FILLED = 0.75
#: Memory that a process uses on a GPU before it allocates anything.
CUDA_CONTEXT = 600 * 2**20
#: Memory of a rank on a CPU before it builds a model: Python, torch and DeepSpeed.
PROCESS = 400 * 2**20
#: Files and folders of the code that the numbers of every run depend on, beside recipes/*.py and, if it has a technique, recipes/*/*.py.
CODE = ("launch/pretrain.py", "launch/config", "launch/formats", "launch/training", "model", "data_pipeline")


@dataclass(frozen=True)
class Trial:
    """One run of an experiment.

    flags: of `launch/pretrain.py`, without the run's name and folder. config: what they resolve to. described: what `run.json` will say
    of the numbers.
    """

    name: str
    flags: tuple[str, ...]
    config: RunConfig
    described: dict[str, Any] = field(compare=False, repr=False)

    @property
    def seed(self) -> int:
        return self.config.seed

    def check_folder(self, run: Path) -> None:
        """Raise UsageError if the folder `run`, which has the name of this run, holds another one."""
        file = run / "run.json"
        if os.path.exists(file) and _name(self.config, described := read_run_json(file)) != self.name:
            raise UsageError(
                f"{file}: describes another run than the folder's name stands for (run_name: {json.dumps(described.get('run_name'))});"
                " rename the folder back, or remove it, and the same command trains the run again"
            )


@dataclass(frozen=True)
class PairedTrials:
    """The runs of a recipe and of its control; entry i of both has the same seed. testbed: None for a setting of the user."""

    recipe: Recipe
    testbed: Testbed | None
    control: tuple[Trial, ...]
    own: tuple[Trial, ...]


class CannotRun(UsageError):
    """A recipe or its control cannot be run here; the message says what it needs."""


def pair_trials(recipe: Recipe, flags: Sequence[str], seeds: Iterable[int], ranks: int, testbed: Testbed | None = None) -> PairedTrials:
    """The runs of a recipe and of its control.

    On a testbed, each side has the testbed's flags with the values that were tuned for it. Otherwise, both sides have the recipe's
    suggested flags, except for those of the architecture: there, the control has what the recipe of its JSON suggests. `flags` override
    both. A `--set` of the recipe's technique is not passed to the control, where it would switch the technique on.

    Raises:
        CannotRun: this machine lacks what one of them needs, or the flags are refused.
        DataError: the corpus is missing or damaged.
    """
    suggested = suggested_flags(recipe, flags)
    of_model = {"--architecture", *(f"--{field}" for field in FIELDS)}
    its_own = next((one.flags for one in read_recipes() if one.config == recipe.control), [])
    of_control = [*without(its_own, *({word for word in its_own if word.startswith("--")} - of_model)), *without(suggested, *of_model)]
    seeds, techniques = list(seeds), only_in_recipe(recipe)
    shared = without(flags, "--set", values=lambda setting: setting.partition("=")[0].partition(".")[0] in techniques)

    def trials(config: str, suggested: list[str], flags: Sequence[str], own: Recipe | None = None) -> tuple[Trial, ...]:
        first = as_words(settings_on(testbed, config, own)) if testbed else suggested
        return tuple(make_trial(config, [*first, *flags, "--seed", str(seed)], ranks) for seed in seeds)

    return PairedTrials(recipe, testbed, trials(recipe.control, of_control, shared), trials(recipe.config, suggested, flags, recipe))


def only_in_recipe(recipe: Recipe) -> set[str]:
    """The sections of techniques that the recipe's JSON has and its control's lacks."""
    own, its_control = (read_json(ROOT / config)[0].keys() for config in (recipe.config, recipe.control))
    return {cls.declaration.section for cls in technique_classes()} & own - its_control


def settings_on(testbed: Testbed, config: str, recipe: Recipe | None = None) -> Flags:
    """The flags of the runs of `config` on a testbed: the testbed's own, with the tuned values of `recipe`.

    A recipe without a sweep takes the values of its control. By default, the values are those of `tuned_by`.
    """
    swept = recipe is not None and bool(recipe.experiments[testbed.name].sweep)
    tuned = recipe if swept else tuned_by(recipe.control if recipe else config, testbed)
    base, own = {**testbed.flags, **testbed.tuned}, {}
    if tuned:
        experiment = tuned.experiments[testbed.name]
        # A list of one value states what the recipe is, such as its architecture, so it also holds before the sweep.
        own = {name: values[0] for name, values in experiment.sweep.items() if len(values) == 1} | experiment.tuned
    return {**base, **own}


def tuned_by(config: str, testbed: Testbed) -> Recipe | None:
    """The recipe with the DeepSpeed JSON `config` and a sweep of its own on the testbed; None if `config` takes the control's values."""
    recipes = (one for one in read_recipes() if one.config == config and testbed.name in one.experiments)
    return next((one for one in recipes if one.experiments[testbed.name].sweep), None)


def corpus_command(testbed: Testbed | Ladder) -> str:
    """The command that makes the testbed's corpus."""
    return shlex.join(["python", "data_pipeline/prepare.py", *as_words(testbed.corpus), "--out", str(testbed.flags["data"])])


def make_trial(config_file: str, flags: Sequence[str], ranks: int) -> Trial:
    """The run of a DeepSpeed JSON (a path within the repository) with flags of `launch/pretrain.py`. Raises as `pair_trials` does."""
    flags = ["--deepspeed_config", str(ROOT / config_file), "--save_every", "0", *flags]
    try:
        config, _ = resolve(flags, ranks)
        from launch.training.engine import check_device  # imports DeepSpeed, whose warnings `resolve` has silenced

        check_device(config)
    except UsageError as reason:
        raise CannotRun(reason.faults[0].removeprefix(f"{ROOT}/")) from None
    if config.lacks:
        raise CannotRun(config.lacks[0].removeprefix(f"{ROOT}/"))
    described = config.as_json() | {"corpus_fingerprint": config.corpus.fingerprint, "corpus": {"vocab_size": config.vocab_size}}
    return Trial(_name(config, described), tuple(flags), config, described)


def _name(config: RunConfig, described: dict[str, Any]) -> str:
    """The name of the run that `described` has the values of. It is that of `config` only if the values are."""
    numbers = {key: described.get(key) for key in config.as_json() if key != "seed" and changes_numbers(key)}
    numbers["corpus"] = described["corpus_fingerprint"]
    numbers["code"] = _code(bool(make_techniques(config).members))
    numbers["environment"] = _environment()
    # "nvme_path": "auto" is resolved to a folder whose path contains the run's name.
    scratch = json.dumps(str(Path(str(described.get("runs_dir"))) / str(described.get("run_name")) / SCRATCH))
    key = hashlib.sha256(json.dumps(numbers, sort_keys=True).replace(scratch, '"auto"').encode()).hexdigest()[:8]
    return f"{Path(described['config_file']).stem}-{key}-seed{described['seed']}"


@functools.cache
def _code(with_technique: bool) -> str:
    """A hash of the code that trains a run. Techniques import each other, so the code of all counts if the run has one."""
    files = {file for path in CODE for file in ([ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("*.py"))}
    files |= {*ROOT.glob("recipes/*.py"), *(ROOT.glob("recipes/*/*.py") if with_technique else ())}
    files = {file for file in files if file.name != "claims.py"}
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in sorted(files))).hexdigest()


@functools.cache
def _environment() -> dict[str, Any]:
    """The versions of the packages, the kind of machine and, on a CPU, the number of threads, which affect the rounding."""
    left_out = ("host", "system", *(["threads"] if device_type() == "cuda" else []))
    kind = {key: value for key, value in machine().items() if key not in left_out}
    return {**versions(), **kind, "instructions": cpu_instructions()}


def interleaved_groups(trials: Sequence[Trial], at_once: int | None) -> list[list[Trial]]:
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


def in_order(experiments: Iterable[PairedTrials]) -> list[list[Trial]]:
    """The distinct runs in batches to interleave, seed by seed. Experiments that share a run are in the same batch."""
    seeds: dict[int, list[dict[str, Trial]]] = {}
    for experiment in experiments:
        for pair in zip(experiment.control, experiment.own, strict=True):
            own = {trial.name: trial for trial in pair}
            batches = seeds.setdefault(pair[0].seed, [])
            sharing = [batch for batch in batches if batch.keys() & own.keys()]
            merged = {name: trial for batch in (*sharing, own) for name, trial in batch.items()}
            seeds[pair[0].seed] = [*(batch for batch in batches if batch not in sharing), merged]
    return [list(batch.values()) for batches in seeds.values() for batch in batches]
