"""Checks the keys and values of a DeepSpeed JSON at every depth.

The message for an unknown key names the nearest key or, for a known key in the wrong section, where it belongs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from launch.config.engine_schema import SCHEDULES, Rule, Rules, engine_schema
from launch.config.flags import MAX_LR
from launch.config.token_schedule import TOKEN_SCHEDULES
from launch.errors import nearest_name
from launch.formats.json_lines import KeyPath, dotted
from recipes.registry import technique_classes
from recipes.technique import Technique

#: The parameters of every optimizer but SGD; `betas` is checked in `launch.config.optimizer`.
PARAMS: Rules = {
    "lr": {"types": ["number"], "above": 0, "maximum": MAX_LR},
    "betas": {},
    "eps": {"types": ["number"], "above": 0, "maximum": 1},
    "weight_decay": {"types": ["number"], "minimum": 0, "maximum": 1},
}
#: The parameters of the optimizers that this project builds itself.
ADAM_PARAMS: Rules = PARAMS | {key: {"types": ["boolean"]} for key in ("amsgrad", "bias_correction", "adam_w_mode", "torch_adam")}
#: The parameters of torch's SGD that are read. A momentum near 1 would keep old gradients for the whole run.
SGD_PARAMS: Rules = {
    "lr": PARAMS["lr"],
    "momentum": {"types": ["number"], "minimum": 0, "maximum": 0.9999},
    "weight_decay": PARAMS["weight_decay"],
}
#: What to write instead of a removed key, where the advice of DeepSpeed's own message does not apply here.
INSTEAD = {
    "amp": "Write 'bf16' or 'fp16' instead.",
    "sparse_gradients": "The gradients of the embedding are dense.",
}
#: Old names that DeepSpeed still reads: what to write instead.
OLD_NAMES = {
    "bfloat16": "'bf16'",
    "aio.thread_count": "'intra_op_parallelism'",
    "zero_optimization.cpu_offload": '"offload_optimizer": {"device": "cpu"}',
    "zero_optimization.cpu_offload_param": '"offload_param": {"device": "cpu"}',
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "'stage3_gather_16bit_weights_on_model_save'",
}
#: A message lists at most this many allowed names.
MANY = 16


class KeyFault(NamedTuple):
    """A fault of a DeepSpeed JSON: where, what is wrong and what to write instead, and for a misspelt key the suggested name."""

    path: KeyPath
    message: str
    meant: str | None = None


Faults = list[KeyFault]


def check_engine_keys(config: dict[str, Any], ours: Rules, auto: set[str]) -> Faults:
    """Faults of a DeepSpeed JSON.

    Deletes from `config` what is removed and switched off (`"enabled": false`), which DeepSpeed would refuse.

    Args:
        ours: the rules of the top-level sections that the project's own techniques claim.
        auto: the dotted keys for which `"auto"` has a meaning.
    """
    schema = engine_schema()
    removed, rules = schema.removed, schema.keys | ours
    for key, value in list(config.items()):
        if key in removed and key not in ours and (value is False or (isinstance(value, dict) and value.get("enabled") is False)):
            del config[key]
    faults: Faults = []
    for fault in check_section((), config, {"keys": rules}, auto):
        if (key := dotted(fault.path)) in removed and key not in ours:
            fault = KeyFault(fault.path, f"is gone from DeepSpeed {schema.version}; remove it. {INSTEAD.get(key) or removed[key]}")
        elif key in OLD_NAMES:
            fault = KeyFault(fault.path, f"is an old name; write {OLD_NAMES[key]} instead")
        faults.append(fault)
    return faults


def section_rule(technique: type[Technique]) -> Rule:
    """The rule of a section that `technique` claims."""
    auto = any(rule.get("auto") for rule in technique.declaration.keys.values())  # then of the section too
    return {"types": ["object"], "keys": {"enabled": {"types": ["boolean"]}, **technique.declaration.keys}, "auto": auto}


def check_section(path: KeyPath, section: Any, rule: Rule, auto: set[str]) -> Faults:
    """Faults of the object `section` at `path`, all the way down. In `section`, a whole number written as `5e8` becomes an integer."""
    faults: Faults = []
    rules = rule["keys"]
    for key, value in section.items():
        here = (*path, key)
        takes_auto = dotted(here) in auto or rules.get(key, {}).get("auto", False)
        if key not in rules:
            faults.append(_unknown(here, value, section, rules))
        elif value == "auto":
            if not takes_auto:
                faults.append(KeyFault(here, '"auto" has no meaning here; write a value or leave the key out'))
        elif (wrong := value_fault(value, rules[key] | {"auto": takes_auto})) is not None:
            faults.append(KeyFault(here, wrong))
        elif isinstance(value, dict) and "keys" in rules[key]:
            faults += check_section(here, value, rules[key], auto)
        elif isinstance(value, float) and value.is_integer() and _is_whole(rules[key]):
            section[key] = int(value)
    return faults


def _unknown(path: KeyPath, value: Any, section: dict[str, Any], rules: Rules) -> KeyFault:
    """The fault of an unknown key, with where it belongs, or the nearest name: unused ones that take such a value are preferred."""
    key = str(path[-1])
    home = _homes().get(key)
    free = [name for name in rules if name not in section]
    fitting = [name for name in free if value == "auto" or value_fault(value, rules[name]) is None]
    meant = nearest_name(key, fitting) or nearest_name(key, free) or nearest_name(key, rules)
    ignored = ", which DeepSpeed would ignore" if len(path) == 1 else ""
    if home is not None and home != dotted(path):
        return KeyFault(path, f"unknown key{ignored}; it belongs to '{home}'", home.rpartition(".")[2])
    if meant is not None:
        return KeyFault(path, f"unknown key{ignored}; did you mean '{meant}'?", meant)
    return KeyFault(path, f"unknown key{ignored}; " + (f"allowed are {', '.join(sorted(rules))}" if len(rules) <= MANY else "remove it"))


@cache
def _homes() -> dict[str, str]:
    """The path of every key that occurs in only one place, by the name of the key; and of `max_grad_norm`, which other projects write."""
    places = Counter[str]()
    found: dict[str, str] = {}

    def walk(rules: Rules, path: KeyPath) -> None:
        for key, rule in rules.items():
            here = dotted((*path, key))
            if found.get(key) != here:
                places[key] += 1
                found[key] = here
            walk(rule.get("keys", {}), (*path, key))

    walk(engine_schema().keys, ())
    for cls in technique_classes():
        if cls.declaration.section:
            walk(cls.declaration.keys, (cls.declaration.section,))
    declared = (cls.declaration.keys for cls in technique_classes() if cls.declaration.optimizer_type)
    for params in (ADAM_PARAMS, SGD_PARAMS, *declared):
        walk(params, ("optimizer", "params"))
    for params in (*TOKEN_SCHEDULES.values(), *SCHEDULES.values()):
        walk(params, ("scheduler", "params"))
    return {key: place for key, place in found.items() if places[key] == 1} | {"max_grad_norm": "gradient_clipping"}


def defaults_left_open(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The dotted keys that `config` leaves out, with the value that DeepSpeed takes: at the top level, and in the sections it has."""

    def walk(section: dict[str, Any], rules: Rules, path: KeyPath) -> Iterator[tuple[str, Any]]:
        for key, rule in rules.items():
            if key not in section and "default" in rule:
                yield dotted((*path, key)), rule["default"]
            elif isinstance(section.get(key), dict):
                yield from walk(section[key], rule.get("keys", {}), (*path, key))

    return walk(config, engine_schema().keys, ())


