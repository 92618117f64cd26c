"""The layers with random initial weights, which each layer draws in its constructor, from the seed and its name."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from model.presets import GPTConfig

INIT_STD = 0.02  # Radford et al. 2018, section 4.1, and GPT-2's code, for every matrix and both embeddings


def generator_for(place: str) -> torch.Generator:
    """A CPU generator whose seed is a hash of `place`."""
    digest = hashlib.sha256(place.encode()).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "big"))


@torch.no_grad()
def draw_normal(parameter: torch.Tensor, std: float, config: GPTConfig, name: str, rows: int | None = None) -> None:
    """Fills `parameter` with N(0, std^2), a pure function of (config.init_seed, name); rows from `rows` on are set to zero.

    The numbers are drawn in fp32 on the CPU and rounded to the parameter's dtype, so all devices, ranks and orders of construction start
    from the same model, and bf16 weights are the rounded fp32 weights. A parameter on the meta device is not changed.
    """
    if parameter.is_meta:
        return
    rows = len(parameter) if rows is None else rows
    # torch.normal, because deepspeed.zero.Init replaces torch.empty and torch.randn with versions that ignore the dtype argument.
    size, generator = (rows, *parameter.shape[1:]), generator_for(f"{config.init_seed}/{name}")
    parameter[:rows].copy_(torch.normal(0.0, std, size, generator=generator, dtype=torch.float32, device="cpu"))
    parameter[rows:].zero_()


class Linear(nn.Linear):
    """(..., n_in) -> (..., n_out), initialized by its constructor.

    deepspeed.zero.Init partitions a module's parameters when its constructor returns, so they cannot be initialized later. The constructor
    therefore needs the parameter's name, from which its values are drawn.
    """

    def __init__(self, n_in: int, n_out: int, config: GPTConfig, name: str, std: float = INIT_STD):
        super().__init__(n_in, n_out, bias=config.bias)
        draw_normal(self.weight, std, config, f"{name}.weight")
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def reset_parameters(self) -> None:
        """Does nothing: torch's initialization would use the global generator, and be overwritten."""


class Embedding(nn.Embedding):
    """int64 (...) -> (..., d_model), initialized by its constructor. Rows from `used_rows` on are padding, and zero."""

    def __init__(self, n_rows: int, config: GPTConfig, name: str, used_rows: int | None = None):
        super().__init__(n_rows, config.d_model)
        draw_normal(self.weight, INIT_STD, config, f"{name}.weight", used_rows)

    def reset_parameters(self) -> None:
        """Does nothing, as in `Linear`."""
