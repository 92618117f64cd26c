"""Muon: the momentum of every hidden matrix is orthogonalized; embeddings, head, norms and biases are trained by AdamW.

    deepspeed launch/pretrain.py --recipe recipes/muon

Jordan et al., Muon: An optimizer for hidden layers in neural networks, https://kellerjordan.github.io/posts/muon/.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from model.accounting import block_tensors, parameter_count
from model.presets import GATED, GPTConfig
from recipes.muon.optimizer import Muon
from recipes.technique import Costs, Declaration, Run, Technique, require_stage_0

if TYPE_CHECKING:
    from model.gpt import GPT

DEFAULTS: dict[str, Any] = {"momentum": 0.95, "nesterov": True, "ns_steps": 5, "ns_dtype": "bf16", "rate_scale": "match_rms_adamw"}


class MuonTechnique(Technique):
    """`"optimizer": {"type": "Muon", "params": {"lr": "auto", "weight_decay": "auto", "momentum": 0.95, ...}}`.

    lr, weight_decay: of both parts.
    adam_lr: the peak of AdamW's part, which follows the schedule in proportion. Default: `lr`.
    betas, eps: of AdamW's part.
    momentum, nesterov: of Muon's part.
    ns_steps, ns_dtype: how often, and in which arithmetic, "bf16" or "fp32", Newton-Schulz iterates.
    rate_scale: how `lr` depends on the shape of a matrix, `recipes.muon.optimizer.RATE_SCALES`.

    The fused matrix of queries, keys and values is orthogonalized as three, and that of swiglu's gate and up as two: each of them is a
    linear map of its own, and Jordan et al. found three better than one.
    """

    declaration = Declaration(
        optimizer_type="Muon",
        keys={
            "momentum": {"types": ["number"], "minimum": 0, "maximum": 1},
            "nesterov": {"types": ["boolean"]},
            "ns_steps": {"types": ["integer"], "minimum": 1, "maximum": 20},
            "ns_dtype": {"enum": ["bf16", "fp32"]},
            "rate_scale": {"enum": ["original", "match_rms_adamw"]},
            "adam_lr": {"types": ["number"], "minimum": 0, "maximum": 1},
        },
    )

    def __init__(self, section: dict[str, Any], run: Run):
        self.params = DEFAULTS | section
        self.costs = Costs(optimizer_tensors=optimizer_tensors(run.model_config))
        if self.params["momentum"] == 1:
            raise ValueError("'optimizer.params.momentum' is 1, so old gradients never decay; write a number below 1")
        require_stage_0(run, "Muon orthogonalizes whole matrices", self.costs.optimizer_tensors)
        self._parts: dict[int, tuple[int, ...]] = {}

    def prepare(self, model: GPT) -> None:
        self._parts = {
            id(parameter): parts_of(name, parameter.shape[0], model.config)
            for name, parameter in model.named_parameters()
            if name.startswith("h.") and parameter.ndim == 2
        }

    def optimizer(self, param_groups: list[dict[str, Any]]) -> Muon:
        for group in param_groups:
            group["parts"] = [self._parts.get(id(parameter)) for parameter in group["params"]]
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[self.params["ns_dtype"]]
        names = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "ns_steps", "rate_scale")
        adam_rate = self.params.get("adam_lr", self.params["lr"]) / self.params["lr"]
        return Muon(param_groups, **{name: self.params[name] for name in names}, adam_rate=adam_rate, ns_dtype=dtype)


def parts_of(name: str, rows: int, config: GPTConfig) -> tuple[int, ...]:
    """The numbers of rows of the matrices that the hidden matrix `name` of `rows` rows consists of."""
    if name.endswith("attn.c_attn.weight"):
        return tuple(heads * config.d_head for heads in config.qkv_heads)
    if name.endswith("mlp.c_fc.weight") and config.mlp in GATED:
        return rows // 2, rows // 2
    return (rows,)


def optimizer_tensors(config: GPTConfig) -> float:
    """fp32 tensors of the parameters' size: one for the hidden matrices, two for the others."""
    hidden = config.n_layer * sum(math.prod(shape) for shape in block_tensors(config).values() if len(shape) == 2)
    return 2 - hidden / parameter_count(config)
