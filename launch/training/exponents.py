"""Histograms of the exponents of gradients, as `histograms.jsonl` holds them, and the share of values that fp16 cannot represent."""

from __future__ import annotations

import math
from typing import Any

#: Bins of floor(log2 |x|): one for each exponent from LOWEST on; the first and the last are open.
LOWEST, HIGHEST = -80, 40
BINS = HIGHEST - LOWEST + 1
KINDS = ("activation_gradients", "weight_gradients")
#: fp16: the smallest number is 2^-24, and values below half of it are rounded to zero.
FP16_ZERO = -25
#: The initial loss scale of the fp16 JSONs in ds_configs/; shown for runs without a loss scale.
INITIAL_SCALE = 2.0**16


def summary(step: int, precision: str, loss_scale: float | None, layers: list[str], counts: list[list[list[int]]]) -> dict[str, Any]:
    """One line of `histograms.jsonl`.

    Args:
        loss_scale: by which the gradients were multiplied, if any.
        counts: kinds x layers x (BINS exponents, zeros, not finite).

    Returns the step, the scale of the shares, and for each kind and layer: `exponents` (of the gradient without its loss scale, as
    {exponent: count}), `elements`, `zero`, `not_finite`, and the shares of all elements that are zero in fp16 at scale 1
    (`fp16_zero_at_1`) and at the run's scale (`fp16_zero_at_scale`).
    """
    scale = loss_scale or INITIAL_SCALE
    # Dynamic scales are powers of two. A fixed scale is rounded to the nearest one, an error of half a bin at most.
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
        "exponents": exponents,
    }


def overall(line: dict[str, Any], kind: str, key: str) -> float:
    """The share `key` over the elements of all layers."""
    layers = line[kind].values()
    elements = sum(layer["elements"] for layer in layers)
    return sum(layer[key] * layer["elements"] for layer in layers) / elements if elements else 0.0
