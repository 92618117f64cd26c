"""Generates pages and pictures from the committed data: recipe.json, testbed.json, results.json, tuning.json, noise.json and RUNS.

make pages                   # python -m launch.comparison.recipe_pages --write

Only the parts between the lines `BEGIN` and `END` are generated: tables and results in README.md, in the index (recipes/README.md), on each
recipe's page and on the page of the testbeds. Verdicts are recomputed from the measures of the published runs. A test compares the pages
with the output of this module.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.staging import write_atomically
from launch.comparison.comparison import LOSS, Comparison, Pair, claims_in_table, compare_experiments, signed
from launch.comparison.forest import draw_forest, row
from launch.comparison.html_report import draw_losses, figure_row
from launch.comparison.runs import read_stored_run
from launch.comparison.trials import corpus_command, settings_on
from launch.comparison.tuning import CONTROL, deviation, draw_tuning, in_words, mean_difference, numbers_in, setting_name
from launch.comparison.verdicts import SIGNS, Verdict, planned_power
from launch.errors import run_command
from launch.formats.files import read_committed
from launch.formats.metrics import read_metrics
from launch.training.picture import draw_blocks, draw_exponents, draw_loss
from launch.training.run_json import commits_of
from recipes.claims import QUESTIONS, Claim
from recipes.registry import ROOT, TESTBEDS, Experiment, Recipe, Testbed, read_recipe, read_recipes, read_testbeds, technique_classes

INDEX = ROOT / "recipes" / "README.md"
README = ROOT / "README.md"
RESULTS = "results.json"

#: The lines around a generated part.
BEGIN, END = "<!-- {}, by `make pages` -->\n", "<!-- end -->\n"
UNMEASURED = "not measured yet"
#: Shown for results whose claims or testbed were changed after publication.
OUTDATED = "measured before the claims or the testbed were changed, so not judged"
NULLS = {
    "precision": "fp32 instead of bf16",
    "accumulation": "four micro-batches instead of one",
    "trajectory": "initial weights perturbed by 1e-3",
}
#: Single runs that a page shows: the file with the run's lines, and what draws the picture beside it.
RUNS: dict[str, Callable[[list[dict[str, Any]], Path], None]] = {
    "benchmarks/make_pretrain.jsonl": partial(draw_loss, title="make pretrain: nano, ZeRO 1, bf16", initial_loss=math.log(8192)),
    "recipes/fp16_dynamic_loss_scale/histograms.jsonl": lambda lines, picture: draw_exponents(lines[-1], picture, "nano"),
    "recipes/progressive_layer_drop/blocks.jsonl": partial(draw_blocks, name="micro with layer dropping, seed 1"),
}
#: Fields of a testbed.json on which the numbers of its runs depend. No testbed has "ranks" any more; published plans have it as null.
SETTING = ("flags", "tuned", "target_loss", "ranks")


# --- the published data ---------------------------------------------------------------------------------------------------------------


def planned(recipe: str, testbed: str) -> dict[str, Any]:
    """The current plan of a recipe on a testbed: the experiment, the testbed's setting, both sides."""
    return plan_in(lambda file: read_committed(ROOT / file), recipe, testbed)


def plan_in(read: Callable[[str], dict[str, Any]], recipe: str, testbed: str) -> dict[str, Any]:
    """`planned` from the files that `read` returns ({} for a missing one); {} if the recipe has no such experiment."""
    own, control, setting = (read(file) for file in plan_files(recipe, testbed))
    experiment = own.get("experiments", {}).get(testbed)
    if experiment is None:
        return {}
    tuned = control.get("experiments", {}).get(testbed, {}).get("tuned")
    sides = {**{key: own.get(key) for key in ("config", "control", "ranks")}, "tuned_control": tuned}
    return {"experiment": experiment, "setting": {key: setting.get(key) for key in SETTING}, "sides": sides}


def plan_files(recipe: str, testbed: str) -> tuple[str, str, str]:
    """The files that `planned` reads: the recipe's, its control's (which may not exist) and the testbed's."""
    config = read_recipe(ROOT / "recipes" / recipe).control
    control = next((one.name for one in read_recipes() if one.config == config), Path(config).stem)
    return f"recipes/{recipe}/recipe.json", f"recipes/{control}/recipe.json", f"recipes/testbeds/{testbed}/testbed.json"


