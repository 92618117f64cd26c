"""Bases of the techniques whose ranks exchange one bit per element instead of gradients: 1-bit Adam, 1-bit LAMB and 0/1 Adam.

The optimizers themselves build on `recipes.compressed_optimizer`.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from model.accounting import parameter_count
from model.gpt import GPT
from recipes.compressed_optimizer import CompressedOptimizer, FreezingOptimizer
from recipes.technique import ADAM_KEYS, Costs, Declaration, Run, StepPlan, Technique, require_stage_0

#: Elements that are reduced to time the links at the start: 1 MiB in fp32, 0.1 s at 100 Mbit/s; and if that takes less than SLOW
#: milliseconds, which may be the launch alone, 64 MiB.
TRIED, TRIED_ON_FAST_LINKS, SLOW = 2**18, 2**24, 20.0
#: Bytes of a parameter's gradient as the engine reduces it.
GRADIENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
#: Keys of all of them beside lr, betas, eps and weight_decay.
COMMON_KEYS: dict[str, dict[str, Any]] = {
    **ADAM_KEYS,
    "cuda_aware": {"types": ["boolean"]},
    "comm_backend_name": {"types": ["string"]},
}


def declare(optimizer_type: str, keys: dict[str, dict[str, Any]], auto_params: dict[str, Any] | None = None) -> Declaration:
    """The declaration of a `CompressedTechnique` with the optimizer `optimizer_type` and `keys` of its own."""
    return Declaration(
        optimizer_type=optimizer_type,
        keys={**keys, **COMMON_KEYS},
        auto_params={"betas": [0.9, 0.999]} if auto_params is None else auto_params,
        ignored={
            "cuda_aware": "it is for MPI, and torch.distributed's own backend is used",
            "comm_backend_name": "the backend of the run's process group is used",
        },
    )


#: The key of a `FreezingTechnique`.
FREEZE_STEP: dict[str, dict[str, Any]] = {"freeze_step": {"types": ["integer"], "minimum": 1, "auto": True}}


class CompressedTechnique(Technique):
    """Base of the techniques that have a `CompressedOptimizer` and switch the engine's own reduction of gradients off."""

    #: "auto" for the length of the first phase, as a share of the run's steps; 1-bit Adam's paper takes 0.15 to 0.25.
    auto_share = 0.2
    #: fp32 tensors of the parameters' size that the optimizer keeps on each rank, besides the errors of the compression.
    kept_tensors = 2

    def __init__(self, section: dict[str, Any], run: Run):
        self.params, self._ranks = section, run.ranks
        # Each rank has an error of its own, and one for the part of the mean that it owns.
        self.costs = Costs(optimizer_tensors=self.kept_tensors + (0 if run.ranks == 1 else 1 + 1 / run.ranks))
        self._check_engine(run)
        self._reduced_in = run.engine.get("communication_data_type") or run.precision
        self._engine: Any = None

    def _check_engine(self, run: Run) -> None:
        """Refuse settings of the engine that compression does not support. Raises ValueError, see `Technique.__init__`."""
        name = self.declaration.name
        require_stage_0(run, f"{name} compresses the momentum of the whole model on every rank", self.costs.optimizer_tensors)
        if run.engine.get("gradient_allreduce_op") == "sum":
            raise ValueError(f'\'gradient_allreduce_op\' is "sum", but {name} sends the mean; write "mean", or leave it out')

    def _share_of(self, run: Run) -> tuple[int, str]:
        """The steps of the first phase for "auto", and the reason."""
        return max(1, round(self.auto_share * run.steps)), f"{self.auto_share} of the run's steps, of whole batches"

    def _megabytes(self, run: Run) -> tuple[float, float]:
        """What a rank sends in a step with whole gradients, and in one with compressed momentum, in MB."""
        elements = 2 * (run.ranks - 1) / run.ranks * parameter_count(run.model_config) / 1e6
        return elements * GRADIENT_BYTES[self._reduced_in], elements / 8

    def prepare(self, model: GPT) -> None:
        self._model = model

    @abstractmethod
    def build_optimizer(self, param_groups: list[dict[str, Any]]) -> CompressedOptimizer:
        """The optimizer for `param_groups` with the values of `self.params`."""

    def optimizer(self, param_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        self._optimizer = self.build_optimizer(param_groups)
        # By place, because in bf16 and fp16 the engine replaces the model's own parameters in the groups by fp32 copies.
        self._place = {id(p): place for place, p in enumerate(p for group in param_groups for p in group["params"])}
        return self._optimizer

    def attach(self, engine: Any, collectives: Any) -> None:
        self._engine = engine
        self._optimizer.bind(collectives)
        if collectives.world_size > 1:
            with collectives.uncounted():
                self._note(self._try_links(collectives))

    def _try_links(self, collectives: Any) -> str:
        """Time the links of this run: reducing all gradients of the model, and its compressed momentum."""
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self._reduced_in]
        parameters = sum(self._optimizer.reduction.live)

        def milliseconds(reduce: Callable[[], Any]) -> float:
            """The faster of two trials, after one for warm-up; on the slowest rank."""
            took = []
            for _ in range(3):
                collectives.barrier()
                since = time.perf_counter()
                reduce()
                collectives.wait()
                took.append(1e3 * (time.perf_counter() - since))
            return max(collectives.of_each(min(took[1:])))

        def of_all(tried: int) -> float:
            """The time for all gradients of the model, estimated from that for `tried` of them."""
            gradients = torch.zeros(min(tried, parameters), dtype=dtype, device=collectives.device)
            return milliseconds(lambda: collectives.all_reduce(gradients)) * parameters / gradients.numel()

        whole = of_all(TRIED)
        if whole * TRIED / parameters < SLOW:
            whole = of_all(TRIED_ON_FAST_LINKS)
        compressed = milliseconds(self._optimizer.reduction.reduce)  # of zeros, which stay zeros
        verdict = (
            "" if whole > compressed else ": on links as fast as these, of one host or of NVLink's class, compression is slower; use AdamW"
        )
        return f"reducing the gradients takes about {whole:,.0f} ms here, the compressed momentum {compressed:,.0f} ms{verdict}"

    def _updates_before(self, step: int) -> int:
        """The number of updates before `step`: fp16 skips some steps."""
        return step - 1 - (self._engine.skipped_steps if self._engine is not None else 0)

    def _set_up_step(self, plan: StepPlan, whole_gradients: bool) -> None:
        """Tell the engine whether to reduce the gradients of the step, and the optimizer which rows of embeddings have gradients.

        On one rank reducing changes nothing, and the norm of the gradients is exact.
        """
        if self._engine is not None:
            self._engine.enable_backward_allreduce = whole_gradients or self._ranks == 1
            used = self._model.used_rows(plan.seq_len)
            self._optimizer.used_rows = {self._place[id(parameter)]: rows for parameter, rows in used.items()}

    def state_dict(self) -> dict[str, Any]:
        """The errors of this rank's compressions."""
        reduction = self._optimizer.reduction
        return {"worker_error": reduction.worker_error, "server_error": reduction.server_error}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("worker_error", "server_error"):
            if name in state:
                getattr(self._optimizer.reduction, name).copy_(state[name])

    def discard_state(self, reason: str) -> None:
        self._note(f"the errors of the compression start at zero: {reason}" if self._ranks > 1 else f"nothing is compressed: {reason}")

    def _note(self, text: str) -> None:
        self.notes = (*self.notes, f"{self.declaration.name}: {text}")

    def _note_all(self, texts: Iterable[str]) -> None:
        for text in texts:
            self._note(text)


