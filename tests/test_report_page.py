"""The report of a comparison, opened in a real browser; it is written from run folders with the keys of real runs."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.comparison.comparison import Absent, Comparison, compare, compare_experiments
from launch.comparison.html_report import PALETTE, draw_losses, mean_columns, started_runs, thinned, write_page
from launch.comparison.runs import read_run
from recipes.registry import ROOT, read_recipe, read_testbed

DESCRIPTION: dict[str, Any] = {
    "created": "2026-03-01T12:00:00+0000",
    "command": ["launch/pretrain.py"],
    "seed": 1,
    "preset": "nano",
    "no_cross_document": False,
    "recipe": None,
    "config_file": "ds_configs/zero1_bf16.json",
    "engine": {"train_batch_size": 8, "zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.002, "betas": [0.9, 0.95], "eps": 1e-08, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupCosineTokens", "params": {"min_lr": 0.0002, "warmup_steps": 2, "total_tokens": 20480}},
    "techniques": {},
    "ranks": 2,
    "micro_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "global_batch_size": 8,
    "eval_batches": 16,
    "shape": {"n_layer": 4, "n_head": 4, "d_model": 256, "seq_len": 128, "dropout": 0.0},
    "zero_stage": 1,
    "precision": "bf16",
    "corpus_fingerprint": "9eed1e60238b8485e1fffec8341dfb1cecbee7ac5e3a20486309d47b652bbb7d",
    "corpus": {"path": "data/stdlib", "vocab_size": 8192},
    "commit": "33f1f12976618731f2fe2022bca4473cb22cac33",
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "machine": {"host": "one", "processor": "AMD EPYC", "cores": 2},
}
TOKENS = 1024


def write_run(folder: Path, seed: int, steps: int, recipe: str | None = None, better: float = 0.0, **changed: Any) -> Path:
    """A run folder as `launch/pretrain.py` leaves it: a loss that falls from 9.06, with noise of its seed, and a spike at 60%."""
    folder.mkdir(parents=True)
    techniques = {recipe: {"enabled": True}} if recipe else {}
    config = f"ds_configs/{recipe or 'zero1_bf16'}.json"
    length = {"steps": steps, "total_tokens": TOKENS * steps, "eval_every": max(1, steps // 20)}
    description = {**DESCRIPTION, **length, "seed": seed, "recipe": recipe, "techniques": techniques, "config_file": config, **changed}
    (folder / "run.json").write_text(json.dumps(description))
    noise = random.Random(f"{recipe} {seed}")
    spike, seconds = round(0.6 * steps), 2.9
    lines: list[dict[str, Any]] = [{"step": 0, "tokens": 0, "seconds": seconds, "val_loss": 9.06}]
    for step in range(1, steps + 1):
        loss = 3.3 - better + 5.7 * math.exp(-8 * step / steps) + noise.gauss(0, 0.05)
        took = 0.3 + 0.02 * noise.random()
        seconds += took
        line = {
            "step": step,
            "tokens": TOKENS * step,
            "seconds": seconds,
            "loss": 12.5 if step == spike else loss,
            "lr": 0.002 * (1 - 0.9 * step / steps),
            "grad_norm": 1 + noise.random(),
            "loss_scale": 1.0,
            "skipped_steps": 0,
            "tokens_per_second": TOKENS / took,
            "step_seconds": took,
            "peak_memory_bytes": 492744704 + 4096 * seed,
            "bytes_sent": 14288929,
        }
        if recipe == "progressive_layer_drop":
            line |= {"skipped_flops": 0.15, "theta": 0.5 + 0.5 * math.exp(-9 * step / steps), "kept_blocks": 3.0}
        if step % length["eval_every"] == 0:
            line["val_loss"] = loss + 0.2
        lines.append(line)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


#: A folder may be called so; what is in `run.json` may hold a slash too.
HOSTILE = ("<img src=x onerror=window.pwned=1>", "<b>%{x} & $y$ &lt;", "'\"{{ 7 * 7 }}")
HOSTILE_TEXT = "</script><script>window.pwned=1</script>"


def compared(*folders: Path, force: bool = False) -> Comparison:
    return compare([read_run(folder) for folder in folders], force=force)


def control_and_recipe(folder: Path, steps: int, seeds: int = 3, **changed: Any) -> list[Path]:
    """Runs of a control and of Progressive Layer Drop, which is better by 0.05, with the same seeds."""
    recipe = "progressive_layer_drop"
    runs = [write_run(folder / f"control-{seed}", seed, steps, **changed) for seed in range(seeds)]
    return runs + [write_run(folder / f"pld-{seed}", seed, steps, recipe, 0.05, **changed) for seed in range(seeds)]


class Page:
    """A report in a headless Chromium, switched to the validation loss. shown_first: what the chart shows before."""

    def __init__(self, driver: Any):
        self.driver = driver

    def media(self, scheme: str, width: int = 1280) -> None:
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
        screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)

    def open(self, folder: Path, scheme: str = "light", width: int = 1280) -> Page:
        self.media(scheme, width)
        self.driver.get(f"file://{folder}/report.html")
        self.shown_first = self.js("document.querySelector('[name=loss]:checked').value")
        self.click("[name=loss][value=val_loss]")
        return self

    def js(self, expression: str, *arguments: Any) -> Any:
        return self.driver.execute_script(f"return {expression}", *arguments)

    def click(self, selector: str) -> None:
        from selenium.webdriver.common.by import By

        self.driver.find_element(By.CSS_SELECTOR, selector).click()

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait for what the browser does in its own time, 5 seconds at most."""
        deadline = time.monotonic() + 5
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def choose(self, name: str, value: str) -> None:
        from selenium.webdriver.common.by import By
        from selenium.webdriver.support.select import Select

        Select(self.driver.find_element(By.NAME, name)).select_by_value(value)

    def axis(self, chart: str = "loss") -> tuple[str, float, float]:
        """Title of the axis as it is drawn, and from where to where the data go on it."""
        title = self.js(f"document.querySelector('#{chart} .xtitle').textContent")
        xs = self.js(f"document.getElementById('{chart}').data.flatMap(trace => Array.from(trace.x))")
        return title, min(xs), max(xs)

    def drawn(self, chart: str = "loss") -> list[str]:
        """The names of the traces that are drawn."""
        return self.js(f"document.getElementById('{chart}').data.map(trace => trace.name)")

    def hover(self, curve: int) -> str:
        """What is written at the second point of a trace of the losses."""
        self.js("Plotly.Fx.hover('loss', [{curveNumber: arguments[0], pointNumber: 1}])", curve)
        return self.js("document.querySelector('#loss .hoverlayer').textContent")

    def is_sound(self) -> bool:
        """Nothing in the console, nothing fetched, no wider than the window."""
        assert self.driver.get_log("browser") == []
        assert self.js("performance.getEntriesByType('resource').map(one => one.name)") == []
        assert self.js("document.documentElement.scrollWidth <= innerWidth")
        return True


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """A browser, one for all tests of this file."""
    from selenium import webdriver

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    chromedriver = shutil.which("chromedriver")
    if not chromium or not chromedriver:
        pytest.skip(f"{'chromium' if not chromium else 'chromedriver'} is not installed (apt install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    yield Page(driver)
    driver.quit()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of 2 x 3 runs of 2,000 steps."""
    out = tmp_path_factory.mktemp("report")
    write_page(compared(*control_and_recipe(out / "runs", 2000)), out)
    return out


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of two recipes on a testbed, with the planned seeds."""
    out = tmp_path_factory.mktemp("judged")
    testbed, sides = read_testbed("nano-0.5M"), {}
    for name, recipe, better in (("control", None, 0.0), ("zero_1", "zero_1", 0.0), ("lamb", "lamb", 0.3)):
        folders = [write_run(out / "runs" / f"{name}-{seed}", seed, 100, recipe, better, interleaved=f"{seed}") for seed in range(1, 6)]
        sides[name] = [read_run(folder) for folder in folders]
    recipes = [read_recipe(ROOT / "recipes" / name) for name in ("zero_1", "lamb")]
    recipes = [replace(recipe, experiments={"nano-0.5M": replace(recipe.experiments["nano-0.5M"], seeds=5)}) for recipe in recipes]
    write_page(compare_experiments([(recipe, testbed, sides["control"], sides[recipe.name]) for recipe in recipes]), out)
    return out


@pytest.mark.parametrize(("scheme", "width"), [("dark", 1280), ("light", 360)])
def test_the_first_screen_says_which_is_better_and_why_to_believe_it(page, judged, scheme, width):
    page.open(judged, scheme, width)
    text = page.js("document.querySelector('[aria-labelledby=answers]').innerText")
    assert "zero_1 on nano-0.5M" in text and "The final validation loss differs from the control's by at most 0.01." in text
    assert re.search(r"lamb ends 0\.\d{4} nats below its control \(95% interval", text) and "The same number of tokens takes " in text
    assert "5 pairs of runs with the same seed, interleaved. The claims are judged on testbed nano-0.5M" in text
    assert "lamb against zero_1 on nano-0.5M" in text and "No claim compares them." in text, "two recipes are compared directly"
    assert page.js("document.querySelector('.forest').naturalWidth") > 1000, "the picture is in the page"
    places = page.js("['answers', 'setting', 'curves', 'figures'].map(id => document.getElementById(id).getBoundingClientRect().top)")
    assert places == sorted(places)
    assert width < 1280 or page.js("document.querySelector('.forest').getBoundingClientRect().bottom < innerHeight")
    assert page.is_sound()


def test_pairs_are_shown_by_seed_and_as_differences(page, judged):
    page.open(judged)
    assert page.shown_first == "val_loss-control"
    table = page.driver.find_element("css selector", "[aria-label^='Pairs by seed'] tbody")
    rows = page.js("Array.from(arguments[0].rows, row => Array.from(row.cells, cell => cell.innerText.trim()))", table)
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "5"]
    for _, control, own, gap, ratio in rows:
        assert float(gap.replace("−", "-")) == pytest.approx(float(own) - float(control), abs=2e-4)
        assert float(ratio) > 0
    page.click("[name=loss][value=val_loss-control]")
    page.choose("show", "2")  # lamb against zero_1
    own, other = (read_run(judged / "runs" / f"{name}-1").columns["val_loss"] for name in ("lamb", "zero_1"))
    y = page.js("Array.from(document.getElementById('loss').data.find(t => t.name.endsWith('lamb-1')).y)")
    np.testing.assert_allclose(y, (own - other)[np.isfinite(own)], atol=1e-5)