@dataclass
class Published:
    """A recipe on a testbed.

    entry: of results.json; None if nothing was published. pair: its runs, compared; None if nothing was published for the current claims.
    """

    recipe: Recipe
    testbed: Testbed
    experiment: Experiment
    entry: dict[str, Any] | None
    pair: Pair | None = None

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """One per claim, corrected for all claims on testbeds of the device; empty without a pair."""
        return self.pair.verdicts if self.pair else ()

    @property
    def note(self) -> str:
        """Why there are no verdicts; empty if there are."""
        return "" if self.pair else OUTDATED if self.entry else UNMEASURED


def published() -> list[Published]:
    """Every recipe on each of its testbeds, ordered by testbed, with the verdicts.

    Raises ValueError if results were published for an experiment that its recipe no longer has: they would vanish from the pages.
    """
    testbeds = {testbed.name: testbed for testbed in read_testbeds()}
    cells = []
    for recipe in read_recipes():
        entries = read_committed(ROOT / "recipes" / recipe.name / RESULTS)
        if lost := sorted(entries.keys() - recipe.experiments.keys()):
            raise ValueError(f"recipes/{recipe.name}: {RESULTS} has results on {lost[0]}; keep this experiment in recipe.json")
        cells += [Published(recipe, testbeds[name], own, entries.get(name)) for name, own in recipe.experiments.items()]
    cells.sort(key=lambda cell: (cell.testbed.device, cell.testbed.name, cell.recipe.name))
    judged = [(cell, cell.entry) for cell in cells if cell.entry and cell.entry["planned"] == planned(cell.recipe.name, cell.testbed.name)]
    stored = []
    for cell, entry in judged:
        control, own = ([read_stored_run(run) for run in entry[side]] for side in ("control", "recipe"))
        stored.append((cell.recipe, cell.testbed, control, own))
    for (cell, _), pair in zip(judged, compare_experiments(stored).pairs, strict=False):  # pairs of two recipes follow
        cell.pair = _with_short_names(pair)
    return cells


def _with_short_names(pair: Pair) -> Pair:
    """The pair with its sides named by DeepSpeed JSON and recipe, without the names of runs that `Side.name` may have."""
    name = pair.recipe.name if pair.recipe else pair.side.name
    control = Path(pair.control.runs[0].description["config_file"]).stem
    return replace(pair, control=replace(pair.control, name=control), side=replace(pair.side, name=name))


# --- a recipe's page ------------------------------------------------------------------------------------------------------------------


def measured_part(recipe: Recipe, own: list[Published]) -> str:
    """The results on a recipe's page: what it claims, what was measured, and which claims were changed."""
    blocks = [block for one in own for block in _measured_on(one)]
    if not own:
        blocks.append("It has no experiment of its own.")
    if any(one.pair for one in own):
        blocks.append(f"![Validation loss over tokens, and the difference to the control, of {recipe.name} on each testbed](loss.png)")
    if swept := read_committed(ROOT / "recipes" / recipe.name / "tuning.json"):
        blocks.append("![Final validation loss over each swept setting, of the recipe and its control](tuning.png)")
        blocks.append(f"Machines of the sweeps: {'; '.join(_machines(name, one) for name, one in swept.items())}.")
    if recipe.history:
        blocks.append("**History.**")
        blocks.append("\n".join(f"- {sentence}" for sentence in recipe.history))
    return "\n" + "\n\n".join(blocks) + "\n\n"


def _machines(testbed: str, swept: dict[str, Any]) -> str:
    """The machine of a recipe's sweep on a testbed, and of its control's, which is published in another file."""
    others = dict.fromkeys(
        read_committed(ROOT / arm["published_in"])[testbed]["machine"] for arm in swept["arms"].values() if "published_in" in arm
    )
    return f"{testbed} {swept['machine']} (control: {_listed(others)})"


