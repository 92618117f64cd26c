"""0/1 Adam: the variance of Adam is updated at intervals that grow, and later the ranks make local steps between compressed exchanges.

    deepspeed launch/pretrain.py --recipe recipes/zero_one_adam

Lu, Li, Zhang, De Sa and He, Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam, arXiv 2202.06009. DeepSpeed had it,
at least until 0.19.6, for GPUs with cupy or MPI; here it is plain torch, on any backend.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from recipes.one_bit import CompressedTechnique, declare
from recipes.technique import RunForTechniques, StepWork
from recipes.zero_one_adam.optimizer import LocalStepAdam

KEYS = ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")


class Schedule(NamedTuple):
    """The two sets of steps of 0/1 Adam, in updates from 1 on (section 4 of the paper).

    T_v, in which the variance is updated: k_0 = 0, k_{j+1} = k_j + 2^floor(j / var_update_scaler), up to var_freeze_step.
    T_u, after which all ranks have the same weights: every step up to t_0 = var_freeze_step; then t_{j+1} = t_j +
    min(local_step_clipper, 2^floor((t_j - var_freeze_step) / local_step_scaler)).
    """

    var_freeze_step: int
    var_update_scaler: int
    local_step_scaler: int
    local_step_clipper: int

    def updates_variance(self, step: int) -> bool:
        """Whether `step` is one of T_v."""
        return self.variance_updates(step) > self.variance_updates(step - 1)

    def variance_updates(self, step: int) -> int:
        """The number of steps of T_v up to `step`."""
        step, found, power = min(step, self.var_freeze_step), 0, 0
        # Distances of 2^p lead from kappa (2^p - 1) to kappa (2^(p+1) - 1).
        while (left := step - self.var_update_scaler * (2**power - 1)) > 0:
            found += min(self.var_update_scaler, left >> power)
            power += 1
        return found

    def exchanges(self, step: int) -> bool:
        """Whether `step` is one of T_u: all ranks have the same weights after it."""
        return self.last_exchange(step)[0] == step

    def last_exchange(self, step: int) -> tuple[int, int]:
        """The last step of T_u up to `step`, and the number of them up to there."""
        last = found = min(step, self.var_freeze_step)
        while last < step:
            level = (last - self.var_freeze_step) // self.local_step_scaler
            distance = min(self.local_step_clipper, 2 ** min(level, 64))
            times = (step - last) // distance
            if distance < self.local_step_clipper:  # up to the first exchange of the next level
                times = min(times, -(-(self.var_freeze_step + (level + 1) * self.local_step_scaler - last) // distance))
            if not times:
                break
            last, found = last + times * distance, found + times
        return last, found


class ZeroOneAdam(CompressedTechnique):
    """DeepSpeed's documented `"optimizer": {"type": "ZeroOneAdam", "params": {..., "var_freeze_step": 1000}}`.

    Steps are updates that fp16 did not skip.

    var_freeze_step: the last step that may update the variance; local steps begin after it. "auto", or left out: 0.2 of the run's steps of
        whole batches, as long as 1-bit Adam's warm-up.
    var_update_scaler: after how many updates of the variance the distance between them doubles, from 1 (kappa); "auto", or left out: a
        fiftieth of the run's steps, 4 to 16.
    local_step_scaler: after how many steps the distance between exchanges doubles; "auto", or left out: a fourth of the steps after
        var_freeze_step.
    local_step_clipper: the largest distance between exchanges (H); "auto", or left out: 16.
    lr, betas, eps, weight_decay: as for AdamW, but "auto" for the second beta is 0.999, because the frozen variance must last.
    bias_correction: as for Adam; in DeepSpeed it had no effect.
    cuda_aware, comm_backend_name: accepted without effect.
    """

    declaration = declare(
        "ZeroOneAdam",
        {key: {"types": ["integer"], "minimum": 1, "auto": True} for key in KEYS},
        exclusive=("whether the ranks of a row have the same weights",),  # between two exchanges, no two ranks have
    )
    #: Momentum, variance, and the updates since the last exchange.
    optimizer_tensors = 3
    optimizer_class = LocalStepAdam
    also_lost = "; local steps since the last exchange, if there were any, are lost"
    _optimizer: LocalStepAdam

    def __init__(self, section: dict[str, Any], run: RunForTechniques):
        super().__init__(section, run)
        freeze = self._first_phase("var_freeze_step", run)
        self.schedule = Schedule(
            freeze,
            self._value("var_update_scaler", min(16, max(4, run.steps // 50)), "a fiftieth of the run's steps, 4 to 16"),
            self._value("local_step_scaler", max(1, (run.steps - freeze) // 4), "a fourth of the run's steps after var_freeze_step"),
            self._value("local_step_clipper", 16, "the paper's"),
        )
        has_local_steps = run.ranks > 1 and self.schedule.last_exchange(run.steps)[1] < run.steps
        self.optimizer_tensors += has_local_steps  # the weights of the last exchange
        # In the second stage the variance is frozen, and the ranks make local steps.
        self.stages = 1, freeze + 1
        self._note_traffic(run)

    def _note_traffic(self, run: RunForTechniques) -> None:
        if run.ranks == 1:
            self._note(
                "one rank sends nothing; Adam whose variance is updated at the steps of the schedule, and frozen after step"
                f" {self.schedule.var_freeze_step:,}"
            )
            return
        whole, compressed = self._exchanges(run.steps)
        self._note(
            f"of {run.steps:,} steps of whole batches, {whole:,} update the variance, for which a rank sends {self._whole:,.2f} MB,"
            f" {compressed:,} send about {self._compressed:,.2f} MB, and {run.steps - whole - compressed:,} a few KB"
        )
        last, _ = self.schedule.last_exchange(run.steps)
        if last < run.steps:
            self._note(
                f"of {run.steps:,} steps of whole batches, the last exchange is in step {last:,}; the {run.steps - last:,} local step(s)"
                " after it are not in the saved weights; lower local_step_clipper to lose fewer"
            )

    def _exchanges(self, steps: int) -> tuple[int, int]:
        updates = self.schedule.variance_updates(steps)
        return updates, self.schedule.last_exchange(steps)[1] - updates

    def on_step(self, step: int, work: StepWork) -> StepWork:
        update = self._updates_before(step) + 1
        self.updates_variance, self.exchanges = self.schedule.updates_variance(update), self.schedule.exchanges(update)
        if self._ds_engine is not None:
            self._optimizer.updates_variance = self.updates_variance
            self._optimizer.exchanges = self.exchanges or self._ranks == 1
        self._set_up_step(work, whole_gradients=self.updates_variance)
        return work

    def metrics(self) -> dict[str, float]:
        synced = self.exchanges if self._ds_engine is None else not self._optimizer.local_steps
        return {"variance_updated": int(self.updates_variance), "exchanged": int(synced and self._ranks > 1)}

    def common_weights(self) -> AbstractContextManager[None]:
        return self._optimizer.synced_weights(self._copy_weights)

    def _copy_weights(self) -> None:
        """In bf16 and fp16, copy the optimizer's fp32 weights to the model's."""
        wrapper = self._ds_engine.optimizer
        for half, full in zip(getattr(wrapper, "fp16_groups", ()), getattr(wrapper, "fp32_groups", ()), strict=True):
            torch._foreach_copy_([parameter.data for parameter in half], [parameter.data for parameter in full])

    def state_dict(self) -> dict[str, Any]:
        """The compression errors of this rank, and its local steps since the last exchange."""
        return super().state_dict() | self._optimizer.own_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._optimizer.load_own_state(state)
        self._copy_weights()
