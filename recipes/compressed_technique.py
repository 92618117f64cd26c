"""What the optimizers have in common whose ranks exchange one bit an element instead of gradients: their part of the JSON and of a run.

Imports none of torch: the validator of the configuration reads it. The optimizers themselves build on `recipes.compressed_optimizer`.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from model.accounting import parameter_count
from recipes.technique import ADAM_KEYS, Run, Technique, require_stage_0

if TYPE_CHECKING:
    import torch

    from model.gpt import GPT
    from recipes.compressed_optimizer import CompressedOptimizer, FreezingOptimizer

#: Gradients with which the links are tried at the start: 1 MiB in fp32, 0.1 s at 100 Mbit/s; and where these take less than SLOW
#: milliseconds, which may be the launch alone, 64 MiB.
TRIED, TRIED_ON_FAST_LINKS, SLOW = 2**18, 2**24, 20.0
#: Bytes of a parameter's gradient as the engine reduces it.
GRADIENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
#: What all of them take beside lr, betas, eps and weight_decay.
COMMON_KEYS: dict[str, dict[str, Any]] = {
    **ADAM_KEYS,
    "cuda_aware": {"types": ["boolean"]},
    "comm_backend_name": {"types": ["string"]},
}


class CompressedTechnique(Technique):
    """Base of the techniques that bring a `CompressedOptimizer` and switch the engine's own reduction of gradients off."""

    decides = ("how gradients are reduced",)
    auto_params = {"betas": [0.9, 0.999]}
    without_effect = {
        "cuda_aware": "it is for MPI, and torch.distributed's own backend is used",
        "comm_backend_name": "the backend of the run's process group is used",
    }
    #: What "auto" is for the first phase, in shares of the run's steps; 1-bit Adam's paper spends 0.15 to 0.25 in full precision.
    auto_share = 0.2
    #: fp32 tensors of the parameters' size that the optimizer keeps on each rank, the errors of the compression aside.
    kept_tensors = 2

    def __init__(self, section: dict[str, Any], run: Run):
        self.params, self._ranks = section, run.ranks
        # An error of each rank's own, and one of the part of the mean that it owns.
        self.state_tensors = self.kept_tensors + (0 if run.ranks == 1 else 1 + 1 / run.ranks)
        self._check_engine(run)
        self._reduced_in = run.engine.get("communication_data_type") or run.precision
        self._engine: Any = None

    def _check_engine(self, run: Run) -> None:
        """Refuse what the engine cannot do with it. Raises ValueError, see `Technique.__init__`."""
        require_stage_0(run, f"{self.name()} compresses the momentum of the whole model on every rank", self.state_tensors)
        if run.engine.get("gradient_allreduce_op") == "sum":
            raise ValueError(f'\'gradient_allreduce_op\' is "sum", but {self.name()} sends the mean; write "mean", or leave it out')

    def _share_of(self, run: Run) -> tuple[int, str]:
        """What "auto" comes to for the steps of the first phase, and from what."""
        return max(1, round(self.auto_share * run.steps)), f"{self.auto_share} of the run's steps, of whole batches"

    def _megabytes(self, run: Run) -> tuple[float, float]:
        """What a rank sends of whole gradients, and of compressed momentum, in MB."""
        elements = 2 * (run.ranks - 1) / run.ranks * parameter_count(run.model_config) / 1e6
        return elements * GRADIENT_BYTES[self._reduced_in], elements / 8

    def prepare(self, model: GPT) -> None:
        self._model = model

    @abstractmethod
    def build_optimizer(self, param_groups: list[dict[str, Any]]) -> CompressedOptimizer:
        """The optimizer for these groups, by `self.params`."""

    def optimizer(self, param_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        self._optimizer = self.build_optimizer(param_groups)
        # Their places: in bf16 and fp16 the engine puts fp32 copies where the model's own parameters are now.
        self._place = {id(p): place for place, p in enumerate(p for group in param_groups for p in group["params"])}
        return self._optimizer

    def attach(self, engine: Any, collectives: Any) -> None:
        self._engine = engine
        self._optimizer.bind(collectives)
        if collectives.world_size > 1:
            with collectives.uncounted():
                self._note(self._try_links(collectives))

    def _try_links(self, collectives: Any) -> str:
        """What the links of this run make of the compression: as many gradients reduced whole, and this model's momentum compressed."""
        import torch

        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self._reduced_in]
        parameters = sum(self._optimizer.reduction.live)

        def milliseconds(reduce: Callable[[], Any]) -> float:
            """The faster of two tries, after one that is not counted; on the slowest rank."""
            took = []
            for _ in range(3):
                collectives.barrier()
                since = time.perf_counter()
                reduce()
                collectives.wait()
                took.append(1e3 * (time.perf_counter() - since))
            return max(collectives.of_each(min(took[1:])))

        def of_all(tried: int) -> float:
            """What all of the model's gradients take, by so many of them."""
            gradients = torch.zeros(min(tried, parameters), dtype=dtype, device=collectives.device)
            return milliseconds(lambda: collectives.all_reduce(gradients)) * parameters / gradients.numel()

        whole = of_all(TRIED)
        if whole * TRIED / parameters < SLOW:
            whole = of_all(TRIED_ON_FAST_LINKS)
        compressed = milliseconds(self._optimizer.reduction.reduce)  # of zeros, which stay zeros
        verdict = (
            "" if whole > compressed else ": over links as fast as these, of one host or of NVLink's class, it will not pay; use AdamW"
        )
        return f"reducing the gradients takes about {whole:,.0f} ms here, the compressed momentum {compressed:,.0f} ms{verdict}"

    def _updates_before(self, step: int) -> int:
        """Of the steps before `step`, how many made an update: fp16 skips some."""
        return step - 1 - (self._engine.skipped_steps if self._engine is not None else 0)

    def _reduce_gradients(self, wanted: bool) -> None:
        """Whether the engine reduces the gradients of the step. On one rank that changes nothing, and their norm is exact."""
        if self._engine is not None:
            self._engine.enable_backward_allreduce = wanted or self._ranks == 1

    def on_length(self, length: int) -> None:
        if self._engine is not None:
            used = self._model.used_rows(length)
            self._optimizer.used_rows = {self._place[id(parameter)]: rows for parameter, rows in used.items()}

    def state_dict(self) -> dict[str, Any]:
        """The errors of this rank's compressions."""
        reduction = self._optimizer.reduction
        return {"worker_error": reduction.worker_error, "server_error": reduction.server_error}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("worker_error", "server_error"):
            if name in state:
                getattr(self._optimizer.reduction, name).copy_(state[name])

    def forget_state(self, reason: str) -> None:
        self._note(f"the errors of the compression start at zero: {reason}" if self._ranks > 1 else f"nothing is compressed: {reason}")

    def _note(self, text: str) -> None:
        self.notes = (*self.notes, f"{self.name()}: {text}")

    def _note_all(self, texts: Iterable[str]) -> None:
        for text in texts:
            self._note(text)


