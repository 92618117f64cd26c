"""Generates pages and pictures from the committed data: recipe.json, testbed.json, results.json, tuning.json and RUNS.

make pages                   # python -m launch.comparison.recipe_pages --write

In README.md, docs/configuration.md, the index (recipes/README.md), on each recipe's page and on the page of the testbeds, the parts between
the lines `BEGIN` and `END` are generated: one short table each. Everything else that was measured is in the results.md beside a page, which
is generated as a whole. Verdicts are recomputed from the measures of the published runs. A test compares the pages with the output of this
module.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from data_pipeline.staging import write_atomically
from launch.comparison import ladder, tables
from launch.comparison.comparison import Comparison, Pair, compare_experiments
from launch.comparison.pictures import draw_forest, draw_losses
from launch.comparison.runs import read_stored_run
from launch.comparison.tables import COLUMNS, LOSS_COLUMN, Table, signed
from launch.comparison.tuning import draw_tuning, in_words
from launch.comparison.verdicts import SIGNS, Interval
from launch.errors import run_command
from launch.formats.files import read_committed
from launch.formats.metrics import read_metrics
from launch.training.run_folder.picture import draw_loss
from launch.training.run_folder.run_json import commits_of
from model.accounting import parameter_count
from model.presets import PRESETS, GPTConfig, shape_of
from recipes.registry import (
    LADDER,
    ROOT,
    TESTBEDS,
    Experiment,
    Recipe,
    Testbed,
    read_recipe,
    read_recipes,
    read_testbeds,
    technique_classes,
)

INDEX = ROOT / "recipes" / "README.md"
README = ROOT / "README.md"
RESULTS, DETAILS = "results.json", "results.md"

#: The lines around a generated part.
BEGIN, END = "<!-- {}, by `make pages` -->\n", "<!-- end -->\n"
UNMEASURED = "not measured yet"
#: Shown for results whose claims or testbed were changed after publication.
OUTDATED = "measured before the claims or the testbed were changed, so not judged"
#: Measure that a recipe claims -> its group in the picture of all recipes; the first that it has.
PURPOSES = {"bytes": "fewer bytes", "step_time": "time or memory", "loss": "loss"}
#: Single runs that a page shows: the file with the run's lines, and what draws the picture beside it.
RUNS: dict[str, Callable[[list[dict[str, Any]], Path], None]] = {
    "benchmarks/make_pretrain.jsonl": partial(draw_loss, title="make pretrain: 5.3M parameters, ZeRO 1, bf16", initial_loss=math.log(8192)),
}
#: Fields of a testbed.json on which the numbers of its runs depend. No testbed has "ranks" any more; published plans have it as null.
SETTING = ("flags", "tuned", "target_loss", "ranks")


# --- the published data ---------------------------------------------------------------------------------------------------------------


def protocol(recipe: str, testbed: str, read: Callable[[str], dict[str, Any]] = lambda file: read_committed(ROOT / file)) -> dict[str, Any]:
    """What an experiment states beforehand: seeds and claims, the testbed's setting, both sides; {} if the recipe has no such experiment.

    read: returns the content of a file, {} for a missing one.
    """
    config = read_recipe(ROOT / "recipes" / recipe).control
    control = next((one.name for one in read_recipes() if one.config == config), Path(config).stem)
    own, other = (read(f"recipes/{name}/recipe.json") for name in (recipe, control))
    setting = read(f"recipes/testbeds/{testbed}/testbed.json")
    experiment = own.get("experiments", {}).get(testbed)
    if experiment is None:
        return {}
    # Earlier commits also stated an `expected` value, which no verdict depends on.
    claims = [{key: value for key, value in claim.items() if key != "expected"} for claim in experiment.get("claims", [])]
    experiment = {**experiment, **({"claims": claims} if "claims" in experiment else {})}
    tuned = other.get("experiments", {}).get(testbed, {}).get("tuned")
    sides = {**{key: own.get(key) for key in ("config", "control", "ranks")}, "tuned_control": tuned}
    return {"experiment": experiment, "setting": {key: setting.get(key) for key in SETTING}, "sides": sides}


@dataclass
class RecipeOnTestbed:
    """A recipe on a testbed.

    entry: of results.json; None if nothing was published. pair: its runs, compared; None if nothing was published for the current claims.
    """

    recipe: Recipe
    testbed: Testbed
    experiment: Experiment
    entry: dict[str, Any] | None
    pair: Pair | None = None


def recipes_on_testbeds() -> list[RecipeOnTestbed]:
    """Every recipe on each of its testbeds, ordered by testbed, with the verdicts.

    Raises ValueError if results were published for an experiment that its recipe no longer has: they would vanish from the pages.
    """
    testbeds = {testbed.name: testbed for testbed in read_testbeds()}
    cells = []
    for recipe in read_recipes():
        entries = read_committed(ROOT / "recipes" / recipe.name / RESULTS)
        if lost := sorted(entries.keys() - recipe.experiments.keys()):
            raise ValueError(f"recipes/{recipe.name}: {RESULTS} has results on {lost[0]}; keep this experiment in recipe.json")
        cells += [RecipeOnTestbed(recipe, testbeds[name], own, entries.get(name)) for name, own in recipe.experiments.items()]
    cells.sort(key=lambda one: (one.testbed.device, one.testbed.name, one.recipe.name))
    judged = [(one, one.entry) for one in cells if one.entry and one.entry["planned"] == protocol(one.recipe.name, one.testbed.name)]
    stored = []
    for one, entry in judged:
        control, own = ([read_stored_run(run) for run in entry[side]] for side in ("control", "recipe"))
        stored.append((one.recipe, one.testbed, control, own))
    for (one, _), pair in zip(judged, compare_experiments(stored).pairs, strict=True):
        one.pair = pair
    return cells


# --- a recipe's page and its results.md ---------------------------------------------------------------------------------------------


def measured_part(recipe: Recipe, own: list[RecipeOnTestbed]) -> str:
    """The results on a recipe's page: a row per testbed, and the curves."""
    if not own:
        return "\nIt has no experiment of its own.\n\n"
    figures = [one.pair.published_figures if one.pair else {} for one in own]
    shown = [heading for heading, (name, _) in COLUMNS.items() if any(name in found for found in figures)] or [LOSS_COLUMN]
    rows = []
    for one, found in zip(own, figures, strict=True):
        cells = [UNMEASURED if heading == LOSS_COLUMN and not one.pair else tables.cell(found, heading) for heading in shown]
        rows.append([f"[{one.testbed.name}](../testbeds/README.md)", *cells, _claims(one)])
    blocks = [Table("Results", ["testbed", *shown, "claims"], rows).markdown()]
    if any(one.pair for one in own):
        blocks.append(f"![Validation loss over tokens, and the difference to the control, of {recipe.name} on each testbed](loss.png)")
    if both := ladder.published_sides(recipe):
        blocks += [ladder.table(*both).markdown(), ladder.whether_gain_holds(ladder.gains(*both))]
        blocks.append(f"![Compute saved by {recipe.name} over compute](ladder.png)")
    legend = f"Means of the pairs, with 95% intervals; {', '.join(f'{sign} {outcome}' for outcome, sign in SIGNS.items())}."
    blocks.append(f"{legend} All figures, seeds, sweeps and the history: [{DETAILS}]({DETAILS}).")
    return "\n" + "\n\n".join(blocks) + "\n\n"


