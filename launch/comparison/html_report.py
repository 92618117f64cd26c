"""The report of a comparison for readers: `report.html`, a single file that works offline, and `loss.png`.

`launch/compare.py` writes both. `report.html` is the template, `report.js` draws the curves with plotly. Names of runs, and the keys and
values in their files, are untrusted text: the template escapes them, and the page forbids all scripts but its own.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, cycle
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure as Picture
from matplotlib.ticker import EngFormatter
from plotly.offline import get_plotlyjs
from scipy.ndimage import uniform_filter1d

from data_pipeline.staging import write_atomically
from launch.comparison.comparison import FIGURES, LOSS, Comparison, Figure, Pair, Side, sequences_evaluated, signed
from launch.comparison.forest import draw_forest, row
from launch.comparison.runs import Column, Run
from launch.comparison.verdicts import SIGNS, Interval
from launch.errors import printable_line
from launch.training.run_folder.provenance import machine_in_words
from model.presets import ModelShape

HERE = Path(__file__).resolve().parent
#: Where reports go without --out.
REPORTS = Path("runs/reports")
#: Figures printed for pairs without claims, and shown in the table of all sides.
MAIN_FIGURES = ("final_val_loss", "step_seconds", "peak_memory_bytes", "bytes_per_step")

#: Points per curve; fewer, but at least 200, if there are more than 30 runs, so that the page stays below 10 MB.
POINTS = 1000
#: The x axes of the curves: column of `Run.columns` -> label.
AXES = {"step": "steps", "tokens": "tokens", "seconds": "seconds", "flops": "FLOPs of all ranks", "bytes": "bytes sent by rank 0"}
#: In nats per token.
LOSSES = {"val_loss-control": "validation loss − control's", "val_loss": "validation loss", "loss": "training loss"}
#: Metrics that are measured in each step; their mean over seeds is smoothed over 1% of the run.
NOISY = ("loss", "grad_norm", "step_seconds", "tokens_per_second", "mfu")
#: Colours of the sides, grey for controls. The first five differ for colour-blind readers; all have a contrast of 3:1 with white and black.
PALETTE = ("#808890", "#2f80cf", "#d9601a", "#149071", "#b065ab", "#a87b12", "#d2477f", "#5b73d8")
#: The colour and line style of controls, and the line styles of other sides, by plotly's names.
CONTROL = (PALETTE[0], "solid")
DASHES = ("dot", "dashdot", "dash", "longdash", "longdashdot")


def new_folder(name: str) -> Path:
    """Make the folder `name` in `REPORTS`, or the first free `name-2`, `name-3`, ..., also if other commands do so at the same time."""
    REPORTS.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        with contextlib.suppress(FileExistsError):
            (folder := REPORTS / (name if number == 1 else f"{name}-{number}")).mkdir()
            return folder
    raise AssertionError("there is always a free number")


def write_report(comparison: Comparison, out: Path, unfinished: Sequence[str] = ()) -> Path:
    """Write `report.html`, `report.json` and `loss.png` into the folder `out`, and return the page.

    `"complete"` in `report.json` is false until all is written, and if runs are `unfinished`: the same command may then replace the report.
    """

    def write_json(complete: bool) -> None:
        write_atomically(out / "report.json", json.dumps({"complete": complete, **comparison.as_json()}, indent=1, allow_nan=False) + "\n")

    out.mkdir(parents=True, exist_ok=True)
    write_json(complete=False)
    draw_losses(comparison, out / "loss.png")
    page = write_page(comparison, out)
    write_json(complete=not unfinished)
    return page


def summary(comparison: Comparison) -> Iterator[str]:
    """The lines that `launch/compare.py` prints: remarks on runs and pairs; the verdicts of each pair, or its main figures."""
    for mismatch in comparison.mismatches:
        yield f"not a controlled comparison: {mismatch}"
    for side in comparison.sides:
        yield from (f"{run.folder}: {remark}" for run in side.runs for remark in run.remarks)
    yield from comparison.remarks
    for pair in comparison.pairs:
        for verdict in pair.verdicts:
            yield f"{pair.recipe and pair.recipe.name}: {verdict.claim.label} {verdict.outcome}: {verdict.reason}"
        if not pair.verdicts:
            rows = [figure_row(name, pair.figures[name]) for name in MAIN_FIGURES if name in pair.figures]
            yield f"{pair.title}: " + "; ".join(f"{label}: {difference}" for label, _, _, difference, _ in rows)
        yield " ".join([*answers(pair), trust(pair)])
    for missing in comparison.absent:
        yield f"{missing.recipe} was not run: {missing.reason}"


def write_page(comparison: Comparison, out: Path) -> Path:
    """Write `report.html` into the folder `out`; 5 MB of it are plotly.js, so that it opens without a network."""
    scripts = {"plotly": get_plotlyjs(), "script": (HERE / "report.js").read_text(encoding="utf-8")}
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts.values()]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"seeds": _seeds}
    runs = [run for side in comparison.sides for run in side.runs]
    page = environment.get_template("report.html").render(
        comparison=comparison,
        facts=_facts(runs),
        outcomes=Counter(verdict.outcome for pair in comparison.pairs for verdict in pair.verdicts),
        signs=SIGNS,
        answers=answers,
        trust=trust,
        by_seed=_by_seed,
        forest=_forest,
        main_figures=[FIGURES[name][0] for name in MAIN_FIGURES],
        results=_results(comparison.sides),
        differences=_differences,
        figures=lambda pair: [figure_row(name, figure) for name, figure in pair.figures.items()],
        losses={name: label for name, label in LOSSES.items() if "-" not in name or any(pair.seeds for pair in comparison.pairs)},
        axes={name: label for name, label in AXES.items() if name != "bytes" or any(run.columns[name].any() for run in runs)},
        metrics=_metrics(runs),
        noisy=NOISY,
        batches=next(filter(None, map(_batches, comparison.sides)), None),
        provenance=_provenance(comparison.sides),
        data=_curves(comparison),
        script_hashes=Markup(" ".join(hashes)),
        style=Markup((HERE / "report.css").read_text(encoding="utf-8")),
        **{name: Markup(text) for name, text in scripts.items()},
    )
    file = out / "report.html"
    file.write_text(page, encoding="utf-8", errors="backslashreplace")  # a file's name may not be UTF-8
    return file


# --- text and tables ------------------------------------------------------------------------------------------------------------------


def answers(pair: Pair) -> list[str]:
    """Which side ends at the lower loss and by how much, and how long the same tokens take, in sentences."""
    name, control = (pair.recipe.name, "its control") if pair.recipe else (pair.side.name, pair.control.name)
    found = []
    for side, runs in ((name, pair.side.by_seed()), ("The control" if pair.recipe else control, pair.control.by_seed())):
        if diverged := sum(run.diverged for run in runs.values()):
            found.append(f"{side} diverged in {diverged} of {len(runs)} runs.")
    rest = " in the runs that did not diverge" if found else ""
    loss = pair.figures[LOSS].difference if LOSS in pair.figures else None
    if loss is not None:
        if loss.low is None or loss.high is None:
            interval = " with the only seed"
        else:
            includes = ", which includes 0" if loss.low <= 0 <= loss.high else ""
            interval = f" (95% interval {signed(loss.low)} to {signed(loss.high)}{includes})"
        gap = f"{abs(loss.mean):.4f} nats {'above' if loss.mean > 0 else 'below'}" if round(loss.mean, 4) else "at the same loss as"
        found.append(f"{name} ends {gap} {control}{rest}{interval}.")
    speed = pair.figures["tokens_per_second"].ratio if "tokens_per_second" in pair.figures else None
    if speed is not None:
        time = speed.inverse()
        interval = "" if time.low is None or time.high is None else f" (95%: {time.low:.3f} to {time.high:.3f})"
        found.append(f"The same number of tokens takes {time.mean:.3f} times as long{interval}.")
    return found or [f"{name} and {control} have no seed in common that can be compared."]


def trust(pair: Pair) -> str:
    """How reliable the answer is, in sentences: seeds, interleaving, testbed."""
    count = len(pair.seeds)
    if not count:
        return "Exploratory: no claim is judged."
    found = [
        f"{count} pair{'s' * (count != 1)} of runs with the same seed" + (", interleaved." if pair.interleaved else ", not interleaved.")
    ]
    if pair.verdicts and pair.testbed is not None:
        found.append(f"The claims are judged on testbed {pair.testbed.name}, with the planned seeds.")
    elif pair.recipe is None and pair.testbed is not None:
        found.append(f"Both are recipes on testbed {pair.testbed.name}. No claim compares them.")
    else:
        found.append("Exploratory: no claim is judged.")
    if count == 1:
        found.append("One seed shows no noise.")
    return " ".join(found)


def _forest(pairs: Iterable[Pair]) -> str:
    """A forest plot with a row per pair, those of a testbed together: a PNG in base64."""
    rows = [
        row(
            pair.testbed.name if pair.testbed else "",
            pair.recipe.name if pair.recipe else printable_line(pair.title)[:60],
            pair.published_figures,
            {verdict.claim: verdict.outcome for verdict in pair.verdicts},
        )
        for pair in sorted(pairs, key=lambda pair: pair.testbed.name if pair.testbed else "")
    ]
    draw_forest(rows, png := io.BytesIO())
    return base64.b64encode(png.getvalue()).decode()


def _by_seed(pair: Pair) -> list[list[str]]:
    """A row per pair: seed, both final losses, their difference, and the ratio of the step times."""
    loss, time = (pair.figures.get(name, Figure({}, {}, None, None)) for name in (LOSS, "step_seconds"))
    rows = []
    for seed in pair.seeds:
        losses = [_mean(LOSS, [side[seed]] if seed in side else []) for side in (loss.control, loss.other)]
        gap = _number(LOSS, loss.pairs[seed][1] - loss.pairs[seed][0], "+") if seed in loss.pairs else "–"
        ratio = f"{time.pairs[seed][1] / time.pairs[seed][0]:.3f}" if time.pairs.get(seed, (0,))[0] > 0 else "–"
        rows.append([str(seed), *losses, gap, ratio])
    return rows


def _facts(runs: Sequence[Run]) -> dict[str, str]:
    """Facts about the compared runs, each with its distinct values."""
    shapes = [ModelShape(**run.description["shape"]) for run in runs]
    facts = {
        "seeds": [_seeds(run.seed for run in runs)],
        "tokens per run": [f"{run.description['total_tokens']:,}" for run in runs],
        "model": [f"{shape.n_layer} layers, width {shape.d_model}, {shape.seq_len} tokens{shape.components}" for shape in shapes],
        **{name: [str(run.description.get(name)) for run in runs] for name in ("ranks", "precision")},
        "machine": map(_machine, runs),
        "corpus": [run.description["corpus_fingerprint"][:12] for run in runs],
    }
    return {name: "; ".join(dict.fromkeys(values)) for name, values in facts.items()} if runs else {}


def _machine(run: Run) -> str:
    return machine_in_words({"processor": "unknown", "cores": "unknown", **(run.description.get("machine") or {})})


def _seeds(seeds: Iterable[int]) -> str:
    """A list of seeds: "1 to 5" if they are consecutive."""
    found = sorted(set(seeds))
    consecutive = len(found) > 2 and found[-1] - found[0] == len(found) - 1
    return f"{found[0]} to {found[-1]}" if consecutive else ", ".join(map(str, found))


def _differences(pair: Pair) -> list[list[str]]:
    """The table of what differs: key, control, recipe."""

    def shown(value: Any) -> str:
        return "–" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)

    return [[one.key, shown(one.control), shown(one.other)] for one in pair.differences]


def figure_row(name: str, figure: Figure) -> list[str]:
    """A row of a pair's table: label, control, recipe, difference and ratio, with 95% confidence intervals."""

    sides = [_mean(name, list(side.values())) for side in (figure.control, figure.other)]
    difference = _shown(figure.difference, lambda value: _number(name, value, "+"))
    ratio = _shown(figure.ratio, "{:.3f}".format)
    if figure.to_target is not None:
        counts = [f"{reached} of {figure.to_target.seeds}" for reached in figure.to_target.reached]
        sides = [f"{text} ({count})" if text != "∞" else f"reached by {count}" for text, count in zip(sides, counts, strict=True)]
        ratio = f"{ {'>=': '≥ ', '<=': '≤ '}.get(figure.to_target.bound, '') }{ratio}"
    return [FIGURES[name][0], *sides, difference, ratio]


