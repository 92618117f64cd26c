"""Resolves the sections `optimizer` and `scheduler`: their types, their parameters with `"auto"` filled in, and what works together.

A schedule is one of the project, by tokens (`launch/config/token_schedule.py`), or of DeepSpeed, by steps.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any, NamedTuple

from launch.config.deepspeed_json import DeepSpeedJson, check_section, declared_rules, fill_defaults
from launch.config.deepspeed_schema import ADAM_PARAMS, PARAMS, SCHEDULES, SGD_PARAMS, Rules
from launch.config.token_schedule import STABLE_DECAY, TOKEN_SCHEDULES
from launch.errors import nearest
from model.presets import Preset
from recipes.registry import technique_classes
from recipes.technique import Declaration

#: Optimizers that this project builds itself, with the fused kernel of torch; SGD is left to DeepSpeed.
ADAM_TYPES = ("Adam", "AdamW")
#: The values of `"auto"` for an optimizer's parameters, beside `lr` (GPT-3, appendix B).
OPTIMIZER_AUTO: dict[str, Any] = {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
GPT_3 = "GPT-3, appendix B"
PATH = ("optimizer", "params")


def decouples_weight_decay(optimizer: dict[str, Any]) -> bool:
    """Whether `optimizer`, Adam or AdamW, decouples weight decay: DeepSpeed's "Adam" does, unless "adam_w_mode" is false."""
    return bool(optimizer["type"] == "AdamW" or optimizer["params"].get("adam_w_mode", True))


def resolve_optimizer(ds_json: DeepSpeedJson, flags: argparse.Namespace, preset: Preset) -> tuple[dict[str, Any], float]:
    """The optimizer with its type's canonical name and all of its parameters, and the peak learning rate."""
    # Files for a trainer with its own optimizer lack the section.
    ds_json.fill(("optimizer",), {"type": "AdamW", "params": dict.fromkeys(("lr", *OPTIMIZER_AUTO), "auto")}, "default")
    declared = _declared()
    canonical = {name.lower(): name for name in (*ADAM_TYPES, "SGD", *declared)}
    asked = ds_json.get("optimizer", "type")
    kind = canonical.get(str(asked).lower())
    if kind is None:
        if asked is not None:
            names = canonical.values()
            ds_json.fault(("optimizer", "type"), f'is "{asked}"{nearest(asked, names)}; there are {", ".join(names)}')
        elif not ds_json.is_faulty("optimizer"):
            ds_json.fault(("optimizer", "type"), 'must name an optimizer: "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}')
        check_section(ds_json, PATH, {key: PARAMS.get(key, {"auto": True}) for key in ds_json.get(*PATH) or {}})
        return {}, flags.lr or ds_json.get(*PATH, "lr") or preset.lr
    declaration = declared.get(kind, Declaration())
    usual_lr, origin = preset.lr, f"preset {flags.preset}"
    if "lr" in declaration.auto_params:
        usual_lr, origin = declaration.auto_params["lr"], f"the default of {kind}"
    params = ds_json.get(*PATH) or {}
    own = PARAMS | declared_rules(declaration)
    check_section(ds_json, PATH, own if kind in declared else ADAM_PARAMS if kind in ADAM_TYPES else SGD_PARAMS)
    betas = params.get("betas", "auto")
    if betas != "auto" and not (
        isinstance(betas, list) and len(betas) == 2 and all(type(beta) in (int, float) and 0 <= beta < 1 for beta in betas)
    ):
        ds_json.fault((*PATH, "betas"), f"is {json.dumps(betas)}; write two numbers from 0 to below 1")
    lr = ds_json.choose((*PATH, "lr"), "lr", usual_lr, origin)
    if kind == "AdamW" and params.get("adam_w_mode") is False:
        ds_json.fault((*PATH, "adam_w_mode"), 'is false, which turns AdamW into Adam; write "type": "Adam", or leave the key out')
    _check_stage(ds_json, kind, kind in declared)
    for key, reason in declaration.ignored.items():
        if key in params:
            ds_json.note((*PATH, key), f"has no effect here: {reason}")
    for key, value in (OPTIMIZER_AUTO | declaration.auto_params).items():
        if params.get(key) == "auto" or (kind in (*ADAM_TYPES, *declared) and key not in params):
            ds_json.fill((*PATH, key), value, f"the default of {kind}" if key in declaration.auto_params else GPT_3)
    return {"type": kind, "params": ds_json.get(*PATH) or {}}, lr


def fill_optimizer(ds_json: DeepSpeedJson, kind: str) -> None:
    """Fill in the parameters of a recipe's optimizer that the JSON leaves out, once the schedule has set `lr`."""
    fill_defaults(ds_json, PATH, kind, _keys(kind))


