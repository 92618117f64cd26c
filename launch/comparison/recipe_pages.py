"""Generates pages and pictures from the committed data: recipe.json, testbed.json, results.json, tuning.json and RUNS.

make pages                   # python -m launch.comparison.recipe_pages --write

In README.md, in the index (recipes/README.md), on each recipe's page and on the page of the testbeds, the parts between the lines `BEGIN`
and `END` are generated: one short table each. Everything else that was measured is in the results.md beside a page, which is generated as a
whole. Verdicts are recomputed from the measures of the published runs. A test compares the pages with the output of this module.
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
from launch.comparison.comparison import LOSS, Comparison, Pair, compare_experiments, signed
from launch.comparison.forest import Row, draw_forest, row
from launch.comparison.html_report import draw_losses, figure_row
from launch.comparison.runs import read_stored_run
from launch.comparison.trials import corpus_command
from launch.comparison.tuning import draw_tuning, in_words, numbers_in, setting_name
from launch.comparison.verdicts import SIGNS, Interval, Verdict
from launch.errors import run_command
from launch.formats.files import read_committed
from launch.formats.metrics import read_metrics
from launch.training.run_folder.picture import draw_loss
from launch.training.run_folder.run_json import commits_of
from recipes.registry import ROOT, TESTBEDS, Experiment, Recipe, Testbed, read_recipe, read_recipes, read_testbeds, technique_classes

INDEX = ROOT / "recipes" / "README.md"
README = ROOT / "README.md"
RESULTS, DETAILS = "results.json", "results.md"

#: The lines around a generated part.
BEGIN, END = "<!-- {}, by `make pages` -->\n", "<!-- end -->\n"
UNMEASURED = "not measured yet"
#: Shown for results whose claims or testbed were changed after publication.
OUTDATED = "measured before the claims or the testbed were changed, so not judged"
#: The columns of a recipe's table: heading -> the figure, and whether its difference or its ratio to the control is shown.
COLUMNS = {
    "loss − control's": (LOSS, "difference"),
    "time per token ÷ control's": ("tokens_per_second", "ratio"),
    "memory ÷ control's": ("peak_memory_bytes", "ratio"),
    "bytes ÷ control's": ("bytes_sent", "ratio"),
}
#: Measure that a recipe claims -> its group in the picture of all recipes; the first that it has.
PURPOSES = {"bytes": "fewer bytes", "step_time": "time or memory", "loss": "loss"}
#: Single runs that a page shows: the file with the run's lines, and what draws the picture beside it.
RUNS: dict[str, Callable[[list[dict[str, Any]], Path], None]] = {
    "benchmarks/make_pretrain.jsonl": partial(draw_loss, title="make pretrain: nano, ZeRO 1, bf16", initial_loss=math.log(8192)),
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
    # Earlier commits also planned with an `expected` value, which no verdict depends on.
    claims = [{key: value for key, value in claim.items() if key != "expected"} for claim in experiment.get("claims", [])]
    experiment = {**experiment, **({"claims": claims} if "claims" in experiment else {})}
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
        """One per claim; empty without a pair."""
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


# --- a recipe's page and its results.md ---------------------------------------------------------------------------------------------


def measured_part(recipe: Recipe, own: list[Published]) -> str:
    """The results on a recipe's page: a row per testbed, and the curves."""
    if not own:
        return "\nIt has no experiment of its own.\n\n"
    shown = [heading for heading, (name, _) in COLUMNS.items() if any(one.pair and name in one.pair.published_figures for one in own)]
    shown = shown or [*COLUMNS][:1]
    rows = [[_link(one.testbed), *(_cell(one, heading) for heading in shown), _claims(one)] for one in own]
    blocks = [_table(["testbed", *shown, "claims"], rows)]
    if any(one.pair for one in own):
        blocks.append(f"![Validation loss over tokens, and the difference to the control, of {recipe.name} on each testbed](loss.png)")
    blocks.append(f"Means of the pairs, with 95% intervals. All figures, seeds, sweeps and the history: [{DETAILS}]({DETAILS}).")
    return "\n" + "\n\n".join(blocks) + "\n\n"


def _cell(one: Published, heading: str) -> str:
    """The estimate in a column, with its 95% interval."""
    name, scale = COLUMNS[heading]
    found = _estimate(one.pair, name, scale)
    return UNMEASURED if one.pair is None and name == LOSS else "–" if found is None else _with_interval(found, scale)


def _estimate(pair: Pair | None, name: str, scale: str) -> Interval | None:
    """The difference or the ratio of a figure; for the speed, the ratio of the times."""
    figure = pair.published_figures.get(name) if pair else None
    if figure is None:
        return None
    found = figure.difference if scale == "difference" else figure.ratio
    return found.inverse() if found and name == "tokens_per_second" else found


def _with_interval(found: Interval, scale: str) -> str:
    write = "{:.3f}".format if scale == "ratio" else lambda value: signed(value) if value else "0"
    interval = f" ({write(found.low)} to {write(found.high)})" if found.low is not None and found.high is not None else ""
    return write(found.mean) + interval