def _measured_on(one: Published) -> Iterator[str]:
    testbed, entry, pair = one.testbed, one.entry, one.pair
    yield f"**On [{testbed.name}]({_link(testbed)}).** {testbed.title}; {one.experiment.seeds} seeds planned."
    if entry is None or pair is None:
        claims = "\n".join(f"- {claim} ({_plan(claim, one)})" for claim in one.experiment.claims)
        rest = f" The claims:\n\n{claims}" if claims else " No claims yet."
        yield f"{one.note.capitalize()}.{rest}"
        return
    description = pair.side.runs[0].description
    look = "" if entry["looks"] == 1 else f" This is look number {entry['looks']} at these claims; only the first was planned."
    turns = "interleaved" if pair.interleaved else "not interleaved, so times are not compared"
    runs = dict.fromkeys(commit[:7] for run in (*pair.side.runs, *pair.control.runs) for commit in commits_of(run.description))
    yield (
        f"Seeds {_listed(pair.seeds)}, {turns}, on {description['ranks']} {'rank' if description['ranks'] == 1 else 'ranks'} of"
        f" {entry['machine']}; learning rate {description['lr']:g} (control: {pair.control.runs[0].description['lr']:g}). Commits: claims"
        f" {entry['claims_commit'][:7]}, tuned setting {entry['plan_commit'][:7]}, runs {_listed(runs)}.{look}"
    )
    yield f"    {entry['command']}"
    if one.verdicts:
        heads = ["claim", "power", "verdict", "measured (95% interval)", "p (Holm-corrected)"]
        yield _table(heads, (_claim_row(verdict, one) for verdict in one.verdicts))
    heads = ["mean over seeds ± standard deviation", pair.control.name, one.recipe.name, "difference", "ratio"]
    yield _table(heads, (figure_row(name, figure) for name, figure in pair.published_figures.items()))
    if gaps := _gaps(pair):
        values = (f"{seed}: {signed(gaps[seed]) if seed in gaps else 'diverged'}" for seed in pair.seeds)
        yield f"Difference of the final loss by seed: {'; '.join(values)}. Standard deviation: {_spread(gaps)}."


def _gaps(pair: Pair) -> dict[int, float]:
    """Seed -> the difference of the final losses, in nats per token. Empty if fewer than two seeds have both."""
    figure = pair.figures.get(LOSS)
    if figure is None or len(figure.pairs) < 2:
        return {}
    return {seed: other - control for seed, (control, other) in figure.pairs.items()}


def _spread(gaps: Mapping[int, float]) -> str:
    """The standard deviation of the differences over seeds."""
    return f"{np.std([*gaps.values()], ddof=1):.4f}"


def _claim_row(verdict: Verdict, one: Published) -> list[str]:
    claim = verdict.claim
    p = "-" if verdict.p_holds is None else f"{verdict.adjusted:.2g}"
    return [str(claim), _plan(claim, one), f"{SIGNS[verdict.outcome]} **{verdict.outcome}**", _measured(verdict), p]


def _plan(claim: Claim, one: Published) -> str:
    """The assumed true value; for the loss, also the power at the testbed's noise and at the ends of the noise's interval.

    The noise is the largest of the measured standard deviations; for "equal", of those that come from rounding (precision, accumulation).
    """
    truth = f"if the true {claim.scale} is {_number(claim, claim.expected)}"
    noise = noise_of(one.testbed)
    if claim.measure != "loss" or not noise:
        what = "noise" if claim.measure == "loss" else "noise of this quantity"
        return f"planned {truth}; the {what} is not measured, so the power is unknown"
    nulls = noise["nulls"]
    kinds = ("precision", "accumulation") if claim.question == "equal" else tuple(nulls)
    middle, high, low = (
        f"{planned_power(claim, one.experiment.seeds, noise, claims_in_table(one.testbed.device)):.2f}"
        for noise in max(deviation(nulls[kind]) for kind in kinds)
    )
    return f"power {middle} ({low} to {high}) at the measured noise {truth}"


def _number(claim: Claim, value: float) -> str:
    """A mean difference with its sign, or a mean ratio."""
    return f"{value:.3f}" if claim.scale == "ratio" else signed(value) if value else "0"


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def _link(testbed: Testbed) -> str:
    """A link to the testbed's heading, with GitHub's anchor."""
    anchor = re.sub(r"[^\w -]", "", testbed.name.lower()).replace(" ", "-")
    return f"../testbeds/README.md#{anchor}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (heads, *rows)]
    return "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:]])


# --- the index, the README and the testbeds -------------------------------------------------------------------------------------------


def questions() -> str:
    """The kinds of claims, as a Markdown table."""
    rows = []
    for name, kind in QUESTIONS.items():
        what = "loss" if kind.scale == "difference" else "quantity"
        rows.append([f"`{kind.short.format(what=what, x='x')}`", f"`{name}` x", kind.statement.format(what=what, x="x")])
    return _table(["claim", "in recipe.json", "of a recipe against its control"], rows) + "\n"


def index_table(cells: list[Published]) -> str:
    """How many claims are measured, and all recipes as a Markdown table."""
    claims, measured = sum(len(one.experiment.claims) for one in cells), sum(len(one.verdicts) for one in cells)
    rows = []
    for recipe in read_recipes():
        found = "; ".join(_found(one) for one in cells if one.recipe.name == recipe.name) or "-"
        link = f"[{recipe.name}]({recipe.name}/README.md)"
        rows.append([link, recipe.title, f"`{recipe.config}`", f"`{recipe.control}`", found, recipe.needs or "-"])
    heads = ["recipe", "what it does", "DeepSpeed JSON", "control", "claims, and what was found", "needs"]
    return f"\nMeasured: {measured} of {claims} claims.\n\n{_table(heads, rows)}\n"