def value_fault(value: Any, rule: Rule) -> str | None:
    """What is wrong with `value` under `rule`, and what to write instead; None if it is allowed."""
    wrong, auto = f"is {json.dumps(value)}; write", ', or "auto"' if rule.get("auto") else ""
    if "enum" in rule:
        if any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in rule["enum"]):
            return None
        return f"{wrong} {'one of ' if len(rule['enum']) > 1 else ''}{', '.join(map(json.dumps, rule['enum']))}{auto}"
    if (types := rule.get("types")) and not any(_fits(value, kind) for kind in types):
        keys = f" with keys such as {', '.join(list(rule['keys'])[:3])}" if "keys" in rule else ""
        return f"{wrong} {_with_article(types)}{keys}{auto}"
    if "items" in rule and isinstance(value, list) and not all(any(_fits(item, kind) for kind in rule["items"]) for item in value):
        return f"{wrong} a list of {' or '.join(rule['items'])}s"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if "above" in rule and value <= rule["above"]:
            return f"{wrong} a number above {rule['above']}{auto}"
        if "minimum" in rule and value < rule["minimum"]:
            return f"{wrong} {rule['minimum']} or more{auto}"
        if "maximum" in rule and value > rule["maximum"]:
            return f"{wrong} {rule['maximum']} or less{auto}"
    return None


def _fits(value: Any, kind: str) -> bool:
    if kind == "integer":  # 5e8 is how DeepSpeed's own examples write a bucket size
        return isinstance(value, (int, float)) and not isinstance(value, bool) and float(value).is_integer()
    if kind == "number":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, {"boolean": bool, "string": str, "object": dict, "array": list, "null": type(None)}[kind])


def _with_article(types: list[str]) -> str:
    words = {
        "integer": "a whole number",
        "number": "a number",
        "boolean": "true or false",
        "string": "a string",
        "object": "an object",
        "array": "a list",
        "null": "null",
    }
    return " or ".join(words[kind] for kind in types)


def _is_whole(rule: Rule) -> bool:
    return "integer" in rule.get("types", ()) or isinstance(rule.get("enum", [None])[0], int)
