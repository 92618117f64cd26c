"""The file `tuning.json` of sweeps that have ended, its picture, and the published ones, which set the values of testbeds."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from data_pipeline.staging import write_atomically
from launch.comparison.pictures import PALETTE
from launch.comparison.runs import Run
from launch.comparison.trials import tuned_by
from launch.formats.files import read_committed
from launch.training.run_folder.provenance import machine_in_words
from recipes.registry import ROOT, TESTBEDS, Flags, Recipe, Testbed

#: The DeepSpeed JSON whose sweep sets the values of a testbed.
CONTROL = "ds_configs/zero0_bf16.json"
#: The keys of a point in the grid of a sweep that are no flags.
NO_FLAGS = ("loss", "losses", "spikes")
#: Flag -> its label on an axis of a sweep's picture.
FLAGS = {"lr": "peak learning rate", "min_lr": "learning rate at the end", "warmup_steps": "steps of warm-up"}
#: The range of losses in that picture, in nats; it is larger where it would not hold three points of a side.
LOSSES_SHOWN = 0.25


def published_sweep(config: str, testbed: Testbed, recipe: Recipe | None = None) -> tuple[Path, dict[str, Any]]:
    """The `tuning.json` with the sweep that sets the values of `config` on a testbed, and that sweep; its grid is empty if unpublished.

    It is the sweep of `recipe`, by default of `tuned_by`.
    """
    own = recipe or tuned_by(config, testbed)
    file = (ROOT / "recipes" / own.name if own else TESTBEDS / testbed.name) / "tuning.json"
    arms = read_committed(file).get(testbed.name, {}).get("arms", {})
    return file, arms.get(Path(config if own else CONTROL).stem, {"grid": [], "chosen": None})


def edges(grid: Sequence[Flags], chosen: Flags) -> list[str]:
    """The flags whose chosen number is at an edge of the grid. Words have no edge, and neither has 0: no value is below it."""
    swept = {name: {point[name] for point in grid} for name, value in chosen.items() if value and not isinstance(value, str)}
    return [name for name, values in swept.items() if len(values) > 1 and chosen[name] in (min(values), max(values))]


def origin_of(runs: Iterable[Run]) -> dict[str, Any]:
    """The commits, the machines and the corpora of the runs of a sweep."""
    descriptions = [run.description for run in runs]
    machines = dict.fromkeys(machine_in_words(one["machine"]) for one in descriptions)
    commits, corpora = ([*dict.fromkeys(one[key] for one in descriptions)] for key in ("commit", "corpus_fingerprint"))
    return {"commits": commits, "machine": " and ".join(machines), "corpora": corpora}


def write_tuning(found: dict[str, Any], file: Path) -> None:
    """Write a `tuning.json`, and its picture `tuning.png` beside it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draw_tuning(found, file.with_suffix(".png"))
    write_atomically(file, json.dumps(found, indent=1, allow_nan=False) + "\n")


