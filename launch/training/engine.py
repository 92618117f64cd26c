"""Builds DeepSpeed's engine from a resolved configuration, and wraps it in a `TrainingEngine`, which the loop uses.

Throughout the project `engine` is a `TrainingEngine`, and `ds_engine` is DeepSpeed's.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import installed_ops
from torch.utils.cpp_extension import CUDA_HOME

from launch.config.flags import VALUES
from launch.config.hardware import bf16_arithmetic, unused_gpus
from launch.config.optimizer import ADAM_TYPES, decouples_weight_decay
from launch.config.ranks import ranks_of_host
from launch.config.run_config import RunConfig, cuda_requirement
from launch.errors import TrainingFailed, UsageError
from launch.training.checkpoints.start_from import fill_masters, fill_model
from launch.training.deepspeed_fixes.corrections import after_initialize, before_initialize
from launch.training.deepspeed_fixes.half_products import train_on_cpu_in
from launch.training.deepspeed_fixes.norms import NormNotFinite
from launch.training.deepspeed_fixes.start_up import load_extension
from launch.training.ranks.distributed import Collectives
from launch.training.run_folder import monitors
from launch.training.run_folder.run_json import differences
from model.gpt import GPT, weight_decay_groups
from recipes.optimizers import LATE_STEP
from recipes.technique import Techniques

#: The phases of a run, as messages name them.
FORWARD, BACKWARD, UPDATE, EVALUATION, CHECKPOINT = "forward pass", "backward pass", "update", "evaluation", "checkpoint"


@dataclass
class TrainingEngine:
    """DeepSpeed's engine and the model, with the operations that the training loop needs.

    Attributes:
        ds_engine: DeepSpeed's engine.
        corrections: the names of the corrections that a probe of DeepSpeed asked for.
        loss_scale: the loss scale of the last backward pass.
        loss_so_far: the sum of this rank's micro-batch losses so far over their number in the step; after the last, their mean.
        on_phase: called with the name of each phase when it begins, e.g. "forward pass".
    """

    ds_engine: Any
    config: RunConfig
    corrections: list[str]
    collectives: Collectives
    techniques: Techniques
    loss_scale: float = 1.0
    loss_so_far: torch.Tensor | float = 0.0
    on_phase: Callable[[str], None] = lambda phase: None
    _micro_step: int = 0

    @property
    def data_ranks(self) -> int:
        """The ranks, or groups of ranks, that read different rows."""
        return self.collectives.world_size // self.config.ranks_per_row

    @property
    def notes(self) -> list[str]:
        """Lines for the log from the techniques and about the device, in addition to those of the configuration."""
        notes = [note for note in self.techniques.notes if note not in self.config.notes]
        if self.config.precision == "bf16" and self.collectives.device.type == "cpu" and not (bf16 := bf16_arithmetic())[0]:
            # A step of `nano` takes 1.3 times as long as in fp32 with AVX512 alone, and 1.2 times with AVX2 (recipes/bf16/README.md).
            fp32 = f"ds_configs/zero{self.config.zero_stage}_fp32.json"
            notes.append(f"bf16 is emulated, {bf16[1]}: the fp32 JSON of the same stage ({fp32}) is probably faster")
        return notes

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy of (B, T + 1) token ids, where each position predicts the next one; an fp32 scalar."""
        self.on_phase(FORWARD if self.ds_engine.module.training else EVALUATION)
        if self.config.shape.dropout and self.ds_engine.module.training:
            # Dropout masks are a function of (seed, step, micro-step, rank), so that a resumed run draws the same ones.
            place = f"{self.config.seed}/{self.ds_engine.global_steps}/{self._micro_step}/{self.collectives.rank}"
            torch.manual_seed(int.from_bytes(hashlib.sha256(place.encode()).digest()[:8], "big", signed=True))
        return self.ds_engine(tokens[:, :-1], tokens[:, 1:])

    def backward_and_step(self, loss: torch.Tensor, accumulation: int) -> torch.Tensor:
        """Accumulate the gradients of `loss`, one of `accumulation` micro-batches. After the last one, clip and update.

        A technique may make a step of another number of micro-batches than DeepSpeed's JSON has.

        Returns `loss_so_far`.

        Raises:
            TrainingFailed: the gradients overflow in fp16 at the minimum loss scale or at a fixed one, or are not finite in bf16 or fp32.
                It is raised on all ranks, and the weights are not changed.
        """
        configured = self.config.gradient_accumulation_steps
        self.loss_so_far = loss.detach() / accumulation + (self.loss_so_far if self._micro_step else 0.0)
        self._micro_step = (self._micro_step + 1) % accumulation
        self.on_phase(BACKWARD)
        self.ds_engine.set_gradient_accumulation_boundary(self._micro_step == 0)
        self.ds_engine.backward(loss if accumulation == configured else loss * (configured / accumulation))
        self.loss_scale = float(getattr(self.ds_engine.optimizer, "loss_scale", 1.0))  # `step` may change it
        if self._micro_step == 0:
            self.techniques.on_gradients()
        counters = self.ds_engine.global_steps, self.ds_engine.skipped_steps
        self.on_phase(UPDATE)
        try:
            self.ds_engine.step()
            # A dynamic loss scale becomes smaller; DeepSpeed itself raises at its minimum.
            lasting = self.config.precision != "fp16" or not self.ds_engine.dynamic_loss_scale()
            if self._micro_step == 0 and lasting and not self.ds_engine.was_step_applied():
                raise NormNotFinite
        except Exception as reason:
            # DynamicLossScaler raises a bare Exception.
            if not isinstance(reason, NormNotFinite) and "already at minimum" not in str(reason):
                raise
            self.ds_engine.global_steps, self.ds_engine.skipped_steps = counters  # a checkpoint is then of the previous step
            self._fail(counters[0] + 1)
        return self.loss_so_far

    def skip_updates_if(self, condition: Callable[[], bool]) -> None:
        """From now on, make no update for which `condition` is true. At stages 1 to 3 it is asked for each group of parameters.

        DeepSpeed calls the optimizer that it wraps at every stage. Without the call, the weights, the moments and their step count stay
        unchanged, and DeepSpeed clears the gradients as after any step.
        """
        wrapper = self.ds_engine.optimizer
        optimizer = getattr(wrapper, "optimizer", wrapper)
        update = optimizer.step
        optimizer.step = lambda *args, **options: None if condition() else update(*args, **options)

    def require_finite(self, loss: float) -> None:
        """Raise TrainingFailed if the step's mean loss is not finite. In fp16 nothing is raised: the gradients overflow too."""
        if not math.isfinite(loss) and self.config.precision != "fp16":
            self._fail(self.ds_engine.global_steps)

    def weights_are_finite(self) -> bool:
        """Whether no weight of any rank is NaN or Inf. At stage 3 each rank checks its part; weights on NVMe are not checked. All ranks
        call this together."""
        weights = (getattr(parameter, "ds_tensor", parameter) for parameter in self.ds_engine.module.parameters())
        return not self.collectives.any(any(not bool(torch.isfinite(weight.detach()).all()) for weight in weights))

    def _fail(self, step: int) -> NoReturn:
        """Raise TrainingFailed with what is not finite, on which ranks, and what to change. All ranks call this together."""
        losses: list[float] = self.collectives.gather(float(self.loss_so_far))
        bad = [f"{loss:g} on rank {rank}" for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        if bad:
            what = f"the loss is {', '.join(bad[:4])}" + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")
        else:
            what = f"the gradients are not finite, but the loss is {sum(losses) / len(losses):.4f}"
        if self.config.precision == "fp16":
            kind, key = ("minimum", "min_loss_scale") if self.ds_engine.dynamic_loss_scale() else ("fixed", "loss_scale")
            raise TrainingFailed(
                f"step {step}: {what}: an overflow in fp16 at the {kind} loss scale of {self.loss_scale:g} (fp16.{key}); "
                "lower it or --lr, raise --warmup_steps or use the bf16 JSON"
            )
        fix = "lower --lr, raise --warmup_steps, or look at the data" if step > 1 else "look at the data, the model's flags and --init_from"
        raise TrainingFailed(f"step {step}: {what} in {self.config.precision}; {fix}")

    def set_learning_rate(self, tokens: int) -> float:
        """Set and return the learning rate of the step that ends after `tokens` tokens of the run."""
        if (schedule := self.config.token_schedule) is not None:
            rate = schedule.rate(tokens)
            for group in self.ds_engine.optimizer.param_groups:
                group["lr"] = rate
        else:
            self.ds_engine.lr_scheduler.step()  # corrected: `schedule_by_step` in launch/training/deepspeed_fixes/resume.py
        return float(self.ds_engine.optimizer.param_groups[0]["lr"])

    def step_metrics(self) -> dict[str, float | None]:
        """The step's gradient norm before clipping and its loss scale, and the updates skipped so far."""
        norm = self.ds_engine.get_global_grad_norm()
        if norm is not None and self.config.zero_stage == 0:
            norm = norm / self.loss_scale  # stages 1, 2, 3 report it unscaled
        return {
            # The norm is infinite if fp16 overflowed; JSON has no infinity.
            "grad_norm": float(norm) if norm is not None and math.isfinite(norm) else None,
            "loss_scale": self.loss_scale,
            "skipped_steps": self.ds_engine.skipped_steps,
            **({"overflow": int(not self.ds_engine.was_step_applied())} if self.config.precision == "fp16" else {}),
        }


def start_engine(config: RunConfig, techniques: Techniques, collectives: Collectives) -> TrainingEngine:
    """Build the model and the engine.

    Raises:
        UsageError: the hosts have resolved different runs, or DeepSpeed does not support a combination of values.
    """
    _check_hosts(config, collectives)
    # A host that does not share rank 0's file system does not see its checkpoints.
    if config.init_from is not None and collectives.any(config.start is None):
        config = replace(config, start=None)
    if collectives.device.type == "cpu":
        train_on_cpu_in(config.precision)
    deepspeed_config = _deepspeed_config(config)
    if config.quantizes_weights:
        load_extension("QuantizerBuilder")
    if config.uses_nvme:  # before `zero.Init`, which loads them for weights on NVMe
        load_extension("PinMemoryBuilder")
        load_extension("AsyncIOBuilder")
    # At stage 3 every module is partitioned as soon as it is built, so the whole model is never on one rank.
    with deepspeed.zero.Init(config_dict_or_path=deepspeed_config, enabled=config.zero_stage == 3):
        model = GPT(config.model_config)
    if config.start is not None:
        fill_model(model, config.start, config.zero_stage, collectives)
    techniques.prepare(model)

    groups = weight_decay_groups(model, config.optimizer["params"].get("weight_decay", 0.0))
    optimizer = techniques.optimizer(groups) or _adam(config, groups)
    if optimizer is None:
        deepspeed_config["optimizer"] = config.optimizer
    torch_adam = config.optimizer["params"].get("torch_adam", False)
    if config.offload("offload_optimizer") != "none" and config.optimizer["type"] in ADAM_TYPES and not torch_adam:
        load_extension("CPUAdamBuilder")
    compiled = any(block._compiled_call_impl is not None for block in model.h)
    applied = before_initialize(config.zero_stage, config.precision, compiled, collectives)
    with contextlib.redirect_stdout(io.StringIO()):  # prints of DeepSpeed's own start
        try:
            ds_engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=groups, config=deepspeed_config)
        except (AssertionError, NotImplementedError) as reason:  # values that DeepSpeed does not combine
            raise UsageError(f"{config.config_file}: DeepSpeed refuses this: {reason}") from reason
    applied += after_initialize(ds_engine, collectives)
    if config.start is not None and config.precision != "fp32":
        fill_masters(ds_engine, config.start, collectives)
    techniques.attach(ds_engine, collectives)
    return TrainingEngine(ds_engine, config, applied, collectives, techniques)


