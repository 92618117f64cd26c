"""The report that people read of a comparison: `report.html`, one file that works offline, and `loss.png`.

`launch/compare.py` writes both. The numbers are those of `Comparison`; only the curves are read from the runs, and thinned for drawing.
What comes from a run folder (its name, the keys and values of its files) is text of unknown origin: the template escapes it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from launch.errors import one_line
from recipes.claims import CLAIMS

if TYPE_CHECKING:
    from launch.comparison.comparison import Comparison, Figure, Pair, Side, Spread
    from launch.comparison.runs import Run
    from launch.comparison.verdicts import Verdict

HERE = Path(__file__).resolve().parent

#: How many points of a curve are drawn at most; fewer where there are more than 30 runs, so that the page stays below 10 MB.
POINTS = 1000
#: Numbers from here on are not drawn in `loss.png`: matplotlib's own arithmetic with them overflows.
DRAWABLE = 1e100
#: What curves are drawn over: column of `Run.columns` -> its name.
AXES = {"step": "steps", "tokens": "tokens", "seconds": "seconds", "flops": "FLOPs", "bytes": "bytes sent"}
AXIS_TITLES = {
    "step": "optimizer steps",
    "tokens": "tokens",
    "seconds": "seconds since the start",
    "flops": "FLOPs that ran, all ranks",
    "bytes": "bytes sent by rank 0",
}
LOSSES = {"val_loss": "validation", "loss": "training", "val_loss-control": "validation − control"}
LOSS_TITLES = {
    "val_loss": "validation loss (nats a token)",
    "loss": "training loss (nats a token)",
    "val_loss-control": "validation loss − control's (nats a token)",
}
#: Measured anew in each step: the mean over seeds is smoothed over a hundredth of the run.
NOISY = ("loss", "grad_norm", "step_seconds", "tokens_per_second", "mfu")

#: (on light, on dark): Okabe and Ito's hues, readable with the common colour blindnesses, their lightness chosen so that a line
#: has at least 3:1 of contrast with either paper. The first is for controls.
PALETTE = (
    ("#3d4349", "#d3d8de"),
    ("#0b62b0", "#6db3f2"),
    ("#c8500a", "#f58b5c"),
    ("#007a5e", "#3fc79a"),
    ("#9b4f96", "#d79bd2"),
    ("#2a8fbd", "#a5def5"),
    ("#9a6a00", "#e6c04a"),
    ("#b3265e", "#f28db2"),
)
#: plotly's name of a dash pattern -> SVG's, and matplotlib's.
DASHES = {
    "solid": ("", "-"),
    "dash": ("7 4", (0, (5, 2))),
    "dot": ("2 3", (0, (1, 1.2))),
    "dashdot": ("7 3 2 3", (0, (5, 1.5, 1, 1.5))),
    "longdash": ("12 4", (0, (9, 2.5))),
    "longdashdot": ("12 3 2 3", (0, (9, 1.5, 1, 1.5))),
}
#: plotly's name of a symbol -> SVG's path in the middle of the legend's 44 x 14, and matplotlib's marker.
SYMBOLS = {
    "circle": ("M18 7a4 4 0 1 0 8 0a4 4 0 1 0-8 0", "o"),
    "square": ("M18 3h8v8h-8z", "s"),
    "diamond": ("M22 2l5 5-5 5-5-5z", "D"),
    "triangle-up": ("M22 2l5 9h-10z", "^"),
    "triangle-down": ("M22 12l5-9h-10z", "v"),
}

#: outcome of a verdict -> (class of the page, sign).
OUTCOMES = {"holds": ("holds", "✓"), "fails": ("fails", "✕"), "cannot be told": ("open", "?")}

UNITS = {
    "bytes": ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes")),
    "count": ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1, "")),
    "flops": ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1, "FLOP")),
    "share": ((0.01, "%"),),
    "seconds": ((3600, "h"), (1, "s"), (1e-3, "ms")),
    "nats": ((1, "nats"),),
    "": ((1, ""),),
}


class Measure(NamedTuple):
    """How a figure is called and in which of `UNITS` it is written."""

    label: str
    unit: str


#: In the order of the page; a figure that is not here comes last, under its own name.
MEASURES = {
    "final_val_loss": Measure("final validation loss", "nats"),
    "tokens_per_second": Measure("tokens a second, median", "count"),
    "mfu": Measure("MFU, median", "share"),
    "step_seconds": Measure("time of a step, median", "seconds"),
    "seconds": Measure("time of the run", "seconds"),
    "seconds_to_reach": Measure("time to reach the control's final loss", "seconds"),
    "tokens_to_reach": Measure("tokens to reach the control's final loss", "count"),
    "peak_memory_bytes": Measure("peak memory of a rank", "bytes"),
    "bytes_per_step": Measure("sent by a rank in a step", "bytes"),
    "bytes_sent": Measure("sent by a rank in the run", "bytes"),
    "flops": Measure("arithmetic that ran, all ranks", "flops"),
    "skipped_steps": Measure("skipped steps", ""),
    "spikes": Measure("spikes", ""),
    "non_finite_losses": Measure("steps whose loss is no number", ""),
}
OVERVIEW = ("final_val_loss", "tokens_per_second", "mfu", "seconds", "peak_memory_bytes", "bytes_per_step", "skipped_steps", "spikes")


def write_page(comparison: Comparison, out: Path) -> Path:
    """Write `report.html` into the folder `out`; 5 MB of it are plotly.js, so that it opens without a network."""
    import jinja2
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    scripts = {"plotly": get_plotlyjs(), "script": _text("page.js")}
    # Only these two scripts may run, whatever the page holds, and nothing may be fetched.
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts.values()]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page = environment.from_string(_text("page.html")).render(
        _content(comparison),
        data=_drawing(comparison),
        palette=PALETTE,
        script_hashes=[Markup(text) for text in hashes],
        style=Markup(_text("page.css")),
        **{name: Markup(text) for name, text in scripts.items()},
    )
    file = out / "report.html"
    file.write_text(page, encoding="utf-8", errors="backslashreplace")  # a name of the file system need not be UTF-8
    return file


def _text(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


# ---- what is written ----


def _content(comparison: Comparison) -> dict[str, Any]:
    """What the template writes, apart from the curves."""
    sides, pairs = comparison.sides, comparison.pairs
    looks = _looks(comparison)
    runs = [(side, run) for side in sides for run in side.runs]
    shown = [_pair(number, pair) for number, pair in enumerate(pairs)]
    losses = {name: label for name, label in LOSSES.items() if pairs or "-" not in name}
    # One rank sends nothing.
    axes = {name: label for name, label in AXES.items() if name != "bytes" or any(run.columns[name].any() for _, run in runs)}
    if 1 <= len(pairs) <= 3 and len({id(pair.control) for pair in pairs}) == 1:
        title = f"{', '.join(pair.side.name for pair in pairs)} against {pairs[0].control.name}"
    else:
        title = f"{len(sides)} configuration{'s' * (len(sides) > 1)}, {len(runs)} run{'s' * (len(runs) > 1)}"
    return {
        "title": title,
        "facts": _facts(comparison),
        "marks": comparison.marks,
        "verdicts": [verdict for pair in shown for verdict in pair["verdicts"]],
        "outcomes": Counter(verdict.outcome for pair in pairs for verdict in pair.verdicts),
        "sides": [
            {"name": side.name, "role": side.role, "seeds": _seeds(run.seed for run in side.runs), **look}
            for side, look in zip(sides, looks, strict=True)
        ],
        "overview": _overview(sides),
        "losses": losses.items(),
        "axes": axes.items(),
        "metrics": _metrics([run for _, run in runs]),
        "drawing": _how_drawn(comparison),
        "pairs": shown,
        "first_pair_only": len(sides) > 6,
        "absent": comparison.absent,
        "remarks": comparison.remarks,
        "runs": [_provenance(side, run) for side, run in runs],
    }


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    """What was compared, in a few lines."""
    runs = [run for side in comparison.sides for run in side.runs]

    def values(key: str) -> str:
        found = dict.fromkeys(_short(run.description.get(key)) for run in runs)
        names = [name for name in found if name]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def named(role: str) -> str:
        return ", ".join(side.name for side in comparison.sides if side.role == role)

    shapes = dict.fromkeys(
        f"{shape.get('n_layer')} layers, {shape.get('d_model')} wide, {shape.get('seq_len')} tokens"
        for shape in (run.description["shape"] for run in runs)
    )
    tokens = dict.fromkeys(f"{run.description['total_tokens']:,}" for run in runs)
    facts = {
        "control": named("control"),
        "recipe": named("recipe"),
        "run": named("run"),
        "seeds": _seeds(run.seed for run in runs),
        "tokens of a run": ", ".join(tokens),
        "model": "; ".join(shapes),
        "ranks, precision": "; ".join(filter(None, (values("ranks"), values("precision")))),
        "machine": "; ".join(dict.fromkeys(_machine(run) for run in runs)),
        "commit": values("commit"),
        "corpus": values("corpus_fingerprint"),
    }
    return [(name, value) for name, value in facts.items() if value]


def _short(value: Any) -> str:
    """A value in a line; of a hash its first twelve digits."""
    text = "" if value is None else str(value)
    is_hash = len(text) >= 40 and set(text) <= set("0123456789abcdef")
    return text[:12] if is_hash else text


def _seeds(seeds: Iterable[int]) -> str:
    """Seeds in words: "1 to 5" where they follow each other."""
    found = sorted(set(seeds))
    if len(found) > 2 and found[-1] - found[0] == len(found) - 1:
        return f"{found[0]} to {found[-1]}"
    return ", ".join(map(str, found))


def _machine(run: Run) -> str:
    machine = run.description.get("machine")
    if not isinstance(machine, dict):
        return _short(machine)
    said = {key: f"{value} cores" if key == "cores" else _short(value) for key, value in machine.items() if key not in ("system", "gpus")}
    gpus = machine.get("gpus")
    return ", ".join(filter(None, [*said.values(), *(map(str, gpus) if isinstance(gpus, list) else ())]))


def _provenance(side: Side, run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "side": side.name,
        "seed": run.seed,
        "state": run.state,
        "created": str(run.description.get("created", ""))[:16].replace("T", " "),
        "commit": _short(run.description.get("commit")),
        "machine": _machine(run),
        "folder": str(run.folder),
        "remarks": run.remarks,
    }


def _pair(number: int, pair: Pair) -> dict[str, Any]:
    """The section of one pair."""
    recipe = pair.recipe
    # What never happened on either side needs no row.
    happened = {
        name for name, figure in pair.figures.items() if name != "non_finite_losses" or any(figure.control.values + figure.other.values)
    }
    order = [*(name for name in MEASURES if name in happened), *sorted(happened - MEASURES.keys())]
    if pair.seeds:
        seeds = f"Paired by seed: {_seeds(pair.seeds)}. "
    else:
        seeds = "No seed is in both, so nothing is paired. "
    return {
        "title": _title(pair),
        "about": ". ".join(filter(None, (recipe.title, recipe.paper, recipe.needs and f"Needs {recipe.needs}"))) + "." if recipe else "",
        "control": pair.control.name,
        "other": pair.side.name,
        "verdicts": [_verdict(number, pair, verdict) for verdict in pair.verdicts],
        "differences": [(one.key, _value(one.control), _value(one.other)) for one in pair.differences],
        "figures": [_figure(name, pair.figures[name]) for name in order],
        "seeds": seeds
        + "Mean over seeds ± standard deviation; intervals are 95%, of the mean difference and the mean ratio, by paired t-tests.",
    }


def _title(pair: Pair) -> str:
    named = f"{pair.recipe.name}: " if pair.recipe and pair.recipe.name != pair.side.name else ""
    return f"{named}{pair.side.name} against {pair.control.name}"


def _value(value: Any) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _verdict(number: int, pair: Pair, verdict: Verdict) -> dict[str, Any]:
    style, sign = OUTCOMES[verdict.outcome]
    details = {"evidence": verdict.reason, "null hypothesis": verdict.null}
    if verdict.p_holds is not None and verdict.p_fails is not None:
        details["p-values"] = (
            f"{verdict.p_holds:.3g} for holds, {verdict.p_fails:.3g} for fails; below 0.05 the null hypothesis is rejected"
        )
    return {
        "pair": number,
        "name": pair.recipe.name if pair.recipe else pair.side.name,
        "claim": f"{verdict.claim} {verdict.threshold:g}",
        "statement": CLAIMS[verdict.claim].says(verdict.threshold),
        "outcome": verdict.outcome,
        "style": style,
        "sign": sign,
        "reason": verdict.reason,
        "details": details.items(),
    }


def _figure(name: str, figure: Figure) -> dict[str, str]:
    """A row of a pair's table."""
    label, write = _writer(name, [*figure.control.values, *figure.other.values])

    def mean(spread: Spread | None, write: Callable[[float], str]) -> str:
        if spread is None or spread.mean is None:
            return "–"
        interval = "" if spread.low is None or spread.high is None else f" [{write(spread.low)}, {write(spread.high)}]"
        return write(spread.mean) + interval

    return {
        "label": label,
        "control": _spread(figure.control.values, write),
        "other": _spread(figure.other.values, write),
        "difference": mean(figure.difference, lambda value: write(value, "+")),
        "ratio": mean(figure.ratio, lambda value: f"{value:.3f}"),
    }