def _keys(kind: Any) -> dict[str, dict[str, Any]]:
    """The rules of the parameters of a recipe's optimizer; {} for other optimizers."""
    return _declared().get(str(kind), Declaration()).keys


def _declared() -> dict[str, Declaration]:
    """The declarations of the recipes' optimizers, by type."""
    return {cls.declaration.optimizer_type: cls.declaration for cls in technique_classes() if cls.declaration.optimizer_type}


def without_defaults(description: dict[str, Any]) -> dict[str, Any]:
    """A `run.json` without the values that equal a technique's default. Earlier versions did not record them."""
    optimizer, sections = description.get("optimizer") or {}, description.get("techniques") or {}
    rules = {cls.declaration.section: cls.declaration.keys for cls in technique_classes()}
    params = _without_defaults(optimizer.get("params") or {}, _keys(optimizer.get("type")))
    techniques = {name: _without_defaults(section, own) if (own := rules.get(name)) else section for name, section in sections.items()}
    kept = {key: value for key, value in description.items() if (key, value) != ("perturb_init", 0)}  # only earlier versions had it
    return kept | {"optimizer": optimizer | {"params": params}, "techniques": techniques}


def has_rate_of_its_own(optimizer: dict[str, Any]) -> bool:
    """Whether a parameter of the `optimizer` without defaults is a learning rate beside `lr`, such as Muon's `adam_lr`."""
    return any("same_as" in rule and key in optimizer["params"] for key, rule in _keys(optimizer.get("type")).items())


def _without_defaults(section: dict[str, Any], rules: Rules) -> dict[str, Any]:
    defaults = {
        key: rule.get("default", section.get(rule.get("same_as", key))) for key, rule in rules.items() if {"default", "same_as"} & {*rule}
    }
    return {key: value for key, value in section.items() if key not in defaults or value != defaults[key]}


def _check_stage(ds_json: DeepSpeedJson, kind: str, is_from_recipe: bool) -> None:
    """Refuse a type that does not work at this ZeRO stage. A recipe checks the stage of its own optimizer."""
    path, allow_untested = ("optimizer", "type"), ("zero_allow_untested_optimizer",)
    offloaded = (ds_json.get("zero_optimization", "offload_optimizer", "device") or "none") != "none"
    if offloaded and ds_json.get(*PATH, "amsgrad"):
        ds_json.fault((*PATH, "amsgrad"), "is not available with an offloaded optimizer; leave it out, or do not offload it")
    if offloaded and ds_json.get(*PATH, "torch_adam") and ds_json.get(*PATH, "bias_correction") is not None:
        ds_json.fault((*PATH, "bias_correction"), "is unknown to the Adam of torch_adam; leave out one of the two")
    if kind in ADAM_TYPES or not ds_json.get("zero_optimization", "stage"):
        return
    if offloaded:
        ds_json.fault(path, f"is {kind}, which is not available as an offloaded optimizer; use AdamW, or do not offload it")
    elif is_from_recipe and allow_untested[0] not in ds_json.values:
        ds_json.fill(allow_untested, True, f"{kind} is an optimizer of a recipe")
    elif not ds_json.get(*allow_untested) and not ds_json.is_faulty(*allow_untested):
        ds_json.fault(path, f'is {kind}, which DeepSpeed has not tested with ZeRO; write "{allow_untested[0]}": true, or use stage 0')


def state_tensors(optimizer: dict[str, Any]) -> int:
    """The number of fp32 tensors of its size that the optimizer keeps for a parameter."""
    params = optimizer["params"]
    return int(bool(params.get("momentum"))) if optimizer["type"] == "SGD" else 2 + bool(params.get("amsgrad"))


# --- the schedule of the learning rate --------------------------------------------------------------------------------------------------

#: The schedule of a run without a `scheduler` section.
DEFAULT = "WarmupCosineTokens"
SCHEDULE = ("scheduler", "params")
DEEPSPEED = "DeepSpeed's default"
#: arXiv 2405.18392, section 4: a decay of a fifth of the run reaches the loss of a cosine.
DECAY_FRACTION, DECAY_SHAPE = 0.2, "1-sqrt"


class Schedule(NamedTuple):
    """The scheduler with all of its parameters, the peak learning rate, and the steps of warm-up."""

    scheduler: dict[str, Any]
    lr: float
    warmup_steps: int