def draw_tuning(found: dict[str, Any], file: Path) -> None:
    """Draw the final validation loss over the values of each swept flag: a panel per testbed and flag, with a line per side.

    The panels of a testbed have one scale, which ends `LOSSES_SHOWN` above the best loss of the worse side, or at the third best.
    """
    panels = dict.fromkeys((name, flag) for name, one in found.items() for arm in one["arms"].values() for flag in _lines(arm["grid"]))
    across = min(3, len(panels))
    down = math.ceil(len(panels) / across)
    with rc_context({"text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False}):
        picture = Figure(figsize=(4.2 * across + 0.4, 3.2 * down + 0.2), dpi=110, layout="constrained")
        every, hidden = picture.subplots(down, across, squeeze=False).flatten(), 0
        for axes, (name, flag) in zip(every, panels, strict=False):
            axes.set_title(name, fontsize=10, loc="left")
            hidden += _draw_panel(axes, flag, found[name]["arms"])
        for axes in every[len(panels) :]:
            axes.set_axis_off()
        note = "★ chosen" + "; one run per point, with a seed that no verdict uses" * all("seed" in one for one in found.values())
        diverged = any(None in (point["loss"] for point in arm["grid"]) for one in found.values() for arm in one["arms"].values())
        notes = [note, *["higher losses are above the frame"] * bool(hidden), *["diverged runs are left out"] * diverged]
        picture.supxlabel(("; " if across > 1 else ";\n").join(notes), fontsize=9)
        picture.savefig(file, metadata={"Software": None})


def _draw_panel(axes: Axes, flag: str, arms: dict[str, Any]) -> int:
    """Draw the losses over the values of a flag; the number of points above the frame."""
    lines = {config: _lines(arm["grid"]).get(flag, []) for config, arm in arms.items()}
    values = sorted({point[flag] for points in lines.values() for point in points}, key=numbers_in)
    logarithmic = all(not isinstance(value, str) and value > 0 for value in values)
    place = {value: math.log2(value) if logarithmic else float(number) for number, value in enumerate(values)}
    for color, (config, points) in zip(PALETTE[len(lines) < 2 :], lines.items(), strict=False):
        places = [place[point[flag]] for point in points]
        losses = [math.inf if point["loss"] is None else point["loss"] for point in points]
        axes.plot(places, losses, marker="o", markersize=4, linewidth=1.5, color=color, label=config)
        for point, x, loss in zip(points, places, losses, strict=True):
            if arms[config]["chosen"] and point[flag] == arms[config]["chosen"][flag]:
                axes.plot(x, loss, marker="*", markersize=14, color=color, markeredgecolor="black")
    bests = [min(losses) for arm in arms.values() if (losses := _losses(arm["grid"]))]
    lowest = min(bests, default=0.0)
    thirds = [losses[:3][-1] for arm in arms.values() for points in _lines(arm["grid"]).values() if (losses := _losses(points))]
    highest = max(max(bests, default=0.0) + LOSSES_SHOWN, lowest + 1.05 * (max(thirds, default=lowest) - lowest))
    axes.set_ylim(lowest - max(0.02, 0.05 * (highest - lowest)), highest)
    axes.set_ylabel("final validation loss\n(nats per token)")
    turned: dict[str, Any] = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if len(values) > 4 else {}
    named = values[:1]
    for value in values[1:]:  # those whose names do not overlap
        if place[value] - place[named[-1]] > 0.08 * (place[values[-1]] - place[values[0]]):
            named.append(value)
    axes.set_xticks([place[value] for value in named], [in_words(value) for value in named], **turned)
    axes.set_xlabel(FLAGS.get(flag, str(values[0]).partition("=")[0] if flag == "set" else flag))
    axes.margins(x=0.15)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)
    return sum(loss > highest for points in lines.values() for loss in _losses(points))


def _losses(points: Sequence[Flags]) -> list[float]:
    """The losses of the points that have not diverged, in ascending order."""
    return sorted(point["loss"] for point in points if point["loss"] is not None)


def _lines(grid: Sequence[Flags]) -> dict[str, list[Flags]]:
    """Flag of a sweep -> its points in ascending order: those that differ in this flag alone."""
    lines: dict[str, list[Flags]] = {}
    for flag in (key for key in grid[0] if key not in NO_FLAGS):
        agreeing: dict[str, list[Flags]] = {}
        for point in grid:
            others = {key: value for key, value in point.items() if key not in (flag, *NO_FLAGS)}
            agreeing.setdefault(str(others), []).append(point)
        points = max(agreeing.values(), key=len)
        if len(points) > 1 or not lines:
            lines[flag] = sorted(points, key=lambda point: numbers_in(point[flag]))
    return lines


def numbers_in(value: Any) -> list[float]:
    """The numbers of a flag's value, by which values are sorted."""
    return [float(number) for number in re.findall(r"-?\d+\.?\d*(?:[eE][-+]?\d+)?", in_words(value))] if isinstance(value, str) else [value]


def in_words(value: Any) -> str:
    """A flag's value; of `--set KEY=VALUE`, the value."""
    if value is True:
        return "yes"
    return f"{value:g}" if isinstance(value, (int, float)) else str(value).partition("=")[2] or str(value)
