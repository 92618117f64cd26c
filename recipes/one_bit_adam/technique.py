"""1-bit Adam: after a warm-up the variance of Adam stays as it is, and the ranks exchange one bit a parameter instead of gradients.

    deepspeed launch/pretrain.py --recipe recipes/one_bit_adam

Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed, arXiv 2102.02888. DeepSpeed had it,
up to 0.19.6 at least, for GPUs with cupy or MPI; here it is plain torch, on any backend.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from model.accounting import parameter_count
from recipes.technique import Run, Technique

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from model.gpt import GPT

#: "auto": the share of the run's steps that the paper spends in full precision is 0.15 to 0.25.
AUTO_SHARE = 0.2
#: Gradients with which the links are tried at the start: 1 MiB in fp32, 0.1 s at 100 Mbit/s; and where these take less than SLOW
#: milliseconds, which may be the launch alone, 64 MiB.
TRIED, TRIED_ON_FAST_LINKS, SLOW = 2**18, 2**24, 20.0
#: Bytes of a parameter's gradient as the engine reduces it.
GRADIENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


class OneBitAdam(Technique):
    """DeepSpeed's documented `"optimizer": {"type": "OneBitAdam", "params": {..., "freeze_step": 400}}`.

    freeze_step: optimizer steps (updates that fp16 did not skip) of plain Adam, after which the variance stays and the momentum is
        compressed; "auto", or left out: 0.2 of the run's steps of whole batches.
    lr, betas, eps, weight_decay: as for AdamW, but "auto" for the second beta is 0.999: what the variance has seen is to last.
    bias_correction: as for Adam; upstream read it and corrected nothing.
    cuda_aware, comm_backend_name: accepted and without effect.
    """

    optimizer_types = ("OneBitAdam",)
    decides = ("how gradients are reduced",)
    keys = {
        "freeze_step": {"types": ["integer"], "minimum": 1, "auto": True},
        "bias_correction": {"types": ["boolean"]},
        "cuda_aware": {"types": ["boolean"]},
        "comm_backend_name": {"types": ["string"]},
    }
    auto_params = {"betas": [0.9, 0.999]}
    without_effect = {
        "cuda_aware": "it is for MPI, and torch.distributed's own backend is used",
        "comm_backend_name": "the backend of the run's process group is used",
    }

    def __init__(self, section: dict[str, Any], run: Run):
        self.params, self._ranks = section, run.ranks
        self._check_engine(run)
        asked = section.get("freeze_step", "auto")
        self.freeze_step = max(1, round(AUTO_SHARE * run.steps)) if asked == "auto" else int(asked)
        if asked == "auto":
            self.resolved = {"freeze_step": (self.freeze_step, f"{AUTO_SHARE} of the run's steps, of whole batches")}
        else:
            self.must_arrive = "optimizer.params.freeze_step"
        self.arrives_at = self.freeze_step + 1
        self.state_tensors = 2 if run.ranks == 1 else 3 + 1 / run.ranks
        self._reduced_in = run.engine.get("communication_data_type") or run.precision
        self.notes = tuple(self._notes(run))
        self._engine: Any = None
        self.on_step(1)

    def _check_engine(self, run: Run) -> None:
        """Refuse what the engine cannot do with it. Raises ValueError, see `Technique.__init__`."""
        if run.zero_stage:
            parameters = parameter_count(run.model_config)
            # fp32: 4 weights + 4 gradients; 16 bits: 2 + 2 + 4 master weights. Then two moments and the errors.
            stage_0 = parameters * (16 + 4 + 4 / run.ranks)
            raise ValueError(
                f"'zero_optimization.stage' is {run.zero_stage}, but OneBitAdam compresses the momentum of the whole model on every rank,"
                f" and ZeRO leaves a rank a part of it; write 0, with which the model states take {stage_0 / 2**30:.2f} GiB on each, or use"
                " AdamW"
            )
        if run.engine.get("gradient_allreduce_op") == "sum":
            raise ValueError('\'gradient_allreduce_op\' is "sum", but OneBitAdam sends the mean; write "mean", or leave it out')

    def _notes(self, run: Run) -> Iterator[str]:
        parameters, share = parameter_count(run.model_config), 2 * (run.ranks - 1) / run.ranks
        if run.ranks == 1:
            yield f"OneBitAdam: one rank has nobody to send to; Adam whose variance stays after step {self.freeze_step:,}, uncompressed"
        else:
            whole, compressed = (share * width * parameters / 1e6 for width in (GRADIENT_BYTES[self._reduced_in], 1 / 8))
            yield (
                f"OneBitAdam: {self.freeze_step:,} steps as Adam, which send {whole:,.2f} MB each and rank, then steps that send about"
                f" {compressed:,.2f}"
            )
        if self.freeze_step < run.warmup_steps:
            yield (
                f"OneBitAdam: the variance is frozen after step {self.freeze_step:,}, while the learning rate still rises, to step"
                f" {run.warmup_steps:,}; it should be frozen later"
            )

    def prepare(self, model: GPT) -> None:
        self._model = model

    def optimizer(self, param_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        from recipes.one_bit_adam.optimizer import CompressedAdam

        params = self.params
        self._adam = CompressedAdam(
            param_groups, params["lr"], params["betas"], params["eps"], params["weight_decay"], params.get("bias_correction", True)
        )
        # Their places: in bf16 and fp16 the engine puts fp32 copies where the model's own parameters are now.
        self._place = {id(p): place for place, p in enumerate(p for group in param_groups for p in group["params"])}
        return self._adam

    def attach(self, engine: Any, collectives: Any) -> None:
        self._engine = engine
        self._adam.bind(collectives)
        if collectives.world_size > 1:
            with collectives.uncounted():
                self._note(self._try_links(collectives))

    def _try_links(self, collectives: Any) -> str:
        """What the links of this run make of the compression: as many gradients reduced whole, and this model's momentum compressed."""
        import torch

        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self._reduced_in]
        parameters = sum(self._adam.reduction.live)

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
        compressed = milliseconds(self._adam.reduction.reduce)  # of zeros, which stay zeros
        verdict = (
            "" if whole > compressed else ": over links as fast as these, of one host or of NVLink's class, it will not pay; use AdamW"
        )
        return f"reducing the gradients takes about {whole:,.0f} ms here, the compressed momentum {compressed:,.0f} ms{verdict}"

    def on_step(self, step: int) -> None:
        if self._engine is None:
            self.compressing = step > self.freeze_step
            return
        # Of the steps before this one, those that made an update.
        self.compressing = bool(self._adam.frozen) or step - 1 - self._engine.skipped_steps >= self.freeze_step
        self._adam.compressing = self.compressing
        # On one rank the engine's reduction changes nothing, and the norm of its gradients is exact.
        self._engine.enable_backward_allreduce = not self.compressing or self._ranks == 1

    def on_length(self, length: int) -> None:
        if self._engine is not None:
            used = self._model.used_rows(length)
            self._adam.used_rows = {self._place[id(parameter)]: rows for parameter, rows in used.items()}

    def metrics(self) -> dict[str, float]:
        return {"compressed": int(self.compressing and self._ranks > 1)}

    def state_dict(self) -> dict[str, Any]:
        """The errors of this rank's compressions, once there are some."""
        reduction = self._adam.reduction
        return {"worker_error": reduction.worker_error, "server_error": reduction.server_error} if self.compressing else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, error in state.items():
            getattr(self._adam.reduction, name).copy_(error)
        if self._adam.frozen != self.freeze_step:
            self._note(
                f"the variance was frozen after step {self._adam.frozen:,}, which freeze_step, {self.freeze_step:,}, does not change"
            )

    def forget_state(self, reason: str) -> None:
        self._note(f"the errors of the compression start at zero: {reason}" if self._ranks > 1 else f"nothing is compressed: {reason}")

    def _note(self, text: str) -> None:
        self.notes = (*self.notes, f"OneBitAdam: {text}")
