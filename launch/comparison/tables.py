"""What a comparison found, as tables and sentences. The terminal, `report.html` and the recipes' pages all show these.

Intervals are 95% confidence intervals of the mean over the pairs of a seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from launch.comparison.comparison import LOSS, TO_TARGET, Comparison, Figure, Pair, Side, quantity
from launch.comparison.runs import Run
from launch.comparison.verdicts import SIGNS, Interval
from launch.errors import printable_line
from launch.training.run_folder.provenance import machine_in_words
from model.presets import ModelShape

#: The columns of results: heading -> the figure, and whether its difference or its ratio to the control is shown. The time is per token,
#: because a shorter step with fewer tokens is no gain.
LOSS_COLUMN, TIME_COLUMN = "loss − control's", "time per token ÷ control's"
COLUMNS = {
    LOSS_COLUMN: (LOSS, "difference"),
    TIME_COLUMN: ("tokens_per_second", "ratio"),
    "memory ÷ control's": ("peak_memory_bytes", "ratio"),
    "bytes ÷ control's": ("bytes_sent", "ratio"),
}


@dataclass(frozen=True)
class Table:
    """Cells of text. caption: what the table is, for who cannot see it."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """The table on a page."""
        lines = [f"| {' | '.join(row)} |" for row in (self.heads, *self.rows)]
        return "\n".join([lines[0], "|---" * len(self.heads) + "|", *lines[1:]])

    def text(self) -> str:
        """The table on a terminal."""
        lines = [[printable_line(cell) for cell in row] for row in (self.heads, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in lines)


# --- numbers --------------------------------------------------------------------------------------------------------------------------


def signed(value: float, form: str = ".4f") -> str:
    """A difference with its sign, U+2212 for minus."""
    return f"{value:+{form}}".replace("-", "−")


def estimate(figures: Mapping[str, Figure], heading: str) -> Interval | None:
    """The difference or the ratio of a column; for the speed, the ratio of the times."""
    name, scale = COLUMNS[heading]
    figure = figures.get(name)
    if figure is None:
        return None
    found = figure.difference if scale == "difference" else figure.ratio
    return found.inverse() if found and name == "tokens_per_second" else found


def cell(figures: Mapping[str, Figure], heading: str) -> str:
    """The estimate of a column with its interval."""
    write = "{:.3f}".format if COLUMNS[heading][1] == "ratio" else lambda value: signed(value) if value else "0"
    return with_interval(estimate(figures, heading), write)


def with_interval(found: Interval | None, write: Callable[[float], str]) -> str:
    """A mean, and its interval in parentheses."""
    if found is None:
        return "–"
    return write(found.mean) + ("" if found.low is None or found.high is None else f" ({write(found.low)} to {write(found.high)})")


def number(name: str, value: float, sign: str = "") -> str:
    """A value of a figure in the figure's unit."""
    _, unit, decimals = quantity(name)
    rounded = round(value / unit, decimals)
    return f"{rounded:{sign},.{decimals}f}".replace("-", "−") if rounded else f"{0:.{decimals}f}"  # no sign before zero


def mean(name: str, values: Sequence[float]) -> str:
    """Mean ± standard deviation over seeds."""
    if not values:
        return "–"
    if reached := len(values) - sum(map(math.isinf, values)):
        if reached < len(values):
            return f"{'reached by' if name in TO_TARGET else 'finite in'} {reached} of {len(values)}"
        deviation = f" ± {number(name, float(np.std(values, ddof=1)))}" if len(values) > 1 else ""
        return number(name, float(np.mean(values))) + deviation
    return "not reached" if name in TO_TARGET else "∞"


# --- sentences ------------------------------------------------------------------------------------------------------------------------


def answer(comparison: Comparison) -> str:
    """What was found, in a sentence, on the largest testbed of each recipe that has a loss: of several recipes, the largest clear gain."""
    if not comparison.pairs:
        return "One configuration, and nothing to compare it with." if len(comparison.sides) == 1 else "Nothing was compared."
    largest: dict[str, Pair] = {}
    for pair in sorted(comparison.pairs, key=lambda pair: (estimate(pair.figures, LOSS_COLUMN) is None, -tokens(pair))):
        largest.setdefault(pair.treatment.name, pair)
    if (count := len(largest)) == 1:
        return _answer(next(iter(largest.values())))
    gaps = {gap.mean: pair for pair in largest.values() if (gap := estimate(pair.figures, LOSS_COLUMN)) and (gap.high or gap.mean) < 0}
    return f"Of {count} comparisons, the largest gain: {_answer(gaps[min(gaps)])}" if gaps else f"None of {count} ends at a lower loss."


