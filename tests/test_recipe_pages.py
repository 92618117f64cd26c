"""What stands on the pages and pictures of recipes and testbeds is what the committed data give; published runs are read as they were."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import subprocess
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from launch.comparison import publish, recipe_pages, trials, tuning
from launch.comparison.comparison import compare_experiments
from launch.comparison.runs import read_run, read_stored_run, stored_run
from launch.comparison.trials import settings_on, tuned_by
from launch.comparison.verdicts import SIGNS
from launch.errors import UsageError
from launch.training.run_folder.run_json import commits_of, differences
from recipes import registry
from recipes.registry import read_recipe, read_recipes, read_testbed, read_testbeds, recipe_names, technique_classes
from tests.helpers import ROOT as CHECKOUT
from tests.run_folders import description, line, write_run


@pytest.fixture(scope="module")
def cells():
    return recipe_pages.recipes_on_testbeds()


def test_every_page_is_what_the_committed_data_give(cells):
    for page, text in recipe_pages.pages(cells).items():
        assert page.read_text(encoding="utf-8") == text, f"{page.relative_to(CHECKOUT)}: run `make pages`"


def test_every_picture_is_what_the_committed_data_give(cells, tmp_path):
    drawn = recipe_pages.pictures(cells)
    assert {*CHECKOUT.glob("recipes/**/*.png"), *CHECKOUT.glob("benchmarks/**/*.png")} == set(drawn)
    if f'matplotlib=={matplotlib.__version__}; python_version >= "3.11"' not in (CHECKOUT / "constraints.txt").read_text():
        pytest.skip("another matplotlib draws other pixels")
    for number, (picture, draw) in enumerate([*drawn.items()][::5]):
        draw(file := tmp_path / f"{number}.png")
        assert file.read_bytes() == picture.read_bytes(), f"{picture.relative_to(CHECKOUT)}: run `make pages`"


def test_the_claims_were_committed_before_the_runs(cells):
    if subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=CHECKOUT, capture_output=True, text=True).stdout != "false\n":
        pytest.skip("this checkout does not have the history")
    judged = [cell for cell in cells if cell.pair]
    assert len(judged) > 30
    for cell in judged:
        for commit in {commit for run in cell.entry["recipe"] for commit in commits_of(run["description"])}:
            assert publish.protocol_at(commit, cell.recipe.name, cell.testbed.name) == cell.entry["planned"], (cell.recipe.name, commit)


def test_the_published_data_are_small():
    files = [path for name in ("results.json", "tuning.json") for path in CHECKOUT.glob(f"recipes/**/{name}")]
    assert sum(path.stat().st_size for path in (*files, *(CHECKOUT / name for name in recipe_pages.RUNS))) < 3e6


@pytest.mark.parametrize("name", recipe_names())
def test_every_page_opens_with_what_it_buys_and_costs(name):
    text = (CHECKOUT / "recipes" / name / "README.md").read_text(encoding="utf-8")
    begin, end = recipe_pages.BEGIN.format("results"), recipe_pages.END
    parts = ["**What it buys.**", "**What it costs.**", "**When to use it.**", begin, end]
    parts += ["**How it works.**", "**Switch.**", "**Limits.**", "**Source.**"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    before, _, rest = text.partition(begin)
    generated, _, after = rest.partition(end)
    assert len(generated.split()) <= 150 and len((before + after).split()) <= 500
    assert len(before.split()) <= 80, "the answer comes first, in a few words"


# --- with made-up results -------------------------------------------------------------------------------------------------------------

RECIPE, TESTBED = "zero_1", "nano-0.5M"
SEEDS = read_recipe(recipe_pages.ROOT / "recipes" / RECIPE).experiments[TESTBED].seeds
LR = read_testbed(TESTBED).tuned["lr"]


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """The recipes and pages in a git repository of their own, in place of the checkout, without results."""
    technique_classes()  # of the checkout
    copy = tmp_path / "tree"
    left_out = shutil.ignore_patterns("*.py", "*.png", "__pycache__", "results.json", "tuning.json")
    shutil.copytree(CHECKOUT / "recipes", copy / "recipes", ignore=left_out)
    shutil.copy(CHECKOUT / "README.md", copy)
    (copy / "docs").mkdir()
    shutil.copy(CHECKOUT / "docs" / "configuration.md", copy / "docs")
    for module in (registry, recipe_pages, publish, trials, tuning):
        monkeypatch.setattr(module, "ROOT", copy)
    for module in (registry, recipe_pages, tuning):
        monkeypatch.setattr(module, "TESTBEDS", copy / "recipes" / "testbeds")
    monkeypatch.setattr(recipe_pages, "INDEX", copy / "recipes" / "README.md")
    monkeypatch.setattr(recipe_pages, "README", copy / "README.md")
    write_tuning(copy, LR)
    commit(copy, "init", "-q")
    return copy


def write_tuning(tree: Path, lr: float, others: tuple[float, ...] = ()) -> None:
    """A sweep of the testbed that chose `lr`, also tried at `others`."""
    tuned = read_testbed(TESTBED).tuned | {"lr": lr}
    grid = [{**tuned, "lr": rate, "loss": 4.5 + (rate != lr), "spikes": 0} for rate in (lr, *others)]
    arm = {"grid": grid, "chosen": tuned}
    found = {TESTBED: {"commits": ["a" * 40], "machine": "m", "seed": 0, "arms": {"zero0_bf16": arm}}}
    (tree / "recipes" / "testbeds" / TESTBED / "tuning.json").write_text(json.dumps(found))


def commit(tree: Path, *first: str) -> str:
    """Commit all of the tree, and return the commit."""
    name = ("-c", "user.name=t", "-c", "user.email=t@t")
    for words in (*([first] if first else []), ("add", "-A"), (*name, "commit", "-qm", "t", "--allow-empty")):
        subprocess.run(["git", "-C", str(tree), *words], check=True, capture_output=True)
    return subprocess.run(["git", "-C", str(tree), "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def make(tree, corpus, tmp_path):
    """Compares runs of control and recipe that differ by `gap` and by noise; `at` is their commit."""
    made = iter(range(1000))

    def comparison_of(at=None, gap=0.0, seeds=SEEDS, diverged=None):
        at = at or commit(tree)
        folder, sides = tmp_path / f"runs-{next(made)}", []
        for side, config in enumerate(("ds_configs/zero0_bf16.json", "ds_configs/zero1_bf16.json")):
            runs = []
            for seed in range(1, seeds + 1):
                end = 4.5 + 0.01 * seed + side * (gap + 0.0005 * (-1) ** seed)
                lost = diverged == seed and side == 1
                steps = [line(step, step_seconds=0.5 + 0.1 * side) for step in range(31)]
                for step in range(0, 31, 5):
                    steps[step]["val_loss"] = None if lost and step == 30 else end + 2 * math.exp(-step / 6)
                said = description(corpus, "--steps", "30", "--deepspeed_config", config, seed=seed) | {"commit": at}
                runs.append(read_run(write_run(folder / f"{side}-{seed}", said, steps)))
            sides.append(runs)
        return compare_experiments([(read_recipe(recipe_pages.ROOT / "recipes" / RECIPE), read_testbed(TESTBED), *sides)])

    return comparison_of


def entry(tree: Path) -> dict:
    return json.loads((tree / "recipes" / RECIPE / "results.json").read_text())[TESTBED]


def test_a_published_run_is_read_as_it_was(make):
    for diverged in (None, 2):
        for run in make(diverged=diverged).pairs[0].treatment.runs:
            text = json.dumps(stored_run(run), allow_nan=False)
            again = read_stored_run(json.loads(text))
            assert again.measures == run.measures
            assert (again.seed, again.state, again.description["ranks"]) == (run.seed, run.state, run.description["ranks"])
            evaluated = np.isfinite(run.columns["val_loss"])
            for name in ("step", "tokens", "seconds", "val_loss"):
                np.testing.assert_allclose(again.columns[name], run.columns[name][evaluated], atol=1e-5)
            assert "host" not in again.description["machine"] and str(run.folder.parent) not in text


def test_what_is_published_stands_on_every_page(tree, make):
    compared = make()
    (verdict,) = compared.pairs[0].verdicts
    publish.publish(compared)
    found = entry(tree)
    assert found["commit"] == compared.pairs[0].treatment.runs[0].description["commit"]
    (one,) = (cell for cell in recipe_pages.recipes_on_testbeds() if cell.pair)
    assert one.pair.verdicts == (verdict,), "the same verdict from the folders and from the committed data"
    for name, figure in compared.pairs[0].figures.items():
        assert one.pair.figures[name].other == pytest.approx(figure.other, rel=1e-4), name
    page = (tree / "recipes" / RECIPE / "README.md").read_text()
    assert f"| `loss = control ± 0.01` {SIGNS[verdict.outcome]} |" in page and "![Validation loss" in page
    page = (tree / "recipes" / RECIPE / recipe_pages.DETAILS).read_text()
    assert f"- {SIGNS[verdict.outcome]} {verdict.outcome}: {verdict.claim}; measured: {verdict.reason}." in page
    by_seed = "; ".join(f"{seed}: {'−+'[seed % 2 == 0]}0.0005" for seed in range(1, SEEDS + 1))
    spread = np.std([0.0005 if seed % 2 == 0 else -0.0005 for seed in range(1, SEEDS + 1)], ddof=1)
    assert f"Difference of the final loss by seed: {by_seed}. Standard deviation: {spread:.4f}." in page
    assert f"| {spread:.4f} |" in (tree / "recipes" / "testbeds" / "README.md").read_text()
    assert "(recipes/zero_1/README.md)" in (tree / "README.md").read_text()
    assert f"{TESTBED}: `loss = control ± 0.01` {SIGNS[verdict.outcome]}" in recipe_pages.INDEX.read_text()
    for picture in (f"{RECIPE}/loss.png", "forest.png"):
        assert (tree / "recipes" / picture).stat().st_size > 10_000
    for picture, draw in recipe_pages.pictures(recipe_pages.recipes_on_testbeds()).items():
        draw(again := tree / "again.png")
        assert again.read_bytes() == picture.read_bytes(), "drawn alike each time"


def test_every_target_loss_is_that_of_the_published_sweep():
    for testbed in read_testbeds():
        grid = tuning.published_sweep(tuning.CONTROL, testbed)[1]["grid"]
        if grid:
            lowest = min(point["loss"] for point in grid if point["loss"] is not None)
            assert testbed.target_loss == pytest.approx(math.ceil((lowest + 0.2) / 0.05) * 0.05), testbed.name


def test_every_published_sweep_has_run_all_its_values():
    arms = [(testbed, tuning.CONTROL, None, testbed.sweep) for testbed in read_testbeds()]
    for recipe in read_recipes():
        arms += [(read_testbed(name), recipe.config, recipe, own.sweep) for name, own in recipe.experiments.items() if own.sweep]
    for testbed, config, recipe, sweep in arms:
        grid = tuning.published_sweep(config, testbed, recipe)[1]["grid"]
        for name, values in sweep.items() if grid else ():
            assert set(values) <= {point[name] for point in grid}, f"{testbed.name}, {config}: run the sweep of {name} again"


def test_both_sides_of_a_published_experiment_train_with_the_best_values_of_their_sweeps(cells):
    """Inside their grids. A testbed that takes other values than the sweep chose states why."""
    for recipe, testbed in [(cell.recipe, cell.testbed) for cell in cells if cell.entry]:
        own_sweep = recipe.experiments[testbed.name].sweep
        for config, own in [(recipe.control, tuned_by(recipe.control, testbed)), *([(recipe.config, recipe)] if own_sweep else [])]:
            if own is None and testbed.reason:
                continue
            arm, used = tuning.published_sweep(config, testbed, own)[1], settings_on(testbed, config, own)
            assert arm["chosen"] == {name: used[name] for name in arm["chosen"] or {}}, (recipe.name, testbed.name, config)
            assert not tuning.edges(arm["grid"], arm["chosen"]), (recipe.name, testbed.name, config)


def test_published_runs_had_the_values_of_the_present_json():
    """Else they need to be run again. The testbeds set the betas."""
    for file in CHECKOUT.glob("recipes/*/results.json"):
        recipe = read_recipe(file.parent)
        for testbed, found in json.loads(file.read_text()).items():
            for side, config in (("control", recipe.control), ("recipe", recipe.config)):
                said = found[side][0]["description"]
                used = {**said["engine"], **said["techniques"], "optimizer": said["optimizer"], "scheduler": said["scheduler"]}
                for section, asked in json.loads((CHECKOUT / config).read_text()).items():
                    for key, value, held in differences(section, asked, used.get(section)):
                        assert value in ("auto", None) or "betas" in key, (
                            f"{recipe.name} on {testbed}: {config} has another {key} than {held}"
                        )


def change_claim(tree: Path, number: float) -> None:
    path = tree / "recipes" / RECIPE / "recipe.json"
    recipe = json.loads(path.read_text())
    recipe["experiments"][TESTBED]["claims"][0]["number"] = number
    path.write_text(json.dumps(recipe))


def test_results_of_other_claims_are_not_judged(tree, make):
    publish.publish(make())
    change_claim(tree, 0.005)
    (one,) = (cell for cell in recipe_pages.recipes_on_testbeds() if cell.entry)
    assert one.pair is None and recipe_pages.OUTDATED.capitalize() in recipe_pages.details(one.recipe, [one])
    recipe = json.loads((tree / "recipes" / RECIPE / "recipe.json").read_text())
    recipe["history"] = ["It was 0.01."]
    (tree / "recipes" / RECIPE / "recipe.json").write_text(json.dumps(recipe))
    publish.publish(make())
    assert "It was 0.01." in (tree / "recipes" / RECIPE / recipe_pages.DETAILS).read_text()


def test_published_results_do_not_vanish_with_their_experiment(tree, make):
    publish.publish(make())
    path = tree / "recipes" / RECIPE / "recipe.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"experiments": {}}))
    with pytest.raises(ValueError, match=f"recipes/{RECIPE}: results.json has results on {TESTBED}; keep this experiment"):
        recipe_pages.recipes_on_testbeds()


def test_runs_without_claims_have_figures_only(tree, make):
    path = tree / "recipes" / RECIPE / "recipe.json"
    recipe = json.loads(path.read_text())
    recipe["experiments"][TESTBED]["claims"] = []
    path.write_text(json.dumps(recipe))
    publish.publish(make(gap=0.02))
    assert "| +0.0200 (" in (path.parent / "README.md").read_text()
    assert "| final validation loss (nats) |" in (path.parent / recipe_pages.DETAILS).read_text()


def test_only_planned_experiments_are_published(tree, make):
    with pytest.raises(UsageError, match=f"{SEEDS} seeds are planned"):
        publish.publish(make(seeds=4))
    with pytest.raises(UsageError, match="its token budget differs; publish a comparison that needs no --force"):
        publish.publish(dataclasses.replace(make(), mismatches=("its token budget differs",)))
    for unknown in ("0" * 40 + "+changes", "0" * 40):
        with pytest.raises(UsageError, match="was not committed or trains differently from this checkout; train them again"):
            publish.publish(make(at=unknown))
    before = commit(tree)
    change_claim(tree, 0.008)
    after = commit(tree)
    with pytest.raises(UsageError, match="does not contain the current claims"):
        publish.publish(make(at=before))
    publish.publish(make(at=after))
    assert entry(tree)["commit"] == after
    assert not (tree / "recipes" / "zero_2" / "results.json").exists()


def test_runs_of_commits_that_train_alike_are_published(tree, make):
    """A control that was trained for another recipe before is used again; pages may have changed since, but no code of the training."""
    before = commit(tree)
    (tree / "recipes" / "claims.py").write_text("changed = True\n")
    after = commit(tree)

    def mixed(at):
        compared = make(at=at)
        for run in compared.pairs[0].control.runs:
            run.description["commit"] = before
        return compared

    publish.publish(mixed(after))
    assert entry(tree)["commit"] == after
    assert f"Commits of the runs: {after[:7]}, {before[:7]}." in (tree / "recipes" / RECIPE / recipe_pages.DETAILS).read_text()
    (tree / "model").mkdir()
    (tree / "model" / "gpt.py").write_text("changed = True\n")
    with pytest.raises(UsageError, match=f"has runs of {before}, whose code was not committed or trains"):
        publish.publish(mixed(commit(tree)))


def test_a_run_that_was_begun_with_other_code_is_not_published(tree, make):
    """It was stopped and resumed: the commit of each start counts."""
    compared = make()
    compared.pairs[0].treatment.runs[0].description["resumes"] = [{"commit": "0" * 40 + "+changes"}]
    with pytest.raises(UsageError, match=r"\+changes, whose code was not committed"):
        publish.publish(compared)


def test_files_of_the_training_that_git_does_not_know_are_not_published(tree, monkeypatch):
    monkeypatch.setattr(publish, "repository_commit", lambda: "0" * 40)  # git describes no files that it does not know
    (tree / "notes.txt").touch()
    publish.check_checkout()
    (tree / "ds_configs").mkdir()
    (tree / "ds_configs" / "new.json").write_text("{}")
    with pytest.raises(UsageError, match=r"--publish: ds_configs/new\.json is not in git"):
        publish.check_checkout()


def test_sides_with_other_package_versions_are_not_published(tree, make):
    """The control was reused after an upgrade."""
    compared = make()
    for run in compared.pairs[0].control.runs:
        run.description["versions"] = {**run.description["versions"], "torch": "1.0"}
    with pytest.raises(UsageError, match="control and recipe used different package versions; train both in another --runs_dir"):
        publish.publish(compared)


def test_figures_of_time_are_only_shown_for_interleaved_runs(tree, make):
    for interleaved in (True, False):
        compared = make()
        if not interleaved:
            for run in compared.pairs[0].treatment.runs:
                run.description["interleaved"] = "another"
        publish.publish(compared)
        text = (tree / "recipes" / RECIPE / recipe_pages.DETAILS).read_text()
        assert ("not interleaved, so times are not compared" in text) is not interleaved
        assert ("tokens per second" in text) is interleaved
        assert "final validation loss (nats)" in text


def test_a_diverged_run_is_published(tree, make):
    publish.publish(make(diverged=3))
    assert entry(tree)["recipe"][2]["measures"]["final_val_loss"] is None
    assert "✗ fails" in (tree / "recipes" / RECIPE / recipe_pages.DETAILS).read_text()


def test_a_part_is_written_in_its_place_once():
    begin, other = recipe_pages.BEGIN.format("results"), recipe_pages.BEGIN.format("pairs")
    page = f"# T\n\n{begin}{recipe_pages.END}\nby hand\n\n{other}old\n{recipe_pages.END}end\n"
    once = recipe_pages.with_parts(Path("p.md"), page, {"results": "a\n", "pairs": "b\n"})
    assert once == f"# T\n\n{begin}a\n{recipe_pages.END}\nby hand\n\n{other}b\n{recipe_pages.END}end\n"
    assert recipe_pages.with_parts(Path("p.md"), once, {"results": "a\n", "pairs": "b\n"}) == once
    with pytest.raises(ValueError, match=r"p\.md: lacks the part 'results'; add the lines <!-- results, by `make pages` -->"):
        recipe_pages.with_parts(Path("p.md"), "# T\n", {"results": "a\n"})