def test_the_mean_difference_is_of_the_seeds_of_both_sides(page, tmp_path):
    *runs, without_partner = control_and_recipe(tmp_path / "runs", 20, seeds=3)
    control, other, _, *own = runs
    write_page(compared(control, other, *own, without_partner), tmp_path)
    page.open(tmp_path)
    page.click("[name=loss][value=val_loss-control]")
    losses = [[read_run(run).columns["val_loss"] for run in side] for side in ((control, other), own)]
    expected = np.mean([pld - adam for adam, pld in zip(*losses, strict=True)], axis=0)
    y = page.js("Array.from(document.getElementById('loss').data.find(t => t.name.includes('mean of 2')).y)")
    np.testing.assert_allclose(y, expected[np.isfinite(expected)], atol=1e-5)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [pytest.param(1280, marks=pytest.mark.long), 360])
def test_every_axis_can_be_switched_to(page, report, scheme, width):
    page.open(report, scheme, width)
    assert page.axis() == ("tokens", 0, 2000 * TOKENS)
    tables = page.js("Array.from(document.querySelectorAll('.scroll'), one => one.clientWidth <= innerWidth)")
    assert len(tables) == 6 and all(tables)
    for axis, title, low, high in (
        ("step", "steps", 0, 2000),
        ("seconds", "seconds", 2.9, pytest.approx(623, abs=3)),
        ("flops", "FLOPs of all ranks", 0, None),
        ("bytes", "bytes sent by rank 0", 0, pytest.approx(2000 * 14288929)),
    ):
        page.click(f"[name=axis][value={axis}]")
        for chart in ("loss", "metric"):
            found, first, last = page.axis(chart)
            assert found == title
            if chart == "loss":
                assert first == pytest.approx(low) and (high is None or last == high)
    page.click("[name=loss][value=loss]")
    assert page.js("document.querySelector('#loss .ytitle').textContent") == "training loss (nats)"
    page.click("[name=log_y]")
    assert page.js("document.getElementById('loss')._fullLayout.yaxis.type") == "log"
    assert page.is_sound()


