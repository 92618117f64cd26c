"""The ladder: compute saved is what a second implementation finds, and a climb ends in a page's table."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy.interpolate import interp1d
from scipy.optimize import brentq

from launch import compare
from launch.comparison import ladder
from recipes import registry
from recipes.registry import read_ladder, read_recipe, read_recipes
from tests.helpers import refusal_of, run_here

FLOPS = {"S": 1e13, "M": 5e13, "L": 2.5e14}
SPREAD = (-0.011, 0.002, 0.009)


def side(losses, lr=0.01, flops=FLOPS):
    """A side whose three seeds end around a loss at each rung."""
    return {
        rung: {"flops": flops[rung], "lr": lr, "losses": [loss + one for one in SPREAD]} for rung, loss in zip(flops, losses, strict=True)
    }


def law(flops, factor=1.0):
    """The losses of a power law at `factor` times the compute."""
    return [3.0 * (factor * one / 1e13) ** -0.06 for one in flops.values()]


@pytest.mark.parametrize("factor", [1.4, 2.0, 0.8])
def test_compute_saved_is_the_factor_of_a_power_law(factor):
    found = ladder.gains(side(law(FLOPS)), side(law(FLOPS, factor)))
    for gain in found.values():
        assert gain.saved.mean == pytest.approx(factor, rel=1e-9) and gain.saved.low <= gain.saved.mean <= gain.saved.high
    outside = "S" if factor > 1 else "L"
    assert [rung for rung, gain in found.items() if gain.beyond] == [outside]


@pytest.mark.parametrize("seed", range(20))
def test_compute_saved_is_that_of_another_implementation(seed):
    draws = np.random.default_rng(seed)
    control, own = (side(sorted(draws.uniform(2.0, 4.0, 3), reverse=True)) for _ in range(2))
    curve = interp1d(*np.log(np.array(ladder.line_of(own))).T, fill_value="extrapolate")
    for rung, gain in ladder.gains(control, own).items():
        target = math.log(np.mean(control[rung]["losses"]))
        reached = brentq(lambda x, target=target: float(curve(x)) - target, -200, 300)
        assert gain.saved.mean == pytest.approx(control[rung]["flops"] / math.exp(reached), rel=1e-6)


def test_seeds_are_paired():
    control = side([3.0, 2.8, 2.6])
    own = {
        rung: {**one, "losses": [loss - gap for loss, gap in zip(one["losses"], (0.10, 0.11, 0.12), strict=True)]}
        for rung, one in control.items()
    }
    gap = ladder.gains(control, own)["M"].loss
    assert gap.mean == pytest.approx(-0.11) and gap.high - gap.low == pytest.approx(2 * 4.302653 * 0.01 / math.sqrt(3), rel=1e-5)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ([2.8, 2.7, 2.5], "The gain holds: −0.1000 nats at L, −0.2000 at S."),
        ([2.8, 2.7, 2.55], "The gain fades: −0.0500 nats at L, −0.2000 at S."),
        ([3.1, 2.9, 2.7], "There is no gain at S (+0.1000 nats)."),
    ],
)
def test_a_gain_that_is_halved_fades(own, said):
    assert ladder.whether_gain_holds(ladder.gains(side([3.0, 2.8, 2.6]), side(own))) == said


def test_a_line_that_rises_saves_nothing_and_a_diverged_run_is_no_point():
    control, own = side([3.0, 2.8, 2.6]), side([2.9, 2.95, 2.5])
    assert [gain.saved for gain in ladder.gains(control, own).values()] == [None] * 3
    own["M"]["losses"][0] = None
    assert [*ladder.gains(control, own)] == ["S", "L"] and ladder.gains(control, own)["S"].saved is not None
    assert "| M |" not in ladder.table(control, own).markdown()


def test_the_plan_is_read_and_its_rungs_grow():
    plan = read_ladder()
    flags = [{**plan.flags, **rung.flags} for rung in plan.rungs]
    assert [rung.name for rung in plan.rungs] == ["S", "M", "L"] and all(1 in rung.rates for rung in plan.rungs)
    assert [one["steps"] for one in flags] == sorted(one["steps"] for one in flags)
    assert [one.name for one in read_recipes() if one.ladder is not None]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--recipe", "recipes/zero_1"], "recipes/zero_1 is not on the ladder; give its recipe.json"),
        (["XL"], "--ladder XL: no such rung; there are S, M, L"),
        (["S", "--seeds", "3"], "leave out --seeds"),
        (["S", "--lr", "1e-3"], "leave out --lr"),
    ],
)
def test_a_mistake_is_one_line(words, line, monkeypatch):
    monkeypatch.setattr(ladder, "found_by", lambda _: {"S": {}})
    assert line in refusal_of(compare.main, "--ladder", *words)


@pytest.mark.long
def test_a_climb_is_continued_and_ends_in_a_table(corpus, tmp_path, monkeypatch):
    """Two rungs of the control and a recipe, the second rung in another command, from another folder of runs."""
    plan, runs = tmp_path / "ladder/plan.json", iter(range(9))
    plan.parent.mkdir()
    tiny = {"n_layer": 1, "n_head": 1, "seq_len": 8, "data": str(corpus), "global_batch_size": 2, "micro_batch_size": 2, "whole_eval": True}
    tiny |= {"eval_batches": 1, "warmup_steps": 1, "eval_every": 100}
    rungs = [
        {"name": name, "flags": {"d_model": 8 * size, "steps": 4 * size}, "rates": [1, 2], "seeds": 2}
        for name, size in (("S", 1), ("M", 2))
    ]
    made = json.loads((corpus / "manifest.json").read_text())["options"]
    plan.write_text(json.dumps({"corpus": {"tokenizer": made["tokenizer"]}, "flags": tiny, "lr": 0.01, "rungs": rungs}))
    for module in (registry, ladder, compare):
        monkeypatch.setattr(module, "LADDER", plan)

    def climb(*words):
        done = run_here(
            compare.main, "--ladder", *words, "--runs_dir", tmp_path / f"runs{next(runs)}", "--out", tmp_path / "out", "--quiet"
        )
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads((tmp_path / "out/ladder.json").read_text()), done.stdout

    first, _ = climb("S")
    (plan.parent / ladder.FOUND).write_text(json.dumps(first))  # as --publish does
    control, said = climb()
    assert control["S"] == first["S"] and [*control] == ["S", "M"] and "Control" not in said
    assert control["M"]["planned"]["lr"] == control["S"]["lr"] in {point["lr"] for point in control["S"]["grid"]}
    other = {rung: {**one, "corpora": ["of other packages"]} for rung, one in control.items()}
    (plan.parent / ladder.FOUND).write_text(json.dumps(other))
    assert f"{corpus}: is not the corpus of the published control" in refusal_of(compare.main, "--ladder", "--recipe", "recipes/muon")
    (plan.parent / ladder.FOUND).write_text(json.dumps(control))
    found, said = climb("--recipe", "recipes/muon")
    assert found["S"]["planned"]["config"] == read_recipe("recipes/muon").config and all(len(one["losses"]) == 2 for one in found.values())
    assert ("loss − control's" in said and "The gain" in said) or "no gain" in said
    assert (tmp_path / "out/ladder.png").stat().st_size > 10_000
