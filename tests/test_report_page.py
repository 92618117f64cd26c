"""The report of a comparison, opened in a real browser, and the pictures in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from launch.comparison import tables
from launch.comparison.comparison import Absent, Comparison, compare, compare_experiments
from launch.comparison.pictures import PALETTE, draw_losses, together
from launch.comparison.report import write_report
from launch.comparison.runs import Run, read_run
from recipes.registry import ROOT, read_recipe, read_testbed
from tests.run_folders import description, lines, write_run

ZERO_1 = ("--deepspeed_config", "ds_configs/zero1_bf16.json")
PLD = ("--recipe", "recipes/progressive_layer_drop")
#: A folder may be called so; what is in `run.json` may hold a slash too.
HOSTILE = ("<img src=x onerror=document.title=1>", "<b>%{x} & $y$ &lt;", "'\"{{ 7 * 7 }}")
HOSTILE_TEXT = "</title></style><script>document.title=1</script>"


class Page:
    """A report in a headless Chromium."""

    def __init__(self, driver: Any):
        self.driver = driver

    def open(self, folder: Path, width: int = 1280) -> Page:
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        self.driver.get(f"file://{folder}/report.html")
        return self

    def js(self, expression: str) -> Any:
        return self.driver.execute_script(f"return {expression}")

    def text(self, selector: str) -> str:
        return str(self.js(f"document.querySelector('{selector}').innerText"))

    def rows(self, table: str) -> list[list[str]]:
        """The cells of the first table whose caption begins with `table`, with its heads."""
        rows = f"document.querySelector('[aria-label^=\"{table}\"] table').rows"
        return list(self.js(f"Array.from({rows}, row => Array.from(row.cells, cell => cell.innerText.trim()))"))

    def is_sound(self) -> bool:
        """Nothing in the console, nothing fetched, no wider than the window, every picture has pixels, and nothing says it at a glance."""
        assert self.driver.get_log("browser") == []
        assert self.js("performance.getEntriesByType('resource').filter(one => !one.name.startsWith('data:')).map(one => one.name)") == []
        assert self.js("document.documentElement.scrollWidth <= innerWidth")
        assert self.js("Array.from(document.images).every(image => image.naturalWidth > 500)")
        assert self.js("document.scripts.length") == 0
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


def runs(corpus: Path, folder: Path, name: str, flags: tuple[str, ...], seeds: range, final: float, **changed: Any) -> list[Run]:
    """Runs that are evaluated every four steps; their loss falls to `final`, with noise of the seed."""
    made = []
    for seed in seeds:
        steps = lines(final=final + 0.01 * (-1) ** seed, steps=40, step_seconds=0.5 + 0.01 * seed)
        for step in range(4, 40, 4):
            steps[step]["val_loss"] = 6 - (6 - final) * step / 40
        said = description(corpus, "--steps", "40", *flags, seed=seed) | changed
        made.append(read_run(write_run(folder / f"{name}{seed}", said, steps)))
    return made


@pytest.fixture(scope="module")
def judged(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Comparison]:
    """The report of two recipes on a testbed, with the planned seeds."""
    out, testbed = tmp_path_factory.mktemp("judged"), read_testbed("nano-0.5M")
    control = runs(corpus, out / "runs", "control-", ("--deepspeed_config", "ds_configs/zero0_bf16.json"), range(1, 4), 4.0)
    experiments = []
    for name, final in (("zero_1", 4.0), ("lamb", 3.7)):
        recipe = read_recipe(ROOT / "recipes" / name)
        recipe = replace(recipe, experiments={testbed.name: replace(recipe.experiments[testbed.name], seeds=3)})
        flags = ("--deepspeed_config", recipe.config, "--lr", "0.016" if name == "lamb" else "0.0014")
        experiments.append((recipe, testbed, control, runs(corpus, out / "runs", f"{name}-", flags, range(1, 4), final)))
    comparison = compare_experiments(experiments, [Absent("fp8", "needs a GPU")])
    write_report(comparison, out)
    return out, comparison


@pytest.mark.parametrize("width", [1280, 360])
def test_the_first_screen_says_which_is_better_by_how_much_and_at_what_cost(page, judged, width):
    out, comparison = judged
    page.open(out, width)
    assert page.text("h1") == tables.answer(comparison)
    control = "zero0_bf16 (AdamW, ZeRO 0, bf16, 2 ranks)"
    assert page.text("h1").startswith(f"Of 2 comparisons, the largest gain: LAMB ends 0.3000 nats below {control} on nano-0.5M (95%: ")
    assert "a token takes " in page.text("h1")
    heads, *rows = page.rows("Ranking")
    assert heads == ["", "final loss (nats)", *[*tables.COLUMNS], "learning rate", "claims"]
    assert rows == tables.ranking(comparison).rows
    assert [row[0] for row in rows] == ["LAMB", f"control: {control}", "ZeRO stage 1"], "the lowest loss first"
    assert [row[-2] for row in rows] == ["0.016", "0.002", "0.0014"] and rows[0][-1] == "✓ loss ≤ control + 0.02"
    assert not page.js("document.getElementById('caveats').open") and page.text("summary") == "1 caveat"
    assert "fp8 was not run: needs a GPU" in tables.caveats(comparison)
    if width == 1280:
        assert page.js("document.getElementById('first').getBoundingClientRect().bottom <= innerHeight")
        assert page.js("Array.from(document.querySelectorAll('#first .scroll')).every(one => one.scrollWidth <= one.clientWidth)")
    assert "±: standard deviation over seeds" in page.text("#first .note")
    assert page.is_sound()


def test_terminal_page_and_report_show_the_same_cells(page, judged):
    out, comparison = judged
    page.open(out)
    table = tables.figures(comparison.pairs[1])
    assert page.rows(f"Figures, {comparison.pairs[1].title}") == [[*table.heads], *table.rows]
    assert all(cell in table.markdown() and cell in table.text() for row in table.rows for cell in row)
    assert ["optimizer.type", "AdamW", "Lamb"] in page.rows("Settings that differ, lamb")
    assert "holds: the final validation loss is at most 0.02 above" in page.text(".pair:nth-of-type(3)")


def test_names_of_any_text_are_only_names(page, corpus, tmp_path):
    folders = []
    for number, name in enumerate(HOSTILE):
        said = description(corpus, *ZERO_1, seed=number) | {"machine": {"host": HOSTILE_TEXT, "processor": HOSTILE_TEXT, "cores": 1}}
        folders.append(write_run(tmp_path / "runs" / name, said, lines()))
    folders.append(write_run(tmp_path / "runs" / "pld", description(corpus, *PLD) | {"preset": HOSTILE_TEXT}, lines(**{HOSTILE_TEXT: 1.0})))
    write_report(compare([read_run(folder) for folder in folders]), tmp_path)
    page.open(tmp_path)
    assert page.is_sound()
    assert all(text in page.text("main") for text in (*HOSTILE, HOSTILE_TEXT))
    assert page.js("document.title") == page.text("h1")


def test_runs_without_much_in_them_have_a_report(page, corpus, tmp_path):
    steps = {"empty": [], "short": lines()[:5], "diverged": lines(final=None), "no_evaluation": lines()}
    for line in steps["no_evaluation"]:
        line.pop("val_loss", None)
    found = [read_run(write_run(tmp_path / name, description(corpus, *ZERO_1, seed=n), of)) for n, (name, of) in enumerate(steps.items())]
    pld = read_run(write_run(tmp_path / "pld", description(corpus, *PLD), lines()))
    for number, chosen in enumerate((found, found[:1], found[3:], [*found, pld], [])):
        comparison = compare(chosen) if chosen else compare_experiments([], [Absent("fp8", "needs a GPU")])
        write_report(comparison, out := tmp_path / str(number))
        page.open(out)
        assert page.is_sound() and (out / "loss.png").is_file()
        page.js("document.getElementById('caveats').open = true")
        assert all(caveat in page.text("#caveats") for caveat in tables.caveats(comparison))


def test_what_was_forced_is_on_the_first_screen(page, corpus, tmp_path):
    folders = [
        write_run(tmp_path / "one", description(corpus, *ZERO_1), lines()),
        write_run(tmp_path / "two", description(corpus, *PLD) | {"corpus_fingerprint": "0" * 64}, lines()),
    ]
    comparison = compare([read_run(folder) for folder in folders], force=True)
    write_report(comparison, tmp_path)
    page.open(tmp_path)
    assert comparison.mismatches and all(one in page.text(".mismatches") for one in comparison.mismatches)


@pytest.mark.gate
def test_a_large_report_stays_small(corpus, tmp_path):
    """A fifth of the bound for 30 comparisons of long runs."""
    long = [{**line, "grad_norm": 1 + line["step"] % 7} for line in lines(steps=5000)]
    said = [description(corpus, "--steps", "5000", *flags) for flags in (ZERO_1, PLD)]
    pair = compare([read_run(write_run(tmp_path / str(n), one, long)) for n, one in enumerate(said)])
    write_report(replace(pair, pairs=pair.pairs * 6), tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 1e6


def test_curves_are_compared_where_all_have_evaluations():
    dense, sparse = np.arange(0, 101.0), np.arange(10, 90.0, 20)
    x, values = together([(dense, dense**2), (sparse, sparse)])
    np.testing.assert_array_equal(x, sparse)
    np.testing.assert_array_equal(values, [sparse**2, sparse])


def test_a_picture_of_losses_shows_what_the_runs_have(judged, tmp_path):
    """It changes with them, and the untrained model's loss does not set the scale."""
    _, comparison = judged
    draw_losses(comparison, tmp_path / "a.png")
    run = comparison.pairs[0].treatment.runs[0]
    run.columns["val_loss"][-1] -= 0.1
    draw_losses(comparison, tmp_path / "b.png")
    run.columns["val_loss"][-1] += 0.1
    draw_losses(comparison, tmp_path / "c.png")
    a, b, c = ((tmp_path / f"{name}.png").read_bytes() for name in "abc")
    assert a == c != b


def test_a_run_that_was_not_evaluated_yet_is_drawn_by_its_training_loss(corpus, tmp_path, monkeypatch):
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    for steps in (5, 1):  # of 20, from step 0, which alone is evaluated
        run = read_run(write_run(tmp_path / str(steps), description(corpus, *ZERO_1), lines()[:steps]))
        draw_losses(compare([run]), tmp_path / "loss.png")
    begun, started = (figure.axes[0] for figure in drawn)
    assert begun.get_ylabel() == "training loss (nats)" and len(begun.lines[0].get_xdata()) == 4
    assert not started.axison and started.texts[0].get_text() == "no loss after step 0 yet"


def test_lines_stand_out_from_the_paper():
    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    assert all((luminance("#ffffff") + 0.05) / (luminance(colour) + 0.05) >= 3 for colour in PALETTE)  # WCAG 2.2, 1.4.11: 3:1