def test_what_is_drawn_is_what_the_runs_say(page, report):
    comparison = compared(*sorted((report / "runs").iterdir()))
    runs = {run.name: run for side in comparison.sides for run in side.runs}
    page.open(report)
    page.click("[name=axis][value=seconds]")
    for name, run in runs.items():
        x, y = page.js(
            "(t => [Array.from(t.x), Array.from(t.y)])(document.getElementById('loss').data.find(t => t.name.endsWith(arguments[0])))", name
        )
        evaluated = np.isfinite(run.columns["val_loss"])
        np.testing.assert_allclose(x, run.columns["seconds"][evaluated], atol=2e-3 * run.columns["seconds"][-1])
        np.testing.assert_allclose(y, run.columns["val_loss"][evaluated], rtol=1e-6)
    page.click("[name=loss][value=val_loss-control]")
    page.click("[name=axis][value=tokens]")
    names = page.drawn()
    assert len(names) == 4 and not any("control-" in name for name in names)  # 3 seeds and their mean
    one, other = runs["control-1"].columns["val_loss"], runs["pld-1"].columns["val_loss"]
    y = page.js("Array.from(document.getElementById('loss').data.find(t => t.name.endsWith('pld-1')).y)")
    np.testing.assert_allclose(y, (other - one)[np.isfinite(one)], atol=1e-5)