def _claims(one: RecipeOnTestbed) -> str:
    """The claims on a testbed with their verdicts."""
    outcomes = {verdict.claim: f" {SIGNS[verdict.outcome]}" for verdict in (one.pair.verdicts if one.pair else ())}
    return ", ".join(f"`{claim.label}`{outcomes.get(claim, '')}" for claim in one.experiment.claims) or "–"


def details(recipe: Recipe, own: list[RecipeOnTestbed]) -> str:
    """The results.md of a recipe: for each testbed what was claimed and measured, by seed; the sweeps; what was changed over time."""
    blocks = [f"# Results of {recipe.name}", f"Generated by `make pages` from `{RESULTS}` and `tuning.json`. [The recipe](README.md)"]
    blocks += [block for one in own for block in _measured_on(one)]
    if (ROOT / "recipes" / recipe.name / "tuning.json").exists():
        blocks += ["## Sweeps", "![Final validation loss over each swept setting, of the recipe and its control](tuning.png)"]
    if recipe.history:
        blocks += ["## History", "\n".join(f"- {sentence}" for sentence in recipe.history)]
    return "\n\n".join(blocks) + "\n"


def _measured_on(one: RecipeOnTestbed) -> Iterator[str]:
    testbed, entry, pair = one.testbed, one.entry, one.pair
    yield f"## {testbed.name}"
    yield f"{testbed.title}; {one.experiment.seeds} seeds planned."
    if entry is None or pair is None:
        claims = "\n".join(f"- {claim}" for claim in one.experiment.claims)
        rest = f" The claims:\n\n{claims}" if claims else " No claims yet."
        yield f"{(OUTDATED if entry else UNMEASURED).capitalize()}.{rest}"
        return
    description = pair.treatment.runs[0].description
    turns = "interleaved" if pair.interleaved else "not interleaved, so times are not compared"
    commits = dict.fromkeys(commit[:7] for run in (*pair.treatment.runs, *pair.control.runs) for commit in commits_of(run.description))
    yield (
        f"Seeds {', '.join(map(str, pair.seeds))}, {turns}, on {description['ranks']} {'rank' if description['ranks'] == 1 else 'ranks'} of"
        f" {entry['machine']}; learning rate {description['lr']:g} (control: {pair.control.runs[0].description['lr']:g}). Commits of the"
        f" runs: {', '.join(commits)}."
    )
    yield f"    {entry['command']}"
    if pair.verdicts:
        yield "\n".join(f"- {verdict}" for verdict in tables.verdicts(pair))
    yield tables.figures(pair, published=True).markdown()
    if gaps := tables.by_seed(pair):
        yield gaps


