"""The exponents of gradients as a run records them: the bins, and what fp16 makes of each; without torch."""

from __future__ import annotations

import math
from typing import Any

#: Bins of floor(log2 |x|): one for each exponent from LOWEST on; the first and the last are open.
LOWEST, HIGHEST = -80, 40
BINS = HIGHEST - LOWEST + 1
KINDS = ("activation_gradients", "weight_gradients")
#: fp16: the smallest number is 2^-24, and what is below half of it is rounded to zero; from 2^16 on it is infinite.
FP16_ZERO, FP16_SMALLEST, FP16_INFINITE = -25, -24, 16
#: Where an fp16 JSON of ds_configs/ begins: the scale that a run without one is compared with.
INITIAL_SCALE = 2.0**16


def summary(step: int, precision: str, loss_scale: float | None, layers: list[str], counts: list[list[list[int]]]) -> dict[str, Any]:
    """One line of `histograms.jsonl`.

    Args:
        loss_scale: what the gradients were multiplied by; None where there is none.
        counts: kinds x layers x (BINS exponents, zeros, not finite).

    Returns the step, the scale that the shares are for, and for each kind and layer: `exponents` (unscaled: of the gradient itself, as
    {exponent: count}), `elements`, `zero`, `not_finite`, and the shares of all elements that fp16 holds as zero at scale 1
    (`fp16_zero_at_1`) and at the run's scale (`fp16_zero_at_scale`), and as infinite at that scale.
    """
    scale = loss_scale or INITIAL_SCALE
    # Dynamic scales are powers of two. A fixed one that is none is taken for the nearest: its shares are those of up to half a bin beside.
    shift = round(math.log2(loss_scale or 1.0))
    line: dict[str, Any] = {"step": step, "precision": precision, "loss_scale": loss_scale, "scale": scale}
    for kind, rows in zip(KINDS, counts, strict=True):
        line[kind] = {layer: _layer(row, shift, round(math.log2(scale))) for layer, row in zip(layers, rows, strict=True)}
    return line


def _layer(row: list[int], shift: int, scale_exponent: int) -> dict[str, Any]:
    *bins, zero, not_finite = row
    exponents = {LOWEST + place - shift: count for place, count in enumerate(bins) if count}
    elements = sum(row)

    def share(number: int) -> float:
        return number / elements if elements else 0.0

    return {
        "elements": elements,
        "zero": zero,
        "not_finite": not_finite,
        "fp16_zero_at_1": share(zero + sum(count for exponent, count in exponents.items() if exponent < FP16_ZERO)),
        "fp16_zero_at_scale": share(zero + sum(count for exponent, count in exponents.items() if exponent + scale_exponent < FP16_ZERO)),
        "fp16_infinite_at_scale": share(
            not_finite + sum(count for exponent, count in exponents.items() if exponent + scale_exponent >= FP16_INFINITE)
        ),
        "exponents": exponents,
    }


def overall(line: dict[str, Any], kind: str, key: str) -> float:
    """The share `key` of all layers' elements together."""
    layers = line[kind].values()
    elements = sum(layer["elements"] for layer in layers)
    return sum(layer[key] * layer["elements"] for layer in layers) / elements if elements else 0.0
