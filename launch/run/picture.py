"""`loss.png`: the curve of a run, as people look at it first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch.run.metrics import read_metrics


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
    train = [line for line in lines if line.get("loss") is not None]
    val = [line for line in lines if line.get("val_loss") is not None]
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
        per_step = train[-1]["tokens"] / train[-1]["step"]
        axes.secondary_xaxis("top", functions=(lambda x: x / per_step, lambda x: x * per_step)).set_xlabel("steps")
    file = run / "loss.png"
    figure.savefig(file)
    pyplot.close(figure)
    return file


def _smooth(values: list[float], weight: float = 0.9) -> list[float]:
    """Exponential mean, corrected for its start as Adam corrects its moments."""
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
