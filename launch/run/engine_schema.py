"""The keys that the installed DeepSpeed reads from its JSON, as a committed file that can be checked without importing torch.

DeepSpeed ignores an unknown top-level key without a word (DeepSpeed#653, #774, #1809), and its own models cannot be imported without
torch. So the keys are written down once, by watching the engine's configuration class look for them:

    python -m launch.run.engine_schema --write     # after changing the DeepSpeed version; a test compares file and engine

The file holds, for the DeepSpeed version it names: `removed`, the keys it refuses, each with its reason; `keys`, a rule for every key
it looks for; `optimizers` and `schedulers`, a rule for every parameter of each type. A rule says `types`, `enum`, `minimum`,
`maximum`, `default`, and `keys` for what is inside; an empty one allows everything.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from launch.run.errors import nearest
from launch.run.json_lines import KeyPath, dotted

FILE = Path(__file__).with_suffix(".json")
Rule = dict[str, Any]
Faults = list[tuple[KeyPath, str]]

#: What the engine asserts in code, or says nothing of until it fails: added to what is read off its classes.
BOUNDS: dict[str, Rule] = {
    "train_batch_size": {"types": ["integer"], "minimum": 1},
    "train_micro_batch_size_per_gpu": {"types": ["integer"], "minimum": 1},
    "gradient_accumulation_steps": {"types": ["integer"], "minimum": 1},
    "gradient_clipping": {"minimum": 0},
    "gradient_predivide_factor": {"minimum": 1e-6},
    "steps_per_print": {"types": ["integer", "null"], "minimum": 1},
    "vocabulary_size": {"types": ["integer", "null"], "minimum": 1},
    "sequence_parallel_size": {"types": ["integer"], "minimum": 1},
    "log_level": {"enum": ["debug", "info", "warning", "error", "critical", None]},
    "zero_optimization.reduce_bucket_size": {"minimum": 1},
    "zero_optimization.allgather_bucket_size": {"minimum": 1},
    "fp16.loss_scale": {"minimum": 0, "maximum": 2**24},  # at 2^24 a gradient of 0.004 exceeds fp16's largest number
    "fp16.initial_scale_power": {"minimum": 0, "maximum": 32},
    "fp16.loss_scale_window": {"minimum": 1},
    "fp16.hysteresis": {"minimum": 1},
    "fp16.min_loss_scale": {"minimum": 1},
    "aio.thread_count": {"types": ["integer"], "minimum": 1},  # the documented name; the engine reads intra_op_parallelism
    "optimizer": {"keys": {"type": {"types": ["string"]}, "params": {"types": ["object"]}, "legacy_fusion": {"types": ["boolean"]}}},
    "scheduler": {"keys": {"type": {"types": ["string"]}, "params": {"types": ["object"]}}},
}
#: Choices that the engine's code knows; which of the candidates it takes is found by asking it.
CHOICES: dict[str, list[Any]] = {
    "communication_data_type": ["fp32", "fp16", "bf16", None],
    "seq_parallel_communication_data_type": ["fp32", "fp16", "bf16", None],
    "gradient_allreduce_op": ["mean", "sum"],
    "checkpoint.tag_validation": ["Ignore", "Warn", "Fail", "ignore", "warn", "fail", "IGNORE", "WARN", "FAIL"],
    "torch_autocast.dtype": ["fp32", "fp16", "bf16", "float32", "float16", "bfloat16", "torch.float16", "torch.bfloat16"],
}


#: Parameters of torch's optimizers that say how to compute, or what breaks in a training loop.
SWITCHES_OF_TORCH = ("capturable", "differentiable", "foreach", "fused", "maximize")


@cache
def engine_schema() -> dict[str, Any]:
    """The committed schema."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def check_engine_keys(config: dict[str, Any], known_elsewhere: set[str], auto: set[str]) -> Faults:
    """Faults of an engine JSON, each as (key path, what is wrong and what to write instead).

    Two things are put right in place: a whole number written as `5e8` becomes one, and a section of a removed feature that is
    switched off (`"enabled": false`) is taken out, which DeepSpeed would refuse even so.

    Args:
        known_elsewhere: the top-level keys that the project's own techniques claim.
        auto: the dotted keys for which `"auto"` has a meaning.
    """
    schema = engine_schema()
    removed, rules = schema["removed"], schema["keys"]
    ours = {key: value for key, value in config.items() if key in known_elsewhere}
    for key, value in list(config.items()):
        if key in removed and key not in ours and (value is False or (isinstance(value, dict) and value.get("enabled") is False)):
            del config[key]
    faults: Faults = [((key,), f"is {json.dumps(value)}, must be an object") for key, value in ours.items() if not isinstance(value, dict)]
    for path, message in check_section((), {key: config[key] for key in config if key not in ours}, {"keys": rules}, auto):
        top_level_key = path[0] if len(path) == 1 else None
        if dotted(path) in removed:
            message = f"is gone from DeepSpeed {schema['deepspeed']}; remove it. {removed[dotted(path)]}"
        elif top_level_key is not None and top_level_key not in rules:
            message = f"unknown key, which DeepSpeed would ignore{nearest(top_level_key, {*rules, *known_elsewhere}) or '; remove it'}"
        faults.append((path, message))
    for key, value in config.items():
        if key not in ours:
            config[key] = _whole(value, rules.get(key, {}))
    return faults