def check_schedule(ds_json: DeepSpeedJson) -> None:
    """Note the faults of single values in the `scheduler` section; without the section, fill in `DEFAULT`."""
    ds_json.fill(("scheduler",), {"type": DEFAULT}, "default")
    rules = TOKEN_SCHEDULES | SCHEDULES
    kind = ds_json.get("scheduler", "type")
    if kind not in rules:
        if not ds_json.is_faulty("scheduler", "type"):
            wrong = "is missing" if kind is None else f"is {json.dumps(kind)}{nearest(kind, rules)}"
            ds_json.fault(("scheduler", "type"), f"{wrong}; there are {', '.join(rules)}")
        return
    check_section(ds_json, SCHEDULE, rules[kind])


def resolve_schedule(
    ds_json: DeepSpeedJson, flags: argparse.Namespace, preset: Preset, lr: float, steps: int, total_tokens: int
) -> Schedule:
    """Resolve the `scheduler` section, after `check_schedule`, for a run of `steps` steps and `total_tokens` tokens."""
    kind = ds_json.get("scheduler", "type")
    if kind is None:  # a fault
        return Schedule({}, lr, 0)
    # A preset's warm-up is for the preset's rate and length. A shorter run at that rate needs nearly as many steps of it: `nano` over 200
    # steps ends at a validation loss of 5.82 with 20 steps of warm-up, and at 5.50 with 80.
    most = max(1, steps * 2 // 5)
    warmup = (preset.warmup_steps, f"preset {flags.preset}") if preset.warmup_steps <= most else (most, "40% of the run")
    if kind in TOKEN_SCHEDULES:
        return _token_schedule(ds_json, flags, kind, lr, steps, total_tokens, *warmup)
    return _engine_schedule(ds_json, flags, kind, lr, steps, *warmup)


def _token_schedule(
    ds_json: DeepSpeedJson, flags: argparse.Namespace, kind: str, lr: float, steps: int, total_tokens: int, warmup: int, warmup_from: str
) -> Schedule:
    least, why = (lr / 10, "a tenth of the peak") if kind == DEFAULT else (0.0, f"{kind} ends at zero")
    min_lr = ds_json.choose((*SCHEDULE, "min_lr"), "min_lr", least, why)
    if min_lr > lr:
        ds_json.fault((*SCHEDULE, "min_lr"), f"is {min_lr:g}, above the peak learning rate of {lr:g}; lower it (--min_lr), or raise --lr")
    asked = ds_json.asked((*SCHEDULE, "warmup_steps"), "warmup_steps")
    if asked and asked >= steps:
        why = f"is {asked}, but the run has {steps} steps; lower it (--warmup_steps), or raise --steps"
        ds_json.fault((*SCHEDULE, "warmup_steps"), why)
    warmup = int(ds_json.choose((*SCHEDULE, "warmup_steps"), "warmup_steps", warmup, warmup_from))
    path = (*SCHEDULE, "total_tokens")
    ds_json.fill(path, total_tokens, "the run's length")
    if (written := ds_json.get(*path)) not in (None, total_tokens):
        ds_json.fill(path, total_tokens, f"{ds_json.origin(path)}: {written:,}, in whole steps", replace=True)
    params = {"min_lr": min_lr, "warmup_steps": warmup, "total_tokens": total_tokens}
    if kind == STABLE_DECAY:
        params |= _decay(ds_json, steps, warmup, total_tokens)
    return Schedule({"type": kind, "params": params}, lr, warmup)


def _decay(ds_json: DeepSpeedJson, steps: int, warmup: int, total_tokens: int) -> dict[str, Any]:
    """`decay_fraction` and `decay_shape`."""
    ds_json.fill((*SCHEDULE, "decay_fraction"), DECAY_FRACTION, "default")
    ds_json.fill((*SCHEDULE, "decay_shape"), DECAY_SHAPE, "default")
    fraction = ds_json.get(*SCHEDULE, "decay_fraction")
    if not ds_json.is_faulty(*SCHEDULE, "decay_fraction"):
        if fraction * steps < 1:
            ds_json.note(
                (*SCHEDULE, "decay_fraction"),
                f"is {fraction:g}: the decay is shorter than one step; it needs {1 / steps:.2g} or more",
            )
        elif warmup * (total_tokens // steps) > total_tokens - round(fraction * total_tokens):  # as in `token_schedule`
            begin = f"{(1 - fraction) * steps:.4g}"
            why = f"the decay would begin at step {begin}, within the warm-up of {warmup} steps; lower it, or --warmup_steps"
            ds_json.fault((*SCHEDULE, "decay_fraction"), f"is {fraction:g}: {why}")
    return {"decay_fraction": fraction, "decay_shape": ds_json.get(*SCHEDULE, "decay_shape")}


def _engine_schedule(
    ds_json: DeepSpeedJson, flags: argparse.Namespace, kind: str, lr: float, steps: int, warmup: int, warmup_from: str
) -> Schedule:
    """A schedule of DeepSpeed, by steps. A flag fills a key that is left out or "auto". Without a flag, "auto", and a default that exceeds
    the run, are filled as in transformers."""
    given, rules = ds_json.get(*SCHEDULE) or {}, SCHEDULES[kind]
    if "warmup_max_lr" in rules:
        ds_json.asked((*SCHEDULE, "warmup_max_lr"), "lr")
    if flags.min_lr is not None:
        ds_json.fault_of_run(f"--min_lr {flags.min_lr:g}: {kind} ends where its own parameters say; leave the flag out, or use {DEFAULT}")
    _check_length(ds_json, rules, steps, flags)

    rate_from = ds_json.origin(("optimizer", "params", "lr")) or "default"
    fill = {
        "warmup_num_steps": (max(1, warmup if flags.warmup_steps is None else flags.warmup_steps), warmup_from, "warmup_steps"),
        "total_num_steps": (steps, "the run's length", "steps"),
        "warmup_max_lr": (lr, rate_from, "lr"),
        "warmup_min_lr": (0.0, "as transformers fills it", ""),
    }
    for key, (value, origin, flag) in fill.items():
        if key in rules and (
            given.get(key) == "auto" or (key not in given and (flag in flags.origins or rules[key].get("default", math.inf) > steps))
        ):
            ds_json.fill((*SCHEDULE, key), value, flags.origins.get(flag, origin))
    least = ds_json.get(*SCHEDULE, "warmup_min_lr")
    most = ds_json.get(*SCHEDULE, "warmup_max_lr") or rules.get("warmup_max_lr", {}).get("default")
    if least is not None and most is not None and least > most:
        ds_json.fault((*SCHEDULE, "warmup_min_lr"), f"is {least:g}, above 'warmup_max_lr' of {most:g}; lower it")
    params = ds_json.values["scheduler"].get("params") or {}
    if "warmup_max_lr" in rules and not ds_json.is_faulty(*SCHEDULE, "warmup_max_lr"):
        peak: Any = params.get("warmup_max_lr", rules["warmup_max_lr"].get("default", lr))
        lr = _peak(ds_json, kind, lr, peak)
    steps_of_warmup: Any = params.get("warmup_num_steps", rules.get("warmup_num_steps", {}).get("default", 0))
    end: Any = params.get("total_num_steps", steps)
    if "total_num_steps" in rules and steps_of_warmup > end and not ds_json.is_faulty(*SCHEDULE):
        ds_json.fault((*SCHEDULE, "warmup_num_steps"), f"is {steps_of_warmup}, and the schedule ends at step {end}; write fewer steps")
    return Schedule({"type": kind, "params": params}, lr, steps_of_warmup)


def _peak(ds_json: DeepSpeedJson, kind: str, lr: float, peak: float) -> float:
    """The run's peak learning rate: the schedule's, which overwrites the optimizer's at the first step."""
    where, rate = (*SCHEDULE, "warmup_max_lr"), ("optimizer", "params", "lr")
    if peak != lr:
        if not ds_json.is_filled(rate):
            ds_json.note(rate, f"is {lr:g} and is not used: {kind} sets the rate, up to its 'warmup_max_lr' of {peak:g}")
        whose = ds_json.origin(where) if ds_json.get(*where) is not None else DEEPSPEED
        ds_json.fill(rate, peak, f"scheduler.params.warmup_max_lr, {whose}", replace=True)
    return peak


def _check_length(ds_json: DeepSpeedJson, rules: dict[str, Any], steps: int, flags: argparse.Namespace) -> None:
    """Refuse a schedule that is longer than the run."""
    flag_of = {"total_num_steps": "steps", "warmup_num_steps": "warmup_steps"}
    asked = {key: ds_json.asked((*SCHEDULE, key), flag) for key, flag in flag_of.items() if key in rules}
    for key, what in (("total_num_steps", "the schedule"), ("warmup_num_steps", "the warm-up")):
        if asked.get(key) is not None and asked[key] > steps:
            ds_json.fault(
                (*SCHEDULE, key), f'is {asked[key]}: {what} is longer than the run of {steps} steps; write "auto", or raise --steps'
            )
    total, warmup = asked.get("total_num_steps"), asked.get("warmup_num_steps")
    if "total_num_steps" in rules and warmup is not None and warmup >= (total or steps):
        ds_json.fault((*SCHEDULE, "warmup_num_steps"), f"is {warmup}, and the schedule ends at step {total or steps}; lower it")
    elif total is not None and total < steps:
        ds_json.note(
            (*SCHEDULE, "total_num_steps"),
            f"is {total}: the rate keeps its final value for the last {steps - total} of {steps} steps",
        )
