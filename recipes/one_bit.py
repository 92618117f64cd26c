"""Shared by 1-bit Adam, 1-bit LAMB and 0/1 Adam: optimizers that exchange compressed momenta, and the techniques that drive them.

In compressed steps, the engine does not reduce gradients: each rank keeps its own, and the optimizer exchanges what it computes from them
through `recipes.compressed_all_reduce`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from model.accounting import WIDTH, parameter_count
from model.gpt import GPT
from recipes.blocks import blocks
from recipes.compressed_all_reduce import CompressedAllReduce
from recipes.optimizers import ADAM_KEYS, adam_arguments, require_stage_0
from recipes.technique import Declaration, RunForTechniques, StepWork, Technique

#: The smallest value of an element of a frozen variance, as a share of the mean of its tensor.
LEAST_SHARE = 0.1
#: The key of the recipes that freeze the variance once.
FREEZE_STEP: dict[str, dict[str, Any]] = {"freeze_step": {"types": ["integer"], "minimum": 1, "auto": True}}


# --- the optimizers -----------------------------------------------------------------------------------------------------------------


def settle_variance(variance: torch.Tensor, steps: int, beta2: float, row_steps: torch.Tensor | None = None) -> None:
    """Prepare the variance of one tensor for freezing after `steps` steps, in place.

    Each element becomes at least a tenth of the mean. The momentum is sent as plus or minus the root mean square of its tensor, so a
    weight whose deviation is a thousandth of the others' would move far. This happens for the key biases, whose gradient is 0 except for
    rounding. It would also happen at the first large gradient of a rare token, because a frozen variance does not rise with it.

    Args:
        row_steps: for an embedding, the number of steps in which each row could have gradients, (rows,). In k steps the variance of a row
            reaches 1 - beta2^k of the mean square, and is scaled to the 1 - beta2^steps that the bias correction assumes. A row without
            such steps, for example a position that a curriculum has not reached, gets the mean of the other rows.
    """
    if row_steps is not None:
        seen = row_steps > 0
        powers = torch.pow(beta2, row_steps[seen].double())
        variance[seen] *= ((1 - beta2**steps) / (1 - powers)).to(variance.dtype)[:, None]
        if seen.any():
            variance[~seen] = variance[seen].mean(0)
    variance.clamp_(min=LEAST_SHARE * float(variance.mean(dtype=torch.float64)))


class CompressedOptimizer(torch.optim.Optimizer):
    """Base of the optimizers whose ranks exchange their own momenta, compressed, instead of gradients.

    `state_dict` has the state that is the same on all ranks. The technique saves the state of each rank: the errors in `reduction`, and
    more between exchanges.

    Attributes:
        used_rows: index of a parameter -> the number of its first rows that can have gradients in this step. For the other rows, the
            exchanged values and the errors are 0.
        reduction: the exchanged tensors of all parameters, and their compression errors.
    """

    #: The name of the state that is exchanged, stored in `reduction.buffer`; empty if the exchanged values are not part of the state.
    exchanged = "exp_avg"
    #: The names of other states with the shape of the parameter.
    kept: tuple[str, ...] = ("exp_avg_sq",)

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        lr: float,
        betas: Sequence[float],
        eps: float,
        weight_decay: float,
        bias_correction: bool = True,
        **defaults: Any,
    ):
        super().__init__(param_groups, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, **defaults})
        self._parameters: list[torch.Tensor] = []
        self.used_rows: dict[int, int] = {}
        self._bias_correction = bias_correction

    def bind(self, collectives: Any) -> None:
        """Allocate the state for the current parameters: in bf16 and fp16, the engine's fp32 copies of the model's."""
        self._parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.reduction = CompressedAllReduce([p.numel() for p in self._parameters], collectives, self._parameters[0].device)
        self._take_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        super().load_state_dict(state_dict)
        self._take_state()

    def _take_state(self) -> None:
        """Add zeros for missing state, and move the exchanged state of all parameters into one buffer."""
        for parameter, view in zip(self._parameters, self.reduction.views, strict=True):
            state = self.state[parameter]
            if self.exchanged:
                if self.exchanged in state:
                    view.copy_(state[self.exchanged].view(-1))
                state[self.exchanged] = view.view_as(parameter)
            for name in self.kept:
                state.setdefault(name, torch.zeros_like(parameter, requires_grad=False))
            state.setdefault("step", torch.zeros((), device=parameter.device))
        self._steps = int(self.state[self._parameters[0]]["step"])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters with their gradients; a missing gradient counts as zero. All ranks must call this together.

        Does nothing before `bind`, because DeepSpeed may step an optimizer while it builds the engine.
        """
        if not self._parameters:
            return
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for place, rows in self.used_rows.items():
            self.reduction.live[place] = rows * self._parameters[place].shape[1]
        self._steps += 1
        torch._foreach_add_([self.state[parameter]["step"] for parameter in self._parameters], 1.0)
        self._update()

    @abstractmethod
    def _update(self) -> None:
        """Perform step number `_steps`. Every parameter has a gradient."""

    def _bias(self, beta: float, steps: int) -> float:
        """The bias correction of a moment after `steps` steps, by which it is divided."""
        return 1 - beta**steps if self._bias_correction else 1.0

    def _row_steps(self, place: int) -> torch.Tensor:
        """The number of steps in which each row of an embedding could have gradients, (rows,); part of its state."""
        parameter = self._parameters[place]
        return self.state[parameter].setdefault("row_steps", torch.zeros(parameter.shape[0], device=parameter.device))

    def _count_rows(self) -> None:
        for place, rows in self.used_rows.items():
            self._row_steps(place)[:rows] += 1

    def _blocks(self, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """Tensors of equal size in flat parts, each with at most as many elements as `reduction.scratch`."""
        return blocks(self.reduction.scratch.numel(), *tensors)

    def _momenta(self) -> Iterator[tuple[dict[str, Any], torch.Tensor, torch.Tensor]]:
        """(group, parameter, flat view of its exchanged values) for every parameter."""
        views = iter(self.reduction.views)
        for group in self.param_groups:
            for parameter in group["params"]:
                yield group, parameter, next(views)


class FreezingOptimizer(CompressedOptimizer):
    """Base of the optimizers with two phases: first with mean gradients, then with the variance frozen by `settle_variance`.

    Attributes:
        compressing: whether the next step is in the second phase; set before each step. A frozen variance stays frozen.
    """

    def __init__(self, param_groups: list[dict[str, Any]], *arguments: Any):
        # The step after which the variance was frozen, and its bias correction then; 0 before. In the groups, which checkpoints contain.
        super().__init__(param_groups, *arguments, variance_steps=0, variance_bias=0.0)
        self.compressing = False

    @property
    def frozen(self) -> int:
        """The step after which the variance was frozen; 0 if it is not frozen."""
        return int(self.param_groups[0]["variance_steps"])

    def _update(self) -> None:
        if self.compressing and not self.frozen:
            self._freeze(self._steps - 1)
        if self.frozen:
            self._step_compressed()
        else:
            self._count_rows()
            self._step_whole()

    @abstractmethod
    def _step_whole(self) -> None:
        """Update with gradients that are averaged over all ranks."""

    @abstractmethod
    def _step_compressed(self) -> None:
        """Update with each rank's own gradients."""

    def _freeze(self, steps: int) -> None:
        """Freeze the variance after `steps` steps. A variance of 0, of a block that was dropped in every step, becomes the others' mean."""
        some: list[torch.Tensor] = []
        none: list[torch.Tensor] = []
        for place, (group, parameter, _) in enumerate(self._momenta()):
            group |= {"variance_steps": steps, "variance_bias": self._bias(group["betas"][1], steps)}
            for variance in self._settled_apart(self.state[parameter]["exp_avg_sq"]):
                settle_variance(variance, steps, group["betas"][1], self._row_steps(place) if place in self.used_rows else None)
                (some if variance.any() else none).append(variance)
        mean = sum(float(variance.sum(dtype=torch.float64)) for variance in some) / max(1, sum(variance.numel() for variance in some))
        for variance in none:
            variance.fill_(mean)

    def _settled_apart(self, variance: torch.Tensor) -> Sequence[torch.Tensor]:
        """The parts of a parameter's variance that `settle_variance` takes for tensors."""
        return [variance]

    def _biases(self, group: dict[str, Any]) -> tuple[float, float]:
        """The bias corrections by which the two moments are divided. That of a frozen variance stays, even if a resume changes beta2."""
        beta1, beta2 = group["betas"]
        frozen = group.get("variance_bias")  # missing in checkpoints of earlier versions
        return self._bias(beta1, self._steps), frozen or self._bias(beta2, group["variance_steps"] or self._steps)

    def _divisor(self, variance: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """The divisor of the momentum for a block of the variance: sqrt(variance / bias) + eps, in `reduction.scratch`."""
        root = torch.sqrt(variance, out=self.reduction.scratch[: variance.numel()])
        return root.mul_(self._biases(group)[1] ** -0.5).add_(group["eps"])


# --- the techniques -----------------------------------------------------------------------------------------------------------------


def declare(
    optimizer_type: str, keys: dict[str, dict[str, Any]], auto_params: dict[str, Any] | None = None, exclusive: tuple[str, ...] = ()
) -> Declaration:
    """The declaration of a `CompressedTechnique` with the optimizer `optimizer_type` and `keys` of its own."""
    return Declaration(
        optimizer_type=optimizer_type,
        exclusive=exclusive,
        keys={**keys, **ADAM_KEYS, "cuda_aware": {"types": ["boolean"]}, "comm_backend_name": {"types": ["string"]}},
        auto_params={"betas": [0.9, 0.999]} if auto_params is None else auto_params,
        ignored={
            "cuda_aware": "it is for MPI, and torch.distributed's own backend is used",
            "comm_backend_name": "the backend of the run's process group is used",
        },
    )


class CompressedTechnique(Technique):
    """Base of the techniques that use a `CompressedOptimizer` and switch off the engine's own reduction of gradients."""

    #: The length of the first phase for "auto", as a share of the run's steps; 1-bit Adam's paper takes 0.15 to 0.25.
    auto_share = 0.2
    #: Without the compression errors, which `__init__` adds.
    optimizer_tensors: float = 2
    optimizer_class: type[CompressedOptimizer]
    #: What a checkpoint of other ranks loses besides the compression errors, for the note.
    also_lost = ""

    def __init__(self, section: dict[str, Any], run: RunForTechniques):
        self.params, self._ranks, name = section, run.ranks, self.declaration.name
        self.resolved_params = {}
        if run.ranks > 1:  # each rank keeps the error of its own compression, and that of its part of the mean
            self.optimizer_tensors += 1 + 1 / run.ranks
        require_stage_0(run, f"{name} compresses the momentum of the whole model on every rank")
        # MB that a rank sends in a step with mean gradients, and in a step with compressed momentum.
        elements = 2 * (run.ranks - 1) / run.ranks * parameter_count(run.model_config) / 1e6
        self._whole = elements * WIDTH[run.ds_config.get("communication_data_type") or run.precision]
        self._compressed = elements / 8
        self._ds_engine: Any = None

    @abstractmethod
    def _exchanges(self, steps: int) -> tuple[int, int]:
        """How many of the first `steps` steps send mean gradients, and how many send compressed momentum."""

    def bytes_sent(self, base: int, steps: int) -> int:
        whole, compressed = self._exchanges(steps)
        return round(1e6 * (whole * self._whole + compressed * self._compressed) / steps)

    def _value(self, key: str, auto: int, reason: str) -> int:
        """The value of `key`; `auto`, for `reason`, if it is "auto" or left out."""
        if (value := self.params.get(key, "auto")) != "auto":
            return int(value)
        self.resolved_params[key] = auto, reason
        return auto

    def _first_phase(self, key: str, run: RunForTechniques) -> int:
        """The steps of the first phase: the value of `key`."""
        return self._value(key, max(1, round(self.auto_share * run.steps)), f"{self.auto_share} of the run's steps, of whole batches")

    def prepare(self, model: GPT) -> None:
        self._model = model

    def optimizer_options(self) -> dict[str, Any]:
        """What `optimizer_class` takes beside the arguments of Adam."""
        return {}

    def optimizer(self, param_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        self._optimizer = self.optimizer_class(param_groups, *adam_arguments(self.params), **self.optimizer_options())
        # By index, because in bf16 and fp16 the engine replaces the model's parameters in the groups with fp32 copies.
        self._place = {id(p): place for place, p in enumerate(p for group in param_groups for p in group["params"])}
        return self._optimizer

    def attach(self, ds_engine: Any, collectives: Any) -> None:
        self._ds_engine = ds_engine
        self._optimizer.bind(collectives)

    def _updates_before(self, step: int) -> int:
        """The number of updates before `step`, without the steps that fp16 skipped."""
        return step - 1 - (self._ds_engine.skipped_steps if self._ds_engine is not None else 0)

    def _set_up_step(self, work: StepWork, whole_gradients: bool) -> None:
        """Set whether the engine reduces the gradients of the step, and which rows of embeddings have gradients.

        On one rank the engine always reduces: this changes no gradient, and their norm is then exact.
        """
        if self._ds_engine is not None:
            self._ds_engine.enable_backward_allreduce = whole_gradients or self._ranks == 1
            used = self._model.used_rows(work.seq_len)
            self._optimizer.used_rows = {self._place[id(parameter)]: rows for parameter, rows in used.items()}

    def state_dict(self) -> dict[str, Any]:
        """The compression errors of this rank."""
        reduction = self._optimizer.reduction
        return {"worker_error": reduction.worker_error, "server_error": reduction.server_error}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("worker_error", "server_error"):
            if name in state:
                getattr(self._optimizer.reduction, name).copy_(state[name])

    def discard_state(self, reason: str) -> None:
        lost = "the errors of the compression start at zero" if self._ranks > 1 else "nothing is compressed"
        self._note(f"{lost}{self.also_lost}: {reason}")

    def _note(self, text: str) -> None:
        self.notes = (*self.notes, f"{self.declaration.name}: {text}")


class FreezingTechnique(CompressedTechnique):
    """Base of 1-bit Adam and 1-bit LAMB: `freeze_step` steps with mean gradients, then a frozen variance and compressed momentum.

    freeze_step: a number of updates, without the steps that fp16 skips; "auto", or left out: `auto_share` of the run's steps of whole
        batches.
    """

    #: The optimizer of the first phase, for the notes.
    uncompressed = ""
    compressing = False
    _optimizer: FreezingOptimizer

    def __init__(self, section: dict[str, Any], run: RunForTechniques):
        super().__init__(section, run)
        self.freeze_step = self._first_phase("freeze_step", run)
        if not self.resolved_params:
            self.schedule_key = "optimizer.params.freeze_step"
        self.stages = 1, self.freeze_step + 1
        if run.ranks == 1:
            self._note(f"one rank sends nothing; the variance of {self.uncompressed} is frozen after step {self.freeze_step:,}")
        else:
            self._note(
                f"{self.freeze_step:,} steps of {self.uncompressed}, in each of which a rank sends {self._whole:,.2f} MB, then steps with"
                f" about {self._compressed:,.2f} MB"
            )
        if self.freeze_step < run.warmup_steps:
            self._note(
                f"the variance is frozen after step {self.freeze_step:,}, while the learning rate rises until step"
                f' {run.warmup_steps:,}; write freeze_step: {run.warmup_steps}, or more ("auto" does not consider the warm-up)'
            )

    def _exchanges(self, steps: int) -> tuple[int, int]:
        whole = min(self.freeze_step, steps)
        return whole, steps - whole

    def on_step(self, step: int, work: StepWork) -> StepWork:
        self.compressing = self._updates_before(step) >= self.freeze_step
        if self._ds_engine is not None:
            self.compressing |= bool(self._optimizer.frozen)
            self._optimizer.compressing = self.compressing
        self._set_up_step(work, whole_gradients=not self.compressing)
        return work

    def metrics(self) -> dict[str, float]:
        return {"compressed": int(self.compressing and self._ranks > 1)}

    def state_dict(self) -> dict[str, Any]:
        """The compression errors of this rank; empty in the first phase."""
        return super().state_dict() if self._optimizer.frozen else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self._optimizer.frozen != self.freeze_step:
            self._note(
                f"the variance was frozen after step {self._optimizer.frozen:,}; freeze_step, {self.freeze_step:,}, does not change that"
            )
