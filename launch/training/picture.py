"""Pictures of a run: `loss.png`, `histograms.png` (exponents of gradients) and `blocks.png` (similarity of a block's input and output)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from launch.formats.metrics import is_finite_number, read_metrics
from launch.training.exponents import FP16_INFINITE, FP16_SMALLEST, FP16_ZERO, KINDS, overall

MAX_TICKS = 12
#: The shares of zeros in a layer of `histograms.jsonl`: at loss scale 1, and at the run's.
KEYS = ("fp16_zero_at_1", "fp16_zero_at_scale")


def draw_loss(run: Path, title: str, initial_loss: float) -> Path:
    """Draw training and validation loss of the run in folder `run` over tokens, with steps on the upper axis.

    Args:
        initial_loss: ln(vocabulary), the loss of an untrained model; a dashed line.
    """
    lines = [line for line in read_metrics(run / "metrics.jsonl") if is_finite_number(line.get("tokens"))]
    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    if train := [line for line in lines if is_finite_number(line.get("loss"))]:
        tokens, loss = [line["tokens"] for line in train], [line["loss"] for line in train]
        smooth = _smooth(loss)
        axes.plot(tokens, loss, color="#9ec5e8", linewidth=0.8, label="training, each step")
        axes.plot(tokens, smooth, color="#1f6fb4", linewidth=1.8, label=f"training, smoothed: {smooth[-1]:.3f} at the end")
        steps = [line["step"] for line in train]
        ticks = [int(step) for step in MaxNLocator(8, integer=True).tick_values(0, steps[-1]) if steps[0] <= step <= steps[-1]]
        top = axes.secondary_xaxis("top")
        top.set_xticks(list(np.interp(ticks, steps, tokens)), list(map(str, ticks)))  # steps may differ in their number of tokens
        top.set_xlabel("steps")
    if val := [line for line in lines if is_finite_number(line.get("val_loss"))]:
        tokens, loss = [line["tokens"] for line in val], [line["val_loss"] for line in val]
        axes.plot(tokens, loss, color="#d95f02", marker="o", markersize=4, label=f"validation: {loss[-1]:.3f} at the end")
    axes.axhline(initial_loss, color="#888888", linestyle="--", linewidth=1, label=f"untrained: ln(vocabulary) = {initial_loss:.2f}")
    axes.set(xlabel="tokens", ylabel="loss (nats a token)", title=title)
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.grid(alpha=0.3)
    axes.legend()
    return _save(figure, run / "loss.png")


def draw_exponents(run: Path, line: dict[str, Any]) -> Path:
    """Draw a line of `histograms.jsonl`: for activation and weight gradients the share of each exponent, over all layers and by layer.

    The exponents are those of the gradient without its loss scale. Two bars show the range of fp16 at scale 1 and at the run's scale.
    """
    layers = list(line[KINDS[0]])
    seen = [int(exponent) for kind in KINDS for layer in line[kind].values() for exponent in layer["exponents"]]
    low = min([*seen, FP16_ZERO - round(math.log2(line["scale"]))]) - 1
    exponents = range(low, max([*seen, FP16_INFINITE]) + 1)
    height = 0.26 * len(layers)
    figure = Figure(figsize=(13, 4.8 + height), dpi=110, layout="constrained")
    axes = figure.subplots(2, 2, sharex=True, height_ratios=[4.0, max(1.5, height)])
    for (top, bottom), kind in zip(axes.T, KINDS, strict=True):
        found = [{int(exponent): count for exponent, count in layer["exponents"].items()} for layer in line[kind].values()]
        counts = [[layer.get(exponent, 0) for exponent in exponents] for layer in found]  # (layers, exponents)
        elements = [max(1, layer["elements"]) for layer in line[kind].values()]
        top.bar(exponents, [100 * sum(column) / sum(elements) for column in zip(*counts, strict=True)], width=0.9, color="#1f6fb4")
        top.set(yscale="log", ylim=(1e-5, 1e4), title=f"{kind.replace('_', ' ')}, all layers", ylabel="% of the values")
        top.grid(axis="y", alpha=0.3)
        for scale, key, level, color in ((1.0, KEYS[0], 2e3, "#b3261e"), (line["scale"], KEYS[1], 2e2, "#2e7d32")):
            start, end = FP16_SMALLEST - math.log2(scale), FP16_INFINITE - math.log2(scale)
            top.plot([start, end], [level, level], color=color, linewidth=5, solid_capstyle="butt")
            label = f"fp16 at scale {scale:,.10g}: {100 * overall(line, kind, key):.3g}% are zero"
            top.text((start + end) / 2, level * 1.35, label, color=color, ha="center", fontsize=9)
            for panel in (top, bottom):
                panel.axvline(FP16_ZERO - math.log2(scale) - 0.5, color=color, linestyle="--", linewidth=1)
        shares = [[100 * count / total or math.nan for count in row] for row, total in zip(counts, elements, strict=True)]
        mesh = bottom.pcolormesh(exponents, range(len(layers)), shares, norm=LogNorm(1e-3, 40), shading="nearest")
        zero = [" | ".join(f"{100 * layer[key]:.3g}%" for key in KEYS) for layer in line[kind].values()]
        bottom.set_yticks(range(len(layers)), [f"{name}  {share}" for name, share in zip(layers, zero, strict=True)], fontsize=8)
        bottom.invert_yaxis()
        bottom.set_xlabel("exponent: log2 of the gradient, without the loss scale")
        bottom.set_title(f"by layer, with the share that is zero in fp16 at scale 1 | {line['scale']:,.10g}", fontsize=9)
    figure.colorbar(mesh, ax=axes[1], label="% of the layer's values", location="bottom", shrink=0.5, aspect=50)
    scaled = f"loss scale {line['loss_scale']:,.10g}" if line["loss_scale"] else "no loss scale"
    figure.suptitle(f"{run.name}, step {line['step']}: gradients in {line['precision']}, {scaled}")
    return _save(figure, run / "histograms.png")


def draw_blocks(run: Path) -> Path:
    """Draw `blocks.jsonl`: for each block and evaluation the norm of the output over that of the input, and the cosine between the two."""
    lines = read_metrics(run / "blocks.jsonl")
    n_layer = len(lines[-1]["norm_ratio"])
    figure = Figure(figsize=(13, 2.2 + 0.32 * max(6, n_layer)), dpi=110, layout="constrained")
    # Logarithmic colors: a first block may multiply the norm by hundreds, a late one turn its input by a thousandth.
    panels = {
        "norm_ratio": ("norm of the output over that of the input", "ratio", lambda ratio: max(1e-4, ratio)),
        "cosine_similarity": ("cosine between input and output", "1 - cosine", lambda cosine: max(1e-4, 1 - cosine)),
    }
    for axes, (key, (title, label, color)) in zip(figure.subplots(1, 2, sharey=True), panels.items(), strict=True):
        values = [[line[key][layer] for line in lines] for layer in range(n_layer)]  # (blocks, evaluations)
        mesh = axes.pcolormesh([[color(value) for value in row] for row in values], norm=LogNorm(), edgecolors="white", linewidth=0.5)
        if len(lines) <= MAX_TICKS and n_layer <= 24:
            for layer, row in enumerate(values):
                for column, value in enumerate(row):
                    text = "black" if mesh.norm(color(value)) > 0.5 else "white"
                    axes.text(column + 0.5, layer + 0.5, f"{value:.4g}", ha="center", va="center", color=text, fontsize=8)
        every = -(-len(lines) // MAX_TICKS)
        axes.set_xticks([column + 0.5 for column in range(0, len(lines), every)], [str(line["step"]) for line in lines[::every]])
        axes.set_yticks([layer + 0.5 for layer in range(n_layer)], [str(layer) for layer in range(n_layer)])
        axes.set(title=title, xlabel="step", ylim=(n_layer, 0))
        figure.colorbar(mesh, ax=axes, label=label)
    figure.supylabel("block, from the input")
    figure.suptitle(f"{run.name}: each block's output compared with its input, mean over the validation tokens")
    return _save(figure, run / "blocks.png")


def _save(figure: Figure, file: Path) -> Path:
    figure.savefig(file)
    return file


def _smooth(values: list[float]) -> list[float]:
    """Exponential mean over ten steps (fewer in a short run), corrected for its start as Adam corrects its moments."""
    weight = min(0.9, max(0.0, 1 - 10 / len(values)))
    mean, out = 0.0, []
    for count, value in enumerate(values, 1):
        mean = weight * mean + (1 - weight) * value
        out.append(mean / (1 - weight**count))
    return out