def _overview(sides: Sequence[Side]) -> dict[str, Any]:
    """The table of all sides: `labels`, and `rows` of cells, one for each side."""
    measured = [[run.measures() for run in side.runs] for side in sides]
    labels, columns = [], []
    for name in OVERVIEW:
        values = [[run[name] for run in runs if name in run] for runs in measured]
        if any(values):
            label, write = _writer(name, [value for side in values for value in side])
            labels.append(label)
            columns.append([_spread(side, write) for side in values])
    return {"labels": labels, "rows": list(zip(*columns, strict=True)) or [()] * len(sides)}


def _spread(values: Sequence[float], write: Callable[..., str]) -> str:
    """Mean and standard deviation; `values` are of one seed each."""
    if not len(values):
        return "–"
    finite = bool(np.all(np.isfinite(values)))
    mean = float(np.mean(values)) if finite else math.inf
    return f"{write(mean)} ± {write(float(np.std(values, ddof=1)))}" if len(values) > 1 and finite else write(mean)


def _writer(name: str, values: Sequence[float]) -> tuple[str, Callable[..., str]]:
    """The label of a measure with its unit, and what writes a number of it: all of a row with the same unit and as many decimals."""
    measure = MEASURES.get(name, Measure(name.replace("_", " "), ""))
    size = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    scale, unit = next((pair for pair in UNITS[measure.unit] if size >= pair[0]), UNITS[measure.unit][-1])
    largest = size / scale
    if all(float(value).is_integer() for value in values) and measure.unit in ("", "count") and scale == 1:
        decimals = 1 if len(set(values)) > 1 else 0
    else:
        decimals = 4 if measure.unit == "nats" else max(0, 3 - math.floor(math.log10(largest))) if largest > 0 else 0

    def write(value: float, sign: str = "") -> str:
        if math.isinf(value):
            return "∞" if value > 0 else "−∞"
        rounded = round(value / scale, decimals)
        return f"{rounded:{sign},.{decimals}f}".replace("-", "−") if rounded else f"{0:.{decimals}f}"  # no sign before zero

    return f"{measure.label} ({unit})" if unit else measure.label, write