def _shown(interval: Interval | None, write: Callable[[float], str]) -> str:
    if interval is None:
        return "–"
    ends = "" if interval.low is None or interval.high is None else f" [{write(interval.low)}, {write(interval.high)}]"
    return write(interval.mean) + ends


def _results(sides: Sequence[Side]) -> list[list[str]]:
    """The table of all sides."""
    rows = []
    for side in sides:
        measures = [run.measures for run in side.by_seed().values()]
        means = [_mean(name, [run[name] for run in measures if name in run]) for name in MAIN_FIGURES]
        rows.append([side.name, side.role, _seeds(run.seed for run in side.runs), *means])
    return rows


def _provenance(sides: Sequence[Side]) -> list[list[str]]:
    """The table of all runs."""
    return [
        [
            run.name,
            side.name,
            str(run.seed),
            "; ".join([run.state, *run.remarks]),
            str(run.description.get("created"))[:16].replace("T", " "),
            re.sub(r"^([0-9a-f]{12})[0-9a-f]*", r"\1", str(run.description.get("commit") or "–")),  # "+changes" may follow
            _machine(run),
            str(run.folder),
        ]
        for side in sides
        for run in side.runs
    ]


def _mean(name: str, values: Sequence[float]) -> str:
    """Mean ± standard deviation over seeds."""
    if not values:
        return "–"
    if not all(map(math.isfinite, values)):
        return "∞"
    deviation = f" ± {_number(name, float(np.std(values, ddof=1)))}" if len(values) > 1 else ""
    return _number(name, float(np.mean(values))) + deviation


