"""Moves a checkpoint into an engine of another layout: other ranks, another ZeRO stage, offload or precision.

DeepSpeed loads a checkpoint only if each rank finds its own part in it. Here every rank maps the files of all ranks
(`launch/formats/deepspeed_files.py`) and copies its own part, piece by piece: the fp32 weights and the optimizer's state of each parameter,
then the weights that the model computes with. The files are not changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from launch.errors import UsageError
from launch.formats.deepspeed_files import DeepSpeedFiles, DeepSpeedLayout, Piece, copy_pieces
from launch.training.deepspeed_fixes.resume import SETTINGS, scaler_of, take_scale
from recipes.masters import Fragment, UpdatedTensor, master_weights

#: Keys of the checkpoint's groups that a move does not copy: settings of this run, and the step, which each parameter's state has.
NOT_COPIED = ("params", "lr", "initial_lr", "step", "foreach", "fused", "capturable", "differentiable", *SETTINGS)


class Move:
    """A checkpoint of another layout, to be loaded into `ds_engine`.

    Args:
        files: of the checkpoint.
        layout: the engine's.

    Raises:
        UsageError: this state cannot be moved, or not into this engine; one line with the reason. The engine is not changed.
    """

    def __init__(self, files: DeepSpeedFiles, ds_engine: Any, layout: DeepSpeedLayout):
        self._files, self._ds_engine, self._layout, self._wrapper = files, ds_engine, layout, ds_engine.optimizer
        self._names = {id(parameter): name for name, parameter in ds_engine.module.named_parameters()}
        self._optimizer = getattr(ds_engine.optimizer, "optimizer", ds_engine.optimizer)
        self._refuse_engine()
        with files.as_deepspeed_writes():
            self._weights, self._state = files.weights(), files.optimizer()
        self._refuse_state()

    def __str__(self) -> str:
        return f"resumed {self._files.checkpoint.name}, written by {self._files.layout}, on {self._layout}"

    def _refuse_engine(self) -> None:
        known = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "FP16_UnfusedOptimizer")
        kind, why = type(self._wrapper).__name__, ""
        if any(flat is None for flat in getattr(self._wrapper, "fp16_partitioned_groups_flat", ())):
            why = 'weights are not moved to NVMe; write "cpu" for the device of offload_param'
        elif self._layout.offload == "nvme":
            why = 'the optimizer is not moved to NVMe; write "cpu" for the device of offload_optimizer'
        elif kind not in known and not isinstance(self._wrapper, torch.optim.Optimizer):
            why = f"the state of DeepSpeed's {kind} is not known"
        if why:
            raise UsageError(f"{self._files.checkpoint}: was written by {self._files.layout}, and this job has {self._layout}: {why}")

    def _refuse_state(self) -> None:
        """At stages 1 to 3: refuse state that only some parameters of a flat tensor have, and state that ZeRO would cut."""
        if self._layout.stage == 0:
            return
        for names in ([fragment.name for fragment in master.fragments] for master in master_weights(self._ds_engine)):
            for key, of_parameter in self._state.pieces.items():
                if 0 < len(lacking := set(names) - set(of_parameter)) < len(names):
                    raise UsageError(f"{self._files.checkpoint}: the optimizer has no {key} of {min(lacking)}; use stage 0")
            first = self._state.others[names[0]]
            for name in names:
                for key, value in (first | self._state.others[name]).items():
                    if getattr(value, "ndim", 0) or key not in first or bool(value != first[key]) or key not in self._state.others[name]:
                        why = f"the optimizer's {key} of {name} is of this parameter alone, and ZeRO would cut it"
                        raise UsageError(f"{self._files.checkpoint}: {why}; use stage 0")

    @torch.no_grad()
    def fill(self) -> None:
        """Load everything into the engine. All ranks call this together."""
        if partitioned := self._layout.stage == 3:
            self._wrapper.checkpoint_event_prologue()
        masters = list(master_weights(self._ds_engine))
        for master in masters:
            _fill(master.tensor.data, master.fragments, self._weights)
        self._load_optimizer(masters)
        if partitioned:
            self._take_over_weights_at_stage_3()
            self._wrapper.checkpoint_event_epilogue()
        else:
            for parameter in self._ds_engine.module.parameters():
                copy_pieces(self._weights[self._names[id(parameter)]], parameter.data.view(-1))
            if self._layout.stage:
                self._wrapper._link_all_hp_params()
        self._load_counters()

    def _load_optimizer(self, masters: list[UpdatedTensor]) -> None:
        counts_in_python = type(self._optimizer).__module__.startswith("deepspeed.")
        states: dict[int, dict[str, Any]] = {}
        for index, (tensor, fragments) in enumerate(masters):
            state: dict[str, Any] = {}
            for key, of_parameter in self._state.pieces.items():
                if fragments[0].name in of_parameter:
                    state[key] = _fill(torch.zeros_like(tensor, requires_grad=False), fragments, of_parameter)
            for key, value in self._state.others[fragments[0].name].items():
                # A separate tensor for each: torch's optimizers count in place, so a shared one would be counted several times.
                state[key] = value.clone() if isinstance(value, torch.Tensor) else value
                if key == "step":
                    state[key] = int(value) if counts_in_python else torch.tensor(float(value))
            if state:
                states[index] = state
        with self._every_parameter():
            own = self._optimizer.state_dict()["param_groups"]
            for group, saved in zip(own, self._state.groups, strict=False):
                group.update({key: value for key, value in saved.items() if key in group and key not in NOT_COPIED})
            self._optimizer.load_state_dict({"state": states, "param_groups": own})

    @contextlib.contextmanager
    def _every_parameter(self) -> Iterator[None]:
        """Stage 3 gives its optimizer one parameter at a time; in the body, it has all of them."""
        if self._layout.stage != 3:
            yield
            return
        self._wrapper._set_fp32_optimizer_param_groups()
        try:
            yield
        finally:
            self._wrapper._clear_fp32_optimizer_param_groups()

    def _take_over_weights_at_stage_3(self) -> None:
        """Have DeepSpeed copy the fp32 weights, which it has already, to the partitions that the model computes with."""
        wrapper = self._wrapper
        state = {name: getattr(wrapper, name) for name in ("loss_scaler", "dynamic_loss_scale", "overflow")}
        state["fp32_flat_groups"] = wrapper.fp32_partitioned_groups_flat
        wrapper.load_state_dict({self._ds_engine.global_rank: state}, load_optimizer_states=False)

    def _load_counters(self) -> None:
        ds_engine, saved = self._ds_engine, self._files.state
        ds_engine.global_steps, ds_engine.skipped_steps = saved["global_steps"], saved["skipped_steps"]
        ds_engine.global_samples = saved["global_samples"]
        if self._layout.precision == self._files.layout.precision == "fp16":
            take_scale(scaler_of(self._wrapper)[1], self._files.loss_scale())


def move_of(checkpoint: Path, ranks_before: int, ds_engine: Any, ranks: int) -> Move | None:
    """The move of `checkpoint`, which `ranks_before` ranks wrote, into `ds_engine` on `ranks` ranks; None if DeepSpeed can load it itself.

    Raises:
        UsageError: it cannot be moved.
    """
    shapes = {name: getattr(parameter, "ds_shape", parameter.shape) for name, parameter in ds_engine.module.named_parameters()}
    files, layout = DeepSpeedFiles(checkpoint, ranks_before, shapes), DeepSpeedLayout.of(ds_engine.config, ranks)
    return None if files.layout == layout else Move(files, ds_engine, layout)


def _fill(flat: torch.Tensor, fragments: list[Fragment], pieces: dict[str, list[Piece]]) -> torch.Tensor:
    """Copy the pieces of all fragments into `flat`, and return it."""
    for name, first, start, length in fragments:
        copy_pieces(pieces[name], flat.view(-1)[start : start + length], first)
    return flat