# --- the index, the README and the testbeds -------------------------------------------------------------------------------------------


def index_table(cells: list[RecipeOnTestbed]) -> str:
    """All recipes as a Markdown table, with the verdicts on their claims."""
    rows = []
    for recipe in read_recipes():
        own = [one for one in cells if one.recipe.name == recipe.name]
        claims = "; ".join(f"{one.testbed.name}: {_claims(one)}" for one in own if one.experiment.claims) or "–"
        link = f"[{recipe.name}]({recipe.name}/README.md)"
        rows.append([link, f"`{recipe.config}`", f"`{recipe.control}`", claims, recipe.needs or "–"])
    return f"\n{Table('Recipes', ['recipe', 'DeepSpeed JSON', 'control', 'claims', 'needs'], rows).markdown()}\n"


def short_table(cells: list[RecipeOnTestbed]) -> str:
    """The measured recipes for the project's README: what each does, and one figure for loss, step time, and memory or bytes.

    Each figure is of the largest testbed that has it. † marks one of another testbed than the loss, ‡ a loss within its testbed's `noise`.
    """
    by_tokens = sorted(cells, key=lambda one: -_tokens(one))
    rows = []
    for recipe in read_recipes():
        pairs = [one.pair for one in by_tokens if one.recipe.name == recipe.name and one.pair]
        if not pairs:
            continue
        found = [[(pair, one) for pair in pairs if (one := tables.estimate(pair.published_figures, heading))] for heading in COLUMNS]
        (place, loss), (timed, time), memory, sent = (of_pairs[0] if of_pairs else (None, None) for of_pairs in found)
        half = "" if loss is None or loss.high is None else f" ± {loss.high - loss.mean:.3f}"
        noisy = loss and place and place.testbed and abs(loss.mean) < place.testbed.noise
        sizes = [
            f"{one.mean:.2f}× {what}{'†' * (pair is not place)}"
            for (pair, one), what in ((sent, "bytes"), (memory, "memory"))
            if one and not _includes_1(one)
        ]
        rows.append(
            [
                f"[{recipe.name}](recipes/{recipe.name}/README.md)",
                recipe.title,
                "–" if loss is None else f"{signed(loss.mean, '.3f') if round(loss.mean, 3) else '0'}{half}{'‡' * bool(noisy)}",
                "–" if time is None else f"{time.mean:.2f}×{'†' * (timed is not place)}",
                sizes[0] if sizes else "–",
            ]
        )
    heads = ["recipe", "what it does", "loss (nats)", "time per token", "memory or bytes sent"]
    return Table("Recipes", heads, rows).markdown() + "\n"


def _includes_1(ratio: Interval) -> bool:
    """Whether a ratio differs from 1 by less than its interval, or than two digits show."""
    return ratio.low is None or ratio.high is None or ratio.low <= 1 <= ratio.high or f"{ratio.mean:.2f}" == "1.00"


def _tokens(one: RecipeOnTestbed) -> int:
    return tables.tokens(one.pair) if one.pair else 0


def excluded_pairs() -> str:
    """The pairs of recipes that cannot be combined, with what both control, as a Markdown table."""
    classes = {cls.__module__.split(".")[1]: cls.declaration for cls in technique_classes()}
    pairs = [(one, other, classes[one].shared_with(classes[other])) for one, other in combinations(classes, 2)]
    rows = [(one, other, str(shared)) for one, other, shared in pairs if shared]
    return Table("Excluded pairs", ["recipe", "recipe", "both control"], rows).markdown() + "\n"