def _claims(one: Published) -> str:
    """The claims on a testbed with their verdicts."""
    outcomes = {verdict.claim: f" {SIGNS[verdict.outcome]}" for verdict in one.verdicts}
    return ", ".join(f"`{claim.label}`{outcomes.get(claim, '')}" for claim in one.experiment.claims) or "–"


def details(recipe: Recipe, own: list[Published]) -> str:
    """The results.md of a recipe: for each testbed what was claimed and measured, by seed; the sweeps; what was changed over time."""
    blocks = [f"# Results of {recipe.name}", f"Generated by `make pages` from `{RESULTS}` and `tuning.json`. [The recipe](README.md)"]
    blocks += [block for one in own for block in _measured_on(one)]
    if swept := read_committed(ROOT / "recipes" / recipe.name / "tuning.json"):
        blocks += ["## Sweeps", "![Final validation loss over each swept setting, of the recipe and its control](tuning.png)"]
        blocks.append(f"Machines: {'; '.join(_machines(name, one) for name, one in swept.items())}.")
    if recipe.history:
        blocks += ["## History", "\n".join(f"- {sentence}" for sentence in recipe.history)]
    return "\n\n".join(blocks) + "\n"


def _machines(testbed: str, swept: dict[str, Any]) -> str:
    """The machine of a recipe's sweep on a testbed, and of its control's, which is published in another file."""
    others = dict.fromkeys(
        read_committed(ROOT / arm["published_in"])[testbed]["machine"] for arm in swept["arms"].values() if "published_in" in arm
    )
    return f"{testbed} {swept['machine']} (control: {_listed(others)})"


def _measured_on(one: Published) -> Iterator[str]:
    testbed, entry, pair = one.testbed, one.entry, one.pair
    yield f"## {testbed.name}"
    yield f"{testbed.title}; {one.experiment.seeds} seeds planned."
    if entry is None or pair is None:
        claims = "\n".join(f"- {claim}" for claim in one.experiment.claims)
        rest = f" The claims:\n\n{claims}" if claims else " No claims yet."
        yield f"{one.note.capitalize()}.{rest}"
        return
    description = pair.side.runs[0].description
    turns = "interleaved" if pair.interleaved else "not interleaved, so times are not compared"
    runs = dict.fromkeys(commit[:7] for run in (*pair.side.runs, *pair.control.runs) for commit in commits_of(run.description))
    yield (
        f"Seeds {_listed(pair.seeds)}, {turns}, on {description['ranks']} {'rank' if description['ranks'] == 1 else 'ranks'} of"
        f" {entry['machine']}; learning rate {description['lr']:g} (control: {pair.control.runs[0].description['lr']:g}). Commits: claims"
        f" {entry['claims_commit'][:7]}, tuned setting {entry['plan_commit'][:7]}, runs {_listed(runs)}."
    )
    yield f"    {entry['command']}"
    if verdicts := one.verdicts:
        yield "\n".join(f"- {SIGNS[one.outcome]} **{one.outcome}**: {one.claim}; measured: {one.reason}." for one in verdicts)
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


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def _link(testbed: Testbed) -> str:
    return f"[{testbed.name}](../testbeds/README.md)"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (heads, *rows)]
    return "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:]])


# --- the index, the README and the testbeds -------------------------------------------------------------------------------------------


def index_table(cells: list[Published]) -> str:
    """All recipes as a Markdown table, with the verdicts on their claims."""
    rows = []
    for recipe in read_recipes():
        own = [one for one in cells if one.recipe.name == recipe.name]
        claims = "; ".join(f"{one.testbed.name}: {_claims(one)}" for one in own if one.experiment.claims) or "–"
        link = f"[{recipe.name}]({recipe.name}/README.md)"
        rows.append([link, f"`{recipe.config}`", f"`{recipe.control}`", claims, recipe.needs or "–"])
    return f"\n{_table(['recipe', 'DeepSpeed JSON', 'control', 'claims', 'needs'], rows)}\n"


def short_table(cells: list[Published]) -> str:
    """The recipes for the project's README: what each does, and one figure for loss, step time, and memory or bytes."""
    by_tokens = sorted(cells, key=lambda one: -_tokens(one))
    rows = []
    for recipe in read_recipes():
        pairs = [one.pair for one in by_tokens if one.recipe.name == recipe.name and one.pair]

        def first(name: str, scale: str, pairs: Sequence[Pair] = pairs) -> Interval | None:
            return next(filter(None, (_estimate(pair, name, scale) for pair in pairs)), None)

        loss, time, memory, sent = (first(name, scale) for name, scale in COLUMNS.values())
        half = "" if loss is None or loss.high is None else f" ± {loss.high - loss.mean:.3f}"
        sizes = [f"{one.mean:.2f}× {what}" for one, what in ((sent, "bytes"), (memory, "memory")) if one and not _includes_1(one)]
        rows.append(
            [
                f"[{recipe.name}](recipes/{recipe.name}/README.md)",
                recipe.title,
                "–" if loss is None else f"{signed(loss.mean, '.3f') if round(loss.mean, 3) else '0'}{half}",
                "–" if time is None else f"{time.mean:.2f}×",
                sizes[0] if sizes else "–",
            ]
        )
    return _table(["recipe", "what it does", "loss (nats)", "time per token", "memory or bytes sent"], rows) + "\n"