# ---- what is drawn ----


def _looks(comparison: Comparison) -> list[dict[str, Any]]:
    """Colour, dash and symbol of each side. What is only a control is grey, and of another dash than its recipes."""
    dashes, symbols = list(DASHES), list(SYMBOLS)
    control_of = {id(pair.side): pair.control for pair in reversed(comparison.pairs)}
    grey = [side for side in comparison.sides if side.role == "control" and id(side) not in control_of]
    looks = {id(side): (0, number % len(dashes), number % len(symbols)) for number, side in enumerate(grey)}
    for number, side in enumerate(side for side in comparison.sides if id(side) not in looks):
        control = looks.get(id(control_of.get(id(side))), (0, 0, 0))
        dash = (control[1] + 1 + number % (len(dashes) - 1)) % len(dashes)
        looks[id(side)] = (1 + number % (len(PALETTE) - 1), dash, (number + 1) % len(symbols))
    return [
        {
            "color": color,
            "dash": dashes[dash],
            "dasharray": DASHES[dashes[dash]][0],
            "symbol": symbols[symbol],
            "path": SYMBOLS[symbols[symbol]][0],
        }
        for color, dash, symbol in (looks[id(side)] for side in comparison.sides)
    ]


def _drawing(comparison: Comparison) -> dict[str, Any]:
    """What `page.js` draws from: `curves`, one for each run and one for the mean of each side.

    A curve has its axes (`x`) at up to `POINTS` rows that lie evenly, and each metric (`y`) as steps and values at the rows that are drawn
    of it; all float32, base64. The position of a step on another axis is interpolated between two rows, exact to a thousandth of the run.
    """
    sides = comparison.sides
    place = {id(side): number for number, side in enumerate(sides)}
    metrics = ["val_loss", "loss", *_metrics([run for side in sides for run in side.runs])]
    points = _points(comparison)
    curves = []
    for number, side in enumerate(sides):
        for run in side.runs:
            curves.append({"side": number, "seed": run.seed, "name": run.name, **_curve(run.columns, metrics, points)})
        first = first_of_each_seed(side)
        curves.append({"side": number, "seed": None, "count": len(first), **_curve(mean_columns(first), metrics, points)})
    return {
        "axes": AXIS_TITLES,
        "labels": LOSS_TITLES,
        "sides": [{"name": side.name, **look} for side, look in zip(sides, _looks(comparison), strict=True)],
        "pairs": [[place[id(pair.control)], place[id(pair.side)]] for pair in comparison.pairs],
        "controls": {place[id(pair.side)]: place[id(pair.control)] for pair in reversed(comparison.pairs)},
        "curves": curves,
    }


