"""Resolves the `optimizer` section: its type, its parameters with `"auto"` filled in, and the ZeRO stages at which it works."""

from __future__ import annotations

import argparse
import json
from typing import Any

from launch.config.deepspeed_json import DeepSpeedJson
from launch.config.deepspeed_keys import ADAM_PARAMS, PARAMS, SGD_PARAMS, check_section, declared_rules, fill_defaults
from launch.config.deepspeed_schema import Rules
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
    lr = ds_json.choose((*PATH, "lr"), "lr", flags, usual_lr, origin)
    if kind == "AdamW" and params.get("adam_w_mode") is False:
        ds_json.fault((*PATH, "adam_w_mode"), 'is false, which turns AdamW into Adam; write "type": "Adam", or leave the key out')
    _check_stage(ds_json, kind, kind in declared)
    for key, reason in declaration.ignored.items():
        if key in params:
            ds_json.note((*PATH, key), f"has no effect here: {reason}")
    for key, value in (OPTIMIZER_AUTO | declaration.auto_params).items():
        if params.get(key) == "auto" or (kind in (*ADAM_TYPES, *declared) and key not in params):
            ds_json.settle((*PATH, key), value, f"the default of {kind}" if key in declaration.auto_params else GPT_3)
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
    techniques = {name: _without_defaults(section, rules.get(name, {})) for name, section in sections.items()}
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
        ds_json.settle(allow_untested, True, f"{kind} is an optimizer of a recipe")
    elif not ds_json.get(*allow_untested) and not ds_json.is_faulty(*allow_untested):
        ds_json.fault(path, f'is {kind}, which DeepSpeed has not tested with ZeRO; write "{allow_untested[0]}": true, or use stage 0')


def state_tensors(optimizer: dict[str, Any]) -> int:
    """The number of fp32 tensors of its size that the optimizer keeps for a parameter."""
    params = optimizer["params"]
    return int(bool(params.get("momentum"))) if optimizer["type"] == "SGD" else 2 + bool(params.get("amsgrad"))