def test_the_text_alternative_says_the_numbers(page, report):
    page.open(report)
    final = {
        side.role: np.mean([run.measures["final_val_loss"] for run in side.runs])
        for side in compared(*sorted((report / "runs").iterdir())).sides
    }
    label = page.js("document.getElementById('loss').getAttribute('aria-label')")
    assert label.startswith("validation loss (nats) over tokens.")
    assert all(f"from 9.0600 to {value:.4f}" in label for value in final.values())
    cells = page.js("Array.from(document.querySelectorAll('[aria-labelledby=figures] td'), cell => cell.textContent)")
    assert all(any(cell.startswith(f"{value:.4f} ±") for cell in cells) for value in final.values())
    page.click("[name=axis][value=step]")
    assert "over steps" in page.js("document.getElementById('loss').getAttribute('aria-label')")


def test_the_charts_follow_a_change_of_colours(page, report):
    page.open(report, "light")

    def colours() -> Any:
        return page.js("[document.querySelector('#loss .main-svg').style.background, getComputedStyle(document.body).color]")

    light = colours()
    page.media("dark")
    page.until(lambda: colours()[0] != light[0])
    assert page.is_sound()


def test_a_click_on_a_name_hides_its_runs_and_their_mean(page, report):
    page.open(report)
    page.click("#loss .legendtoggle")
    page.until(lambda: page.js("document.querySelectorAll('#loss .scatterlayer .trace').length") == 4)  # of the other side


