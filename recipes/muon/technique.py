"""Muon: the momentum of every hidden matrix is orthogonalized; embeddings, head, norms and biases are trained by AdamW.

    deepspeed launch/pretrain.py --recipe recipes/muon

Jordan et al., Muon: An optimizer for hidden layers in neural networks, https://kellerjordan.github.io/posts/muon/.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from model.accounting import model_tensors, parameter_count
from model.presets import GATED, GPTConfig
from recipes.masters import Fragment, fragments_of_rank, master_weights
from recipes.muon.optimizer import Matrix, Muon
from recipes.technique import FP32_NAMES, Declaration, RunForTechniques, Technique

if TYPE_CHECKING:
    from model.gpt import GPT


class MuonTechnique(Technique):
    """`"optimizer": {"type": "Muon", "params": {"lr": "auto", "weight_decay": "auto", "momentum": 0.95, ...}}`.

    lr, weight_decay: of both parts.
    adam_lr: the peak of AdamW's part, which follows the schedule in proportion. Default: `lr`.
    betas, eps: of AdamW's part.
    momentum, nesterov: of Muon's part.
    ns_steps, ns_dtype: how often, and in which arithmetic, "bf16" or "fp32", Newton-Schulz iterates.
    rate_scale: how `lr` depends on the shape of a matrix, `recipes.muon.optimizer.RATE_SCALES`.

    DeepSpeed's Muon has the same type and other keys: its `muon_lr` is `lr` here, and its update is that of `"rate_scale": "original"`.
    With the default here, the rate of an n x m matrix is 0.2 sqrt(max(n, m)) / sqrt(max(1, n / m)) times as high.

    The fused matrix of queries, keys and values is orthogonalized as three matrices, and that of swiglu's gate and up as two: each is a
    separate linear map, and Jordan et al. found three better than one. So is each expert's; routers are trained by AdamW.
    """

    declaration = Declaration(
        optimizer_type="Muon",
        keys={
            "momentum": {"types": ["number"], "minimum": 0, "maximum": 0.9999, "default": 0.95},
            "nesterov": {"types": ["boolean"], "default": True},
            "ns_steps": {"types": ["integer"], "minimum": 1, "maximum": 20, "default": 5},
            "ns_dtype": {"enum": ["bf16", "fp32"], "default": "bf16"},
            "rate_scale": {"enum": ["original", "match_rms_adamw"], "default": "match_rms_adamw"},
            "adam_lr": {"types": ["number"], "minimum": 0, "maximum": 100, "same_as": "lr"},
        },
    )

    def __init__(self, section: dict[str, Any], run: RunForTechniques):
        self.params = section
        self._stage, self._ranks, self._parts = run.zero_stage, run.ranks, hidden_matrices(run.model_config)
        self.planned_apart, self._has_experts = frozenset(self._parts), run.shape.n_expert > 0
        # Muon keeps one tensor for a hidden matrix, AdamW two for any other parameter.
        hidden = sum(rows * columns for matrices in self._parts.values() for rows, columns in matrices)
        self.optimizer_tensors = 2 - hidden / parameter_count(run.model_config)
        accumulated = (run.ds_config.get("data_types") or {}).get("grad_accum_dtype")
        if run.zero_stage == 1 and run.precision == "bf16" and accumulated in FP32_NAMES:
            raise ValueError(
                f"'data_types.grad_accum_dtype' is \"{accumulated}\", with which DeepSpeed uses its BF16_Optimizer at stage 1, which "
                "Muon does not support; leave it out, or use stage 2"
            )
        if (run.ds_config.get("bf16") or {}).get("bf16_master_weights_and_grads"):
            raise ValueError(
                "'bf16.bf16_master_weights_and_grads' keeps the weights in bf16, where Muon's weight decay, lr x weight_decay per step, is "
                "lost by rounding; leave it out"
            )
        self._optimizer: Muon | None = None

    def prepare(self, model: GPT) -> None:
        self._hidden = {id(parameter) for name, parameter in model.named_parameters() if name in self._parts}

    def optimizer(self, param_groups: list[dict[str, Any]]) -> Muon:
        if self._stage > 0:  # ZeRO makes one tensor of each group, and Muon and AdamW keep different states
            param_groups = [
                {**group, "params": chosen}
                for group in param_groups
                for is_hidden in (True, False)
                if (chosen := [parameter for parameter in group["params"] if (id(parameter) in self._hidden) == is_hidden])
            ]
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[self.params["ns_dtype"]]
        names = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "ns_steps", "rate_scale")
        adam_rate = self.params["adam_lr"] / self.params["lr"]
        options = {name: self.params[name] for name in names}
        self._optimizer = Muon(param_groups, **options, adam_rate=adam_rate, ns_dtype=dtype, in_batches=self._has_experts)
        return self._optimizer

    def bytes_sent(self, base: int, steps: int) -> int:
        return base + 4 * exchanged_elements(self._parts, self._stage, self._ranks)

    def memory_terms(self, model: GPTConfig, device: str) -> dict[str, int]:
        """For the largest matrix, three fp32 tensors of its size: the direction, and two of the iterations or of the result.

        In fp32 the iterations also need two products of the shorter side. If matrices are cut, a rank keeps what it sent.
        """
        sizes = 3 + (self._stage > 0 and self._ranks > 1)
        squares = 2 if self.params["ns_dtype"] == "fp32" else 0
        shapes = (shape for matrices in self._parts.values() for shape in matrices)
        return {"update": 4 * max(sizes * rows * columns + squares * min(rows, columns) ** 2 for rows, columns in shapes)}

    def attach(self, ds_engine: Any, collectives: Any) -> None:
        assert self._optimizer is not None
        self._optimizer.rank, self._optimizer.collectives = collectives.rank, collectives
        masters = [(master.tensor, list(matrices_in(master.fragments, self._parts))) for master in master_weights(ds_engine)]
        shared = shared_among_ranks(collectives.gather([matrices for _, matrices in masters]))
        self._optimizer.matrices = {
            tensor: [matrix._replace(start=one.start) for matrix, one in zip(joined, own, strict=True)]
            for (tensor, own), joined in zip(masters, shared, strict=True)
            if own
        }


def hidden_matrices(config: GPTConfig) -> dict[str, list[tuple[int, int]]]:
    """(rows, columns) of the matrices of each hidden parameter, by its name."""
    return {
        name: [(rows, shape[-1]) for rows in parts_of(name, shape[-2], config)] * math.prod(shape[:-2])  # of each expert
        for name, shape in model_tensors(config).items()
        if name.startswith("h.") and len(shape) >= 2 and not name.endswith("router.weight")
    }


def exchanged_elements(parts: dict[str, list[tuple[int, int]]], stage: int, ranks: int) -> int:
    """Elements that rank 0 sends in the exchanges of a step: its parts of others' matrices, and others' parts of those that it owns."""
    cut = [matrix for matrix in divided_matrices(parts, stage, ranks) if matrix.owner is not None] if stage else []
    return sum(sum(matrix.lengths[1:]) if matrix.owner == 0 else matrix.lengths[0] for matrix in cut)


def divided_matrices(parts: dict[str, list[tuple[int, int]]], stage: int, ranks: int) -> list[Matrix]:
    """All hidden matrices with their lengths on the ranks and their owners, as `MuonTechnique.attach` finds them in an engine.

    At stages 1 and 2 ZeRO cuts the concatenated hidden parameters into equal parts, at stage 3 each of them.
    """
    sizes = {name: sum(rows * columns for rows, columns in matrices) for name, matrices in parts.items()}
    if stage == 3:
        groups = [([(name, 0, size)], -(-size // ranks)) for name, size in sizes.items()]
    else:
        offsets = accumulate(sizes.values(), initial=0)
        part = -(-sum(sizes.values()) // (2 * ranks)) * 2  # DeepSpeed pads it to an even number
        groups = [([(name, offset, size) for (name, size), offset in zip(sizes.items(), offsets, strict=False)], part)]
    of_ranks = [[list(matrices_in(fragments_of_rank(group, rank, part), parts)) for group, part in groups] for rank in range(ranks)]
    return [matrix for matrices in shared_among_ranks(of_ranks) for matrix in matrices]


def matrices_in(fragments: Iterable[Fragment], shapes: dict[str, list[tuple[int, int]]]) -> Iterator[Matrix]:
    """The matrices of a master tensor, each with this rank's part only. shapes: parameter -> shapes of its matrices, in row order."""
    for name, first, start, length in fragments:
        begin = 0
        for rows, columns in shapes.get(name, ()):
            low, high = max(first, begin), min(first + length, begin + rows * columns)
            yield Matrix(rows, columns, start + low - first if low < high else 0, (max(0, high - low),))
            begin += rows * columns


def shared_among_ranks(of_ranks: list[list[list[Matrix]]]) -> list[list[Matrix]]:
    """The matrices of each master tensor with the lengths of all ranks, from those of each rank.

    The owner of a cut matrix is the rank with the least work so far.
    """
    work, joined = [0] * len(of_ranks), []
    for parts_of_master in zip(*of_ranks, strict=True):
        joined.append(list[Matrix]())
        for parts in zip(*parts_of_master, strict=True):
            rows, columns = parts[0].rows, parts[0].columns
            lengths, owner = tuple(part.lengths[0] for part in parts), None
            if any(0 < length < rows * columns for length in lengths):
                owner = work.index(min(work))
                work[owner] += rows * columns * min(rows, columns)
            joined[-1].append(Matrix(rows, columns, 0, lengths, owner))
    return joined


def parts_of(name: str, rows: int, config: GPTConfig) -> tuple[int, ...]:
    """The number of rows of each matrix in the hidden parameter `name` of `rows` rows."""
    if name.endswith("attn.c_attn.weight"):
        return tuple(heads * config.d_head for heads in config.qkv_heads)
    if name.endswith("mlp.c_fc.weight") and config.mlp in GATED:
        return rows // 2, rows // 2
    return (rows,)
