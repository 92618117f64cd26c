"""Checks the keys and values of a DeepSpeed JSON at every depth.

The message for an unknown key names the nearest key or, for a known key in the wrong section, where it belongs.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from launch.config.deepspeed_json import DeepSpeedJson, value_at
from launch.config.deepspeed_schema import KINDS, SCHEDULES, Rule, Rules, deepspeed_schema
from launch.config.flags import MAX_LR
from launch.config.token_schedule import TOKEN_SCHEDULES
from launch.errors import nearest_name
from launch.formats.json_lines import KeyPath, dotted
from recipes.registry import technique_classes
from recipes.technique import Declaration, Technique

#: The parameters of every optimizer but SGD; `betas` is checked in `launch.config.optimizer`.
PARAMS: Rules = {
    "lr": {"types": ["number"], "above": 0, "maximum": MAX_LR, "auto": True},
    "betas": {"auto": True},
    "eps": {"types": ["number"], "above": 0, "maximum": 1, "auto": True},
    "weight_decay": {"types": ["number"], "minimum": 0, "maximum": 1, "auto": True},
}
#: The parameters of the optimizers that this project builds itself.
ADAM_PARAMS: Rules = PARAMS | {key: {"types": ["boolean"]} for key in ("amsgrad", "bias_correction", "adam_w_mode", "torch_adam")}
#: The parameters of torch's SGD that are read. A momentum near 1 would keep old gradients for the whole run.
SGD_PARAMS: Rules = {
    "lr": PARAMS["lr"],
    "momentum": {"types": ["number"], "minimum": 0, "maximum": 0.9999},
    "weight_decay": PARAMS["weight_decay"],
}
#: Bound of a rule -> whether a number is beyond it, and the words for what is allowed.
BOUNDS: dict[str, tuple[Callable[[float, float], bool], str]] = {
    "above": (operator.le, "a number above {}"),
    "minimum": (operator.lt, "{} or more"),
    "maximum": (operator.gt, "{} or less"),
}
#: A message lists at most this many allowed names.
MANY = 16


def check_keys(ds_json: DeepSpeedJson, ours: Rules) -> None:
    """Note the faults of all keys and values.

    Deletes what is removed and switched off (`"enabled": false`), which DeepSpeed would refuse.

    Args:
        ours: the rules of the top-level sections of the project's own techniques.
    """
    schema = deepspeed_schema()
    for key, value in list(ds_json.values.items()):
        if key in schema.removed and key not in ours and (value is False or (isinstance(value, dict) and value.get("enabled") is False)):
            del ds_json.values[key]
    check_section(ds_json, (), schema.keys | ours)


def section_rule(technique: type[Technique]) -> Rule:
    """The rule of the section that `technique` reads; it may be `"auto"` if one of its keys may."""
    keys = technique.declaration.keys
    auto = any(rule.get("auto") for rule in keys.values())
    return {"types": ["object"], "keys": {"enabled": {"types": ["boolean"]}, **declared_rules(technique.declaration)}, "auto": auto}


def declared_rules(declared: Declaration) -> Rules:
    """The rules of a technique's keys, where `"auto"` is accepted for those without effect."""
    return {key: rule | {"auto": True} if key in declared.ignored else rule for key, rule in declared.keys.items()}


def check_section(ds_json: DeepSpeedJson, path: KeyPath, rules: Rules) -> None:
    """Note the faults of the section at `path`, all the way down. A whole number written as `5e8` becomes an integer."""
    section = ds_json.get(*path) or {}
    for key, value in (written := dict(section)).items():
        here = (*path, key)
        if key not in rules:
            ds_json.fault(here, *_unknown(here, value, written, rules))
        elif value == "auto":
            if rules[key].get("auto"):
                continue
            if not rules[key].get("auto_is_default"):
                ds_json.fault(here, '"auto" has no meaning here; write a value or leave the key out')
                continue
            default = rules[key].get("default")
            ds_json.note(here, '"auto" is DeepSpeed\'s default' + ("" if default is None else f", {json.dumps(default)}"))
            del section[key]
        elif (wrong := value_fault(value, rules[key])) is not None:
            ds_json.fault(here, wrong)
        elif isinstance(value, dict) and "keys" in rules[key]:
            check_section(ds_json, here, rules[key]["keys"])
        elif isinstance(value, float) and value.is_integer() and _is_whole(rules[key]):
            section[key] = int(value)


