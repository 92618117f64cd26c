"""Random layerwise token dropping: the middle blocks process only some of each sequence's tokens, and more of them later in the run.

    deepspeed launch/pretrain.py --recipe recipes/random_ltd

Yao et al., Random-LTD: Random and Layerwise Token Dropping Brings Efficient Training for Large-scale Transformers, arXiv 2211.11586,
section 3. DeepSpeed implements it for CUDA only, in wrappers that rename the weights. This is plain PyTorch and reads the section that
DeepSpeed documents.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

from model.accounting import block_flops_per_token
from model.gpt import GPT, Block
from model.layers import generator_for
from recipes.technique import Declaration, RunForTechniques, StepWork, Technique, without_auto

#: "auto", of the paper's GPT: it begins with 128 of 2,048 tokens, and drops none after 200 of 286 thousand steps, 0.7 of the run.
FIRST_LENGTH = 128
AUTO_SHARE = 0.7
#: Lengths are multiples of it, as in DeepSpeed's documentation: tensor cores need 8, and fewer shapes are compiled.
MULTIPLE = 16


def reserved_length(step: int, schedule: dict[str, Any]) -> int:
    """The number of tokens of a sequence that a block sees at optimizer step `step` (from 1), by a resolved `random_ltd_schedule`.

    min + (max - min) (step - 1) / require_steps, rounded down to a multiple of `seq_per_step`, at most max: what DeepSpeed's
    RandomLTDScheduler computes from the completed steps.
    """
    least, most, config = schedule["min_value"], schedule["max_value"], schedule["schedule_config"]
    if least >= most:
        return int(most)
    length = math.floor((step - 1) / config["require_steps"] * (most - least) + least)
    return int(min(length - length % config["seq_per_step"], most))


def draw_positions(seed: int, step: int, layer: int, reserved: int, length: int) -> torch.Tensor:
    """`reserved` random positions of 0 to `length` - 1, ascending, int64 (reserved,); every subset is equally likely.

    A pure function of its arguments, drawn on the CPU: the same on every rank and device, in a resumed run, and when a block is recomputed.
    """
    generator = generator_for(f"{seed}/random_ltd/{step}/{layer}")
    return torch.randperm(length, generator=generator, device="cpu")[:reserved].sort().values


def run_on(block: nn.Module, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Run the tokens of x (B, T, C) at `positions` (r,), ascending, through `block`; the other tokens skip it unchanged.

    The block gets a sequence of r tokens, each of which attends to itself and those before it. During the call, the layout is reduced to
    these tokens, which keep their positions and documents.
    """
    attention: Any = block.attn
    layout = attention.layout
    attention.layout = layout.at(positions)
    try:
        part = block(x.index_select(1, positions))  # (B, r, C)
    finally:
        attention.layout = layout
    return x.index_copy(1, positions, part)