class FreezingTechnique(CompressedTechnique):
    """Base of 1-bit Adam and 1-bit LAMB: after `freeze_step` steps on whole gradients the variance is frozen and the momentum compressed.

    freeze_step: optimizer steps (updates that fp16 did not skip); "auto", or left out: `auto_share` of the run's steps of whole batches.
    """

    #: The optimizer of the first phase, for the notes.
    uncompressed = ""
    compressing = False
    _optimizer: FreezingOptimizer

    def __init__(self, section: dict[str, Any], run: Run):
        super().__init__(section, run)
        asked = section.get("freeze_step", "auto")
        if asked == "auto":
            self.resolved_params = {"freeze_step": self._share_of(run)}
            self.freeze_step = self.resolved_params["freeze_step"][0]
        else:
            self.freeze_step = int(asked)
            self.schedule_key = "optimizer.params.freeze_step"
        self.stages = 1, self.freeze_step + 1
        self._note_all(self._phases(run))

    def _phases(self, run: Run) -> Iterator[str]:
        if run.ranks == 1:
            yield (f"one rank sends nothing; {self.uncompressed} whose variance is frozen after step {self.freeze_step:,}, uncompressed")
        else:
            whole, compressed = self._megabytes(run)
            yield (
                f"{self.freeze_step:,} steps of {self.uncompressed}, in each of which a rank sends {whole:,.2f} MB, then steps with about"
                f" {compressed:,.2f} MB"
            )
        if self.freeze_step < run.warmup_steps:
            yield (
                f"the variance is frozen after step {self.freeze_step:,}, while the learning rate rises until step"
                f" {run.warmup_steps:,}; freeze it later"
            )

    def on_step(self, step: int, plan: StepPlan) -> StepPlan:
        self.compressing = self._updates_before(step) >= self.freeze_step
        if self._engine is not None:
            self.compressing |= bool(self._optimizer.frozen)
            self._optimizer.compressing = self.compressing
        self._set_up_step(plan, whole_gradients=not self.compressing)
        return plan

    def metrics(self) -> dict[str, float]:
        return {"compressed": int(self.compressing and self._ranks > 1)}

    def state_dict(self) -> dict[str, Any]:
        """The errors of this rank's compressions, once it compresses."""
        return super().state_dict() if self.compressing else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self._optimizer.frozen != self.freeze_step:
            self._note(
                f"the variance was frozen after step {self._optimizer.frozen:,}; freeze_step, {self.freeze_step:,}, does not change that"
            )