def fill_defaults(ds_json: DeepSpeedJson, path: KeyPath, owner: str, rules: Rules) -> None:
    """Fill in the keys of the section at `path` that are left out: by their rule's `default`, or the value of the key in `same_as`."""
    for key, rule in rules.items():
        if "default" in rule:
            ds_json.fill((*path, key), rule["default"], f"the default of {owner}")
        elif "same_as" in rule:
            ds_json.fill((*path, key), ds_json.get(*path, rule["same_as"]), f"{rule['same_as']}, the default of {owner}")


def _unknown(path: KeyPath, value: Any, section: dict[str, Any], rules: Rules) -> tuple[str, str | None]:
    """What is wrong with an unknown key, and the key that was probably meant: preferably an unused one that takes such a value."""
    key, name, schema = str(path[-1]), dotted(path), deepspeed_schema()
    if name in schema.removed:
        return f"is no longer in DeepSpeed {schema.version}; remove it. {schema.removed[name]}", None
    home = _homes().get(key)
    ignored = ", which DeepSpeed would ignore" if len(path) == 1 else ""
    if home is not None and home != name:
        return f"unknown key{ignored}; it belongs to '{home}'", None
    fitting = [name for name in rules if name not in section and (value == "auto" or value_fault(value, rules[name]) is None)]
    if meant := nearest_name(key, fitting) or nearest_name(key, rules):
        return f"unknown key{ignored}; did you mean '{meant}'?", meant
    return f"unknown key{ignored}; " + (f"allowed are {', '.join(sorted(rules))}" if len(rules) <= MANY else "remove it"), None


def _walk(rules: Rules, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Rule]]:
    """The path and the rule of each key, at every depth."""
    for key, rule in rules.items():
        yield (*path, key), rule
        yield from _walk(rule.get("keys", {}), (*path, key))


@cache
def _homes() -> dict[str, str]:
    """Name -> dotted path, for keys that occur in one place only, and for `max_grad_norm`, which other projects write."""
    declared = [cls.declaration for cls in technique_classes()]
    trees: list[tuple[KeyPath, Rules]] = [((), deepspeed_schema().keys)]
    trees += [((one.section,), one.keys) for one in declared if one.section]
    params = [ADAM_PARAMS, SGD_PARAMS, *(one.keys for one in declared if one.optimizer_type)]
    trees += [(("optimizer", "params"), rules) for rules in params]
    trees += [(("scheduler", "params"), rules) for rules in (*TOKEN_SCHEDULES.values(), *SCHEDULES.values())]
    places: dict[str, set[str]] = {}
    for above, rules in trees:
        for path, _ in _walk(rules, above):
            places.setdefault(str(path[-1]), set()).add(dotted(path))
    return {key: place for key, (place, *others) in places.items() if not others} | {"max_grad_norm": "gradient_clipping"}


def defaults_left_open(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The dotted keys that `config` leaves out, at the top level and in its sections, with DeepSpeed's defaults."""
    for path, rule in _walk(deepspeed_schema().keys):
        section = value_at(config, path[:-1])
        if "default" in rule and isinstance(section, dict) and path[-1] not in section:
            yield dotted(path), rule["default"]


def value_fault(value: Any, rule: Rule) -> str | None:
    """What is wrong with `value` under `rule`, and what to write instead; None if it is allowed."""
    wrong, auto = f"is {json.dumps(value)}; write", ', or "auto"' if rule.get("auto") else ""
    if "enum" in rule:
        if any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in rule["enum"]):
            return None
        return f"{wrong} {'one of ' if len(rule['enum']) > 1 else ''}{', '.join(map(json.dumps, rule['enum']))}{auto}"
    if (types := rule.get("types")) and not any(_fits(value, kind) for kind in types):
        keys = f" with keys such as {', '.join(list(rule['keys'])[:3])}" if "keys" in rule else ""
        return f"{wrong} {' or '.join(KINDS[kind][1] for kind in types)}{keys}{auto}"
    if "items" in rule and isinstance(value, list) and not all(any(_fits(item, kind) for kind in rule["items"]) for item in value):
        return f"{wrong} a list of {' or '.join(rule['items'])}s"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        for bound, (beyond, words) in BOUNDS.items():
            if bound in rule and beyond(value, rule[bound]):
                return f"{wrong} {words.format(rule[bound])}{auto}"
    return None


def _fits(value: Any, kind: str) -> bool:
    if kind == "integer":  # 5e8 is how DeepSpeed's own examples write a bucket size
        return isinstance(value, (int, float)) and not isinstance(value, bool) and float(value).is_integer()
    if kind == "number":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, KINDS[kind][0])


def _is_whole(rule: Rule) -> bool:
    return "integer" in rule.get("types", ()) or isinstance(rule.get("enum", [None])[0], int)