def _includes_1(ratio: Interval) -> bool:
    """Whether a ratio differs from 1 by less than its interval, or than two digits show."""
    return ratio.low is None or ratio.high is None or ratio.low <= 1 <= ratio.high or f"{ratio.mean:.2f}" == "1.00"


def _tokens(one: Published) -> int:
    return int(one.pair.side.runs[0].description["total_tokens"]) if one.pair else 0


def excluded_pairs() -> str:
    """The pairs of recipes that cannot be combined, with what both control, as a Markdown table."""
    classes = {cls.__module__.split(".")[1]: cls.declaration for cls in technique_classes()}
    pairs = [(one, other, classes[one].shared_with(classes[other])) for one, other in combinations(classes, 2)]
    return _table(["recipe", "recipe", "both control"], [(one, other, str(shared)) for one, other, shared in pairs if shared]) + "\n"


def testbeds_part(cells: list[Published]) -> str:
    """The testbeds as one table: the model and budget, the control's rate, and the spread of a pair."""
    rows = []
    for testbed in read_testbeds():
        gaps = [_gaps(one.pair) for one in cells if one.testbed.name == testbed.name and one.pair]
        spreads = sorted(_spread(own) for own in gaps if own)
        spread = " to ".join(dict.fromkeys((spreads[0], spreads[-1]))) if spreads else UNMEASURED
        rate = {**testbed.flags, **testbed.tuned}.get("lr", "of the preset")
        rows.append([f"[{testbed.name}]({DETAILS}#{_anchor(testbed.name)})", testbed.device, testbed.title, in_words(rate), spread])
    heads = ["testbed", "device", "model and budget", "learning rate of the control", "standard deviation of a pair, by recipe (nats)"]
    return f"\n{_table(heads, rows)}\n\n"


def _anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def testbed_details(cells: list[Published]) -> str:
    """The results.md of the testbeds: the settings, the sweep and the spread of the pairs of each."""
    blocks = ["# Settings and sweeps of the testbeds", "Generated by `make pages` from `testbed.json` and `tuning.json`."]
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
        if unswept:
            blocks.append(f"The sweep: {UNMEASURED}.")
        elif testbed.sweep:
            blocks.append(f"![Final validation loss of the control over each swept setting on {name}]({name}/tuning.png)")
            blocks.append(f"Machine of the sweep: {read_committed(TESTBEDS / name / 'tuning.json')[name]['machine']}.")
        spreads = []
        for one in cells:
            if one.testbed.name == name:
                gaps = _gaps(one.pair) if one.pair else {}
                link = f"[{one.recipe.name}](../{one.recipe.name}/{DETAILS})"
                spreads.append([link, _spread(gaps) if gaps else UNMEASURED, str(len(gaps) or one.experiment.seeds)])
        heads = ["recipe", "standard deviation of its difference to the control, nats", "seeds"]
        blocks.append(_table(heads, spreads) if spreads else "No recipe is compared on it yet.")
    return "\n\n".join(blocks) + "\n"


# --- writing --------------------------------------------------------------------------------------------------------------------------


def pages(cells: list[Published]) -> dict[Path, str]:
    """The text of every page."""
    parts = {
        README: {"recipes": short_table(cells)},
        INDEX: {"results": index_table(cells), "excluded pairs": excluded_pairs()},
        TESTBEDS / "README.md": {"testbeds": testbeds_part(cells)},
    }
    whole = {TESTBEDS / DETAILS: testbed_details(cells)}
    for recipe in read_recipes():
        own = [one for one in cells if one.recipe.name == recipe.name]
        parts[ROOT / "recipes" / recipe.name / "README.md"] = {"results": measured_part(recipe, own)}
        if own:
            whole[ROOT / "recipes" / recipe.name / DETAILS] = details(recipe, own)
    return whole | {page: with_parts(page, page.read_text(encoding="utf-8"), own) for page, own in parts.items()}


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
    made: dict[Path, Callable[[Path], object]] = {ROOT / "recipes" / "forest.png": partial(draw_forest, forest_rows(cells))}
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


def forest_rows(cells: list[Published]) -> list[Row]:
    """A row for each recipe that claims more than an equal loss, on its largest measured testbed, grouped by what it claims."""
    largest = {one.recipe.name: one for one in sorted(cells, key=_tokens) if one.pair}
    rows = []
    for name, one in sorted(largest.items()):
        claims = [claim for experiment in one.recipe.experiments.values() for claim in experiment.claims]
        purpose = next((text for measure, text in PURPOSES.items() if measure in {claim.measure for claim in claims}), "")
        if one.pair and any(claim.question != "equal" for claim in claims):
            outcomes = {verdict.claim: verdict.outcome for verdict in one.verdicts}
            rows.append(row(purpose, f"{name} ({one.testbed.name})", one.pair.published_figures, outcomes))
    return sorted(rows, key=lambda one: one.group)


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
