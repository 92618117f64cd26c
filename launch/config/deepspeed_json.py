"""The DeepSpeed JSON while it is resolved: its values, where each came from, and the faults found so far.

A faulty value is removed, so that later checks treat it as left out: all faults of a file are reported at once, and none twice. `choose`
and `fill` fill in what the file leaves open, and record the origin of each value for `--explain`.
"""

from __future__ import annotations

import argparse
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

from data_pipeline.errors import nearest_name
from launch.config.deepspeed_schema import ADAM_PARAMS, KINDS, SCHEDULES, SGD_PARAMS, Rule, Rules, deepspeed_schema
from launch.config.token_schedule import TOKEN_SCHEDULES
from launch.errors import UsageError
from launch.formats.files import KeyPath, dotted, parse_json, read_json
from recipes.registry import technique_classes
from recipes.technique import Declaration, Technique


def value_at(values: dict[str, Any], path: Iterable[str | int]) -> Any:
    """The value at `path`, or None."""
    value: Any = values
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def leaves(values: dict[str, Any], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """The path and the value of each leaf: every value except non-empty sections."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


class DeepSpeedJson:
    """The JSON in `file`, changed by `flags.overrides` (`--set key.path=value`); other flags fill in what it leaves open.

    Attributes:
        values: the current content of the JSON.
        notes: notes on accepted values: one line each, with the place in the file.
        lacks: what the JSON needs and this machine does not have: a line each.
    """

    def __init__(self, file: str, flags: argparse.Namespace):
        self.file, self._flags = file, flags
        self.values, self._lines = read_json(file)
        self.notes: list[str] = []
        self.lacks: list[str] = []
        self._faults: list[str] = []
        self._faulty: list[KeyPath] = []
        self._reported: set[KeyPath] = set()
        self._overrides: list[KeyPath] = []
        self._filled: dict[KeyPath, str] = {}
        self._written: dict[KeyPath, KeyPath] = {}  # documented name -> the other name that the user wrote
        self._take_other_names()
        for override in flags.overrides:
            self._override(override)
            self._take_other_names()

    def _override(self, text: str) -> None:
        """Apply `--set key.path=value`; the value is JSON, or else a string."""
        keys, equals, raw = text.partition("=")
        path: KeyPath = tuple(keys.split("."))
        if not equals or not raw or not all(path):
            raise UsageError(f"--set {text}: must be KEY=VALUE, e.g. --set zero_optimization.stage=2")
        value: Any = raw
        is_number = re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", raw, re.ASCII)
        if is_number or raw[0] in '{["' or raw in ("true", "false", "null", "NaN", "Infinity", "-Infinity"):
            value, _ = parse_json(raw, f"--set {keys}")
        section: dict[Any, Any] = self.values
        path = self._documented(path)
        for depth, part in enumerate(path[:-1], start=1):
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                above = dotted(path[:depth])
                whose = "another --set" if self._is_overridden(path[:depth]) else self.file
                raise UsageError(f"--set {text}: '{above}' is a value in {whose}, not a section; --set {above}=VALUE changes it")
        section[path[-1]] = value
        self._overrides.append(path)

    @staticmethod
    def _documented(path: KeyPath) -> KeyPath:
        """`path` below a section for which DeepSpeed has two names, with the documented one."""
        for old, (new, if_true) in deepspeed_schema().other_names.items():
            if if_true is None and path[: (depth := old.count(".") + 1)] == tuple(old.split(".")) and len(path) > depth:
                return (*new.split("."), *path[depth:])
        return path

    def _take_other_names(self) -> None:
        """Give the keys for which DeepSpeed has two names the documented one."""
        for old, (new, if_true) in deepspeed_schema().other_names.items():
            path, to = tuple(old.split(".")), tuple(new.split("."))
            section = value_at(self.values, path[:-1])
            if not isinstance(section, dict) or path[-1] not in section:
                continue
            value = section[path[-1]]
            if to[-1] in section and path not in self._overrides:
                self.fault(path, f"is another name of '{new}', which is given too; leave out one of them")
            elif if_true is not None and not isinstance(value, bool):
                self.fault(path, f"is {json.dumps(value)}; write true or false")
            else:
                del section[path[-1]]
                section.pop(to[-1], None)
                if value is not False or if_true is None:
                    section[to[-1]] = value if if_true is None else dict(if_true)
                self._lines |= {(*to, *key[len(path) :]): self._lines.pop(key) for key in [*self._lines] if key[: len(path)] == path}
                self._overrides = [(*to, *key[len(path) :]) if key[: len(path)] == path else key for key in self._overrides]
                self._written[to] = path

    # --- where a value came from ----------------------------------------------------------------------------------------------------

    def where(self, path: KeyPath) -> str:
        """The file, line and key of the value at `path`, or its `--set`, for a message."""
        name = dotted(next(((*old, *path[len(new) :]) for new, old in self._written.items() if path[: len(new)] == new), path))
        if self._is_overridden(path) or (path not in self._lines and any(override[: len(path)] == path for override in self._overrides)):
            return f"--set {name}"
        line = self._lines.get(path)
        return f"{self.file}: " + (f"line {line}: " if line else "") + f"'{name}'"

    def origin(self, path: KeyPath) -> str | None:
        """Where the value at `path` came from: what `fill` noted, `--set`, or `line 12`; None if there is no value."""
        for end in range(len(path), 0, -1):
            if (filled := self._filled.get(path[:end])) is not None:
                return filled
            if self._is_overridden(path[:end]):
                return "--set"
            if (line := self._lines.get(path[:end])) is not None:
                return f"line {line}"
        return None

    def origins(self) -> dict[str, str]:
        """The origin of each value, by its dotted path; "default" for those that nobody wrote or filled in."""
        return {".".join(map(str, path)): self.origin(path) or "default" for path, _ in leaves(self.values)}

    def paths(self) -> list[KeyPath]:
        """The paths of all keys that the user wrote."""
        return [*self._lines, *self._overrides]

    def _is_overridden(self, path: KeyPath) -> bool:
        return any(path[: len(override)] == override for override in self._overrides)

    def fill(self, path: KeyPath, value: Any, origin: str, replace: bool = False) -> None:
        """Fill in what the file leaves out, or "auto", at `path`, unless a fault was noted there; sections on the way are made.

        replace: also where the file has a value.
        """
        if not replace and (self.get(*path) is not None or self.is_faulty(*path)):
            return
        section: dict[Any, Any] = self.values
        for part in path[:-1]:
            section = section.setdefault(part, {})
        section[path[-1]] = value
        self._filled[path] = origin

    def is_filled(self, path: KeyPath) -> bool:
        """Whether the value at `path` is one of `fill`, not the user's."""
        return path in self._filled

    # --- faults and notes -----------------------------------------------------------------------------------------------------------

    def fault(self, path: KeyPath, message: str, meant: str | None = None) -> None:
        """Note a fault, and remove the value.

        meant: the key that a misspelt one stands for; it counts as faulty too, so that it is not reported as missing.
        """
        if path in self._reported:
            return
        self._reported.add(path)
        self._faults.append(self._line(path, message))
        self._faulty += [path] if meant is None else [path, (*path[:-1], meant)]
        section = self.get(*path[:-1])
        if isinstance(section, dict):
            section.pop(path[-1], None)

    def fault_of_run(self, message: str) -> None:
        """Record a fault that does not belong to a single value of the file."""
        self._faults.append(message)

    def note(self, path: KeyPath, message: str) -> None:
        """Accept the value at `path`, and add a note that the run's log and `--explain` print."""
        self.notes.append(self._line(path, message))

    def lack(self, path: KeyPath, message: str) -> None:
        """Note what the value at `path` needs and this machine does not have: the run can be explained here, and not trained."""
        self.lacks.append(self._line(path, message))

    def _line(self, path: KeyPath, message: str) -> str:
        """The place of `path` and `message`, after a colon unless the message begins with "is" or "has"."""
        return f"{self.where(path)}{' ' if message.startswith(('is ', 'has ')) else ': '}{message}"

    def is_faulty(self, *path: str | int) -> bool:
        """Whether a fault was noted at `path`, above it or below it."""
        return any(path[: len(other)] == other[: len(path)] for other in self._faulty)

    def raise_faults(self) -> None:
        """Raise all faults that were noted, if any."""
        if self._faults:
            raise UsageError(*self._faults)

    # --- values ---------------------------------------------------------------------------------------------------------------------

    def get(self, *path: str | int) -> Any:
        """The value at `path`, or None where it is missing or `"auto"`."""
        value = value_at(self.values, path)
        return None if value == "auto" else value

    def by_path(self) -> dict[str, Any]:
        """All values and sections by dotted path; None for "auto"."""

        def flat(section: dict[str, Any], above: str) -> dict[str, Any]:
            found: dict[str, Any] = {}
            for key, value in section.items():
                found[above + key] = None if value == "auto" else value
                found |= flat(value, f"{above}{key}.") if isinstance(value, dict) else {}
            return found

        return flat(self.values, "")

    def asked(self, path: KeyPath, flag: str) -> Any:
        """What the user asks for: the value at `path`, else the flag's, else None. Notes a fault if they differ."""
        value, given = self.get(*path), getattr(self._flags, flag)
        if value is not None and given is not None and value != given:
            source, written = self._flags.origins[flag], "leave --set out" if self._is_overridden(path) else 'write "auto" in the JSON'
            if source == f"--{flag}":
                self.fault(path, f"is {json.dumps(value)}, but --{flag} is {given}; {written} or leave the flag out")
            else:
                self.fault(path, f"is {json.dumps(value)}, but {source} has --{flag} {given}; {written} or give --{flag} {value}")
        return given if value is None else value

    def choose(self, path: KeyPath, flag: str, fallback: Any, origin: str) -> Any:
        """What the user asks for, else `fallback`, which comes from `origin`. It is filled in at `path`."""
        value = self.asked(path, flag)
        value = fallback if value is None else value
        self.fill(path, value, self._flags.origins.get(flag, origin))
        return value


# --- the check of keys and values -------------------------------------------------------------------------------------------------------

#: Bound of a rule -> whether a number is beyond it, and the words for what is allowed.
BOUNDS: dict[str, tuple[Callable[[float, float], bool], str]] = {
    "above": (operator.le, "a number above {}"),
    "minimum": (operator.lt, "{} or more"),
    "maximum": (operator.gt, "{} or less"),
}
#: A message lists at most this many allowed names.
MANY = 16


def drop_removed_if_off(ds_json: DeepSpeedJson, ours: Rules) -> None:
    """Delete the sections that DeepSpeed removed and the file switches off (`"enabled": false`): DeepSpeed would refuse them.

    ours: the rules of the top-level sections of the project's own techniques.
    """
    for key, value in list(ds_json.values.items()):
        off = value is False or (isinstance(value, dict) and value.get("enabled") is False)
        if off and key in deepspeed_schema().removed and key not in ours:
            del ds_json.values[key]


def check_keys(ds_json: DeepSpeedJson, ours: Rules) -> None:
    """Note the faults of all keys and values. ours: as for `drop_removed_if_off`."""
    check_section(ds_json, (), deepspeed_schema().keys | ours)


def section_rule(technique: type[Technique]) -> Rule:
    """The rule of the section that `technique` reads; it may be `"auto"` if one of its keys may."""
    if technique.declaration.is_number:
        return {"types": ["integer"], "minimum": 1, "default": 1, "auto_is_default": True}
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
