"""The keys that the installed DeepSpeed reads from its JSON, as a committed file that can be read without importing torch.

DeepSpeed ignores an unknown top-level key without a word (DeepSpeed#653, #774, #1809), and its own models cannot be imported without
torch. So the keys are written down once, by watching the engine's configuration class look for them:

    python -m launch.config.engine_schema --write     # after changing the DeepSpeed version; a test compares file and engine

The file holds, for the DeepSpeed version it names: `removed`, the keys it refuses, each with its reason; `keys`, a rule for every key
it looks for; `optimizers` and `schedulers`, a rule for every parameter of each type. A rule says `types`, `enum`, `minimum`,
`maximum`, `default`, `items` (the types in a list) and `keys` (what is inside an object); an empty one allows everything.
`launch.config.engine_keys` checks a JSON against them.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
Rule = dict[str, Any]

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
    # Elements, and allocated whole: 10^11 of them are more than any device holds.
    **{f"zero_optimization.{key}": {"minimum": 1, "maximum": 10**11} for key in ("reduce_bucket_size", "allgather_bucket_size")},
    "fp16.loss_scale": {"minimum": 0, "maximum": 2**24},  # at 2^24 a gradient of 0.004 exceeds fp16's largest number
    "fp16.initial_scale_power": {"minimum": 0, "maximum": 32},
    "fp16.loss_scale_window": {"minimum": 1},
    "fp16.hysteresis": {"minimum": 1},
    "fp16.min_loss_scale": {"minimum": 1},
    "aio.block_size": {"minimum": 1},
    "aio.queue_depth": {"minimum": 1},
    "aio.intra_op_parallelism": {"minimum": 1},
    "aio.thread_count": {"types": ["integer"], "minimum": 1},  # the documented name; the engine reads intra_op_parallelism
    "comet.samples_log_interval": {"minimum": 1},
    "flops_profiler.profile_step": {"minimum": 0},
    "flops_profiler.module_depth": {"minimum": -1},
    "flops_profiler.top_modules": {"minimum": 0},
    "flops_profiler.recompute_fwd_factor": {"minimum": 0},
    "zero_optimization.zenflow.topk_ratio": {"minimum": 1e-6, "maximum": 1 - 1e-6},
    "zero_optimization.zenflow.full_warm_up_rounds": {"minimum": 0},
    "zero_optimization.zenflow.update_interval": {"types": ["integer"], "minimum": 1},
    "zero_optimization.zenflow.select_interval": {"types": ["integer"], "minimum": 1},
    # What the engine looks for without saying of which type.
    "activation_checkpointing.number_checkpoints": {"types": ["integer", "null"], "minimum": 1},
    "autotuning.arg_mappings": {"types": ["object", "null"]},
    "autotuning.max_train_batch_size": {"types": ["integer", "null"], "minimum": 1},
    "autotuning.metric_path": {"types": ["string", "null"]},
    "autotuning.model_info": {"types": ["object", "null"]},
    "autotuning.model_info_path": {"types": ["string", "null"]},
    "checkpoint.parallel_write": {"types": ["object"], "keys": {"pipeline_stage": {"types": ["boolean"]}}},
    "checkpoint.writer": {"types": ["object", "null"]},
    "comms_logger.prof_ops": {"items": ["string"]},
    "data_efficiency.data_routing": {"types": ["object"], "keys": {"enabled": {"types": ["boolean"]}, "random_ltd": {"types": ["object"]}}},
    "data_efficiency.data_sampling": {
        "types": ["object"],
        "keys": {
            **{key: {"types": ["boolean"]} for key in ("enabled", "pin_memory")},
            **{key: {"types": ["integer"], "minimum": 0} for key in ("num_epochs", "num_workers")},
            "curriculum_learning": {
                "types": ["object"],
                "keys": {
                    "enabled": {"types": ["boolean"]},
                    "data_cluster_path": {"types": ["string"]},
                    "curriculum_metrics": {"types": ["object"]},
                },
            },
            "dynamic_batching": {"types": ["object"]},
        },
    },
    "data_types.keep_in_fp32_modules": {"types": ["array"], "items": ["string"]},
    "datastates_ckpt": {"types": ["object", "null"]},
    "flops_profiler.output_file": {"types": ["string", "null"]},
    "timers": {
        "types": ["object"],
        "keys": {"throughput": {"types": ["object"], "keys": {key: {"types": ["boolean"]} for key in ("enabled", "synchronized")}}},
    },
    "torch_autocast.lower_precision_safe_modules": {"types": ["array", "null"], "items": ["string"]},
    **{f"zero_optimization.leaf_module.{key}": {"items": ["string"]} for key in ("classes", "names", "name_suffixes")},
    **{f"zero_optimization.{key}.nvme_path": {"types": ["string", "null"]} for key in ("offload_optimizer", "offload_param")},
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
    read_by_key: tuple[str, ...] = (
        "activation_checkpointing",
        "aio",
        "autotuning",
        "checkpoint",
        "data_efficiency",
        "data_types",
        "flops_profiler",
    )
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

    class Recorder(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            found.setdefault(key, {}).update(_default_rule(default))
            return super().get(key, default)

        def __contains__(self, key: object) -> bool:
            found.setdefault(str(key), {})
            return super().__contains__(key)

        def keys(self) -> Any:
            return self

        def __copy__(self) -> Recorder:
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
