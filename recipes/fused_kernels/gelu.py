"""GPT-2's GELU as one compiled kernel each for the forward and the backward pass.

0.5 x (1 + tanh u) is x times the logistic function of 2u, with u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks and Gimpel, arXiv
1606.08415). This takes one exponential instead of a tanh.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import nn

SLOPE, CUBE = 2 * math.sqrt(2 / math.pi), 0.044715


def _forward(x: torch.Tensor) -> torch.Tensor:
    z = x.float()
    return (z * torch.sigmoid(SLOPE * (z + CUBE * z**3))).to(x.dtype)


def _backward(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    z = x.float()
    s = torch.sigmoid(SLOPE * (z + CUBE * z**3))
    return (gradient.float() * (s + z * s * (1 - s) * SLOPE * (1 + 3 * CUBE * z**2))).to(x.dtype)


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function)


class _GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return _compiled(_forward)(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return _compiled(_backward)(x, gradient)


class CompiledGELU(nn.Module):
    """`nn.GELU(approximate="tanh")`, compiled with torch.compile: (...) -> (...)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _GELU.apply(x)
