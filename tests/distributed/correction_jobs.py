"""Jobs for test_corrections: the engine with its corrections, and without them."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch

from launch.config.run_config import resolve
from launch.errors import TrainingFailed
from launch.training.deepspeed_fixes import loss_scale, offload, stage_0, stale_gradients
from launch.training.deepspeed_fixes.norms import norm_in_fp64
from launch.training.engine import TrainingEngine, start_engine
from launch.training.ranks.distributed import start_ranks
from model.gpt import run_all_blocks
from recipes.masters import master_weights
from recipes.technique import Techniques
from tests.distributed.reference import run_all_but

#: Correction that the tests switch off -> the module that has it.
CORRECTIONS = {
    "keep_weights_at_start": stage_0,
    "take_norms_in_fp64": stage_0,
    "scale_like_zero": loss_scale,
    "scale_loss": loss_scale,
    "grow_scale_after_the_update": loss_scale,
    "forget_gradients": stale_gradients,
    "derive_bias_correction_from_step": offload,
    "load_optimizer_on_drive": offload,
}
TINY = ["--n_layer", "2", "--n_head", "2", "--d_model", "64", "--seq_len", "32", "--global_batch_size", "8", "--steps", "8"]


_shipped: list[tuple[Any, str, Any]] = []


def remember_engine_as_shipped() -> None:
    """Note what corrections replace; a rank of a pool calls this before its first job corrects anything."""
    from deepspeed.runtime import engine, utils
    from deepspeed.runtime.fp16 import fused_optimizer, unfused_optimizer

    norms = [
        (module, name) for module in (utils, engine, fused_optimizer, unfused_optimizer) for name in ("clip_grad_norm_", "get_weight_norm")
    ]
    methods = ("__init__", "initialize_optimizer_states", "state_dict", "load_state_dict", "step")
    wrapper = [(unfused_optimizer.FP16_UnfusedOptimizer, name) for name in methods]
    ours = [(module, name) for name, module in CORRECTIONS.items()]
    _shipped[:] = [(place, name, getattr(place, name)) for place, name in (*norms, *wrapper, *ours) if hasattr(place, name)]


@contextlib.contextmanager
def engine_as_shipped() -> Iterator[None]:
    """The engine as DeepSpeed ships it, whatever earlier jobs corrected; and again on leaving."""

    def restore() -> None:
        for place, name, value in _shipped:
            setattr(place, name, value)

    assert _shipped
    restore()
    try:
        yield
    finally:
        restore()
        gc.collect()


def start(corpus: str, stage: int, precision: str, *flags: str, without: str | None = None) -> TrainingEngine:
    """Start an engine with all corrections, or without the one named. Only inside `engine_as_shipped`."""
    if without:
        setattr(CORRECTIONS[without], without, lambda *_: None)
    config, _ = resolve(["--deepspeed_config", f"ds_configs/zero{stage}_{precision}.json", "--data", corpus, *TINY, "--quiet", *flags])
    return start_engine(config, Techniques(), start_ranks())


def one_batch(engine: TrainingEngine) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 1000, (engine.config.micro_batch_size, engine.config.shape.seq_len + 1), generator=generator)


def weights_and_adam_step_at_start(corpus: str, without: str | None = None) -> dict[str, Any]:
    """How far stage 0 in bf16 has moved its fp32 weights before the first step, and how many steps Adam has counted."""
    with engine_as_shipped():
        engine = start(corpus, 0, "bf16", "--lr", "0.1", without=without)
        wrapper = engine.ds_engine.optimizer
        change = max(
            float((fp32.detach() - bf16.float()).abs().max())
            for fp32s, bf16s in zip(wrapper.fp32_groups, wrapper.fp16_groups, strict=True)
            for fp32, bf16 in zip(fp32s, bf16s, strict=True)
        )
        steps = max([int(state["step"]) for state in wrapper.optimizer.state.values()], default=0)
        return {"largest_change": change, "adam_steps": steps, "applied": engine.corrections}


def norm_error(corpus: str, without: str | None = None) -> dict[str, Any]:
    """Relative error of the gradient norm that stage 0 in fp32 clips by, on a model of 4 M parameters."""
    with engine_as_shipped():
        engine = start(corpus, 0, "fp32", "--d_model", "384", without=without)
        loss = engine.loss(one_batch(engine))
        engine.ds_engine.backward(loss)
        exact = float(sum(p.grad.double().pow(2).sum() for p in engine.ds_engine.module.parameters()).sqrt())
        engine.ds_engine.step()
        return {"relative_error": abs(engine.step_metrics()["grad_norm"] / exact - 1), "applied": engine.corrections}


def offloaded_updates(corpus: str, without: str | None = None) -> dict[str, Any]:
    """The first update of a weight by an offloaded Adam, numbered 1 to 30, and numbered 30 to 1."""

    def update(step: int) -> float:
        weight.data.zero_()
        weight.grad = torch.ones_like(weight)
        adam.state[weight] = {"step": step - 1, **{moment: torch.zeros_like(weight.data) for moment in ("exp_avg", "exp_avg_sq")}}
        adam.step()
        return float(weight.data[0])

    with engine_as_shipped():
        engine = start(corpus, 1, "fp32", "--lr", "1", "--set", 'zero_optimization.offload_optimizer={"device": "cpu"}', without=without)
        adam = engine.ds_engine.basic_optimizer
        weight = adam.param_groups[0]["params"][0]
        forward = [update(step) for step in range(1, 31)]
        backward = [update(step) for step in range(30, 0, -1)][::-1]
        return {"forward": forward, "backward": backward, "applied": engine.corrections}


def fp16_update(corpus: str, stage: int, clipping: float, without: str | None = None) -> dict[str, Any]:
    """Size of one plain SGD update in fp16 at a static loss scale of 1,024, and the gradient norm that was reported."""
    with engine_as_shipped():
        # SGD, unlike Adam, does not hide a wrong factor in the gradient.
        changes = ['optimizer={"type": "SGD", "params": {"lr": 1.0}}', "fp16.loss_scale=1024", f"gradient_clipping={clipping}"]
        changes += ["zero_allow_untested_optimizer=true"]
        engine = start(corpus, stage, "fp16", *(word for change in changes for word in ("--set", change)), without=without)
        before = [p.detach().float().clone() for p in engine.ds_engine.module.parameters()]
        engine.ds_engine.optimizer.param_groups[0]["lr"] = 1.0
        engine.backward_and_step(engine.loss(one_batch(engine)), 1)
        after = [p.detach().float() for p in engine.ds_engine.module.parameters()]
        update = float(norm_in_fp64([a - b for a, b in zip(after, before, strict=True)]))
        return {"update": update, "norm": engine.step_metrics()["grad_norm"], "applied": engine.corrections}


def update_while_the_scale_grows(corpus: str, stage: int, offload: bool = False, without: str | None = None) -> dict[str, Any]:
    """Size of two updates on one batch in fp16, and the gradient norms; the loss scale doubles in the second, or in both."""
    optimizer = '{"type": "SGD", "params": {"lr": 1e-4}}'
    if offload:  # DeepSpeed's Adam, whose update with this epsilon is about the rate times the gradient
        optimizer = '{"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.0, 0.0], "eps": 1.0, "weight_decay": 0.0}}'
    flags = ["--set", f"optimizer={optimizer}", "--set", "zero_allow_untested_optimizer=true", "--set", "gradient_clipping=0"]
    flags += ["--set", "fp16.loss_scale_window=1", "--set", "fp16.initial_scale_power=4", "--set", "fp16.hysteresis=1"]
    if offload:
        flags += ["--set", 'zero_optimization.offload_optimizer={"device": "cpu"}']
    with engine_as_shipped():
        engine = start(corpus, stage, "fp16", *flags, without=without)
        sizes, norms = [], []
        for _ in range(2):
            before = [master.tensor.detach().clone() for master in master_weights(engine.ds_engine)]
            for group in engine.ds_engine.optimizer.param_groups:
                group["lr"] = 1e-4
            engine.backward_and_step(engine.loss(one_batch(engine)), 1)
            after = [master.tensor.detach() for master in master_weights(engine.ds_engine)]
            sizes.append(float(norm_in_fp64([a - b for a, b in zip(after, before, strict=True)])))
            norms.append(engine.step_metrics()["grad_norm"])
        assert engine.ds_engine.optimizer.loss_scale > 16.0
        return {"sizes": sizes, "norms": norms, "applied": engine.corrections}


def move_of_a_block_without_gradients(corpus: str, stage: int, offload: bool, without: str | None = None) -> dict[str, Any]:
    """How far plain SGD moves a block that is left out of a step, after a step in which it was not."""
    from deepspeed.utils import safe_get_full_fp32_param

    sgd = 'optimizer={"type": "SGD", "params": {"lr": 0.1}}'
    if offload:  # DeepSpeed's Adam, whose moments move it too: by less than in the step before, and never by the old gradient again
        sgd = 'optimizer={"type": "AdamW", "params": {"lr": 0.1, "betas": [0.0, 0.0], "weight_decay": 0.0}}'
    flags = ["--set", sgd, "--set", "zero_allow_untested_optimizer=true", "--set", "gradient_clipping=0"]
    if offload:
        flags += ["--set", 'zero_optimization.offload_optimizer={"device": "cpu"}']
    with engine_as_shipped():
        engine = start(corpus, stage, "fp32", *flags, without=without)
        model = engine.ds_engine.module
        places = []
        for runner in (run_all_blocks, run_all_but(1)):
            for group in engine.ds_engine.optimizer.param_groups:
                group["lr"] = 0.1
            model.block_runner = runner
            engine.backward_and_step(engine.loss(one_batch(engine)), 1)
            weight = model.h[1].mlp.c_fc.weight
            kept_apart = safe_get_full_fp32_param(weight)  # None at stage 0 in fp32, where the weight is its own master
            places.append((weight.detach() if kept_apart is None else kept_apart).clone())
        return {"moved": float((places[1] - places[0]).abs().max()), "applied": engine.corrections}


def with_every_engine_mended(correct: Callable[[Any], None], probe: Callable[[], bool]) -> bool:
    """What `probe` says where every engine that is started has been corrected already."""
    import deepspeed

    initialize = deepspeed.initialize

    def initialize_mended(**arguments: Any) -> Any:
        built = initialize(**arguments)
        correct(built[0])
        return built

    deepspeed.initialize = initialize_mended
    try:
        return probe()
    finally:
        deepspeed.initialize = initialize


def probe_on_an_engine_that_forgets(corpus: str, stage: int, offload: bool) -> bool:
    """What the probe for stale gradients says where every engine has been mended."""
    with engine_as_shipped():
        flags = ["--set", 'zero_optimization.offload_optimizer={"device": "cpu"}'] if offload else []
        engine = start(corpus, stage, "fp32", *flags)
        return with_every_engine_mended(stale_gradients.forget_gradients, lambda: stale_gradients.gradients_go_stale(engine.ds_engine))


def probes_on_a_mended_engine(corpus: str) -> dict[str, Any]:
    """What the probes say, and what is applied, where the engine has already been mended (here: by our own corrections)."""
    with engine_as_shipped():
        stage_0.keep_weights_at_start()
        stage_0.take_norms_in_fp64()
        loss_scale.scale_like_zero()
        engine = start(corpus, 0, "fp16")
        again = loss_scale.loss_is_not_scaled(engine.ds_engine)
        return {
            "unfused_optimizer_steps_at_start": stage_0.unfused_optimizer_steps_at_start(),
            "engine_norm_is_inaccurate": stage_0.engine_norm_is_inaccurate(),
            "unfused_loss_scale_misbehaves": loss_scale.unfused_loss_scale_misbehaves(),
            "loss_is_not_scaled": again,
            "applied": [name for name in engine.corrections if name != "scale_loss"],
        }


def bf16_losses(corpus: str, stage: int) -> list[float]:
    """Losses of eight steps on one batch in bf16."""
    with engine_as_shipped():
        engine = start(corpus, stage, "bf16")
        losses = []
        for step in range(8):
            engine.set_learning_rate((step + 1) * engine.config.tokens_per_step)
            loss = engine.loss(one_batch(engine))
            engine.backward_and_step(loss, 1)
            losses.append(loss.item())
        return losses


def scales_while_overflowing(corpus: str, stage: int, without: str | None = None) -> dict[str, Any]:
    """The loss scale in force over steps of which the first four overflow, from 16 down to a minimum of 4, and how it ended."""
    with engine_as_shipped():
        options = {"initial_scale_power": 4, "hysteresis": 2, "min_loss_scale": 4, "loss_scale_window": 2}
        flags = [part for key, value in options.items() for part in ("--set", f"fp16.{key}={value}")]
        engine = start(corpus, stage, "fp16", *flags, without=without)
        scales, failure = [], ""
        for step in range(12):
            loss = engine.loss(one_batch(engine))
            try:
                engine.backward_and_step(loss * float("inf") if step in (0, 1, 5, 6, 7, 8, 9, 10) else loss, 1)
            except TrainingFailed as reason:
                failure = str(reason)
                break
            scales.append(engine.step_metrics()["loss_scale"])
        return {"scales": scales, "failure": failure, "skipped": engine.ds_engine.skipped_steps}


def failure_at_a_fixed_scale(corpus: str, stage: int) -> str:
    """How the first step ends in fp16 at a fixed scale at which its gradients overflow."""
    with engine_as_shipped():
        engine = start(corpus, stage, "fp16", "--set", "fp16.loss_scale=16777216")
        try:
            engine.backward_and_step(engine.loss(one_batch(engine)), 1)
        except TrainingFailed as reason:
            return str(reason)
        return ""


def update_at_an_initial_scale_of_one(corpus: str, without: str | None = None) -> list[float]:
    """Gradient norms at stage 0 in fp16 while the scale grows from 1, on one batch and with a learning rate of nothing."""
    with engine_as_shipped():
        flags = ["--set", "fp16.initial_scale_power=0", "--set", "fp16.loss_scale_window=1", "--set", "wall_clock_breakdown=true"]
        engine = start(corpus, 0, "fp16", *flags, without=without)
        norms = []
        for _ in range(5):
            engine.ds_engine.optimizer.param_groups[0]["lr"] = engine.ds_engine.optimizer.param_groups[1]["lr"] = 0.0
            engine.backward_and_step(engine.loss(one_batch(engine)), 1)
            norms.append(engine.step_metrics()["grad_norm"])
        assert engine.ds_engine.optimizer.loss_scale == 16.0
        return norms


def resumed_from_a_drive(corpus: str, runs: str, without: str | None = None) -> dict[str, Any]:
    """Losses of five steps on one batch with the optimizer on a drive; and of the last two again, by an engine that loads step 3.

    With the correction also what the probe says of an engine that has it.
    """
    section = {"device": "nvme", "nvme_path": f"{runs}/{without}"}
    flags = ["--d_model", "256", "--set", f"zero_optimization.offload_optimizer={json.dumps(section)}"]

    def started() -> TrainingEngine:
        return start(corpus, 3, "fp32", *flags, without=without)

    def losses(engine: TrainingEngine, steps: range) -> list[float]:
        seen = []
        for step in steps:
            engine.set_learning_rate(step * engine.config.tokens_per_step)
            loss = engine.loss(one_batch(engine))
            engine.backward_and_step(loss, 1)
            seen.append(loss.item())
        return seen

    with engine_as_shipped():
        first = started()
        losses(first, range(1, 4))
        first.ds_engine.save_checkpoint(runs, tag=f"saved-{without}")
        uninterrupted = losses(first, range(4, 6))
        second = started()
        second.ds_engine.load_checkpoint(runs, tag=f"saved-{without}")
        return {
            "uninterrupted": uninterrupted,
            "resumed": losses(second, range(4, 6)),
            "probe_on_a_mended_engine": with_every_engine_mended(
                offload.load_optimizer_on_drive,
                lambda: offload.optimizer_on_drive_is_not_loaded(second.ds_engine, second.collectives),
            ),
        }