def _number(name: str, value: float, sign: str = "") -> str:
    """A value of a figure in the figure's unit."""
    _, unit, decimals = FIGURES[name]
    rounded = round(value / unit, decimals)
    return f"{rounded:{sign},.{decimals}f}".replace("-", "−") if rounded else f"{0:.{decimals}f}"  # no sign before zero


# --- curves ---------------------------------------------------------------------------------------------------------------------------


def _curves(comparison: Comparison) -> dict[str, Any]:
    """The data of `report.js`: `curves`, one for each run and one for the mean of each side.

    A curve has the values of each axis (`x`) at up to `POINTS` evenly spaced rows, and for each metric (`y`) the steps and the values that
    are drawn; all float32 in base64. `report.js` interpolates between the rows to place a step on another axis.
    """
    sides = comparison.sides
    runs = [run for side in sides for run in side.runs]
    metrics = ["val_loss", "loss", *_metrics(runs)]
    points = max(200, min(POINTS, 30 * POINTS // max(1, len(runs))))
    curves = []
    for number, side in enumerate(sides):
        for run in side.runs:
            curves.append({"side": number, "seed": run.seed, "name": run.name, **_curve(run.columns, metrics, points)})
        first = started_runs(side)
        curves.append({"side": number, "seed": None, "count": len(first), **_curve(mean_columns(first), metrics, points)})
    pairs = [[sides.index(pair.control), sides.index(pair.side)] for pair in comparison.pairs]
    others = zip(cycle(PALETTE[1:]), cycle(DASHES), strict=False)
    looks = [CONTROL if side.role == "control" else next(others) for side in sides]
    return {
        "axes": AXES,
        "labels": {name: f"{label} (nats)" for name, label in LOSSES.items()},
        "sides": [{"name": side.name, "color": color, "dash": dash} for side, (color, dash) in zip(sides, looks, strict=True)],
        "pairs": pairs,
        "controls": {own: control for control, own in reversed(pairs)},
        "curves": curves,
    }


def _metrics(runs: Sequence[Run]) -> list[str]:
    """The logged metrics other than losses and axes, without those that are constant over all runs; the rarest first."""
    found: dict[str, list[Column]] = {}
    for run in runs:
        for name in run.columns.keys() - {*AXES, "loss", "val_loss"}:
            found.setdefault(name, []).append(run.columns[name][np.isfinite(run.columns[name])])
    varying = [name for name, columns in found.items() if len(np.unique(np.concatenate(columns))) > 1]
    return sorted(varying, key=lambda name: (len(found[name]), name))


def _curve(columns: dict[str, Column], metrics: Sequence[str], points: int) -> dict[str, Any]:
    step = columns["step"]
    rows = np.unique(np.linspace(0, len(step) - 1, points).astype(int)) if len(step) else np.arange(0)
    y = {}
    for metric in metrics:
        if metric in columns:
            finite = np.flatnonzero(np.isfinite(columns[metric]))
            if len(drawn := finite[thinned(columns[metric][finite], points)]):
                y[metric] = [_base64(step[drawn]), _base64(columns[metric][drawn])]
    return {"x": {axis: _base64(columns[axis][rows]) for axis in AXES}, "y": y}


def _base64(values: Column) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def thinned(values: Column, points: int) -> Any:
    """Indices of the `values` to draw: all if there are up to `points`, else the ends and the extremes of `points / 2` equal parts."""
    if len(values) <= points:
        return np.arange(len(values))
    width = math.ceil(len(values) / (points // 2))
    rows = np.pad(np.arange(len(values)), (0, -len(values) % width), mode="edge").reshape(-1, width)  # (parts, width)
    part = np.arange(len(rows))
    lowest, highest = rows[part, values[rows].argmin(axis=1)], rows[part, values[rows].argmax(axis=1)]
    return np.unique(np.concatenate([lowest, highest, [0, len(values) - 1]]))


def started_runs(side: Side) -> list[Run]:
    """The run of each seed, if it has made any step."""
    return [run for run in side.by_seed().values() if len(run.columns["step"])]


def mean_columns(runs: Sequence[Run]) -> dict[str, Column]:
    """The mean of each column over `runs` at the steps that all have; NaN if any run's value is. `NOISY` columns are smoothed."""
    if not runs:
        return {axis: np.zeros(0) for axis in AXES}
    steps = runs[0].columns["step"]
    for run in runs[1:]:
        steps = np.intersect1d(steps, run.columns["step"])
    rows = [np.searchsorted(run.columns["step"], steps) for run in runs]
    shared = [name for name in runs[0].columns if all(name in run.columns for run in runs)]
    means = {name: np.mean([run.columns[name][at] for run, at in zip(runs, rows, strict=True)], axis=0) for name in shared}
    return {name: smooth(column) if name in NOISY else column for name, column in means.items()}


def smooth(values: Column) -> Column:
    """A centred moving average over 1% of the finite values."""
    known, smoothed = np.isfinite(values), values.copy()
    if known.any():
        smoothed[known] = uniform_filter1d(values[known], 2 * (int(known.sum()) // 200) + 1, mode="nearest")
    return smoothed


# --- loss.png -------------------------------------------------------------------------------------------------------------------------


def draw_losses(comparison: Comparison, file: Path) -> None:
    """Draw into a PNG file: the validation loss over tokens, or the training loss without evaluations.

    Each pair is a row: the losses, and the recipe's difference to its control with the same seed. Without pairs there is one side.
    Thin lines are runs, thick lines the mean over seeds, the band its standard deviation.
    """
    evaluated = any(np.isfinite(run.columns["val_loss"]).any() for side in comparison.sides for run in side.runs)
    metric = "val_loss" if evaluated else "loss"
    pairs = comparison.pairs
    with rc_context({"text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False}):  # a name may hold dollars
        picture = Picture(figsize=(12.0 if pairs else 8.0, 1.0 + 4.0 * (len(pairs) or 1)), dpi=120, layout="constrained")
        grid = picture.subplots(len(pairs) or 1, 2 if pairs else 1, squeeze=False)
        for number, row_of_axes in enumerate(grid):
            pair = pairs[number] if pairs else None
            for side, color in zip((pair.control, pair.side) if pair else comparison.sides, PALETTE, strict=False):
                _draw_side(row_of_axes[0], side, color, metric)
            _leave_out_the_start(row_of_axes[0])
            if pair and (metric == "loss" or len(sequences_evaluated(pair.control, pair.side)) == 1):
                _draw_difference(row_of_axes[1], pair, metric)
            what, title = LOSSES[metric], f"on {pair.testbed.name}" if pair and pair.testbed else ""
            if metric == "val_loss" and (batches := _batches(pair.side if pair else comparison.sides[0])):
                what += f" on {batches} batches"
                title += "; final losses in tables are of the whole validation split"
            for axes, label in zip(row_of_axes, (f"{what} (nats)", f"{what} − control's (nats)"), strict=False):
                axes.set(xlabel="tokens", ylabel=label)
                axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
                axes.grid(alpha=0.25)
            if row_of_axes[0].get_legend_handles_labels()[0]:
                row_of_axes[0].legend(fontsize=9, frameon=False)
            row_of_axes[0].set_title(title.removeprefix("; "), fontsize=9)
        picture.suptitle(f"{LOSSES[metric]} over tokens; thin: each seed, thick: mean over seeds, band: ± standard deviation", fontsize=11)
        picture.savefig(file, metadata={"Software": None})


def _leave_out_the_start(axes: Any) -> None:
    """The first tenth, where losses fall fast, does not set the scale."""
    points = np.concatenate([line.get_xydata() for line in axes.lines] or [np.zeros((0, 2))])  # (points, 2)
    late = points[points[:, 0] > 0.1 * points[:, 0].max(initial=0.0), 1]
    if len(late) > 1 and np.ptp(late):
        axes.set_ylim(late.min() - 0.05 * np.ptp(late), late.max() + 0.1 * np.ptp(late))


def _batches(side: Side) -> int | None:
    """The number of validation batches of an evaluation during training, if the whole split is evaluated only at the end."""
    first = side.runs[0].description
    return first.get("eval_batches") if first.get("whole_eval") else None


def _draw_difference(axes: Any, pair: Pair, metric: str) -> None:
    """The differences of the runs of a pair with the same seed. The first quarter, where losses fall fast, does not set the scale; if it
    leaves the frame, the title says so."""
    control, own = pair.control.by_seed(), pair.side.by_seed()
    curves = []
    for seed in pair.seeds:
        base, (tokens, loss) = _drawable(control[seed].columns, metric), _drawable(own[seed].columns, metric)
        if len(base[0]) and len(tokens):
            at = min(tokens, base[0], key=len)  # the sparser evaluations: between two of them, a line lies above a curve that falls fast
            gap = np.interp(at, tokens, loss, left=np.nan, right=np.nan) - np.interp(at, *base, left=np.nan, right=np.nan)
            curves.append((at[np.isfinite(gap)], gap[np.isfinite(gap)]))
    axes.axhline(0, color=PALETTE[0], linewidth=1)
    for tokens, gap in curves:
        axes.plot(tokens, smooth(gap) if metric == "loss" else gap, color=PALETTE[1], linewidth=0.6, alpha=0.6)
    if not any(len(tokens) for tokens, _ in curves):
        return
    shared = min((tokens for tokens, _ in curves if len(tokens)), key=len)
    gaps = np.array([np.interp(shared, *curve) for curve in curves if len(curve[0])])  # (seeds, tokens)
    mean = gaps.mean(axis=0)
    if len(gaps) > 1:
        deviation = gaps.std(axis=0, ddof=1)
        axes.fill_between(shared, mean - deviation, mean + deviation, color=PALETTE[1], alpha=0.15, linewidth=0)
    axes.plot(shared, mean, color=PALETTE[1], linewidth=1.8)
    late = np.append(gaps[:, shared >= 0.25 * shared[-1]], 0.0)
    margin = 0.15 * float(np.ptp(late)) or 0.01
    low, high = float(late.min()) - margin, float(late.max()) + margin
    axes.set_ylim(low, high)
    if outside := [signed(gap, ".2f") for gap in (gaps.min(), gaps.max()) if not low <= gap <= high]:
        axes.set_title(f"outside the frame, in the first quarter: up to {' and '.join(outside)}", fontsize=9)


def _draw_side(axes: Any, side: Side, color: str, metric: str) -> None:
    for run in side.runs:
        axes.plot(*_drawable(run.columns, metric), color=color, linewidth=0.6, alpha=0.5)
    first = started_runs(side)
    tokens, loss = _drawable(mean_columns(first), metric)
    if not len(loss):
        return
    label = f"{printable_line(side.name)}: {loss[-1]:.4f}"
    if len(first) > 1:
        deviation = np.std([np.interp(tokens, *_drawable(run.columns, metric)) for run in first], axis=0, ddof=1)  # (seeds, tokens)
        label += f" ± {deviation[-1]:.4f}, {len(first)} seeds"
        axes.fill_between(tokens, loss - deviation, loss + deviation, color=color, alpha=0.15, linewidth=0)
    axes.plot(tokens, loss, color=color, linewidth=1.8, label=label)


def _drawable(columns: dict[str, Column], metric: str) -> tuple[Column, Column]:
    """Tokens and values of the rows that have both."""
    if metric not in columns:
        return np.zeros(0), np.zeros(0)
    rows = np.isfinite(columns[metric]) & np.isfinite(columns["tokens"])
    return columns["tokens"][rows], columns[metric][rows]
