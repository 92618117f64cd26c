"""The engine JSON while it is resolved: its values, where each stands, and the faults found so far.

A value with a fault is taken out, so that the checks behind it go on as if it had been left out: all faults of a file are reported
at once, and none twice.
"""

from __future__ import annotations

import json
from typing import Any

from launch.run.engine_schema import check_engine_keys
from launch.run.errors import UsageError
from launch.run.json_lines import KeyPath, dotted, parse_json, read_json


class EngineJson:
    """The JSON in `file`, changed by `overrides` (`--set key.path=value`)."""

    def __init__(self, file: str, overrides: list[str]):
        self.file = file
        self.values, self._lines = read_json(file)
        self._faults: list[str] = []
        self._faulty: list[KeyPath] = []
        self._overrides: list[KeyPath] = []
        for override in overrides:
            self._override(override)

    def _override(self, text: str) -> None:
        """Apply `--set key.path=value`; the value is JSON, or a string where it is none."""
        keys, equals, raw = text.partition("=")
        path = tuple(keys.split("."))
        if not equals or not raw or not all(path):
            raise UsageError(f"--set {text}: must be KEY=VALUE, e.g. --set zero_optimization.stage=2")
        value: Any = raw
        if raw[0] in '{["-0123456789' or raw in ("true", "false", "null", "NaN", "Infinity"):
            value, _ = parse_json(raw, f"--set {keys}")
        section = self.values
        for depth, part in enumerate(path[:-1], start=1):
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                above = dotted(path[:depth])
                raise UsageError(f"--set {text}: '{above}' is a value in {self.file}, not a section; --set {above}=VALUE changes it")
        section[path[-1]] = value
        self._overrides.append(path)

    def check_keys(self, sections: set[str], auto: set[str]) -> None:
        """Note every unknown or removed key and every value of a wrong type; `sections` are those of our own techniques.

        `auto` are the dotted keys for which `"auto"` has a meaning.
        """
        for path, message in check_engine_keys(self.values, sections, auto):
            self.fault(path, message)

    def where(self, path: KeyPath) -> str:
        """Where the value at `path` stands, for a message."""
        if any(path[: len(override)] == override for override in self._overrides):
            return f"--set {dotted(path)}"
        line = self._lines.get(path)
        return f"{self.file}: " + (f"line {line}: " if line else "") + f"'{dotted(path)}'"

    def fault(self, path: KeyPath, message: str) -> None:
        """Note a fault, and take the value out."""
        self._faults.append(f"{self.where(path)}: {message}")
        self._faulty.append(path)
        section = self.get(*path[:-1])
        if isinstance(section, dict):
            section.pop(path[-1], None)

    def fault_of_run(self, message: str) -> None:
        """Note a fault that no single value of the file has alone."""
        self._faults.append(message)

    def is_faulty(self, *path: str) -> bool:
        """Whether a fault was noted at `path`, above it or below it."""
        return any(path[: len(other)] == other[: len(path)] for other in self._faulty)

    def raise_faults(self) -> None:
        """Raise all faults that were noted, if any."""
        if self._faults:
            raise UsageError(*self._faults)

    def get(self, *path: str) -> Any:
        """The value at `path`, or None where it is missing or `"auto"`."""
        value: Any = self.values
        for part in path:
            if not isinstance(value, dict) or part not in value:
                return None
            value = value[part]
        return None if value == "auto" else value

    def number(
        self, *path: str, minimum: float, maximum: float | None = None, whole: bool = False, above: bool = False
    ) -> int | float | None:
        """The number at `path`, checked, or None where it is missing, `"auto"` or wrong (then a fault is noted)."""
        value = self.get(*path)
        section = self.get(*path[:-1])
        if value is None and not (isinstance(section, dict) and path[-1] in section and section[path[-1]] is None):
            return None
        right_type = isinstance(value, (int, float)) and not isinstance(value, bool) and (not whole or float(value).is_integer())
        if not right_type or value < minimum or (above and value == minimum) or (maximum is not None and value > maximum):
            bound = f"{'above' if above else 'of at least'} {minimum:g}" + (f" and at most {maximum:g}" if maximum is not None else "")
            self.fault(path, f'is {json.dumps(value)}, must be a {"whole " if whole else ""}number {bound}, or "auto"')
            return None
        return int(value) if whole else value

    def agree(self, path: KeyPath, flag: str, given: Any) -> Any:
        """The value at `path` or the flag's, which must not contradict each other; None where neither is there."""
        value = self.get(*path)
        if value is not None and given is not None and value != given:
            self.fault(path, f'is {json.dumps(value)}, but --{flag} says {given}; write "auto" in the JSON or leave the flag out')
        return given if value is None else value