def _check_hosts(config: RunConfig, collectives: Collectives) -> None:
    """Refuse ranks that have resolved another run: they would wait for each other, or train something else without a message.

    Before there is a process group, each rank reads its own command and files, possibly copies of rank 0's, and resolves "auto" for its own
    host.
    """
    values = {"corpus_fingerprint": config.corpus.fingerprint, **config.as_json()}
    runs = collectives.gather({key: value for key, value in values.items() if key not in VALUES or not VALUES[key].local})
    for rank, run in enumerate(runs):
        changes = [one for key in run for one in differences(key, runs[0].get(key), run[key]) if not one[0].endswith(".nvme_path")]
        for name, first, here in changes:
            what = f"rank {rank} has {name} = {json.dumps(here)}, and rank 0 has {json.dumps(first)}"
            fix = 'start all hosts with the same command, files and corpus, and write the value where the JSON has "auto"'
            raise UsageError(f"{what}; {fix}")


def check_device(config: RunConfig) -> None:
    """Refuse values that this device does not support, before the model is built, more ranks than GPUs, and a CPU run on a host with
    unused GPUs.

    Raises:
        UsageError: a line for each such value of the JSON, and one for the GPUs.
    """
    device, faults = get_accelerator().device_name(), []
    if unused := unused_gpus():
        faults.append(unused)
    ranks = max(int(os.environ["LOCAL_RANK"]) + 1, ranks_of_host() or 1) if "RANK" in os.environ else 0
    if device == "cuda" and (found := torch.cuda.device_count()) < ranks:
        faults.append(
            f"this host has {ranks} ranks, each on the GPU with the number of its local rank, and this process sees {found} GPU(s); start "
            "fewer ranks, or let each see all GPUs of the host: srun --gpus-per-node in place of --gpus-per-task"
        )
    for place, capability in config.cuda_only.items():
        if (lacking := _lacking(device, capability)) is not None:
            faults.append(f"{cuda_requirement(place, capability)}, and this is {lacking}; leave it out")
    if config.quantizes_weights and device == "cuda" and not installed_ops.get("quantizer") and CUDA_HOME is None:
        why = "needs the CUDA toolkit (nvcc), to build kernels; install it and set CUDA_HOME, or leave the key out"
        faults.append(f"{config.config_file}: 'zero_optimization.zero_quantized_weights' {why}")
    # Compiles and links a program that calls libaio.
    if config.uses_nvme and not get_accelerator().create_op_builder("AsyncIOBuilder").is_compatible(verbose=False):
        why = 'needs libaio with its headers; install it (apt install libaio-dev, dnf install libaio-devel), or write "cpu"'
        faults.append(f'{config.config_file}: device "nvme" {why}')
    if faults:
        raise UsageError(*faults)