def _points(comparison: Comparison) -> int:
    runs = sum(len(side.runs) for side in comparison.sides)
    return max(200, min(POINTS, 30 * POINTS // max(1, runs)))


def _how_drawn(comparison: Comparison) -> str:
    points = _points(comparison)
    return (
        f"The mean of {', '.join(NOISY[:-1])} and {NOISY[-1]} is smoothed over a hundredth of the run. A curve of more than {points:,} "
        f"points is drawn by the lowest and the highest of each of {points // 2} stretches, so that no spike is lost."
    )


def _metrics(runs: Sequence[Run]) -> list[str]:
    """The logged metrics, without losses and axes, that are not the same constant in all runs; first those that fewest runs have."""
    found: dict[str, set[float]] = {}
    having: Counter[str] = Counter()
    for run in runs:
        for name, column in run.columns.items():
            finite = column[np.isfinite(column)]
            if name not in AXES and name not in ("loss", "val_loss") and len(finite):
                found.setdefault(name, set()).update((float(finite.min()), float(finite.max())))
                having[name] += 1
    return sorted((name for name, values in found.items() if len(values) > 1), key=lambda name: (having[name], name))


def _curve(columns: dict[str, np.ndarray], metrics: Sequence[str], points: int) -> dict[str, Any]:
    step = columns["step"]
    rows = np.unique(np.linspace(0, len(step) - 1, points).astype(int)) if len(step) else np.arange(0)
    y = {}
    for metric in metrics:
        if metric in columns:
            there = np.flatnonzero(np.isfinite(columns[metric]))
            if len(there := there[thinned(columns[metric][there], points)]):
                y[metric] = [_packed(step[there]), _packed(columns[metric][there])]
    return {"x": {axis: _packed(columns[axis][rows]) for axis in AXES}, "y": y}


def _packed(values: np.ndarray) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def thinned(values: np.ndarray, points: int) -> np.ndarray:
    """Which of `values`, all finite, are drawn: all of up to `points`, else the ends, and the extremes of `points / 2` stretches."""
    if len(values) <= points:
        return np.arange(len(values))
    width = math.ceil(len(values) / (points // 2))
    rows = np.pad(np.arange(len(values)), (0, -len(values) % width), mode="edge").reshape(-1, width)  # (stretches, width)
    stretches = values[rows]
    ends = [stretches.argmin(axis=1), stretches.argmax(axis=1)]
    chosen = [np.take_along_axis(rows, end[:, None], axis=1)[:, 0] for end in ends]
    return np.unique(np.concatenate([*chosen, [0, len(values) - 1]]))


def first_of_each_seed(side: Side) -> list[Run]:
    """The runs that are paired, and averaged: of each seed the first that has read anything."""
    first: dict[int, Run] = {}
    for run in side.runs:
        if len(run.columns["step"]):
            first.setdefault(run.seed, run)
    return list(first.values())


def mean_columns(runs: Sequence[Run]) -> dict[str, np.ndarray]:
    """The mean of each column over `runs` at the steps that all of them have; NaN where one of them is. What is `NOISY` is smoothed."""
    if not runs:
        return {axis: np.zeros(0) for axis in AXES}
    steps = runs[0].columns["step"]
    for run in runs[1:]:
        steps = np.intersect1d(steps, run.columns["step"])
    rows = [np.searchsorted(run.columns["step"], steps) for run in runs]
    shared = [name for name in runs[0].columns if all(name in run.columns for run in runs)]
    means = {name: np.mean([run.columns[name][at] for run, at in zip(runs, rows, strict=True)], axis=0) for name in shared}
    return {name: smooth(column) if name in NOISY else column for name, column in means.items()}


def smooth(values: np.ndarray) -> np.ndarray:
    """The mean over a hundredth of the finite values, around each; the stretch is shorter at the ends, where there is less on one side."""
    there = np.flatnonzero(np.isfinite(values))
    count, out = len(there), values.copy()
    place = np.arange(count)
    half = np.minimum(np.minimum(place, count - 1 - place), count // 200)
    total = np.concatenate([[0.0], np.cumsum(values[there])])
    out[there] = (total[place + half + 1] - total[place - half]) / (2 * half + 1)
    return out


def draw_losses(comparison: Comparison, out: Path) -> Path:
    """Draw `loss.png` into the folder `out`: the validation loss (the training loss where none was evaluated) over tokens.

    Thin lines are runs, thick ones the mean over seeds, the band its standard deviation. Up to six sides are in one panel, with a second
    one for the last quarter; more are drawn pair by pair.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import EngFormatter

    looks = {id(side): look for side, look in zip(comparison.sides, _looks(comparison), strict=True)}
    runs = [run for side in comparison.sides for run in side.runs]
    metric = "val_loss" if any(np.isfinite(run.columns["val_loss"]).any() for run in runs) else "loss"
    whole = not comparison.pairs or len(comparison.sides) <= 6
    if whole:
        panels: list[tuple[str, Sequence[Side]]] = [("", comparison.sides), ("the last quarter", comparison.sides)]
        width, height, across = 12.0, 5.0, 2
    else:
        panels = [(one_line(_title(pair)).replace(" against ", "\nagainst "), (pair.control, pair.side)) for pair in comparison.pairs]
        across = min(4, len(panels))
        width, height = 4.2 * across, 3.4 * -(-len(panels) // across)
    with matplotlib.rc_context({"text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False}):  # a name may hold dollars
        figure, grid = pyplot.subplots(
            -(-len(panels) // across), across, figsize=(width, height), dpi=120, layout="constrained", squeeze=False
        )
        for axes, (title, sides) in zip(grid.flat, panels, strict=False):
            for side in sides:
                _draw_side(axes, side, looks[id(side)], metric)
            axes.set(xlabel="tokens", ylabel=LOSS_TITLES[metric])
            axes.set_title(title, fontsize=10)
            axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
            axes.grid(alpha=0.25)
            if axes.get_legend_handles_labels()[0] and not (whole and axes is grid[0, 1]):
                axes.legend(fontsize=9 if whole else 7, frameon=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        if whole:
            _zoom_to_the_end(grid[0, 1], runs, metric)
        figure.suptitle(
            f"{LOSS_TITLES[metric].capitalize()} over tokens; thin: each seed, thick: their mean ± standard deviation", fontsize=11
        )
        file = out / "loss.png"
        figure.savefig(file)
        pyplot.close(figure)
    return file


def _draw_side(axes: Any, side: Side, look: dict[str, Any], metric: str) -> None:
    color = PALETTE[look["color"]][0]
    for run in side.runs:
        axes.plot(*_drawn(run.columns, metric), color=color, linewidth=0.6, alpha=0.5)
    first = first_of_each_seed(side)
    tokens, loss = _drawn(mean_columns(first), metric)
    if not len(loss):
        return
    label = f"{one_line(side.name)}: {loss[-1]:.4f}"
    if len(first) > 1:
        spread = [np.interp(tokens, *_drawn(run.columns, metric)) for run in first]  # (seeds, tokens)
        deviation = np.std(spread, axis=0, ddof=1)
        label += f" ± {deviation[-1]:.4f}, {len(first)} seeds"
        axes.fill_between(tokens, loss - deviation, loss + deviation, color=color, alpha=0.15, linewidth=0)
    style = {
        "linestyle": DASHES[look["dash"]][1],
        "marker": SYMBOLS[look["symbol"]][1],
        "markevery": max(1, len(loss) // 8),
        "markersize": 4,
    }
    axes.plot(tokens, loss, color=color, linewidth=1.8, label=label, **style)


def _drawn(columns: dict[str, np.ndarray], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and values of the rows that have both, and that can be drawn."""
    if metric not in columns:
        return np.zeros(0), np.zeros(0)
    there = (np.abs(columns[metric]) < DRAWABLE) & (np.abs(columns["tokens"]) < DRAWABLE)
    return columns["tokens"][there], columns[metric][there]


def _zoom_to_the_end(axes: Any, runs: Sequence[Run], metric: str) -> None:
    curves = [_drawn(run.columns, metric) for run in runs]
    end = max((tokens[-1] for tokens, _ in curves if len(tokens)), default=0.0)
    late = np.concatenate([np.zeros(0), *(loss[tokens >= 0.75 * end] for tokens, loss in curves)])
    if end > 0 and len(late):
        margin = 0.05 * float(np.ptp(late)) or 0.01
        axes.set(xlim=(0.75 * end, 1.005 * end), ylim=(late.min() - margin, late.max() + margin))