def check_section(path: KeyPath, section: Any, rule: Rule, auto: set[str]) -> Faults:
    """Faults of the object `section` at `path`, all the way down."""
    faults: Faults = []
    rules = rule["keys"]
    for key, value in section.items():
        here = (*path, key)
        if key not in rules:
            faults.append((here, f"unknown key{nearest(key, rules) or '; allowed are ' + ', '.join(sorted(rules))}"))
        elif value == "auto":
            if dotted(here) not in auto:
                faults.append((here, '"auto" has no meaning here; write a value or leave the key out'))
        elif (wrong := value_fault(value, rules[key])) is not None:
            faults.append((here, wrong))
        elif isinstance(value, dict) and "keys" in rules[key]:
            faults += check_section(here, value, rules[key], auto)
    return faults


def defaults_left_open(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The dotted keys that `config` leaves out, with the value that DeepSpeed takes: at the top level, and in the sections it has."""

    def walk(section: dict[str, Any], rules: dict[str, Rule], path: KeyPath) -> Iterator[tuple[str, Any]]:
        for key, rule in rules.items():
            if key not in section and "default" in rule:
                yield dotted((*path, key)), rule["default"]
            elif isinstance(section.get(key), dict):
                yield from walk(section[key], rule.get("keys", {}), (*path, key))

    return walk(config, engine_schema()["keys"], ())


def value_fault(value: Any, rule: Rule) -> str | None:
    """What is wrong with `value` under `rule`, or None."""
    if "enum" in rule:
        if any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in rule["enum"]):
            return None
        return f"is {json.dumps(value)}, must be one of {', '.join(map(json.dumps, rule['enum']))}"
    types = rule.get("types", ())
    if types and not any(_fits(value, kind) for kind in types):
        keys = f" with keys such as {', '.join(list(rule['keys'])[:3])}" if "keys" in rule else ""
        return f"is {json.dumps(value)}, must be {_with_article(types)}{keys}"
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


def _whole(value: Any, rule: Rule) -> Any:
    """`value` with every float that stands for a whole number made one."""
    if isinstance(value, dict) and "keys" in rule:
        return {key: _whole(item, rule["keys"].get(key, {})) for key, item in value.items()}
    whole = "integer" in rule.get("types", ()) or isinstance(rule.get("enum", [None])[0], int)
    return int(value) if isinstance(value, float) and whole and value.is_integer() else value


# --- generation, which imports DeepSpeed and torch ----------------------------------------------------------------------------------


def generate() -> dict[str, Any]:
    """Build the schema from the installed DeepSpeed."""
    import deepspeed
    import torch
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime import config as engine_config
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "bfloat16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "comms_logger": type(engine_config.DeepSpeedCommsConfig({"comms_logger": {}}).comms_logger),
        "compile": CompileConfig,
        "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig,
        "csv_monitor": CSVConfig,
        "comet": CometConfig,
        "hybrid_engine": engine_config.HybridEngineConfig,
    }
    # Sections that the engine reads key by key.
    read_by_key = ("activation_checkpointing", "aio", "autotuning", "checkpoint", "data_efficiency", "data_types", "flops_profiler")
    read_by_key = (*read_by_key, "torch_autocast")

    keys: dict[str, Rule] = {}
    sections: dict[str, dict[str, Rule]] = {name: {} for name in read_by_key}
    engine_config.DeepSpeedConfig(_recorder(keys)(train_batch_size=1))
    for name in read_by_key:
        engine_config.DeepSpeedConfig({"train_batch_size": 1, name: _recorder(sections[name])()})
        keys[name] = {"types": ["object"], "keys": sections[name]}
    for name, model in models.items():
        keys[name] = {"types": ["object"], "keys": _model_rules(model)}
    for name in ("optimizer", "scheduler", "pipeline", "timers", "data_types", "tensor_parallel", "expert_parallel", "weight_quantization"):
        keys[name]["types"] = ["object"]
    dtypes = sorted(name for member in engine_config.DtypeEnum for name in member._all_values[1:] if "int" not in name)
    for name in ("grad_accum_dtype", "param_dtype", "buffer_dtype"):
        keys["data_types"]["keys"][name] = {"enum": [*dtypes, None]}
    keys["data_types"]["keys"]["keep_in_fp32_modules"] = {"types": ["array"]}
    keys["checkpoint"]["keys"]["parallel_write"] = {"types": ["object"], "keys": {"pipeline_stage": {"types": ["boolean"]}}}
    keys["datastates_ckpt"] = {}  # a list, or an object

    removed = dict(engine_config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    removed |= {f"zero_optimization.{key}": reason for key, reason in engine_config._REMOVED_ZERO_CONFIG_KEYS.items()}
    for key in removed:
        keys.pop(key, None)
    for path, bounds in BOUNDS.items():
        _rule_at(keys, path).update(bounds)
    for path, candidates in CHOICES.items():
        accepted = [value for value in candidates if _is_accepted(engine_config.DeepSpeedConfig, path, value)]
        assert accepted and not _is_accepted(engine_config.DeepSpeedConfig, path, "nonsense"), f"{path} is not checked as it was"
        rule = _rule_at(keys, path)
        rule.pop("types", None)
        rule["enum"] = accepted

    schedulers = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
    return {
        "deepspeed": deepspeed.__version__.split("+")[0],
        "removed": {key: " ".join(reason.split()) for key, reason in sorted(removed.items())},
        "keys": _sorted(keys),
        "optimizers": {name: _signature_rules(getattr(torch.optim, name), SWITCHES_OF_TORCH) for name in ("Adagrad", "RMSprop", "SGD")},
        "schedulers": {name: _signature_rules(getattr(lr_schedules, name)) for name in schedulers},
    }


def _recorder(found: dict[str, Rule]) -> type:
    """A dict that notes into `found` which keys are looked for, and with which default, through all the ways in which the engine looks."""

    class Recorder(dict):
        def get(self, key, default=None):
            found.setdefault(key, {}).update(_default_rule(default))
            return super().get(key, default)

        def __contains__(self, key):
            found.setdefault(key, {})
            return super().__contains__(key)

        def keys(self):
            return self

        def __copy__(self):
            return self

    return Recorder


def _default_rule(default: Any) -> Rule:
    """The rule that a default value implies: a key whose default is False is true or false."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}
    if type(default) not in names:
        return {}
    return {"types": [names[type(default)]], **({} if type(default) in (dict, list) else {"default": default})}


def _signature_rules(function: Any, but: tuple[str, ...] = ()) -> dict[str, Rule]:
    """The rules of the keyword parameters of `function`, but some of them, by their annotations and defaults."""
    import inspect

    not_ours = ("self", "params", "optimizer", "last_batch_iteration", *but)
    rules = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in not_ours:
            default = parameter.default
            rule = _default_rule(default)
            if parameter.annotation is int or "float" in str(parameter.annotation):
                rule["types"] = ["integer" if parameter.annotation is int else "number"]
            rules[name] = rule
    return rules


def _rule_at(keys: dict[str, Rule], path: str) -> Rule:
    *sections, name = path.split(".")
    for section in sections:
        keys = keys[section]["keys"]
    return keys.setdefault(name, {})


def _is_accepted(config_class: Any, path: str, value: Any) -> bool:
    for part in reversed(path.split(".")):
        value = {part: value}
    try:
        config_class({"train_batch_size": 1, **value})
    except Exception:
        return False
    return True


def _sorted(rules: dict[str, Rule]) -> dict[str, Rule]:
    """`rules` with the keys of every depth in alphabetical order."""
    return {name: {**rule, "keys": _sorted(rule["keys"])} if "keys" in rule else rule for name, rule in sorted(rules.items())}


def _model_rules(model: Any) -> dict[str, Rule]:
    """The rules of a pydantic model's fields."""
    rules = {}
    for name, item in model.model_fields.items():
        rule = _annotation_rule(item.annotation)
        for constraint in item.metadata:
            if getattr(constraint, "ge", None) is not None:
                rule["minimum"] = constraint.ge
            if getattr(constraint, "le", None) is not None:
                rule["maximum"] = constraint.le
        default = getattr(item.default, "value", item.default)  # an enum's member stands for its value
        if isinstance(default, (bool, int, float, str)) and not (item.json_schema_extra or {}).get("deprecated"):
            rule["default"] = int(default) if type(default) not in (bool, float, str) else default  # an int that prints itself prettily
        rules[item.alias or name] = rule
        if item.alias:
            rules[name] = {key: value for key, value in rule.items() if key != "default"}
    return rules


def _annotation_rule(annotation: Any) -> Rule:
    """`Optional[int]` and its like as `{"types": ["integer", "null"]}`; anything not simple as `{}`, which allows all."""
    import enum
    import types
    import typing

    import pydantic

    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        parts = [_annotation_rule(part) for part in typing.get_args(annotation)]
        if any(not part for part in parts):
            return {}
        merged: Rule = {}
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