def _found(cell: Published) -> str:
    """The claims of a recipe on a testbed with their verdicts."""
    texts = [f"`{one.claim.label}` {SIGNS[one.outcome]} {one.outcome}: {_measured(one)}" for one in cell.verdicts]
    if cell.pair and not texts:
        loss = cell.pair.figures[LOSS].difference if LOSS in cell.pair.figures else None
        texts = ["figures without claims" + (f" (loss {signed(loss.mean)})" if loss else "")]
    elif not texts:
        texts = [*(f"`{claim.label}`" for claim in cell.experiment.claims), cell.note]
    return f"{cell.testbed.name}: {', '.join(texts)}"


def _measured(verdict: Verdict) -> str:
    """The estimate and its 95% interval."""
    if verdict.estimate is None:
        return verdict.evidence
    interval = " ({} to {})".format(*(_number(verdict.claim, end) for end in verdict.interval)) if verdict.interval else ""
    return _number(verdict.claim, verdict.estimate) + interval


def short_table(cells: list[Published]) -> str:
    """The recipes for the project's README: what each does, and the claims that have a verdict."""
    rows = []
    for recipe in read_recipes():
        own = [one for one in cells if one.recipe.name == recipe.name and one.verdicts]
        claims = ", ".join(
            f"`{verdict.claim.label}` {SIGNS[verdict.outcome]} {_measured(verdict)}" + (f" ({one.testbed.name})" if len(own) > 1 else "")
            for one in own
            for verdict in one.verdicts
        )
        claims = claims or (UNMEASURED if any(experiment.claims for experiment in recipe.experiments.values()) else "-")
        rows.append([f"[{recipe.name}](recipes/{recipe.name}/README.md)", recipe.title, claims])
    return _table(["recipe", "what it does", "claims"], rows) + "\n"


def excluded_pairs() -> str:
    """The pairs of recipes that cannot be combined, with what both control, as a Markdown table."""
    classes = {cls.__module__.split(".")[1]: cls.declaration for cls in technique_classes()}
    pairs = [(one, other, classes[one].shared_with(classes[other])) for one, other in combinations(classes, 2)]
    return _table(["recipe", "recipe", "both control"], [(one, other, str(shared)) for one, other, shared in pairs if shared]) + "\n"


def testbeds_part(cells: list[Published]) -> str:
    """A section for each testbed: its setting, its noise, its sweep, and the recipes that are compared on it."""
    blocks = []
    for testbed in read_testbeds():
        name = testbed.name
        blocks += [f"## {name}", f"{testbed.title}. {'On a GPU.' if testbed.device == 'cuda' else 'On a CPU.'} {testbed.reason}".rstrip()]
        rows = [(setting_name(key, value), in_words(value)) for key, value in testbed.flags.items()]
        rows.insert(0, ("corpus, made by", f"`{corpus_command(testbed)}`"))
        unswept = testbed.sweep and not (TESTBEDS / name / "tuning.json").exists()
        tuned = "not tuned yet" if unswept else "tuned"
        rows += [(f"{setting_name(key, value)}, {tuned}", in_words(value)) for key, value in testbed.tuned.items()]
        rows += [
            (f"{setting_name(key, values[0])}, swept over", _listed(map(in_words, sorted(values, key=numbers_in))))
            for key, values in testbed.sweep.items()
        ]
        rows.append((f"target loss{', before the sweep' if unswept else ''}", f"{testbed.target_loss:g}"))
        blocks.append(_table(["setting", "value"], rows))
        blocks += _noise(testbed)
        if unswept:
            blocks.append(f"The sweep: {UNMEASURED}.")
        elif testbed.sweep:
            blocks.append(f"![Final validation loss of the control over each swept setting on {name}]({name}/tuning.png)")
            blocks.append(f"Machine of the sweep: {read_committed(TESTBEDS / name / 'tuning.json')[name]['machine']}.")
        spreads = []
        for one in cells:
            if one.testbed.name == name:
                gaps = _gaps(one.pair) if one.pair else {}
                link = f"[{one.recipe.name}](../{one.recipe.name}/README.md)"
                spreads.append([link, _spread(gaps) if gaps else UNMEASURED, str(len(gaps) or one.experiment.seeds)])
        heads = ["recipe", "standard deviation of its difference to the control, nats", "seeds"]
        blocks.append(_table(heads, spreads) if spreads else "No recipe is compared on it yet.")
    return "\n" + "\n\n".join(blocks) + "\n\n"