def test_names_of_any_text_are_only_names(page, tmp_path):
    machine = {"host": HOSTILE_TEXT, "processor": "AMD EPYC"}
    folders = [write_run(tmp_path / name, seed, 40, machine=machine) for seed, name in enumerate(HOSTILE)]
    folders += [
        write_run(tmp_path / f"pld-{seed}", seed, 40, "progressive_layer_drop", config_file=f"ds_configs/{HOSTILE_TEXT}.json")
        for seed in (0, 1)
    ]
    for number, folder in enumerate(folders):
        metrics = folder / "metrics.jsonl"
        lines = [json.loads(line) | {"<b>%{x}": number, HOSTILE_TEXT: number} for line in metrics.read_text().splitlines()]
        metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    comparison = compared(*folders)
    write_page(comparison, tmp_path)
    draw_losses(comparison, tmp_path / "loss.png")
    page.open(tmp_path)
    assert page.is_sound()
    text = page.js("document.querySelector('main').innerText")
    assert all(name in text for name in (*HOSTILE, HOSTILE_TEXT))
    for metric in ("<b>%{x}", HOSTILE_TEXT):
        page.choose("metric", metric)
        assert page.js("document.querySelector('#metric .ytitle').textContent") == metric
    for name in HOSTILE:
        curve = page.js("document.getElementById('loss').data.findIndex(trace => trace.meta.run === arguments[0])", name)
        page.until(lambda name=name, curve=curve: name in page.hover(curve))  # plotly skips one that comes soon after another
    assert page.js("window.pwned === undefined")


@pytest.mark.long
def test_many_sides_are_shown_pair_by_pair(page, tmp_path):
    recipes = ("progressive_layer_drop", "random_ltd", "curriculum_learning", "zero_1", "zero_2", "zero_3", "lamb")
    folders = [write_run(tmp_path / f"{recipe}-{seed}", seed, 20, recipe) for recipe in (None, *recipes) for seed in (1, 2)]
    comparison = compared(*folders)
    write_page(comparison, tmp_path)
    draw_losses(comparison, file := tmp_path / "loss.png")
    assert file.stat().st_size > 20_000
    page.open(tmp_path)
    assert len(page.drawn()) == 2 * 3
    dropping, partitioned = (
        next(i for i, pair in enumerate(comparison.pairs) if pair.side.name == name) for name in ("progressive_layer_drop", "zero_1")
    )
    page.choose("show", str(dropping))
    page.choose("metric", "theta")
    assert len(page.drawn("metric")) == 3  # the control has none
    page.choose("show", str(partitioned))
    assert page.js("document.querySelector('[name=metric] [value=theta]').disabled")
    assert page.js("other.elements.metric.value") != "theta" and len(page.drawn("metric")) == 2 * 3
    page.choose("show", "all")
    assert len(page.drawn()) == 8 * 3
    looks = page.js("data.sides.map(side => [side.color, side.dash].join())")
    assert len(set(looks)) == 8
    assert all(data["dash"] != looks[0].split(",")[1] for data in page.js("data.sides.slice(1)"))
    assert page.is_sound()


def test_runs_without_much_in_them_have_a_page(page, tmp_path):
    folders = [write_run(tmp_path / name, seed, 30) for seed, name in enumerate(("empty", "short", "diverged", "no_evaluation"))]
    files = {folder.name: folder / "metrics.jsonl" for folder in folders}
    files["empty"].write_text("")
    files["short"].write_text(files["short"].read_text()[:1500])
    lines = [json.loads(line) for line in files["diverged"].read_text().splitlines()]
    files["diverged"].write_text(
        "".join(json.dumps(line | ({"loss": None, "val_loss": None} if line["step"] > 20 else {})) + "\n" for line in lines)
    )
    files["no_evaluation"].write_text(
        "".join(line + "\n" for line in files["no_evaluation"].read_text().splitlines() if "val_loss" not in line)
    )
    for number, chosen in enumerate((folders, folders[:1], folders[3:])):
        out = tmp_path / str(number)
        out.mkdir()
        comparison = compared(*chosen)
        write_page(comparison, out)
        draw_losses(comparison, out / "loss.png")
        assert (out / "loss.png").is_file()
        page.open(out)
        assert page.is_sound()
        remarks = page.js("document.querySelector('[aria-labelledby=runs]').innerText")
        assert all(remark in remarks for side in comparison.sides for run in side.runs for remark in run.remarks)


