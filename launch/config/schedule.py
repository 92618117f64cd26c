"""Resolves the `scheduler` section: a schedule of the project, by tokens (`launch/config/token_schedule.py`), or of DeepSpeed, by steps."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any, NamedTuple

from launch.config.deepspeed_json import DeepSpeedJson
from launch.config.deepspeed_keys import check_section
from launch.config.deepspeed_schema import SCHEDULES
from launch.config.token_schedule import STABLE_DECAY, TOKEN_SCHEDULES
from launch.errors import nearest
from model.presets import Preset

#: The schedule of a run without a `scheduler` section.
DEFAULT = "WarmupCosineTokens"
PATH = ("scheduler", "params")
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
    check_section(ds_json, PATH, rules[kind])


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
    min_lr = ds_json.choose((*PATH, "min_lr"), "min_lr", flags, least, why)
    if min_lr > lr:
        ds_json.fault((*PATH, "min_lr"), f"is {min_lr:g}, above the peak learning rate of {lr:g}; lower it (--min_lr), or raise --lr")
    asked = ds_json.value_or_flag((*PATH, "warmup_steps"), "warmup_steps", flags)
    if asked and asked >= steps:
        why = f"is {asked}, but the run has {steps} steps; lower it (--warmup_steps), or raise --steps"
        ds_json.fault((*PATH, "warmup_steps"), why)
    warmup = int(ds_json.choose((*PATH, "warmup_steps"), "warmup_steps", flags, warmup, warmup_from))
    path = (*PATH, "total_tokens")
    ds_json.fill(path, total_tokens, "the run's length")
    if (written := ds_json.get(*path)) not in (None, total_tokens):
        ds_json.settle(path, total_tokens, f"{ds_json.origin(path)}: {written:,}, in whole steps")
    params = {"min_lr": min_lr, "warmup_steps": warmup, "total_tokens": total_tokens}
    if kind == STABLE_DECAY:
        params |= _decay(ds_json, steps, warmup, total_tokens)
    return Schedule({"type": kind, "params": params}, lr, warmup)


def _decay(ds_json: DeepSpeedJson, steps: int, warmup: int, total_tokens: int) -> dict[str, Any]:
    """`decay_fraction` and `decay_shape`."""
    ds_json.fill((*PATH, "decay_fraction"), DECAY_FRACTION, "default")
    ds_json.fill((*PATH, "decay_shape"), DECAY_SHAPE, "default")
    fraction = ds_json.get(*PATH, "decay_fraction")
    if not ds_json.is_faulty(*PATH, "decay_fraction"):
        if fraction * steps < 1:
            ds_json.note(
                (*PATH, "decay_fraction"), f"is {fraction:g}: the decay is shorter than one step; it needs {1 / steps:.2g} or more"
            )
        elif warmup * (total_tokens // steps) > total_tokens - round(fraction * total_tokens):  # as in `token_schedule`
            begin = f"{(1 - fraction) * steps:.4g}"
            why = f"the decay would begin at step {begin}, within the warm-up of {warmup} steps; lower it, or --warmup_steps"
            ds_json.fault((*PATH, "decay_fraction"), f"is {fraction:g}: {why}")
    return {"decay_fraction": fraction, "decay_shape": ds_json.get(*PATH, "decay_shape")}


def _engine_schedule(
    ds_json: DeepSpeedJson, flags: argparse.Namespace, kind: str, lr: float, steps: int, warmup: int, warmup_from: str
) -> Schedule:
    """A schedule of DeepSpeed, by steps. A flag fills a key that is left out or "auto". Without a flag, "auto", and a default that exceeds
    the run, are filled as in transformers."""
    given, rules = ds_json.get(*PATH) or {}, SCHEDULES[kind]
    if "warmup_max_lr" in rules:
        ds_json.value_or_flag((*PATH, "warmup_max_lr"), "lr", flags)
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
            ds_json.settle((*PATH, key), value, flags.origins.get(flag, origin))
    least = ds_json.get(*PATH, "warmup_min_lr")
    most = ds_json.get(*PATH, "warmup_max_lr") or rules.get("warmup_max_lr", {}).get("default")
    if least is not None and most is not None and least > most:
        ds_json.fault((*PATH, "warmup_min_lr"), f"is {least:g}, above 'warmup_max_lr' of {most:g}; lower it")
    params = ds_json.values["scheduler"].get("params") or {}
    if "warmup_max_lr" in rules and not ds_json.is_faulty(*PATH, "warmup_max_lr"):
        peak: Any = params.get("warmup_max_lr", rules["warmup_max_lr"].get("default", lr))
        lr = _peak(ds_json, kind, lr, peak)
    steps_of_warmup: Any = params.get("warmup_num_steps", rules.get("warmup_num_steps", {}).get("default", 0))
    end: Any = params.get("total_num_steps", steps)
    if "total_num_steps" in rules and steps_of_warmup > end and not ds_json.is_faulty(*PATH):
        ds_json.fault((*PATH, "warmup_num_steps"), f"is {steps_of_warmup}, and the schedule ends at step {end}; write fewer steps")
    return Schedule({"type": kind, "params": params}, lr, steps_of_warmup)


def _peak(ds_json: DeepSpeedJson, kind: str, lr: float, peak: float) -> float:
    """The run's peak learning rate: the schedule's, which overwrites the optimizer's at the first step."""
    where, rate = (*PATH, "warmup_max_lr"), ("optimizer", "params", "lr")
    if peak != lr:
        origin = ds_json.origin(rate) or ""
        if origin.startswith(("line", "--")):
            ds_json.note(rate, f"is {lr:g} and is not used: {kind} sets the rate, up to its 'warmup_max_lr' of {peak:g}")
        ds_json.settle(
            rate, peak, f"scheduler.params.warmup_max_lr, {ds_json.origin(where) if ds_json.get(*where) is not None else DEEPSPEED}"
        )
    return peak


def _check_length(ds_json: DeepSpeedJson, rules: dict[str, Any], steps: int, flags: argparse.Namespace) -> None:
    """Refuse a schedule that is longer than the run."""
    flag_of = {"total_num_steps": "steps", "warmup_num_steps": "warmup_steps"}
    asked = {key: ds_json.value_or_flag((*PATH, key), flag, flags) for key, flag in flag_of.items() if key in rules}
    for key, what in (("total_num_steps", "the schedule"), ("warmup_num_steps", "the warm-up")):
        if asked.get(key) is not None and asked[key] > steps:
            ds_json.fault((*PATH, key), f'is {asked[key]}: {what} is longer than the run of {steps} steps; write "auto", or raise --steps')
    total, warmup = asked.get("total_num_steps"), asked.get("warmup_num_steps")
    if "total_num_steps" in rules and warmup is not None and warmup >= (total or steps):
        ds_json.fault((*PATH, "warmup_num_steps"), f"is {warmup}, and the schedule ends at step {total or steps}; lower it")
    elif total is not None and total < steps:
        ds_json.note(
            (*PATH, "total_num_steps"), f"is {total}: the rate keeps its final value for the last {steps - total} of {steps} steps"
        )