def _lacking(device: str, capability: tuple[int, int]) -> str | None:
    """The name of this device if it is not a CUDA device with at least `capability`; else None.

    torch calls AMD's GPUs "cuda" too, but their compute capabilities mean something else.
    """
    if device != "cuda":
        return f"a {device}"
    if not any(capability):
        return None
    index = int(os.environ.get("LOCAL_RANK", 0))
    name = torch.cuda.get_device_name(index)
    if torch.version.hip:
        return f"{name}, which is not NVIDIA's"
    found = torch.cuda.get_device_capability(index)
    return f"{name} ({found[0]}.{found[1]})" if found < capability else None


def _deepspeed_config(config: RunConfig) -> dict[str, Any]:
    """`config.ds_config` without monitors, with the run's own folders on NVMe, and the `scheduler` if it is DeepSpeed's.

    The ranks of a row count as data ranks. `start_engine` adds an `optimizer` of DeepSpeed.
    """
    # DeepSpeed's throughput timer waits for the device twice a micro-batch, and prints what the log has already.
    deepspeed_config = {"timers": {"throughput": {"enabled": False}}, **config.ds_config}
    deepspeed_config["train_batch_size"] = config.ds_config["train_batch_size"] * config.ranks_per_row
    for section in monitors.SECTIONS:  # the engine would write other rows, by samples
        deepspeed_config.pop(section, None)
    zero = config.ds_config["zero_optimization"]
    deepspeed_config["zero_optimization"] = zero | {key: zero[key] | {"nvme_path": str(path)} for key, path in config.swap_folders.items()}
    if config.token_schedule is None:
        deepspeed_config["scheduler"] = config.scheduler
    return deepspeed_config


def _adam(config: RunConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer | None:
    """torch's fused Adam(W), which needs no compilation on any device; None if DeepSpeed chooses (other types, offload)."""
    if config.optimizer["type"] not in ADAM_TYPES or config.offload("offload_optimizer") != "none":
        return None
    params = config.optimizer["params"]
    optimizer = torch.optim.Adam(
        groups,
        lr=params["lr"],
        betas=(float(params["betas"][0]), float(params["betas"][1])),  # torch refuses the int 0
        eps=params["eps"],
        weight_decay=params["weight_decay"],
        amsgrad=params.get("amsgrad", False),
        decoupled_weight_decay=decouples_weight_decay(config.optimizer),
        fused=True,
    )
    if params.get("bias_correction", True) is False:
        optimizer.register_step_pre_hook(_skip_bias_correction)
    return optimizer


def _skip_bias_correction(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Step hook: set Adam's step count so high that 1 - beta^step is 1, which switches bias correction off."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state and parameter.grad is not None:  # as torch makes it in the step
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                for moment in ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ())):
                    state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            if state:
                state["step"].fill_(LATE_STEP)
