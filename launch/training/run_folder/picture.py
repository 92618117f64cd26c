"""Pictures of a run: `loss.png`, `histograms.png` (exponents of gradients) and `blocks.png` (similarity of a block's input and output)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from launch.formats.metrics import is_finite_number
from launch.training.exponents import FP16_ZERO, KINDS, overall

MAX_TICKS = 12
#: The shares of zeros in a layer of `histograms.jsonl`: at loss scale 1, and at the run's.
KEYS = ("fp16_zero_at_1", "fp16_zero_at_scale")


def draw_loss(lines: Sequence[dict[str, Any]], picture: Path, title: str, initial_loss: float) -> None:
    """Draw training and validation loss of the `lines` of `metrics.jsonl` over tokens, with steps on the upper axis.

    The first 3% of the tokens, where losses fall fast, do not set the scale.

    Args:
        initial_loss: ln(vocabulary), the loss of an untrained model; a dashed line if it is in view.
    """
    lines = [line for line in lines if is_finite_number(line.get("tokens"))]
    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    if train := [line for line in lines if is_finite_number(line.get("loss"))]:
        tokens, loss = [line["tokens"] for line in train], [line["loss"] for line in train]
        smooth = _smooth(loss)
        axes.plot(tokens, loss, color="#9ec5e8", linewidth=0.8, label="training, each step")
        axes.plot(tokens, smooth, color="#1f6fb4", linewidth=1.8, label=f"training, smoothed: {smooth[-1]:.3f} at the end")
        steps = [line["step"] for line in train]
        ticks = [
            int(step)
            for step in MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]).tick_values(0, steps[-1])
            if steps[0] <= step <= steps[-1]
        ]
        top = axes.secondary_xaxis("top")
        top.set_xticks(list(np.interp(ticks, steps, tokens)), list(map(str, ticks)))  # steps may differ in their number of tokens
        top.set_xlabel("steps")
    if val := [line for line in lines if is_finite_number(line.get("val_loss"))]:
        tokens, loss = [line["tokens"] for line in val], [line["val_loss"] for line in val]
        axes.plot(tokens, loss, color="#d95f02", marker="o", markersize=4, label=f"validation: {loss[-1]:.3f} at the end")
    end = max((line["tokens"] for line in lines), default=0)
    late = [line[key] for line in lines for key in ("loss", "val_loss") if is_finite_number(line.get(key)) and line["tokens"] > 0.03 * end]
    if len(late) > 30:
        margin = 0.05 * (max(late) - min(late)) or 0.01
        axes.set_ylim(min(late) - margin, max(late) + margin)
    above = " (above the frame)" if initial_loss > axes.get_ylim()[1] else ""
    line = axes.axhline(initial_loss, color="#888888", linestyle="--", linewidth=1)
    line.set_label(f"untrained: ln(vocabulary) = {initial_loss:.2f}{above}")
    axes.set(xlabel="tokens", ylabel="loss (nats per token)")
    axes.set_title(title, parse_math=False)  # the name of a run may contain $
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture)


def draw_exponents(line: dict[str, Any], picture: Path, name: str) -> None:
    """Draw a line of `histograms.jsonl` of run `name`: for activation and weight gradients the share of each exponent, by layer.

    The exponents are those of the gradient without its loss scale. Lines show what fp16 rounds to zero at scale 1 and at the run's scale.
    """
    layers = list(line[KINDS[0]])
    scales = {1.0: (KEYS[0], "#b3261e"), line["scale"]: (KEYS[1], "#2e7d32")}
    seen = [int(exponent) for kind in KINDS for layer in line[kind].values() for exponent in layer["exponents"]]
    exponents = range(min([*seen, FP16_ZERO - round(math.log2(line["scale"]))]) - 1, max([*seen, FP16_ZERO]) + 2)
    figure = Figure(figsize=(13, 2.8 + 0.3 * len(layers)), dpi=110, layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2, sharey=True), KINDS, strict=True):
        counts = [{int(exponent): count for exponent, count in layer["exponents"].items()} for layer in line[kind].values()]
        elements = [max(1, layer["elements"]) for layer in line[kind].values()]
        shares = [[100 * found.get(one, 0) / total or math.nan for one in exponents] for found, total in zip(counts, elements, strict=True)]
        mesh = axes.pcolormesh(exponents, range(len(layers)), shares, norm=LogNorm(1e-3, 40), shading="nearest")
        for scale, (key, color) in scales.items():
            label = f"zero in fp16 at scale {scale:,.10g}: {100 * overall(line, kind, key):.3g}%"
            axes.axvline(FP16_ZERO - math.log2(scale) - 0.5, color=color, linestyle="--", label=label)
        axes.set_title(kind.replace("_", " "), pad=24)
        axes.set(xlabel="exponent: log2 of the gradient, without the loss scale")
        axes.set_ylim(len(layers) - 0.5, -0.5)
        axes.set_yticks(range(len(layers)), layers, fontsize=8)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, fontsize=8, frameon=False)  # above, where it hides no layer
        figure.colorbar(mesh, ax=axes, label="% of the layer's values", location="bottom", shrink=0.6, aspect=40)
    scaled = f"loss scale {line['loss_scale']:,.10g}" if line["loss_scale"] else "no loss scale"
    figure.suptitle(f"{name}, step {line['step']}: gradients in {line['precision']}, {scaled}", parse_math=False)
    figure.savefig(picture)


def draw_blocks(lines: Sequence[dict[str, Any]], picture: Path, name: str) -> None:
    """Draw the `lines` of `blocks.jsonl` of run `name`: how much each block changes its input, at each evaluation.

    The change is the norm of the output over that of the input, and the cosine between the two.
    """
    figure = Figure(figsize=(13, 2.2 + 0.32 * max(6, len(lines[-1]["norm_ratio"]))), dpi=110, layout="constrained")
    # Logarithmic colors: a first block may multiply the norm by hundreds, a late one turn its input by a thousandth.
    values = np.array([[line["norm_ratio"], line["cosine_similarity"]] for line in lines]).transpose(1, 2, 0)  # (2, blocks, evaluations)
    panels = (
        ("norm of the output over that of the input", "ratio", values[0]),
        ("cosine between input and output", "1 - cosine", 1 - values[1]),
    )
    for axes, (title, label, colors) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        mesh = axes.pcolormesh(np.maximum(colors, 1e-4), norm=LogNorm(), edgecolors="white", linewidth=0.5)
        every = -(-len(lines) // MAX_TICKS)
        axes.set_xticks(np.arange(0, len(lines), every) + 0.5, [str(line["step"]) for line in lines[::every]])
        axes.set_yticks(np.arange(len(colors)) + 0.5, map(str, range(len(colors))))
        axes.set(title=title, xlabel="step", ylim=(len(colors), 0))
        figure.colorbar(mesh, ax=axes, label=label)
    figure.supylabel("block, from the input")
    figure.suptitle(f"{name}: each block's output compared with its input, mean over the validation tokens", parse_math=False)
    figure.savefig(picture)


def _smooth(values: list[float]) -> list[float]:
    """Exponential mean over ten steps (fewer in a short run), corrected for its start as Adam corrects its moments."""
    weight = min(0.9, max(0.0, 1 - 10 / len(values)))
    means = itertools.accumulate(values, lambda mean, value: weight * mean + (1 - weight) * value, initial=0.0)
    return [mean / (1 - weight**count) for count, mean in enumerate(means) if count]