def test_a_metric_may_be_called_like_something_of_the_language(page, tmp_path):
    folders = [write_run(tmp_path / "one", 1, 20), write_run(tmp_path / "two", 1, 20, "progressive_layer_drop")]
    metrics = folders[1] / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    names = ("constructor", "__proto__", "toString")
    metrics.write_text("".join(json.dumps(line | dict.fromkeys(names, line["step"])) + "\n" for line in lines))
    write_page(compared(*folders), tmp_path)
    page.open(tmp_path)
    for name in names:
        page.choose("metric", name)
        assert len(page.drawn("metric")) == 2  # a seed and the mean, of one side
    assert page.is_sound()


def test_a_comparison_of_nothing_has_a_page(page, tmp_path):
    comparison = compare_experiments([], [Absent("fp8", "needs a GPU")])
    write_page(comparison, tmp_path)
    draw_losses(comparison, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").is_file()
    page.open(tmp_path)
    assert page.is_sound() and "needs a GPU" in page.js("document.querySelector('main').innerText")


def test_what_was_forced_stands_in_red(page, tmp_path):
    folders = [
        write_run(tmp_path / "one", 1, 20),
        write_run(tmp_path / "two", 1, 20, "progressive_layer_drop", corpus_fingerprint="0" * 64),
    ]
    comparison = compared(*folders, force=True)
    write_page(comparison, tmp_path)
    page.open(tmp_path)
    assert comparison.mismatches
    assert all(one in page.js("document.querySelector('.mismatches').innerText") for one in comparison.mismatches)


@pytest.mark.long
def test_twelve_runs_of_ten_thousand_steps(page, tmp_path):
    folders = control_and_recipe(tmp_path / "runs", 10_000, seeds=6)
    comparison = compared(*folders)
    page_file = write_page(comparison, tmp_path)
    draw_losses(comparison, tmp_path / "loss.png")
    assert page_file.stat().st_size < 15e6
    page.open(tmp_path)
    page.click("[name=loss][value=loss]")
    seeds = page.js(
        "document.getElementById('loss').data.filter(trace => !trace.meta.mean)"
        ".map(({x, y}) => [x.length, Math.max(...y), x[y.indexOf(Math.max(...y))]])"
    )
    assert len(seeds) == 12
    for count, highest, at in seeds:
        assert 900 <= count <= 1002
        assert highest == 12.5 and at == pytest.approx(6000 * TOKENS)  # the spike of one step
    assert page.is_sound()


def test_thinning_keeps_the_extremes_and_the_ends():
    values = np.random.default_rng(1).normal(size=9_973)
    values[[17, 5003]] = 90, -90
    rows = thinned(values, 1000)
    assert len(rows) <= 1002 and np.all(np.diff(rows) > 0)
    assert {0, 17, 5003, 9_972} <= set(rows)
    assert list(thinned(values[:1000], 1000)) == list(range(1000))


def test_the_mean_is_of_the_steps_that_all_seeds_have(tmp_path):
    folders = [write_run(tmp_path / name, seed, 50) for name, seed in (("1", 1), ("2", 2), ("3", 3), ("again", 1))]
    metrics = folders[1] / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:41]))  # steps 0 to 40
    (side,) = compared(*folders).sides
    first = started_runs(side)
    assert [run.name for run in first] == ["1", "2", "3"]
    mean = mean_columns(first)
    assert list(mean["step"]) == list(range(41))
    for name in ("seconds", "loss"):  # fewer than 200 steps are not smoothed
        np.testing.assert_allclose(mean[name][1:], np.mean([run.columns[name][1:41] for run in first], axis=0))


def test_lines_stand_out_from_either_paper():
    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for colour in PALETTE:  # WCAG 2.2, 1.4.11: 3:1
        assert (luminance("#ffffff") + 0.05) / (luminance(colour) + 0.05) >= 3
        assert (luminance(colour) + 0.05) / (luminance("#15181c") + 0.05) >= 3
