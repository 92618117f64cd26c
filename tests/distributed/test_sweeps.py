"""`launch/compare.py --sweep` and `--tune`, of models so small that a trial takes seconds."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from launch.comparison import sweep, tuning
from launch.comparison.interleaved import free_port
from launch.comparison.sweep import Arm, Swept, read_sweep
from launch.comparison.trials import make_trial, settings_on, tuned_by
from launch.errors import UsageError
from launch.formats.metrics import read_metrics
from recipes import registry
from recipes.registry import ROOT, Experiment, Flags, read_recipe, read_testbed
from tests.commands import run_script
from tests.distributed.test_trials import PATIENCE_SECONDS, RECIPE, Command, ended, numbers
from tests.helpers import resumed_after

SHAPE = {"n_layer": 1, "n_head": 2, "d_model": 32, "seq_len": 32, "preset": "nano"}
RATES = [1e-2, 1e-4]


@pytest.fixture
def tiny(corpus, tmp_path, monkeypatch) -> str:
    """The name of a testbed of a model with one block, four steps and two learning rates, of which the first is best."""
    flags = {**SHAPE, "data": str(corpus), "global_batch_size": 4, "micro_batch_size": 4, "steps": 4, "eval_every": 2, "eval_batches": 1}
    testbed = {
        "title": "tiny",
        "device": "cpu",
        "corpus": {"tokenizer": json.loads((corpus / "manifest.json").read_text())["options"]["tokenizer"]},
        "flags": flags,
        "sweep": {"lr": RATES, "set": ["gradient_clipping=1.0", "gradient_clipping=0.01"]},
        "tuned": {"lr": 1e-2},
        "target_loss": 1.0,
    }
    shutil.copytree(registry.TESTBEDS, tmp_path / "testbeds")  # the recipes name them
    (tmp_path / "testbeds" / "tiny").mkdir()
    (tmp_path / "testbeds" / "tiny" / "testbed.json").write_text(json.dumps(testbed))
    monkeypatch.setattr(registry, "TESTBEDS", tmp_path / "testbeds")
    return "tiny"


def flags(testbed: str, folder: Path, *recipes: str) -> argparse.Namespace:
    given = {
        "recipe": list(recipes),
        "testbed": [testbed],
        "runs_dir": str(folder / "trials"),
        "ranks": None,
        "at_once": None,
        "parallel": None,
        "seeds": None,
    }
    return argparse.Namespace(**given, quiet=False, keep_checkpoints=False, grid=False, extend=False)


@pytest.mark.gate
def test_a_sweep_of_a_testbed_chooses_the_lowest_loss(tiny, tmp_path, capfd):
    swept = sweep.tune(flags(tiny, tmp_path), [])
    found = swept.as_json()
    arm = found["tiny"]["arms"]["zero0_bf16"]
    one, other = "gradient_clipping=1.0", "gradient_clipping=0.01"
    assert [(point["lr"], point["set"]) for point in arm["grid"]] == [(1e-2, one), (1e-4, one), (1e-2, other)], "from the best so far"
    assert arm["chosen"] == {name: value for name, value in min(arm["grid"], key=lambda point: point["loss"]).items() if name != "loss"}
    assert found["tiny"]["seed"] == sweep.SWEEP_SEED and {run.seed for run in swept.runs.values()} == {sweep.SWEEP_SEED}
    tuning.write_tuning(found, file := tmp_path / "new" / "tuning.json")
    assert json.loads(file.read_text()) == found and file.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    said = capfd.readouterr().out
    assert [f"run {number} of 3: zero0_bf16, lr {rate}, set" in said for number, rate in ((1, 0.01), (2, 0.0001), (3, 0.01))] == [True] * 3


#: A model of one block for two steps, on one rank.
OWN = ["--architecture", "llama", "--steps", "2", "--eval_batches", "1", "--global_batch_size", "2", "--ranks", "1"]


def own_flags(corpus: Path) -> list[str]:
    return [*OWN, "--data", str(corpus), *(word for name, value in SHAPE.items() for word in (f"--{name}", str(value)))]


@pytest.mark.gate
def test_a_sweep_of_ones_own_model_goes_on_beyond_an_optimum_at_the_edge(corpus, tmp_path):
    words = ["--sweep", "lr=1e-4,3e-2", "--extend", *own_flags(corpus), "--runs_dir", tmp_path / "trials", "--out", tmp_path / "out"]
    done = run_script("launch/compare.py", *words)
    assert (done.returncode, done.stderr) == (0, "")
    (arm,) = json.loads((tmp_path / "out" / "tuning.json").read_text())["sweep"]["arms"].values()
    assert [point["lr"] for point in arm["grid"]] == [1e-4, 3e-2, 9.0], "by the factor of the given values"
    assert arm["chosen"] == {"lr": 3e-2} and "at the edge" not in done.stdout
    assert [line.split(": ")[0] for line in done.stdout.splitlines() if line.startswith("run ")] == [
        "run 1 of 2",
        "run 2 of 2",
        "run 3 of 3",
    ]
    _, comment, command = (tmp_path / "out" / "best.sh").read_text().splitlines()
    assert comment == "# the best of zero0_bf16" and command in done.stdout
    python, script, deepspeed_config, config, *rest, run_name, name = shlex.split(command)
    assert (python, script, deepspeed_config, run_name, name) == (
        "python",
        "launch/pretrain.py",
        "--deepspeed_config",
        "--run_name",
        "zero0_bf16-best",
    )
    assert rest[-2:] == ["--runs_dir", str(tmp_path / "trials")]
    trial = make_trial(config, rest, 1)
    assert trial.config.lr == 3e-2 and (tmp_path / "trials" / trial.name).is_dir(), "the command trains the run that was best"
    again = run_script("launch/compare.py", *words)
    assert again.returncode == 0 and "training" not in again.stdout, "finished runs are reused, and the report is replaced"
    assert again.stdout.splitlines()[-8:] == done.stdout.splitlines()[-8:]


@pytest.mark.long
def test_a_sweep_of_two_sides_continues_after_a_kill_and_finds_what_single_runs_find(corpus, tmp_path):
    """On two ranks. Its command was killed in the second of six trials, with the whole process group."""
    shape = [*own_flags(corpus), "--n_layer", "2", "--steps", "40", "--global_batch_size", "4", "--ranks", "2"]
    words = [*shape, "--sweep", "lr=1e-3,2e-3,4e-3"]
    command = Command(tmp_path, "out", *words)
    command.wait_for_steps(10)
    os.killpg(command.process.pid, signal.SIGKILL)
    assert command.process.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    ended(command)
    before = {run.name: command.steps_of(run) for run in command.folders()}
    assert sorted(before.values())[0] < 40 and sorted(before.values())[1:] == [40]
    again = Command(tmp_path, "out", *words)
    output = again.process.communicate(timeout=4 * PATIENCE_SECONDS)[0]
    assert again.process.returncode == 0, output
    assert "run 2 of 6" in output and "run 6 of 6" in output and "run 1 of 6" not in output
    assert {run.name: resumed_after(run) for run in command.folders() if before.get(run.name, 40) < 40} == {
        name: steps for name, steps in before.items() if steps < 40
    }, "from the checkpoint that its ranks wrote"
    arms = json.loads((tmp_path / "out" / "tuning.json").read_text())["sweep"]["arms"]
    commands = (tmp_path / "out" / "best.sh").read_text().splitlines()[2::2]
    for name, best in zip(("zero1_bf16", Path(RECIPE).name), commands, strict=True):
        words = shlex.split(best)[:-2]
        assert words[:3] == ["deepspeed", "--num_gpus", "2"]
        words = [
            f"{Path(sys.executable).parent}/deepspeed",
            "--master_port",
            str(free_port()),
            *words[1:],
            "--runs_dir",
            str(tmp_path / "single"),
        ]
        losses = {}
        for rate in (1e-3, 2e-3, 4e-3):
            place = words.index("--lr")
            single = [*words[: place + 1], str(rate), *words[place + 2 :], "--run_name", f"{name}-{rate}"]
            subprocess.run(single, cwd=ROOT, check=True, capture_output=True, timeout=4 * PATIENCE_SECONDS)
            losses[rate] = read_metrics(tmp_path / "single" / f"{name}-{rate}" / "metrics.jsonl")[-1]["val_loss"]
        assert {point["lr"]: point["loss"] for point in arms[name]["grid"]} == losses, "bit for bit"
        assert arms[name]["chosen"]["lr"] == min(losses, key=losses.__getitem__)
        swept = [run for run in command.folders() if numbers(run)[-1]["val_loss"] == min(losses.values())]
        assert numbers(tmp_path / "single" / f"{name}-{arms[name]['chosen']['lr']}") in map(numbers, swept)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [[run["measures"]["final_val_loss"] for run in side["runs"]] for side in report["sides"]] == [
        [min(point["loss"] for point in arm["grid"])] for arm in arms.values()
    ], "the two bests are compared"


class Loss:
    """Arms whose losses are a function of their points, without training."""

    def __init__(self, sweep: dict[str, list], loss, combined: bool = False, extends: bool = False, seeds: int = 1):
        self.arm = Arm("own", sweep, lambda point: [], combined, extends)
        self.trained: list[Flags] = []
        for points in self.arm.rounds():
            for point in points:
                if point not in self.trained:
                    self.trained.append(point)
                    self.arm.add(point, [loss(**point) + 0.01 * seed for seed in range(seeds)])

    @property
    def lines(self) -> list[str]:
        return [*Swept("own", [self.arm], {}, {}).lines()]


def test_the_best_is_trained_where_the_sweep_was(corpus, tmp_path, monkeypatch):
    arm = Arm("own", {"lr": [1e-3]}, lambda point: [make_trial(tuning.CONTROL, own_flags(corpus), 1)])
    arm.add({"lr": 1e-3}, [4.0])
    swept = Swept("own", [arm], {}, {})
    monkeypatch.chdir(tmp_path)
    folder, _, command = swept.script("my runs").splitlines()
    assert folder == f"cd {tmp_path}" and command.endswith(" --runs_dir 'my runs' --run_name own-best")
    assert f" {ROOT}/launch/pretrain.py " in command and "--runs_dir" not in swept.script(None)


def test_flags_are_varied_one_after_another_or_in_all_combinations():
    def loss(lr: float, steps: int) -> float:
        return abs(math.log(lr / 4)) + abs(steps - 3)

    varied = Loss({"lr": [1, 2, 4], "steps": [1, 3]}, loss)
    assert varied.trained == [{"lr": lr, "steps": steps} for lr, steps in ((1, 1), (2, 1), (4, 1), (4, 3))]
    assert len(varied.trained) == varied.arm.size
    combined = Loss({"lr": [1, 2, 4], "steps": [1, 3]}, loss, combined=True)
    assert combined.trained == [{"lr": lr, "steps": steps} for lr in (1, 2, 4) for steps in (1, 3)]
    assert varied.arm.chosen == combined.arm.chosen == {"lr": 4, "steps": 3}
    assert [line.split(",")[0] for line in varied.lines] == [
        "own: best is lr 4",
        "own: lr 4 is at the edge of its values",
        "own: steps 3 is at the edge of its values",
    ], "no other point is near"
    near = Loss({"lr": [1, 2]}, lambda lr: 4 + 0.005 * lr)
    assert near.lines[-1] == "own: one seed shows no noise, so lr 2 (+0.0050) may be as good"


@pytest.mark.parametrize(
    ("values", "best", "added"),
    [
        ([1.0, 2.0], 7, [4.0, 8.0, 16.0]),
        ([8.0, 4.0], 0.9, [2.0, 1.0, 0.5]),
        ([0, 50], 90, [100, 200]),
        ([3, 2], 0.1, [1, 0]),
        ([2, 3], 2, [1]),
    ],
)
def test_an_extended_optimum_is_inside(values, best, added):
    found = Loss({"x": values}, lambda x: abs(x - best), extends=True)
    assert [point["x"] for point in found.trained] == [*values, *added]
    assert not [line for line in found.lines if "edge" in line]


def test_an_extension_ends_at_a_bound():
    endless = Loss({"x": [1.0, 2.0]}, lambda x: -x, extends=True)
    assert len(endless.trained) == 2 + sweep.MOST_ADDED and endless.lines[1].endswith(f"--extend adds at most {sweep.MOST_ADDED} values")
    whole = Loss({"x": [100, 101]}, lambda x: -x, extends=True)
    assert whole.trained[2:4] == [{"x": 102}, {"x": 103}]


def test_what_the_seeds_do_not_tell_apart_is_said():
    rates = [1e-3, 2e-3, 4e-3]
    gaps = {1e-3: [0.5, 0.51, 0.49], 2e-3: [0.0, 0.0, 0.0], 4e-3: [0.1, -0.1, 0.02]}
    arm = Arm("own", {"lr": rates}, lambda point: [])
    for rate in rates:
        arm.add({"lr": rate}, [4 + gap for gap in gaps[rate]])
    lines = [*Swept("own", [arm], {}, {}).lines()]
    assert lines[1:] == ["own: 3 seeds do not tell the best from lr 0.004"]
    table = Swept("own", [arm], {}, {}).table()
    assert [row[1:3] for row in table.rows] == [["0.001", "4.5000 ± 0.0100"], ["0.002", "4.0000 ± 0.0000"], ["0.004", "4.0067 ± 0.1007"]]
    arm.add({"lr": 8e-3}, [4.0, math.inf, 4.0])
    assert arm.grid[-1] == {"lr": 8e-3, "loss": None}, "a point diverges with any of its seeds"


def test_values_are_read_as_they_are_written():
    found = read_sweep(["lr=5e-4,1e-3", "optimizer.params.betas=[0.9,0.95],[0.9,0.99]", "tokens=1e6", "bias=true,false"])
    betas = ["[0.9,0.95]", "[0.9,0.99]"]
    assert found == {"lr": [5e-4, 1e-3], "optimizer.params.betas": betas, "tokens": [1_000_000], "bias": ["true", "false"]}
    point = {"lr": 1e-3, "no_cross_document": "true", "whole_eval": "false", "optimizer.params.betas": betas[0], "bias": "false"}
    assert sweep._as_words(point) == shlex.split("--lr 0.001 --no_cross_document --bias false --set optimizer.params.betas=[0.9,0.95]")


def test_a_flag_that_a_recipe_does_not_sweep_has_the_testbeds_value(tiny, tmp_path):
    testbed = dataclasses.replace(read_testbed(tiny), sweep={"lr": [1e-2], "warmup_steps": [2]}, tuned={"lr": 1e-2, "warmup_steps": 2})
    lamb = dataclasses.replace(read_recipe(ROOT / "recipes/lamb"), experiments={"tiny": Experiment(seeds=2, sweep={"lr": [1e-3]})})
    *_, arm = sweep.testbed_arms(testbed, lamb, flags(tiny, tmp_path), [])
    (trial,) = arm.trials(arm.start)
    assert (trial.config.lr, trial.config.warmup_steps) == (1e-3, 2)


def test_an_optimum_at_the_edge_is_found():
    grid = [{"lr": lr, "loss": loss} for lr, loss in ((1e-3, 4.0), (2e-3, 3.9), (4e-3, None))]
    assert tuning.edges([one | {"warmup_steps": 50} for one in grid], {"lr": 2e-3, "warmup_steps": 50}) == [], "the only value is no edge"
    assert tuning.edges(grid, {"lr": 1e-3}) == ["lr"]
    assert tuning.edges(grid, {"lr": 2e-3}) == []
    assert tuning.edges(grid[:2], {"lr": 2e-3}) == ["lr"]
    others = [{**one, "min_lr": end, "set": "a=1"} for one, end in zip(grid, (0, 1e-4, 2e-4), strict=True)]
    assert tuning.edges(others, {"min_lr": 0, "set": "a=1"}) == [], "neither 0 nor a word is an edge"


@pytest.mark.parametrize(
    ("losses", "seen", "words"),
    [
        ([5.0, 4.2], [5.0, 4.2], "★ chosen"),
        ([4.2, 4.4, 4.9, 5.9], [4.2, 4.4, 4.9], "★ chosen;\nhigher losses are above the frame"),
        ([4.2, 4.4, None], [4.2, 4.4], "★ chosen;\ndiverged runs are left out"),
    ],
)
def test_the_picture_of_a_sweep_shows_three_points_if_it_can_and_names_what_it_hides(losses, seen, words, tmp_path, monkeypatch):
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    grid = [{"lr": 10.0**-n, "loss": loss} for n, loss in enumerate(losses)]
    tuning.draw_tuning({"own": {"arms": {"zero0_bf16": {"grid": grid, "chosen": {"lr": 0.1}}}}}, tmp_path / "tuning.png")
    low, high = drawn[0].axes[0].get_ylim()
    assert [loss for loss in losses if loss and low < loss < high] == seen and drawn[0].get_supxlabel() == words


def test_both_sides_have_grids_of_one_size(tiny, tmp_path, monkeypatch):
    recipe = read_recipe(ROOT / "recipes/curriculum_learning")
    swept = dataclasses.replace(recipe, experiments={"tiny": Experiment(seeds=2, sweep={"lr": [1e-3, 1e-2]})})
    monkeypatch.setattr(sweep, "open_recipe", lambda folder: swept)
    with pytest.raises(UsageError, match=r"different numbers of points \(zero0_bf16 3 and curriculum_learning 2\)"):
        sweep.tune(flags(tiny, tmp_path, "recipes/curriculum_learning"), [])
    assert not (tmp_path / "trials").exists()


def test_a_recipe_that_is_tuned_itself_has_its_own_values_also_as_a_control(tiny, monkeypatch):
    testbed, lamb = read_testbed(tiny), read_recipe(ROOT / "recipes/lamb")
    tuned = dataclasses.replace(lamb, experiments={"tiny": Experiment(seeds=2, sweep={"lr": [0.1]}, tuned={"lr": 0.1})})
    monkeypatch.setattr("launch.comparison.trials.read_recipes", lambda: [tuned, *registry.read_recipes()])
    assert settings_on(testbed, "ds_configs/lamb.json") == {**testbed.flags, "lr": 0.1}
    assert settings_on(testbed, "ds_configs/zero0_bf16.json") == {**testbed.flags, **testbed.tuned}
    assert tuned_by("ds_configs/lamb.json", testbed).name == "lamb"
    assert tuned_by("ds_configs/zero1_bf16.json", testbed) is None


def test_a_published_sweep_of_the_control_is_reused(tiny, tmp_path, monkeypatch):
    lamb = read_recipe(ROOT / "recipes/lamb")
    swept = dataclasses.replace(lamb, experiments={"tiny": Experiment(seeds=2, sweep={"lr": [1e-2, 1e-3, 1e-4]})})
    monkeypatch.setattr(sweep, "open_recipe", lambda folder: swept)
    monkeypatch.setattr(tuning, "TESTBEDS", registry.TESTBEDS)
    monkeypatch.setattr(tuning, "ROOT", tmp_path)
    grid = [{"lr": rate, "loss": 5.0} for rate in (1e-2, 1e-3, 1e-4)]
    published = {"tiny": {"arms": {"zero0_bf16": {"grid": grid, "chosen": {"lr": 1e-2}}}}}
    (registry.TESTBEDS / tiny / "tuning.json").write_text(json.dumps(published))
    monkeypatch.setattr(sweep, "ROOT", tmp_path)
    arms = sweep.testbed_arms(read_testbed(tiny), swept, flags(tiny, tmp_path), [])
    assert [(arm.name, arm.grid) for arm in arms] == [("zero0_bf16", grid), ("lamb", [])]
    assert [arm.published_in for arm in arms] == ["testbeds/tiny/tuning.json", ""]
    assert sweep.Swept("tiny", arms[:1], {}, {}).comparison() is None, "its runs are not here"