def tokens(pair: Pair) -> int:
    """The length of a pair's runs, by which testbeds are ordered."""
    return int(pair.treatment.runs[0].description["total_tokens"])


def _control(side: Side) -> str:
    """The name of a control, with what it is."""
    run = side.runs[0].description
    ranks = f", {run['ranks']} ranks" if run["ranks"] > 1 else ""
    return f"{side.name} ({run['optimizer']['type']}, ZeRO {run['zero_stage']}, {run['precision']}{ranks})"


def _answer(pair: Pair) -> str:
    """Which side of a pair ends at the lower loss and by how much, and how long the same tokens take."""
    control = _control(pair.control) if pair.recipe else pair.control.name
    loss, time = (estimate(pair.published_figures, heading) for heading in (LOSS_COLUMN, TIME_COLUMN))
    if loss is None:
        unfinished = any(run.state == "unfinished" for runs in pair.runs for run in runs)
        why = "a run of each seed is unfinished" if unfinished else "no seed ended on both sides"
        return f"The losses of {pair.name} and {control} cannot be compared: {why}."
    gap = f"{abs(loss.mean):.4f} nats {'above' if loss.mean > 0 else 'below'}" if round(loss.mean, 4) else "at the same loss as"
    interval = "one seed, which shows no noise"
    if loss.low is not None and loss.high is not None:
        interval = f"95%: {signed(loss.low)} to {signed(loss.high)}" + "; the seeds do not tell it from 0" * (loss.low <= 0 <= loss.high)
    lost = sum(own.diverged for _, own in pair.runs)
    where = f" on {pair.testbed.name}" if pair.testbed else ""
    takes = f"; a token takes {time.mean:.2f} times as long" if time else ""
    diverged = f"; {lost} of {len(pair.seeds)} runs diverged and are left out" if lost else ""
    return f"{pair.name} ends {gap} {control}{where} ({interval}){takes}{diverged}."


def caveats(comparison: Comparison) -> list[str]:
    """What a reader must know before they believe the numbers, a line each."""
    return [
        *(f"{run.folder}: {remark}" for side in comparison.sides for run in side.runs for remark in run.remarks),
        *comparison.remarks,
        *(f"{one.recipe} was not run: {one.reason}" for one in comparison.absent),
        *(["exploratory: no claim is judged"] if comparison.pairs and not any(pair.verdicts for pair in comparison.pairs) else []),
    ]


def setting(comparison: Comparison) -> str:
    """The seeds, the model and the budget of the runs, in a sentence."""
    every = [run for side in comparison.sides for run in side.runs]
    shapes = [ModelShape(**run.description["shape"]) for run in every]
    facts = (
        [f"{shape.n_layer} layers, width {shape.d_model}, sequences of {shape.seq_len}{shape.components}" for shape in shapes],
        [f"{run.description['total_tokens']:,} tokens" for run in every],
    )
    seeds = ", ".join(map(str, sorted({run.seed for run in every})))
    turns = ", interleaved" if comparison.pairs and all(pair.interleaved for pair in comparison.pairs) else ""
    return f"Seeds {seeds}{turns}; {'; '.join(' or '.join(dict.fromkeys(texts)) for texts in facts)}." if every else ""


def verdicts(pair: Pair) -> Iterator[str]:
    """The verdicts on the claims of a pair, in sentences."""
    for one in pair.verdicts:
        yield f"{SIGNS[one.outcome]} {one.outcome}: {one.claim}; measured: {one.reason}."


def by_seed(pair: Pair) -> str:
    """The difference of the final loss of each seed, and their spread; empty if fewer than two seeds have both."""
    if not (gaps := loss_gaps(pair)):
        return ""
    values = (f"{seed}: {signed(gaps[seed]) if seed in gaps else 'diverged'}" for seed in pair.seeds)
    return f"Difference of the final loss by seed: {'; '.join(values)}. Standard deviation: {spread(gaps)}."