class RandomLTD(Technique):
    """DeepSpeed's documented `"random_ltd": {"enabled": true, "random_ltd_layer_id": [1, 2], "random_ltd_schedule": {...}, ...}`.

    It is at the top level, not in `data_efficiency.data_routing`. Values that are "auto" or left out follow from the model and the run's
    length.

    random_ltd_layer_id: which blocks drop tokens, from 0; "auto": all but the first and the last.
    random_ltd_schedule.min_value, max_value: the first and the last number of tokens; "auto": 128, or half of max_value where that is less,
        and the model's seq_len.
    random_ltd_schedule.schedule_config.require_steps: optimizer steps until max_value; "auto": 0.7 of the run's steps of whole batches.
    random_ltd_schedule.schedule_config.seq_per_step: lengths are multiples of it; "auto": 16, or the largest divisor of it that both ends
        have.

    The kept tokens are drawn once per block and optimizer step. They are the same for all sequences, micro-batches and ranks, so that a run
    does not depend on how its batch is divided; the paper draws for each sequence. Evaluation runs every block on all tokens.
    """

    declaration = Declaration(
        section="random_ltd",
        other_places=("data_efficiency.data_routing.random_ltd",),
        exclusive=("which blocks see which tokens", "which tokens of a row a rank has"),
        ignored={
            "total_layer_num": "the blocks of the model are counted",
            "random_ltd_layer_num": "the blocks in random_ltd_layer_id are counted",
            "layer_token_lr_schedule": "DeepSpeed documents this schedule and has none; the learning rate follows 'scheduler'",
            "model_mask_name": "the mask of --no_cross_document is cut automatically, and there is no other",
            "hidden_state_order": "the order of the model, batch before sequence, is known",
        },
        keys={
            "total_layer_num": {"types": ["integer"], "auto": True},
            "random_ltd_layer_num": {"types": ["integer"], "auto": True},
            "random_ltd_layer_id": {"types": ["array"], "items": ["integer"], "auto": True},
            "model_mask_name": {"types": ["string", "null"]},
            "model_type": {"types": ["string"], "enum": ["decoder"]},
            "hidden_state_order": {"types": ["string"], "enum": ["batch_seq_dim", "seq_batch_dim"]},
            "random_ltd_schedule": {
                "types": ["object"],
                "keys": {
                    "min_value": {"types": ["integer"], "minimum": 1, "auto": "reported"},
                    "max_value": {"types": ["integer"], "minimum": 1, "auto": "reported"},
                    "schedule_type": {"types": ["string"], "enum": ["fixed_linear"]},
                    "schedule_config": {
                        "types": ["object"],
                        "keys": {
                            "require_steps": {"types": ["integer"], "minimum": 1, "auto": "reported"},
                            "seq_per_step": {"types": ["integer"], "minimum": 1, "auto": "reported"},
                        },
                    },
                },
            },
            "layer_token_lr_schedule": {"types": ["object"]},
        },
    )

    def __init__(self, section: dict[str, Any], run: RunForTechniques):
        self.shape, self.seed = run.shape, run.seed
        self.layers = self._layers(section)
        self.schedule = self._schedule(section.get("random_ltd_schedule", {}), run.steps)
        least, most = self.schedule["min_value"], self.schedule["max_value"]
        grows = least < most and self.layers
        self.stages = (1, self.schedule["schedule_config"]["require_steps"] + 1) if grows else (1,)
        self.notes = (self._note(),)

    def _layers(self, section: dict[str, Any]) -> frozenset[int]:
        """The indices of the blocks that drop tokens. Raises ValueError, see `Technique.__init__`."""
        n_layer, ids = self.shape.n_layer, section.get("random_ltd_layer_id", "auto")
        if ids == "auto":
            return frozenset(range(1, n_layer - 1))
        layers = frozenset(int(index) for index in ids)
        if not layers or len(layers) < len(ids) or not layers <= set(range(n_layer)):
            raise ValueError(f"'random_ltd.random_ltd_layer_id' is {ids}; name some of the blocks 0 to {n_layer - 1}, each once")
        return layers

    def _schedule(self, given: dict[str, Any], steps: int) -> dict[str, Any]:
        """`random_ltd_schedule` with every value in it. Raises ValueError, see `Technique.__init__`."""
        config, given = without_auto(given.get("schedule_config", {})), without_auto(given)
        ends = {key: given[key] for key in ("min_value", "max_value") if key in given}
        seq_len, name = self.shape.seq_len, "'random_ltd.random_ltd_schedule"
        most = ends.setdefault("max_value", seq_len)
        multiple = config.get("seq_per_step", math.gcd(MULTIPLE, *ends.values()))
        least = ends.get("min_value", max(multiple, min(FIRST_LENGTH, most // 2) // multiple * multiple))
        if most > seq_len:
            raise ValueError(f"{name}.max_value' is {most}, but a sequence has {seq_len} tokens; lower it, or raise --seq_len")
        for key, value in (("max_value", most), ("min_value", least)):  # else the last length comes late, or the first is below min_value
            if value % multiple:
                raise ValueError(
                    f"{name}.schedule_config.seq_per_step' is {multiple}, which does not divide {key}, {value}; write a divisor"
                )
        if least > most:
            raise ValueError(f"{name}.min_value' is {least}, above max_value, {most}; lower it")
        schedule = {"require_steps": config.get("require_steps", max(1, round(AUTO_SHARE * steps))), "seq_per_step": multiple}
        return {"min_value": least, "max_value": most, "schedule_type": "fixed_linear", "schedule_config": schedule}

    def _note(self) -> str:
        if not self.layers:
            return f"random_ltd: no token is dropped: a model of {self.shape.n_layer} blocks has none between the first and the last"
        least, most, config = self.schedule["min_value"], self.schedule["max_value"], self.schedule["schedule_config"]
        lengths = 1 + (most - least) // config["seq_per_step"]
        return (
            f"random_ltd: {len(self.layers)} of {self.shape.n_layer} blocks see {least} of {self.shape.seq_len} tokens at first, {most}"
            f" from step {self.stages[-1]:,} on; up to {lengths} lengths, and a compiled model compiles as many shapes"
        )

    def on_step(self, step: int, work: StepWork) -> StepWork:
        self.step, self.reserved = step, min(reserved_length(step, self.schedule), work.seq_len)
        self._drawn: dict[tuple[int, int, torch.device], torch.Tensor] = {}

        flops, whole = (length * block_flops_per_token(self.shape, length) for length in (self.reserved, work.seq_len))
        self.kept_blocks = self.shape.n_layer - len(self.layers) * (1 - flops / whole)
        return work._replace(equivalent_blocks=self.kept_blocks)

    def prepare(self, model: GPT) -> None:
        model.block_runner = self.run_dropping_tokens

    def run_dropping_tokens(self, blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) through all blocks; in training, blocks that drop tokens get the kept tokens only."""
        drops = blocks.training and self.reserved < x.shape[1]
        for block in cast("Iterable[Block]", blocks):
            x = run_on(block, x, self._positions(block.index, x)) if drops and block.index in self.layers else block(x)
        return x

    def _positions(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """The kept positions of block `layer`, on the device of x (B, T, C); drawn once for all micro-batches of the step."""
        key = layer, x.shape[1], x.device
        if key not in self._drawn:
            self._drawn[key] = draw_positions(self.seed, self.step, layer, self.reserved, x.shape[1]).to(x.device)
        return self._drawn[key]

    def metrics(self) -> dict[str, float]:
        """The number of kept tokens of a row, and the FLOPs of the blocks in units of one block on all tokens."""
        return {"reserved_length": self.reserved, "kept_blocks": self.kept_blocks}
