"""Pictures of a run: `loss.png`, as people look at it first, `histograms.png`, the exponents of its gradients, and `blocks.png`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launch.formats.metrics import read_metrics
from launch.training.exponents import FP16_INFINITE, FP16_SMALLEST, FP16_ZERO, KINDS, overall


def draw_loss(run: Path, title: str, initial_loss: float) -> Path:
    """Draw training and validation loss of the run in folder `run` over tokens; steps on the upper axis.

    Args:
        initial_loss: ln(vocabulary): where an untrained model starts; drawn as a dashed line.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    lines = read_metrics(run / "metrics.jsonl")
    train, val = ([line for line in lines if _is_number(line.get(key)) and _is_number(line.get("tokens"))] for key in ("loss", "val_loss"))
    figure, axes = pyplot.subplots(figsize=(9, 5), dpi=120, layout="constrained")
    if train:
        tokens, loss = [line["tokens"] for line in train], [line["loss"] for line in train]
        axes.plot(tokens, loss, color="#9ec5e8", linewidth=0.8, label="training, each step")
        axes.plot(tokens, _smooth(loss), color="#1f6fb4", linewidth=1.8, label=f"training, smoothed: {_smooth(loss)[-1]:.3f} at the end")
    if val:
        axes.plot(
            [line["tokens"] for line in val],
            [line["val_loss"] for line in val],
            color="#d95f02",
            marker="o",
            markersize=4,
            linewidth=1.8,
            label=f"validation: {val[-1]['val_loss']:.3f} at the end",
        )
    axes.axhline(initial_loss, color="#888888", linestyle="--", linewidth=1, label=f"untrained: ln(vocabulary) = {initial_loss:.2f}")
    axes.set(xlabel="tokens", ylabel="loss (nats a token)", title=title)
    axes.xaxis.set_major_formatter(FuncFormatter(_engineering))
    axes.grid(alpha=0.3)
    axes.legend()
    if train and train[-1]["step"] > 0:
        places = [(line["tokens"], line["step"]) for line in train]  # steps need not be of equal size
        steps_of, tokens_of = _through(places), _through([(step, tokens) for tokens, step in places])
        axes.secondary_xaxis("top", functions=(steps_of, tokens_of)).set_xlabel("steps")
    file = run / "loss.png"
    figure.savefig(file)
    pyplot.close(figure)
    return file