def loss_gaps(pair: Pair) -> dict[int, float]:
    """Seed -> the difference of the final losses, in nats per token. Empty if fewer than two seeds have both."""
    losses = pair.figures[LOSS].paired_values if LOSS in pair.figures else {}
    return {seed: other - control for seed, (control, other) in losses.items()} if len(losses) > 1 else {}


def spread(gaps: Mapping[int, float]) -> str:
    """The standard deviation of the differences over seeds."""
    return f"{np.std([*gaps.values()], ddof=1):.4f}"


# --- tables ---------------------------------------------------------------------------------------------------------------------------


def ranking(comparison: Comparison) -> Table:
    """All sides with the lowest loss first; those of a testbed together. Without times of runs that were not interleaved."""
    places = {id(side): pair.testbed.name for pair in comparison.pairs if pair.testbed for side in (pair.control, pair.treatment)}
    pairs = {id(pair.treatment): pair for pair in reversed(comparison.pairs)}
    rows: list[tuple[str, float, list[str]]] = []
    for side in comparison.sides:
        pair, place = pairs.get(id(side)), places.get(id(side), "")
        name = pair.name if pair else f"control: {_control(side)}" if comparison.pairs else side.name
        losses = final_losses(side)
        signs = "; ".join(f"{SIGNS[one.outcome]} {one.claim.label}" for one in pair.verdicts) if pair else ""
        cells = [cell(pair.published_figures if pair else {}, heading) for heading in COLUMNS]
        row = [f"{name} on {place}" if len({*places.values()}) > 1 else name, mean(LOSS, losses), *cells, _rates(side), signs or "–"]
        rows.append((place, float(np.mean(losses)) if losses else math.inf, row))
    table = [row for _, _, row in sorted(rows, key=lambda row: row[:2])]
    heads = ["", "final loss (nats)", *COLUMNS, "learning rate", "claims"]
    shown = [column for column in range(len(heads)) if any(row[column] != "–" for row in table)]
    return Table("Ranking by final loss", [heads[column] for column in shown], [[row[column] for column in shown] for row in table])


def final_losses(side: Side) -> list[float]:
    """The final loss of each seed, as all tables have it; +inf for a diverged run."""
    return [run.measures[LOSS] for run in side.by_seed().values() if LOSS in run.measures]


def _rates(side: Side) -> str:
    return ", ".join(dict.fromkeys(f"{run.description['lr']:g}" for run in side.runs if run.description.get("lr")))


def figures(pair: Pair, published: bool = False) -> Table:
    """All figures of a pair. published: without times of runs that were not interleaved."""
    shown = pair.published_figures if published else pair.figures
    heads = ["mean over seeds ± standard deviation", pair.control.name, pair.treatment.name, "difference", "ratio"]
    return Table(f"Figures, {pair.title}", heads, [_figure_row(name, figure) for name, figure in shown.items()])


def _figure_row(name: str, figure: Figure) -> list[str]:
    sides = [mean(name, [*side.values()]) for side in (figure.control, figure.other)]
    difference = with_interval(figure.difference, lambda value: number(name, value, "+"))
    return [quantity(name).label, *sides, difference, with_interval(figure.ratio, "{:.3f}".format)]


def settings(pair: Pair) -> Table:
    """Every setting that differs between the sides of a pair."""

    def shown(value: Any) -> str:
        return "–" if value is None else value if isinstance(value, str) else json.dumps(value)

    rows = [[key, shown(control), shown(own)] for key, control, own in pair.differences]
    return Table(f"Settings that differ, {pair.title}", ["setting", pair.control.name, pair.treatment.name], rows)


def runs(comparison: Comparison) -> Table:
    """Where each run comes from."""
    heads = ["run", "configuration", "seed", "state", "started", "commit", "machine", "corpus", "folder"]
    rows = [
        [run.name, side.name, str(run.seed), "; ".join([run.state, *run.remarks]), *_origin(run)]
        for side in comparison.sides
        for run in side.runs
    ]
    return Table("Runs", heads, rows)


def _origin(run: Run) -> list[str]:
    described = run.description
    commit, _, changes = str(described.get("commit") or "–").partition("+")
    started = str(described.get("created"))[:16].replace("T", " ")
    return [started, commit[:12] + "+changes" * bool(changes), _machine(run), described["corpus_fingerprint"][:12], str(run.folder)]


def _machine(run: Run) -> str:
    return machine_in_words({"processor": "unknown", "cores": "unknown", **(run.description.get("machine") or {})})
