"""What a resume must not take from the checkpoint, and schedules that lag behind the step."""

from __future__ import annotations

from typing import Any

#: The optimizer settings that a resume takes from the configuration, not from the checkpoint: those that do not affect the saved state.
#: The learning rate follows its schedule.
SETTINGS = ("betas", "eps", "momentum", "weight_decay", "dampening", "alpha", "lr_decay", "decoupled_weight_decay", "bias_correction")
#: The state of fp16's loss scale. Its rule (window, hysteresis, minimum) is taken from the configuration.
LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def scaler_of(wrapper: Any) -> tuple[str, Any]:
    """The loss scale of DeepSpeed's optimizer, with DeepSpeed's name of it: at stages 1 to 3, or at stage 0; None without one."""
    name = "loss_scaler" if hasattr(wrapper, "loss_scaler") else "loss_scale_config"
    return name, getattr(wrapper, name, None)


def take_scale(scaler: Any, saved: dict[str, Any]) -> None:
    """Continue with the `LOSS_SCALE` of a checkpoint, unless the scale is fixed."""
    if _is_dynamic(scaler):
        vars(scaler).update({key: saved[key] for key in LOSS_SCALE if hasattr(scaler, key) and saved.get(key) is not None})


def _is_dynamic(scaler: Any) -> bool:
    return bool(getattr(scaler, "dynamic_loss_scale", getattr(scaler, "dynamic", False)))


def keep_own_settings(ds_engine: Any) -> None:
    """Correction: after `load_checkpoint`, restore this run's `SETTINGS`, clipping and rule of the loss scale.

    DeepSpeed loads those of the checkpoint. The scale itself is taken from the checkpoint if both are dynamic.
    """
    load, wrapper = ds_engine.load_checkpoint, ds_engine.optimizer

    def load_state_only(*args: Any, **options: Any) -> Any:
        groups = [{key: group[key] for key in SETTINGS if key in group} for group in wrapper.param_groups]
        own = {name: getattr(wrapper, name) for name in ("clip_grad", "dynamic_loss_scale") if hasattr(wrapper, name)}
        name, scaler = scaler_of(wrapper)
        rule = dict(vars(scaler)) if scaler is not None else {}
        loaded = load(*args, **options)
        for group, settings in zip(wrapper.param_groups, groups, strict=True):
            group.update(settings)
        if scaler is not None:
            of_checkpoint = getattr(wrapper, name)
            saved = dict(vars(of_checkpoint)) if _is_dynamic(of_checkpoint) else {}
            vars(scaler).update(rule)
            setattr(wrapper, name, scaler)
            take_scale(scaler, saved)
        for setting, value in own.items():
            setattr(wrapper, setting, value)
        return loaded

    ds_engine.load_checkpoint = load_state_only


def schedule_by_step(ds_engine: Any) -> None:
    """Correction: before step k, DeepSpeed's schedule is always at its iteration k.

    DeepSpeed makes the first step before iteration 0, so a warm-up from 0 has two steps at rate 0, and a decay does not reach its end. At
    iteration k, a linear warm-up of w steps has k / w of the peak.
    """
    schedule = ds_engine.lr_scheduler
    step = schedule.step
    schedule.step = lambda *_: step(ds_engine.global_steps + 1)