def draw_exponents(run: Path, line: dict[str, Any]) -> Path:
    """Draw a line of `histograms.jsonl`: for activation and weight gradients the share of each exponent, over all layers and by layer.

    The exponents are those of the gradient itself, without its loss scale; two bars show the range of fp16 at scale 1 and at the run's.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import LogNorm

    layers = list(line[KINDS[0]])
    shift = round(math.log2(line["scale"]))
    seen = [exponent for kind in KINDS for layer in line[kind].values() for exponent in layer["exponents"]]
    low = min([*seen, FP16_ZERO - shift]) - 1
    high = max([*seen, FP16_INFINITE]) + 1
    figure, axes = pyplot.subplots(
        2,
        2,
        figsize=(13, 4.8 + 0.26 * len(layers)),
        dpi=110,
        sharex=True,
        layout="constrained",
        height_ratios=[4.0, max(1.5, 0.26 * len(layers))],
    )
    for column, kind in enumerate(KINDS):
        top, bottom = axes[0][column], axes[1][column]
        shares = _shares(line[kind], low, high)
        elements = [layer["elements"] for layer in line[kind].values()]
        total = [sum(row[i] * n for row, n in zip(shares, elements, strict=True)) / max(1, sum(elements)) for i in range(high - low)]
        top.bar(range(low, high), [100 * share for share in total], width=0.9, color="#1f6fb4")
        top.set_yscale("log")
        top.set_ylim(1e-5, 1e4)
        for scale, height, color in ((1.0, 2e3, "#b3261e"), (line["scale"], 2e2, "#2e7d32")):
            start, end = FP16_SMALLEST - math.log2(scale), FP16_INFINITE - math.log2(scale)
            key = "fp16_zero_at_1" if scale == 1.0 else "fp16_zero_at_scale"
            top.plot([start, end], [height, height], color=color, linewidth=5, solid_capstyle="butt")
            label = f"fp16 at scale {scale:,.10g}: {100 * overall(line, kind, key):.3g}% are zero"
            top.text((start + end) / 2, height * 1.35, label, color=color, ha="center", va="bottom", fontsize=9)
            for panel in (top, bottom):
                panel.axvline(FP16_ZERO - math.log2(scale) - 0.5, color=color, linestyle="--", linewidth=1)
        top.set(title=f"{kind.replace('_', ' ')}, all layers", ylabel="% of the values")
        top.set_yticks([1e-4, 1e-3, 1e-2, 1e-1, 1, 10], ["0.0001", "0.001", "0.01", "0.1", "1", "10"])
        top.grid(axis="y", alpha=0.3)
        mesh = bottom.pcolormesh(
            [low - 0.5 + i for i in range(high - low + 1)],
            [i - 0.5 for i in range(len(layers) + 1)],
            [[100 * share or math.nan for share in row] for row in shares],
            norm=LogNorm(1e-3, 40),
            cmap="viridis",
        )
        bottom.set_yticks(range(len(layers)), layers, fontsize=8)
        bottom.invert_yaxis()
        bottom.set_xlabel("exponent: log2 of the gradient, without the loss scale")
        for row, layer in enumerate(line[kind].values()):
            text = f"{100 * layer['fp16_zero_at_1']:.3g}% | {100 * layer['fp16_zero_at_scale']:.3g}%"
            bottom.text(1.01, row, text, transform=bottom.get_yaxis_transform(), va="center", fontsize=8)
        bottom.set_title(f"by layer; zero in fp16 at scale 1 | {line['scale']:,.10g}", fontsize=9, loc="right")
        bottom.set_xlim(low - 0.5, high - 0.5)
    figure.colorbar(mesh, ax=axes[1], label="% of the layer's values", location="bottom", shrink=0.5, aspect=50)
    scaled = f"loss scale {line['loss_scale']:,.10g}" if line["loss_scale"] else "no loss scale"
    figure.suptitle(f"{run.name}, step {line['step']}: gradients in {line['precision']}, {scaled}")
    file = run / "histograms.png"
    figure.savefig(file)
    pyplot.close(figure)
    return file


def draw_blocks(run: Path) -> Path:
    """Draw `blocks.jsonl`: over depth and time each block's norm ratio of output to input, and the cosine between the two."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import LogNorm

    lines = read_metrics(run / "blocks.jsonl")
    n_layer = len(lines[-1]["norm_ratio"])  # the line that was just written
    lines = [line for line in lines if all(_are_numbers(line.get(key), n_layer) for key in ("norm_ratio", "cosine_similarity"))]
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 2.2 + 0.32 * max(6, n_layer)), dpi=110, sharey=True, layout="constrained")
    # Both are a matter of powers: a first block may multiply the norm by hundreds, a late one turn by a thousandth.
    panels = {
        "norm_ratio": ("norm of the output over that of the input", "ratio", lambda ratio: min(1e30, max(1e-4, ratio))),
        "cosine_similarity": ("cosine between input and output", "1 - cosine", lambda cosine: max(1e-4, 1 - cosine)),
    }
    for panel, (key, (title, label, of)) in zip(axes, panels.items(), strict=True):
        values = [[line[key][layer] for line in lines] for layer in range(n_layer)]  # (blocks, evaluations)
        colors = [[of(value) for value in row] for row in values]
        norm = LogNorm(min(map(min, colors)), max(map(max, colors)))
        mesh = panel.pcolormesh(colors, cmap="viridis", norm=norm, edgecolors="white", linewidth=0.5)
        if len(lines) <= 12 and n_layer <= 24:
            for layer, row in enumerate(values):
                for place, value in enumerate(row):
                    color = "black" if norm(of(value)) > 0.5 else "white"
                    panel.text(place + 0.5, layer + 0.5, f"{value:.4g}", ha="center", va="center", color=color, fontsize=8)
        every = -(-len(lines) // 12)
        panel.set_xticks([place + 0.5 for place in range(0, len(lines), every)], [str(line["step"]) for line in lines[::every]])
        panel.set_yticks([layer + 0.5 for layer in range(n_layer)], [str(layer) for layer in range(n_layer)])
        panel.set(title=title, xlabel="step")
        figure.colorbar(mesh, ax=panel, label=label)
    axes[0].set_ylabel("block, from the input")
    axes[0].invert_yaxis()
    figure.suptitle(f"{run.name}: what each block makes of its input (1 is no change), mean over the validation tokens")
    file = run / "blocks.png"
    figure.savefig(file)
    pyplot.close(figure)
    return file


def _shares(layers: dict[str, dict[str, Any]], low: int, high: int) -> list[list[float]]:
    """For each layer the share of every exponent from `low` to below `high` among all of its values."""
    rows = []
    for layer in layers.values():
        exponents = {int(exponent): count for exponent, count in layer["exponents"].items()}
        rows.append([exponents.get(exponent, 0) / max(1, layer["elements"]) for exponent in range(low, high)])
    return rows


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300


def _are_numbers(values: Any, count: int) -> bool:
    return isinstance(values, list) and len(values) == count and all(map(_is_number, values))


def _through(places: list[tuple[float, float]]) -> Callable[[Any], Any]:
    """A function through `places`, which rise, and (0, 0): straight between them, and on at the mean slope."""
    import numpy as np

    xs, ys = np.array([(0, 0), *places], dtype=float).T

    def at(x: Any) -> Any:
        outside = np.minimum(x, 0) + np.maximum(x - xs[-1], 0)
        return np.interp(x, xs, ys) + outside * ys[-1] / xs[-1]

    return at


def _smooth(values: list[float]) -> list[float]:
    """Exponential mean over ten steps, fewer of a short run, corrected for its start as Adam corrects its moments."""
    weight = min(0.9, max(0.0, 1 - 10 / len(values))) if values else 0.0  # a mean over ten of 40 steps would lag far behind
    mean, out = 0.0, []
    for count, value in enumerate(values, 1):
        mean = weight * mean + (1 - weight) * value
        out.append(mean / (1 - weight**count))
    return out


def _engineering(value: float, _: Any = None) -> str:
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g} {name}"
    return f"{value:g}"
