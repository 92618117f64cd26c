"""The picture of a run: `loss.png`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from launch.formats.metrics import is_finite_number


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


def _smooth(values: list[float]) -> list[float]:
    """Exponential mean over ten steps (fewer in a short run), corrected for its start as Adam corrects its moments."""
    weight = min(0.9, max(0.0, 1 - 10 / len(values)))
    means = itertools.accumulate(values, lambda mean, value: weight * mean + (1 - weight) * value, initial=0.0)
    return [mean / (1 - weight**count) for count, mean in enumerate(means) if count]