def noise_of(testbed: Testbed) -> dict[str, Any]:
    """The `noise.json` of a testbed; {} if there is none, or if the testbed has changed since."""
    noise = read_committed(TESTBEDS / testbed.name / "noise.json")
    return noise if noise.get("setting") == settings_on(testbed, CONTROL) else {}


def _noise(testbed: Testbed) -> Iterator[str]:
    noise = noise_of(testbed)
    if not noise:
        yield f"The noise: {UNMEASURED}."
        return
    rows = []
    for name, null in noise["nulls"].items():
        found, low, high = deviation(null)
        mean = signed(mean_difference(null))
        rows.append([NULLS.get(name, name), f"{found:.4f} ({low:.4f} to {high:.4f})", mean, str(len(null["seeds"]))])
    losses = next(iter(noise["nulls"].values()))["control"]
    heads = ["two runs of a seed that differ in", "standard deviation of the difference, nats (95% interval)", "mean difference", "seeds"]
    yield _table(heads, rows)
    yield (
        f"The loss of the control itself has a standard deviation of {np.std(losses, ddof=1):.4f} over these {len(losses)} seeds. All rows"
        f" have the same runs of the control. Measured on {noise['machine']}, commit {_listed(one[:7] for one in noise['commits'])}."
    )


# --- writing --------------------------------------------------------------------------------------------------------------------------


def pages(cells: list[Published]) -> dict[Path, str]:
    """The text of every page."""
    parts = {
        README: {"recipes": short_table(cells)},
        INDEX: {"results": index_table(cells), "questions": questions(), "excluded pairs": excluded_pairs()},
        TESTBEDS / "README.md": {"testbeds": testbeds_part(cells)},
    }
    for recipe in read_recipes():
        own = [one for one in cells if one.recipe.name == recipe.name]
        parts[ROOT / "recipes" / recipe.name / "README.md"] = {"results": measured_part(recipe, own)}
    return {page: with_parts(page, page.read_text(encoding="utf-8"), own) for page, own in parts.items()}


def with_parts(page: Path, text: str, parts: Mapping[str, str]) -> str:
    """`text`, the content of `page`, with the named parts replaced. Raises ValueError if the page lacks a part's lines."""
    for name, part in parts.items():
        begin = BEGIN.format(name)
        before, _, rest = text.partition(begin)
        _, end, after = rest.partition(END)
        if not end:
            raise ValueError(f"{page}: lacks the part '{name}'; add the lines {begin.strip()} and {END.strip()} where it belongs")
        text = before + begin + part + end + after
    return text


def pictures(cells: list[Published]) -> dict[Path, Callable[[Path], object]]:
    """Every picture, with the function that draws it into a file."""
    rows = []
    for one in cells:
        note, figures = ("outdated" if one.note == OUTDATED else one.note), one.pair.published_figures if one.pair else {}
        outcomes = dict.fromkeys(one.experiment.claims) | {verdict.claim: verdict.outcome for verdict in one.verdicts}
        rows.append(row(one.testbed.name, one.recipe.name, figures, outcomes, note))
    made: dict[Path, Callable[[Path], object]] = {ROOT / "recipes" / "forest.png": partial(draw_forest, rows)}
    for name in dict.fromkeys(one.recipe.name for one in cells):
        pairs = tuple(one.pair for one in cells if one.recipe.name == name and one.pair)
        if pairs:
            sides = tuple(side for pair in pairs for side in (pair.control, pair.side))
            made[ROOT / "recipes" / name / "loss.png"] = partial(draw_losses, Comparison(sides, pairs))
    for file in ROOT.glob("recipes/**/tuning.json"):
        made[file.with_suffix(".png")] = partial(draw_tuning, read_committed(file))
    for file, draw in ((ROOT / name, draw) for name, draw in RUNS.items()):
        if file.exists():
            made[file.with_suffix(".png")] = partial(draw, read_metrics(file))
    return made


def write_pages() -> None:
    """Write every page, draw every picture, and remove pictures of recipes without results."""
    cells = published()
    drawn = pictures(cells)
    for file in ROOT.glob("recipes/*/loss.png"):
        if file not in drawn:
            file.unlink()
    for file, draw in drawn.items():
        draw(file)
    for page, text in pages(cells).items():
        write_atomically(page, text)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m launch.comparison.recipe_pages --write")
    run_command(write_pages)
