"""Muon: the momentum of every hidden matrix is orthogonalized; embeddings, head, norms and biases are trained by AdamW.

    deepspeed launch/pretrain.py --recipe recipes/muon

Jordan et al., Muon: An optimizer for hidden layers in neural networks, https://kellerjordan.github.io/posts/muon/.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from model.accounting import block_tensors, parameter_count
from model.presets import GATED, GPTConfig
from recipes.masters import Fragment, master_weights
from recipes.muon.optimizer import Matrix, Muon
from recipes.technique import Costs, Declaration, Run, Technique

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
        self._flattens = run.zero_stage > 0
        #: (rows, columns) of the matrices of each hidden parameter, by its name.
        self._parts: dict[str, list[tuple[int, int]]] = {}
        self._optimizer: Muon | None = None

    def prepare(self, model: GPT) -> None:
        # At stage 3 the parameters are partitioned already.
        shapes = {name: getattr(parameter, "ds_shape", parameter.shape) for name, parameter in model.named_parameters()}
        self._parts = {
            name: [(rows, shape[1]) for rows in parts_of(name, shape[0], model.config)]
            for name, shape in shapes.items()
            if name.startswith("h.") and len(shape) == 2
        }
        self._hidden = {id(parameter) for name, parameter in model.named_parameters() if name in self._parts}

    def optimizer(self, param_groups: list[dict[str, Any]]) -> Muon:
        if self._flattens:  # ZeRO makes one tensor of each group, and Muon and AdamW keep different states
            param_groups = [
                {**group, "params": chosen}
                for group in param_groups
                for is_hidden in (True, False)
                if (chosen := [parameter for parameter in group["params"] if (id(parameter) in self._hidden) == is_hidden])
            ]
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[self.params["ns_dtype"]]
        names = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "ns_steps", "rate_scale")
        adam_rate = self.params.get("adam_lr", self.params["lr"]) / self.params["lr"]
        self._optimizer = Muon(param_groups, **{name: self.params[name] for name in names}, adam_rate=adam_rate, ns_dtype=dtype)
        return self._optimizer

    def attach(self, engine: Any, collectives: Any) -> None:
        assert self._optimizer is not None
        self._optimizer.collectives = collectives
        self._optimizer.matrices = {
            master.tensor: shared_among_ranks(matrices, collectives)
            for master in master_weights(engine)
            if (matrices := [m for fragment in master.fragments for m in matrices_in(fragment, self._parts.get(fragment.name, []))])
        }


def matrices_in(fragment: Fragment, shapes: list[tuple[int, int]]) -> Iterator[Matrix]:
    """The matrices of `shapes` that a parameter consists of, one below the other, with what `fragment` has of each of them."""
    begin = 0
    for rows, columns in shapes:
        low, high = max(fragment.first, begin), min(fragment.first + fragment.length, begin + rows * columns)
        length = max(0, high - low)
        yield Matrix(rows, columns, low - begin if length else 0, fragment.start + low - fragment.first if length else 0, length)
        begin += rows * columns


def shared_among_ranks(matrices: list[Matrix], collectives: Any) -> list[Matrix]:
    """`matrices`, where each of those that are cut has the owner that has the least work so far. All ranks call this together."""
    cut = collectives.gather([0 < matrix.length < matrix.numel for matrix in matrices])
    work, shared = [0] * collectives.world_size, []
    for matrix, is_cut in zip(matrices, map(any, zip(*cut, strict=True)), strict=True):
        if is_cut:
            owner = work.index(min(work))
            work[owner] += matrix.numel * min(matrix.rows, matrix.columns)
            matrix = matrix._replace(owner=owner)
        shared.append(matrix)
    return shared


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
