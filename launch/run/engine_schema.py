"""The keys that the installed DeepSpeed reads from its JSON, as a committed file that can be checked without importing torch.

DeepSpeed ignores an unknown top-level key without a word (DeepSpeed#653, #774, #1809), and its own models cannot be imported without
torch. So the keys are written down once, by asking the engine's configuration class which keys it looks for:

    python -m launch.run.engine_schema --write     # after changing the DeepSpeed version; a test compares file and engine

The file holds, for the DeepSpeed version it names: `top_level`, the keys it looks for; `removed`, those it refuses, with its reason;
`sections`, for the sections whose inner keys it checks itself, the type, choices and bounds of each key.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

from launch.run.errors import nearest
from launch.run.json_lines import KeyPath

FILE = Path(__file__).with_suffix(".json")


@cache
def engine_schema() -> dict[str, Any]:
    """The committed schema."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def check_engine_keys(config: dict[str, Any], known_elsewhere: set[str]) -> list[tuple[KeyPath, str]]:
    """Faults of an engine JSON, each as (key path, what is wrong and what to write instead).

    `known_elsewhere` are the top-level keys that the project's own techniques claim. A value of `"auto"` fits every key.
    """
    schema = engine_schema()
    faults: list[tuple[KeyPath, str]] = []
    allowed = (set(schema["top_level"]) - set(schema["removed"])) | known_elsewhere
    for key, value in config.items():
        if key in allowed:
            if (rules := schema["sections"].get(key)) is not None:
                faults += _check_section((key,), value, rules)
        elif key in schema["removed"]:
            faults.append(((key,), f"DeepSpeed {schema['deepspeed']} removed it: {schema['removed'][key]}"))
        else:
            faults.append(((key,), f"unknown key, which DeepSpeed would ignore{nearest(key, allowed)}"))
    return faults


def _check_section(path: KeyPath, section: Any, rules: dict[str, Any]) -> list[tuple[KeyPath, str]]:
    if not isinstance(section, dict):
        return [(path, f"is {json.dumps(section)}, must be an object with keys such as {', '.join(list(rules)[:3])}")]
    faults = []
    for key, value in section.items():
        here = (*path, key)
        if key not in rules:
            faults.append((here, f"unknown key{nearest(key, rules) or '; allowed are ' + ', '.join(sorted(rules))}"))
        elif (wrong := value_fault(value, rules[key])) is not None:
            faults.append((here, wrong))
        elif isinstance(value, dict) and "keys" in rules[key]:
            faults += _check_section(here, value, rules[key]["keys"])
    return faults


def value_fault(value: Any, rule: dict[str, Any]) -> str | None:
    """What is wrong with `value` under `rule` (`types`, `enum`, `minimum`, `maximum`), or None."""
    if value == "auto":
        return None
    if "enum" in rule:
        return (
            None
            if value in rule["enum"] and not isinstance(value, bool)
            else f"is {json.dumps(value)}, must be one of {', '.join(map(json.dumps, rule['enum']))}"
        )
    types = rule.get("types", ())
    if types and not any(_fits(value, kind) for kind in types):
        return f"is {json.dumps(value)}, must be {_with_article(types)}"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if "minimum" in rule and value < rule["minimum"]:
            return f"is {json.dumps(value)}, must be at least {rule['minimum']}"
        if "maximum" in rule and value > rule["maximum"]:
            return f"is {json.dumps(value)}, must be at most {rule['maximum']}"
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


def generate() -> dict[str, Any]:
    """Build the schema from the installed DeepSpeed. Imports it, and torch with it."""
    import deepspeed
    from deepspeed.runtime import config as engine_config
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    asked: set[str] = set()

    class Recorder(dict):
        """A dict that notes which keys are looked for, through any of the ways in which the engine looks."""

        def get(self, key, default=None):
            asked.add(key)
            return super().get(key, default)

        def __contains__(self, key):
            asked.add(key)
            return super().__contains__(key)

        def keys(self):
            return self

        def __copy__(self):
            return self

    engine_config.DeepSpeedConfig(Recorder(train_batch_size=1))
    removed = getattr(engine_config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {})
    return {
        "deepspeed": deepspeed.__version__.split("+")[0],
        "top_level": sorted(asked),
        "removed": dict(sorted(removed.items())),
        "sections": {
            "zero_optimization": _model_rules(DeepSpeedZeroConfig),
            "bf16": _model_rules(DeepSpeedBF16Config),
            "fp16": _model_rules(DeepSpeedFP16Config),
        },
    }


def _model_rules(model: Any) -> dict[str, Any]:
    """The rules of a pydantic model's fields."""
    rules = {}
    for name, item in model.model_fields.items():
        rule = _annotation_rule(item.annotation)
        for constraint in item.metadata:
            if getattr(constraint, "ge", None) is not None:
                rule["minimum"] = constraint.ge
            if getattr(constraint, "le", None) is not None:
                rule["maximum"] = constraint.le
        rules[item.alias or name] = rule
        if item.alias:
            rules[name] = rule
    return dict(sorted(rules.items()))


def _annotation_rule(annotation: Any) -> dict[str, Any]:
    """`Optional[int]` and its like as `{"types": ["integer", "null"]}`; anything not simple as `{}`, which allows all."""
    import enum
    import types
    import typing

    import pydantic

    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        parts = [_annotation_rule(part) for part in typing.get_args(annotation)]
        if any(not part for part in parts):
            return {}
        merged: dict[str, Any] = {}
        enums = [part["enum"] for part in parts if "enum" in part]
        kinds = [kind for part in parts for kind in part.get("types", [])]
        if enums:
            merged["enum"] = [value for values in enums for value in values] + ([None] if "null" in kinds else [])
        else:
            merged["types"] = list(dict.fromkeys(kinds))
        for part in parts:
            if "keys" in part:
                merged["keys"] = part["keys"]
        return merged
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return {"types": ["object"], "keys": _model_rules(annotation)}
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return {"enum": [member.value for member in annotation]}
    simple = {int: "integer", float: "number", bool: "boolean", str: "string", type(None): "null", dict: "object", list: "array"}
    base = typing.get_origin(annotation) or annotation
    return {"types": [simple[base]]} if base in simple else {}


if __name__ == "__main__":
    text = json.dumps(generate(), indent=1) + "\n"
    if sys.argv[1:] == ["--write"]:
        FILE.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