def testbeds_part(cells: list[RecipeOnTestbed]) -> str:
    """The testbeds as one table: the model and budget, the control's rate, and the spread of a pair."""
    rows = []
    for testbed in read_testbeds():
        gaps = [tables.loss_gaps(one.pair) for one in cells if one.testbed.name == testbed.name and one.pair]
        spreads = sorted(tables.spread(own) for own in gaps if own)
        spread = " to ".join(dict.fromkeys((spreads[0], spreads[-1]))) if spreads else UNMEASURED
        rate = {**testbed.flags, **testbed.tuned}.get("lr", "of the preset")
        rows.append([_settings_and_sweep(testbed), testbed.device, testbed.title, in_words(rate), spread])
    heads = ["testbed", "device", "model and budget", "learning rate of the control", "standard deviation of a pair, by recipe (nats)"]
    return f"\n{Table('Testbeds', heads, rows).markdown()}\n\n"


def _settings_and_sweep(testbed: Testbed) -> str:
    """Links to the files of a testbed."""
    swept = (TESTBEDS / testbed.name / "tuning.json").exists()
    return f"[{testbed.name}]({testbed.name}/testbed.json)" + (f" ([sweep]({testbed.name}/tuning.png))" if swept else "")


def presets_table() -> str:
    """The sizes and training values of the presets."""
    flags = ("n_layer", "n_head", "d_model", "seq_len", "global_batch_size", "micro_batch_size", "lr", "warmup_steps", "steps")
    rows = []
    for name, preset in PRESETS.items():
        values = vars(preset) | vars(preset.shape)
        sizes = shape_of(preset.shape, preset.architecture, preset.published)
        count = parameter_count(GPTConfig(**asdict(sizes), vocab_size=preset.vocab_size))
        rows.append([f"`{name}`", f"{count / 1e6:,.0f} M", *(f"{values[flag]:,}" for flag in flags)])
    return f"""\n{Table("Presets", ["preset", "parameters", *(f"`--{flag}`" for flag in flags)], rows).markdown()}\n\n"""


# --- writing --------------------------------------------------------------------------------------------------------------------------


def pages(cells: list[RecipeOnTestbed]) -> dict[Path, str]:
    """The text of every page."""
    parts = {
        README: {"recipes": short_table(cells)},
        INDEX: {"results": index_table(cells), "excluded pairs": excluded_pairs()},
        TESTBEDS / "README.md": {"testbeds": testbeds_part(cells)},
        ROOT / "docs" / "configuration.md": {"presets": presets_table()},
    }
    whole = {}
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


def pictures(cells: list[RecipeOnTestbed]) -> dict[Path, Callable[[Path], object]]:
    """Every picture, with the function that draws it into a file."""
    made: dict[Path, Callable[[Path], object]] = {ROOT / "recipes" / "forest.png": partial(draw_forest, forest_rows(cells))}
    for name in dict.fromkeys(one.recipe.name for one in cells):
        pairs = tuple(one.pair for one in cells if one.recipe.name == name and one.pair)
        if pairs:
            sides = tuple(side for pair in pairs for side in (pair.control, pair.treatment))
            made[ROOT / "recipes" / name / "loss.png"] = partial(draw_losses, Comparison(sides, pairs))
    for file in ROOT.glob("recipes/**/tuning.json"):
        made[file.with_suffix(".png")] = partial(draw_tuning, read_committed(file))
    climbed = {one.name: both for one in read_recipes() if (both := ladder.published_sides(one))}
    for name, both in climbed.items():
        made[ROOT / "recipes" / name / "ladder.png"] = partial(ladder.draw_ladder, {name: both})
    if climbed:
        made[LADDER.parent / "ladder.png"] = partial(ladder.draw_ladder, climbed)
    for file, draw in ((ROOT / name, draw) for name, draw in RUNS.items()):
        if file.exists():
            made[file.with_suffix(".png")] = partial(draw, read_metrics(file))
    return made


def forest_rows(cells: list[RecipeOnTestbed]) -> list[tuple[str, str, Pair]]:
    """A row for each recipe that claims more than an equal loss, on its largest measured testbed, grouped by what it claims."""
    largest = {one.recipe.name: one for one in sorted(cells, key=_tokens, reverse=True)[::-1] if one.pair}  # of equal ones the first
    rows = []
    for name, one in sorted(largest.items()):
        claims = [claim for experiment in one.recipe.experiments.values() for claim in experiment.claims]
        purpose = next((text for measure, text in PURPOSES.items() if measure in {claim.measure for claim in claims}), "")
        if one.pair and any(claim.question != "equal" for claim in claims):
            rows.append((purpose, f"{name} ({one.testbed.name})", one.pair))
    return sorted(rows, key=lambda row: row[0])


def write_pages() -> None:
    """Write every page, and draw every picture."""
    cells = recipes_on_testbeds()
    for file, draw in pictures(cells).items():
        draw(file)
    for page, text in pages(cells).items():
        write_atomically(page, text)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m launch.comparison.recipe_pages --write")
    run_command(write_pages)
