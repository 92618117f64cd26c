"""The pictures of a run: `loss.png`, and of one with experts `experts.png`.

`python -m launch.training.run_folder.picture runs/first` draws them anew.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from launch.formats.metrics import is_finite_number, model_of_run, read_log, read_run_json, read_valid_lines, resumed_after
from model.accounting import in_words

#: The share of the steps that the smoothed training loss is a mean over.
SMOOTHED = 0.03
#: Colours of the validation losses: the whole one, and the sources of a mixture in turn.
WHOLE, SOURCES = "#d95f02", ("#1b9e77", "#7570b3", "#e7298a", "#a6761d", "#666666")


#: The panels of `experts.png`: the metric of each layer, and its title.
EXPERTS = (
    ("val_expert_load_max", "tokens of the busiest expert ÷ mean"),
    ("val_expert_load_min", "tokens of the idlest expert ÷ mean"),
    ("val_router_entropy", "entropy of the router, nats"),
)
LAYERS = colormaps["viridis"]


def draw_run(run: Path) -> None:
    """Draw the pictures in the folder of a run, which may still train, in place of earlier ones."""
    described = read_run_json(run / "run.json")
    model = model_of_run(described)
    title = f"{run.name}\n{in_words(model)}, ZeRO {described['zero_stage']}, {described['precision']}"
    lines, resumed = read_valid_lines(run / "metrics.jsonl")[0], resumed_after(read_log(run))
    _draw(run / "loss.png", lambda file: draw_loss(lines, file, title, math.log(model.vocab_size), resumed))
    if any(f"{EXPERTS[0][0]}/0" in line for line in lines):
        _draw(run / "experts.png", lambda file: draw_experts(lines, file, title, model.n_expert))


def _draw(picture: Path, draw: Callable[[Path], None]) -> None:
    temporary = picture.with_name(f".{picture.name}.{os.getpid()}.tmp")  # `remove_unfinished` removes it after a kill
    try:
        draw(temporary)
        os.replace(temporary, picture)
    finally:
        temporary.unlink(missing_ok=True)


def draw_loss(lines: Sequence[dict[str, Any]], picture: Path, title: str, initial_loss: float, resumed: Sequence[int] = ()) -> None:
    """Draw training and validation loss of the `lines` of `metrics.jsonl` over tokens, with steps on the upper axis.

    The first 3% of the tokens, where losses fall fast, do not set the scale.

    Args:
        initial_loss: ln(vocabulary), the loss of an untrained model; a dashed line if it is in view.
        resumed: the steps after which the run was resumed, each a vertical line.
    """
    lines = [line for line in lines if is_finite_number(line.get("tokens"))]
    figure = Figure(figsize=(9, 5.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    if train := [line for line in lines if is_finite_number(line.get("loss"))]:
        tokens, loss = [line["tokens"] for line in train], [line["loss"] for line in train]
        width = 2 * round(SMOOTHED * len(loss) / 2) + 1
        axes.plot(tokens, loss, color="#9ec5e8", linewidth=0.8, label="training, each step")
        axes.plot(tokens, _centred_mean(loss, width), color="#1f6fb4", linewidth=1.8, label=f"training, mean over {width} steps")
        steps = [line["step"] for line in train]
        ticks = [
            int(step)
            for step in MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]).tick_values(0, steps[-1])
            if steps[0] <= step <= steps[-1]
        ]
        top = axes.secondary_xaxis("top")
        top.set_xticks(list(np.interp(ticks, steps, tokens)), list(map(str, ticks)))  # steps may differ in their number of tokens
        top.set_xlabel("steps")
        resumed = [*dict.fromkeys(resumed)]
        for number, at in enumerate(np.interp(resumed, steps, tokens)):
            axes.axvline(at, color="#333333", linestyle=":", label=None if number else f"resumed after step {', '.join(map(str, resumed))}")
    sources = dict.fromkeys(key for line in lines for key in line if key.startswith("val_loss/"))
    for key, color in [*zip(sources, SOURCES * len(sources), strict=False), ("val_loss", WHOLE)]:
        if val := [line for line in lines if is_finite_number(line.get(key))]:
            tokens, loss = [line["tokens"] for line in val], [line[key] for line in val]
            name = key.replace("val_loss", "validation").replace("/", " on ", 1)
            size, style = (1.5, "-") if color == WHOLE else (1.0, "--")
            axes.plot(tokens, loss, style, color=color, linewidth=size, marker="o", markersize=3 * size, label=f"{name}: {loss[-1]:.4f}")
    end = max((line["tokens"] for line in lines), default=0)
    late = [line for line in lines if line["tokens"] > 0.03 * end]
    shown = [line[key] for line in late for key in ("loss", "val_loss", *sources) if is_finite_number(line.get(key))]
    if len(shown) > 30:
        margin = 0.05 * (max(shown) - min(shown)) or 0.01
        axes.set_ylim(min(shown) - margin, max(shown) + margin)
    if initial_loss < axes.get_ylim()[1]:
        axes.axhline(initial_loss, color="#888888", linestyle="--", linewidth=1, label=f"untrained: ln(vocabulary) = {initial_loss:.2f}")
    axes.set(xlabel="tokens", ylabel="loss (nats per token)")
    axes.set_title(title, fontsize=10, parse_math=False)  # the name of a run may contain $
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right", fontsize=9)
    drops = ", with dropped blocks or tokens" if any("skipped_flops" in line for line in lines) else ""
    mixed = "\nTraining draws from the sources by their weights; validation counts them by their validation text." if sources else ""
    validation = "Validation: text that is not trained on, after the update, full model."
    figure.supxlabel(f"Training: the batch of the step, before its update{drops}. {validation}{mixed}", fontsize=8.5)
    figure.savefig(picture, format="png")


def draw_experts(lines: Sequence[dict[str, Any]], picture: Path, title: str, n_expert: int) -> None:
    """Draw what the router of each layer did in the evaluations of the `lines` of `metrics.jsonl`, over tokens."""
    lines = [line for line in lines if is_finite_number(line.get("tokens")) and f"{EXPERTS[0][0]}/0" in line]
    layers = sum(key.startswith(f"{EXPERTS[0][0]}/") for key in lines[0])
    figure = Figure(figsize=(13, 4.5), dpi=120, layout="constrained")
    for axes, (name, what) in zip(figure.subplots(1, len(EXPERTS)), EXPERTS, strict=True):
        for layer in range(layers):
            seen = [(line["tokens"], line[key]) for line in lines if is_finite_number(line.get(key := f"{name}/{layer}"))]
            color, label = LAYERS(layer / max(1, layers - 1)), f"layer {layer}" if layers <= 8 or layer in (0, layers - 1) else None
            axes.plot(*zip(*seen, strict=True), color=color, linewidth=1.2, marker="o", markersize=2.5, label=label)
        even = math.log(n_expert) if "entropy" in name else 1.0
        axes.axhline(even, color="#888888", linestyle="--", linewidth=1, label="all experts alike")
        axes.margins(y=0.1)
        axes.set(xlabel="tokens", title=what)
        if "entropy" not in name:
            axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter(EngFormatter())
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.supxlabel("Of validation text, by the weights after the step.", fontsize=8.5)
    figure.suptitle(title, fontsize=10, parse_math=False)
    figure.savefig(picture, format="png")


def _centred_mean(values: Sequence[float], width: int) -> np.ndarray:
    """The mean of the `width` values around each, of fewer at the ends; width is odd: (N,) -> (N,)."""
    sums, places = np.cumsum([0.0, *values]), np.arange(len(values))
    first, end = np.maximum(places - width // 2, 0), np.minimum(places + width // 2 + 1, len(values))
    return (sums[end] - sums[first]) / (end - first)


if __name__ == "__main__":
    draw_run(Path(sys.argv[1]))
