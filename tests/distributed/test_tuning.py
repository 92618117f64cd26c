"""`launch/compare.py --tune` on a testbed so small that its sweeps take seconds."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

from launch.comparison import tuning
from launch.comparison.trials import settings_on
from launch.errors import UsageError
from recipes import registry
from recipes.registry import ROOT, Experiment, read_recipe, read_testbed

SHAPE = {"n_layer": 1, "n_head": 2, "d_model": 32, "seq_len": 32, "preset": "nano"}
RATES = [1e-2, 1e-4, 5.0]


@pytest.fixture
def tiny(corpus, tmp_path, monkeypatch) -> str:
    """The name of a testbed of a model with one block, four steps and three learning rates, of which the first is best."""
    flags = {**SHAPE, "data": str(corpus), "global_batch_size": 4, "micro_batch_size": 4, "steps": 4, "eval_every": 2, "eval_batches": 1}
    testbed = {
        "title": "tiny",
        "device": "cpu",
        "corpus": {"tokenizer": json.loads((corpus / "manifest.json").read_text())["options"]["tokenizer"]},
        "flags": flags,
        "sweep": {"lr": RATES, "warmup_steps": [0, 1], "set": ["gradient_clipping=1.0", "gradient_clipping=0.01"]},
        "tuned": {"lr": 1e-2, "warmup_steps": 1},
        "target_loss": 1.0,
    }
    shutil.copytree(registry.TESTBEDS, tmp_path / "testbeds")  # the recipes name them
    (tmp_path / "testbeds" / "tiny").mkdir()
    (tmp_path / "testbeds" / "tiny" / "testbed.json").write_text(json.dumps(testbed))
    monkeypatch.setattr(registry, "TESTBEDS", tmp_path / "testbeds")
    return "tiny"


def flags(testbed: str, folder: Path, *recipes: str, quiet: bool = True) -> argparse.Namespace:
    given = {
        "recipe": list(recipes),
        "testbed": [testbed],
        "runs_dir": str(folder / "trials"),
        "ranks": None,
        "at_once": None,
        "parallel": None,
        "seeds": None,
    }
    return argparse.Namespace(**given, quiet=quiet, keep_checkpoints=False)


def test_a_sweep_chooses_the_lowest_loss_and_reuses_its_runs(tiny, tmp_path, capfd):
    found, lines, runs = tuning.tune(flags(tiny, tmp_path, quiet=False), [])
    arm = found["tiny"]["arms"]["zero0_bf16"]
    grid = [(point["lr"], point["warmup_steps"], point["set"]) for point in arm["grid"]]
    assert [run.description["lr"] for run in runs[:3]] == RATES and found["tiny"]["seed"] == tuning.SWEEP_SEED
    one, other = "gradient_clipping=1.0", "gradient_clipping=0.01"
    assert grid[:4] == [(1e-2, 0, one), (1e-4, 0, one), (5.0, 0, one), (1e-2, 1, one)], "one flag after another, from the best so far"
    assert len(grid) == len(runs) == 5 and grid[4] == (1e-2, grid[4][1], other)
    best = min(arm["grid"], key=lambda point: point["loss"])
    assert arm["chosen"] == {name: best[name] for name in ("lr", "warmup_steps", "set")}
    assert lines[0].startswith(f"tiny, zero0_bf16: {arm['chosen']} is best")
    assert grid[4][1] == min(arm["grid"][0], arm["grid"][3], key=lambda point: point["loss"])["warmup_steps"]
    (file,) = tuning.write_tuning(found, [tmp_path / "new" / "out"])
    assert json.loads(file.read_text()) == found and file.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    said = capfd.readouterr().out
    assert "a sweep in 3 rounds" in said and [f"training {number} runs" in said for number in (3, 1)] == [True, True]
    for run in (run for run in runs if run.finished):  # the line of a run of more steps comes while it trains, too
        loss = f"{run.measures['final_val_loss']:.4f}"
        assert re.search(rf"runs have ended: {run.name}: step 4/4, loss \d.*, validation {loss}, 00:00 left$", said, re.MULTILINE)
    assert tuning.tune(flags(tiny, tmp_path), [])[0]["tiny"]["arms"] == found["tiny"]["arms"]
    assert "training" not in capfd.readouterr().out


def test_a_flag_that_a_recipe_does_not_sweep_has_the_testbeds_value(tiny):
    testbed = dataclasses.replace(read_testbed(tiny), tuned={"lr": 1e-2, "warmup_steps": 2})
    arm = tuning._Arm(testbed, "ds_configs/zero0_bf16.json", {"lr": [1e-3]}, [], ranks=1)
    ((_, trial),) = arm.round(0)
    assert (trial.config.lr, trial.config.warmup_steps) == (1e-3, 2)


def test_an_optimum_at_the_edge_is_said():
    grid = [{"lr": lr, "loss": loss} for lr, loss in ((1e-3, 4.0), (2e-3, 3.9), (4e-3, None))]
    assert tuning.edges([one | {"warmup_steps": 50} for one in grid], {"lr": 2e-3, "warmup_steps": 50}) == [], "the only value is no edge"
    assert tuning.edges(grid, {"lr": 1e-3}) == ["lr 0.001 is at the edge of the grid, extend it"]
    assert tuning.edges(grid, {"lr": 2e-3}) == []
    assert tuning.edges(grid[:2], {"lr": 2e-3}) == ["lr 0.002 is at the edge of the grid, extend it"]
    others = [{**one, "min_lr": end, "set": "a=1"} for one, end in zip(grid, (0, 1e-4, 2e-4), strict=True)]
    assert tuning.edges(others, {"min_lr": 0, "set": "a=1"}) == [], "neither 0 nor a word is an edge"
    assert tuning.edges(grid, None) == ["every run diverged, lower the values of 'sweep'"]


def test_both_sides_have_grids_of_one_size(tiny, tmp_path, monkeypatch):
    recipe = read_recipe(ROOT / "recipes/curriculum_learning")
    swept = dataclasses.replace(recipe, experiments={"tiny": Experiment(seeds=2, sweep={"lr": [1e-3, 1e-2]})})
    monkeypatch.setattr(tuning, "open_recipe", lambda folder: swept)
    with pytest.raises(UsageError, match=r"different numbers of points \(ds_configs/zero0_bf16.json 5 and .*curriculum_learning.json 2\)"):
        tuning.tune(flags(tiny, tmp_path, "recipes/curriculum_learning"), [])
    assert not (tmp_path / "trials").exists()


def test_a_recipe_that_is_tuned_itself_has_its_own_values_also_as_a_control(tiny, monkeypatch):
    testbed, lamb = read_testbed(tiny), read_recipe(ROOT / "recipes/lamb")
    tuned = dataclasses.replace(lamb, experiments={"tiny": Experiment(seeds=2, sweep={"lr": [0.1]}, tuned={"lr": 0.1})})
    monkeypatch.setattr("launch.comparison.trials.read_recipes", lambda: [tuned, *registry.read_recipes()])
    assert settings_on(testbed, "ds_configs/lamb.json") == {**testbed.flags, "lr": 0.1, "warmup_steps": 1}
    assert settings_on(testbed, "ds_configs/zero0_bf16.json") == {**testbed.flags, **testbed.tuned}
    assert tuning.tuned_by("ds_configs/lamb.json", testbed).name == "lamb"
    assert tuning.tuned_by("ds_configs/zero1_bf16.json", testbed) is None


def test_a_published_sweep_of_the_control_is_reused(tiny, tmp_path, monkeypatch):
    lamb = read_recipe(ROOT / "recipes/lamb")
    swept = dataclasses.replace(lamb, experiments={"tiny": Experiment(seeds=2, sweep={"lr": [1e-2, 1e-3, 1e-4, 2e-3, 5e-3]})})
    monkeypatch.setattr(tuning, "open_recipe", lambda folder: swept)
    monkeypatch.setattr(tuning, "TESTBEDS", registry.TESTBEDS)
    monkeypatch.setattr(tuning, "ROOT", tmp_path)
    grid = [{"lr": rate, "loss": 5.0} for rate in (1e-2, 1e-3, 1e-4, 2e-3, 5e-3)]
    published = {"tiny": {"arms": {"zero0_bf16": {"grid": grid, "chosen": {"lr": 1e-2}}}}}
    (registry.TESTBEDS / tiny / "tuning.json").write_text(json.dumps(published))
    arms = tuning._arms(read_testbed(tiny), swept, flags(tiny, tmp_path), [])
    assert [(arm.config, arm.grid) for arm in arms] == [("ds_configs/zero0_bf16.json", grid), ("ds_configs/lamb.json", [])]
    assert [arm.published_in for arm in arms] == ["testbeds/tiny/tuning.json", ""]
