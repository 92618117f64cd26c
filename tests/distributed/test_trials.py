"""The runs of an experiment are interleaved, train as they would alone, and are resumed after an interruption."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch.comparison import interleaved
from launch.comparison import trials as naming
from launch.comparison.experiments import _paired_trials, script_of, train_missing
from launch.comparison.interleaved import InterleavedRun, run_interleaved
from launch.comparison.trials import CODE, CannotRun, Trial, in_order, interleaved_groups, pair_trials, settings_on
from launch.config.run_config import resolve
from launch.errors import UsageError
from launch.formats.metrics import read_metrics
from launch.training.ranks.interleaving import STEPS
from launch.training.run_folder.provenance import describe_run
from recipes.registry import ROOT, read_recipe, read_testbed
from tests.helpers import resumed_after
from tests.run_folders import write_run

#: Without --data: it differs from test to test.
TINY = ["--n_layer", "2", "--n_head", "2", "--d_model", "32", "--seq_len", "32", "--global_batch_size", "2", "--eval_batches", "1"]
STEPS_OF_A_RUN = 2 * STEPS + 5
RECIPE = "recipes/progressive_layer_drop"
PATIENCE_SECONDS = 180.0


def flags(corpus: Path, steps: int = STEPS_OF_A_RUN) -> list[str]:
    return [*TINY, "--data", str(corpus), "--preset", "nano", "--steps", str(steps), "--eval_every", "20"]


def trials(corpus: Path, ranks: int, seeds: int = 1) -> list[Trial]:
    (group,) = in_order([pair_trials(read_recipe(ROOT / RECIPE), flags(corpus), [seeds], ranks)])
    return group


def numbers(run: Path) -> list[dict[str, Any]]:
    """What must not depend on who else makes steps."""
    return [
        {key: value for key, value in line.items() if key in ("step", "loss", "val_loss", "grad_norm")}
        for line in read_metrics(run / "metrics.jsonl")
    ]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.gate), pytest.param(2, marks=pytest.mark.long)])
def test_interleaved_runs_train_as_they_would_alone(ranks, corpus, tmp_path):
    control, own = trials(corpus, ranks)
    made: list[tuple[str, int]] = []
    start = time.monotonic()
    scripts = {one.name: (ranks, script_of(one, tmp_path)) for one in (control, own)}
    codes: dict[str, int] = {}
    run_interleaved(scripts, tmp_path, lambda name, steps: made.append((name, steps)), codes.__setitem__)
    wall = time.monotonic() - start
    assert codes == {control.name: 0, own.name: 0}
    # Both start, then alternate, in an order that rotates; the last steps end the run.
    assert made == [(one.name, steps) for steps, order in ((0, 1), (STEPS, 1), (STEPS, -1)) for one in (control, own)[::order]]
    ended = [read_metrics(tmp_path / one.name / "metrics.jsonl")[-1] for one in (control, own)]
    assert [line["step"] for line in ended] == [STEPS_OF_A_RUN] * 2
    assert sum(line["seconds"] for line in ended) < wall, "a run's clock stands still while it waits"
    if ranks == 1:
        alone = [sys.executable, "launch/pretrain.py", *control.flags, "--runs_dir", str(tmp_path), "--run_name", "alone", "--quiet"]
        subprocess.run(alone, cwd=ROOT, check=True, capture_output=True)
        assert numbers(tmp_path / "alone") == numbers(tmp_path / control.name)


@pytest.mark.gate
def test_parallel_runs_train_as_they_would_alone(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    first, second, third = (trials(corpus, 1, seed)[0] for seed in (1, 2, 3))
    ended: list[tuple[str, int]] = []
    made: dict[str, int] = {}
    scripts = {one.name: (1, script_of(one, tmp_path)) for one in (first, second, third)}
    scripts["broken"] = (1, ["-c", "import sys; sys.exit(3)"])

    def on_steps(name: str, steps: int) -> None:
        made[name] = made.get(name, 0) + steps

    run_interleaved(scripts, tmp_path, on_steps, lambda name, code: ended.append((name, code)), parallel=2)
    assert sorted(ended) == sorted([("broken", 3), *((one.name, 0) for one in (first, second, third))])
    assert made == {one.name: 2 * STEPS for one in (first, second, third)}
    descriptions = [json.loads((tmp_path / one.name / "run.json").read_text()) for one in (first, second, third)]
    assert len({one["interleaved"] for one in descriptions}) == 3, "their times are not comparable"
    alone = [sys.executable, "launch/pretrain.py", *second.flags, "--runs_dir", str(tmp_path), "--run_name", "alone", "--quiet"]
    subprocess.run(alone, cwd=ROOT, check=True, capture_output=True)
    assert numbers(tmp_path / "alone") == numbers(tmp_path / second.name)


def test_a_parallel_run_uses_one_gpu(monkeypatch):
    assert interleaved._gpu(1) == {}
    monkeypatch.setattr(interleaved, "device_type", lambda: "cuda")
    monkeypatch.setattr(interleaved, "gpus", lambda: [None, None])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [interleaved._gpu(place) for place in range(3)] == [{"CUDA_VISIBLE_DEVICES": number} for number in "010"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert [interleaved._gpu(place) for place in range(3)] == [{"CUDA_VISIBLE_DEVICES": number} for number in "575"]


class Command:
    """`launch/compare.py --recipe RECIPE` with two or more runs, started in a session of its own."""

    def __init__(self, folder: Path, out: str, *more: str):
        self.runs = folder / "trials"
        command = ["launch/compare.py", "--recipe", RECIPE, "--runs_dir", str(self.runs), "--out", str(folder / out)]
        self.process = subprocess.Popen(
            [sys.executable, *command, *more],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def wait_for_steps(self, steps: int) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not all(self.steps_of(run) >= steps for run in self.folders()) or len(self.folders()) < 2:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def folders(self) -> list[Path]:
        return sorted(path.parent for path in self.runs.glob("*/metrics.jsonl"))

    def steps_of(self, run: Path) -> int:
        lines = read_metrics(run / "metrics.jsonl")
        return lines[-1]["step"] if lines else 0

    def trained_by(self) -> list[psutil.Process]:
        """The ranks that live, of whatever command started them."""
        return [one for one in psutil.process_iter(["cmdline"]) if str(self.runs) in (one.info["cmdline"] or [])]


def ended(command: Command) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(word.endswith("launch/pretrain.py") for one in command.trained_by() for word in one.info["cmdline"]):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "code", "more"),
    [
        pytest.param(signal.SIGINT, 130, [], id="SIGINT-interleaved"),
        pytest.param(signal.SIGTERM, 143, ["--parallel", "2"], id="SIGTERM-parallel"),
        pytest.param(signal.SIGKILL, -9, ["--parallel", "2"], id="SIGKILL-parallel"),
    ],
)
def test_an_interrupted_comparison_is_resumed(number, code, more, corpus, tmp_path):
    steps = 40 * STEPS
    words = ["--seeds", "1", "--ranks", "1", *flags(corpus, steps)]
    command = Command(tmp_path, "first", *words, *more)
    command.wait_for_steps(STEPS)
    os.kill(command.process.pid, number)
    output = command.process.communicate(timeout=PATIENCE_SECONDS)[0]
    assert command.process.returncode == code, output
    ended(command)  # no rank outlives the command that started it
    stopped = [command.steps_of(run) for run in command.folders()]
    assert all(STEPS <= step < steps for step in stopped)
    assert all(re.search(rf"{run.name}: step \d+/{steps}, loss [\d.]+,.* left", output) for run in command.folders())
    if number != signal.SIGKILL:
        assert "the same command" in output
    again = Command(tmp_path, "second", *words)
    output = again.process.communicate(timeout=PATIENCE_SECONDS)[0]
    assert again.process.returncode == 0, output
    assert [command.steps_of(run) for run in command.folders()] == [steps] * 2
    assert [resumed_after(run) for run in command.folders()] == stopped, "each from the checkpoint of its stop"
    assert (tmp_path / "second" / "report.html").exists()
    assert not list(command.runs.glob("*/checkpoints/*")), "of finished runs no checkpoints stay"


def test_what_outlives_its_launcher_writes_its_checkpoint(tmp_path):
    run = object.__new__(InterleavedRun)
    run.process = subprocess.Popen(["sh", "-c", f"(sleep 1; touch {tmp_path}/checkpoint) & exit 0"], start_new_session=True)
    run.end()
    assert (tmp_path / "checkpoint").exists()


def test_what_this_machine_cannot_run_is_said(corpus):
    with pytest.raises(CannotRun, match="'tf32' needs CUDA"):
        pair_trials(read_recipe(ROOT / "recipes/tf32"), flags(corpus), [1], 2)


def test_a_setting_of_the_recipes_technique_is_not_the_controls(corpus):
    """`--set` of a section that the control lacks would switch the technique on there, and compare it with itself."""
    recipe, theta = read_recipe(ROOT / "recipes/progressive_layer_drop"), "progressive_layer_drop.theta=0.2"
    for given in (["--set", theta], [f"--set={theta}"]):
        experiment = pair_trials(recipe, [*flags(corpus), *given, "--set", "gradient_clipping=0.5"], [1], 1)
        (control,), (own,) = experiment.control, experiment.own
        assert control.config.techniques == {} and own.config.techniques["progressive_layer_drop"]["theta"] == 0.2
        assert control.config.ds_config["gradient_clipping"] == own.config.ds_config["gradient_clipping"] == 0.5
    other = pair_trials(read_recipe(ROOT / "recipes/zero_2"), [*flags(corpus), "--set", "fused_kernels=auto"], [1], 1)
    assert all("fused_kernels" in trial.config.techniques for trial in (*other.control, *other.own)), "it is not zero_2's technique"


def test_a_run_of_other_code_has_another_name(tmp_path, monkeypatch):
    """So that it is trained again. The code of techniques counts for runs that have one."""
    for path in (*CODE, "recipes/lamb/optimizer.py", "recipes/technique.py", "recipes/claims.py"):
        copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / path, tmp_path / path)
    monkeypatch.setattr(naming, "ROOT", tmp_path)

    def codes() -> tuple[str, str]:
        return naming._code.__wrapped__(False), naming._code.__wrapped__(True)

    def changed(path: str) -> tuple[bool, bool]:
        before = codes()
        (tmp_path / path).write_text((tmp_path / path).read_text() + "# changed\n")
        return tuple(one != other for one, other in zip(before, codes(), strict=True))

    assert codes()[0] != codes()[1]
    assert changed("recipes/lamb/optimizer.py") == (False, True)
    for path in ("launch/pretrain.py", "launch/training/engine.py", "model/gpt.py", "recipes/technique.py"):
        assert changed(path) == (True, True)
    assert changed("recipes/claims.py") == (False, False)


def test_a_variant_of_a_recipe_has_its_own_tuned_values():
    testbed, recipe = read_testbed("nano-0.5M"), read_recipe(ROOT / "recipes/lamb")
    own = recipe.experiments["nano-0.5M"]
    variant = replace(recipe, experiments={"nano-0.5M": replace(own, tuned={**own.tuned, "lr": 0.5})})
    assert settings_on(testbed, recipe.config, variant)["lr"] == 0.5
    assert settings_on(testbed, recipe.config)["lr"] == settings_on(testbed, recipe.config, recipe)["lr"] == own.tuned["lr"]


def test_a_recipe_without_a_sweep_has_the_values_of_its_control():
    testbed, lamb = read_testbed("nano-0.5M"), read_recipe(ROOT / "recipes/lamb")
    unswept = replace(lamb.experiments["nano-0.5M"], sweep={}, tuned={})
    recipe = replace(lamb, name="lamb_2", config="ds_configs/lamb_2.json", control=lamb.config, experiments={"nano-0.5M": unswept})
    assert settings_on(testbed, recipe.config, recipe) == settings_on(testbed, lamb.config)


def test_before_its_sweep_a_recipe_has_the_values_that_are_not_varied():
    settings = settings_on(read_testbed("nano-84M"), "ds_configs/modern_gpt.json", read_recipe(ROOT / "recipes/modern_gpt"))
    assert settings["architecture"] == "qwen3" and settings["lr"] == read_testbed("nano-84M").tuned["lr"]


def test_a_run_is_planned_once_and_named_by_what_decides_its_numbers(corpus):
    names = ("zero_1", "zero_2", "bf16", "fp32")
    experiments = {name: pair_trials(read_recipe(ROOT / "recipes" / name), flags(corpus), [1, 2], 2) for name in names}
    assert [one.name for one in experiments["zero_1"].control] == [one.name for one in experiments["zero_2"].control]
    assert [one.name for one in experiments["bf16"].own] == [one.name for one in experiments["fp32"].control]
    seeds = in_order(experiments.values())
    assert [{trial.seed for trial in group} for group in seeds] == [{1}, {2}]
    assert [len(group) for group in seeds] == [4, 4]  # stages 0, 1, 2 in bf16, and fp32
    assert all(re.fullmatch(r"zero\d_(bf16|fp32)-[0-9a-f]{8}-seed[12]", trial.name) for group in seeds for trial in group)
    apart = in_order([experiments["zero_1"], experiments["zero_2"], pair_trials(read_recipe(ROOT / "recipes/lamb"), flags(corpus), [1], 1)])
    assert [len(batch) for batch in apart] == [3, 2, 3], "only experiments that share a run are interleaved"
    longer = pair_trials(read_recipe(ROOT / "recipes/zero_1"), flags(corpus, steps=99), [1], 2)
    assert longer.own[0].name != experiments["zero_1"].own[0].name
    kept = pair_trials(read_recipe(ROOT / "recipes/zero_1"), [*flags(corpus), "--save_every", "7"], [1], 2)
    assert kept.own[0].name == experiments["zero_1"].own[0].name, "when it saves decides no number"
    for name, found in (("versions", {"torch": "1.0"}), ("machine", {"processor": "another"})):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(naming, name, lambda found=found: found)
            patch.setattr(naming, "_environment", naming._environment.__wrapped__)
            elsewhere = pair_trials(read_recipe(ROOT / "recipes/zero_1"), flags(corpus), [1], 2)
        assert elsewhere.own[0].name != experiments["zero_1"].own[0].name


def test_a_folder_that_holds_another_run_than_its_name_is_refused(corpus, tmp_path):
    other, own = trials(corpus, ranks=2)
    for trial in (own, other):
        config, _ = resolve([*trial.flags, "--runs_dir", str(tmp_path), "--run_name", trial.name], 2)
        write_run(tmp_path / trial.name, describe_run(config), [])
        trial.check_folder(tmp_path / trial.name)
    own.check_folder(tmp_path / "nothing")
    (tmp_path / own.name).rename(tmp_path / "x")
    (tmp_path / other.name).rename(tmp_path / own.name)
    with pytest.raises(UsageError, match=rf"{own.name}/run\.json: describes another run .*run_name: \"{other.name}\""):
        train_missing(argparse.Namespace(parallel=None, at_once=None, runs_dir=tmp_path), [[own]])
    nvme = ["--deepspeed_config", "ds_configs/zero_infinity.json", *flags(corpus)]  # "nvme_path": "auto" contains the run's name
    described = (resolve([*nvme, *where], 2)[0] for where in ((), ("--runs_dir", str(tmp_path), "--run_name", "y")))
    assert len({naming._name(config, describe_run(config)) for config in described}) == 1


@pytest.mark.parametrize(("given", "seeds"), [(None, [*range(1, 9)]), (2, [201, 202])])
def test_explorations_on_a_testbed_use_seeds_that_judge_nothing(corpus, given, seeds):
    recipe, testbed = read_recipe(ROOT / "recipes/lamb"), read_testbed("nano-0.5M")
    pair = _paired_trials(recipe, testbed, ["--data", str(corpus)], argparse.Namespace(seeds=given, ranks=None, parallel=None))
    assert [trial.seed for trial in pair.own] == [trial.seed for trial in pair.control] == seeds


def test_an_architecture_is_the_recipes_alone(corpus):
    """Off the testbeds, both sides have the recipe's suggested flags, but for the architecture."""
    pair = pair_trials(read_recipe(ROOT / "recipes/modern_gpt"), flags(corpus), [1], 1)
    shapes = [trial.config.shape for trial in (*pair.control, *pair.own)]
    assert [shape.positions for shape in shapes] == ["learned", "rotary"]


def test_groups_are_what_fits_in_memory(corpus, monkeypatch):
    group = trials(corpus, ranks=2) * 3
    assert [len(part) for part in interleaved_groups(group, 4)] == [4, 2]
    assert [len(part) for part in interleaved_groups(group, 1)] == [1] * 6
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 5 * 2**30})())
    # Two ranks of 400 MiB and a small model each, in three quarters of 5 GiB.
    assert [len(part) for part in interleaved_groups(group, None)] == [4, 2]