class FreezingTechnique(CompressedTechnique):
    """Base of 1-bit Adam and 1-bit LAMB: `freeze_step` steps on whole gradients, after which the variance stays and the ranks compress.

    freeze_step: optimizer steps (updates that fp16 did not skip); "auto", or left out: `auto_share` of the run's steps of whole batches.
    """

    keys = {"freeze_step": {"types": ["integer"], "minimum": 1, "auto": True}, **COMMON_KEYS}
    #: What it is in the first phase, for its notes.
    uncompressed = ""
    _optimizer: FreezingOptimizer

    def __init__(self, section: dict[str, Any], run: Run):
        super().__init__(section, run)
        asked = section.get("freeze_step", "auto")
        if asked == "auto":
            self.resolved = {"freeze_step": self._share_of(run)}
            self.freeze_step = self.resolved["freeze_step"][0]
        else:
            self.freeze_step = int(asked)
            self.must_arrive = "optimizer.params.freeze_step"
        self.arrives_at = self.freeze_step + 1
        self._note_all(self._phases(run))
        self.on_step(1)

    def _phases(self, run: Run) -> Iterator[str]:
        if run.ranks == 1:
            yield (
                f"one rank has nobody to send to; {self.uncompressed} whose variance stays after step {self.freeze_step:,}, uncompressed"
            )
        else:
            whole, compressed = self._megabytes(run)
            yield (
                f"{self.freeze_step:,} steps as {self.uncompressed}, which send {whole:,.2f} MB each and rank, then steps that send about"
                f" {compressed:,.2f}"
            )
        if self.freeze_step < run.warmup_steps:
            yield (
                f"the variance is frozen after step {self.freeze_step:,}, while the learning rate still rises, to step"
                f" {run.warmup_steps:,}; it should be frozen later"
            )

    def on_step(self, step: int) -> None:
        self.compressing = self._updates_before(step) >= self.freeze_step
        if self._engine is not None:
            self.compressing |= bool(self._optimizer.frozen)
            self._optimizer.compressing = self.compressing
        self._reduce_gradients(not self.compressing)

    def metrics(self) -> dict[str, float]:
        return {"compressed": int(self.compressing and self._ranks > 1)}

    def state_dict(self) -> dict[str, Any]:
        """The errors of this rank's compressions, once there are some."""
        return super().state_dict() if self.compressing else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self._optimizer.frozen != self.freeze_step:
            self._note(
                f"the variance was frozen after step {self._optimizer.frozen:,}, which freeze_step, {self.freeze_step:,}, does not change"
            )
