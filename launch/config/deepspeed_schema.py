"""The rules of the keys that DeepSpeed reads: from its own pydantic models, and from tables for the keys without a model.

DeepSpeed ignores an unknown top-level key in silence (DeepSpeed#653, #774, #1809), so `launch.config.deepspeed_json` checks a JSON by these
rules. A rule says `types`, `enum`, `minimum`, `above`, `maximum`, `default`, `auto` (whether `"auto"` is allowed), `auto_is_default`
(whether it is DeepSpeed's default), `items` (the types in a list) and `keys` (the rules inside an object). An empty rule allows everything
but `"auto"`. DeepSpeed is imported on the first call.
"""

from __future__ import annotations

import enum
import logging
import os
import types
import typing
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from launch.config.flags import MAX_LR
from recipes.technique import FP32_NAMES

Rule = dict[str, Any]
Rules = dict[str, Rule]
OtherNames = dict[str, tuple[str, Any]]
#: DeepSpeed's default for `offload_param.buffer_size`, elements.
BUFFER_SIZE = 100_000_000
#: DeepSpeed's default for `offload_param.max_in_cpu`: that many of a rank's weights on NVMe are moved to host memory for good.
MAX_IN_CPU = 1_000_000_000


class DeepSpeedSchema(NamedTuple):
    """The rules of every top-level key, the removed keys with the reason, and the other names of keys.

    other_names: dotted key that DeepSpeed also reads -> the key of the rule, and the value that true stands for, if it is a switch.
    """

    version: str
    keys: Rules
    removed: dict[str, str]
    other_names: OtherNames


def _count(default: int | None = None, minimum: int = 1) -> Rule:
    return {"types": ["integer"], "minimum": minimum} | ({} if default is None else {"default": default})


def _choice(*values: Any, **more: Any) -> Rule:
    return {"enum": [*values], **more}


def _section(keys: Rules | None = None, *or_types: str) -> Rule:
    """An object; without `keys` its contents are not checked."""
    return {"types": ["object", *or_types]} | ({} if keys is None else {"keys": keys})


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
#: Added to the rule of a key for which `"auto"` has a meaning.
AUTO = {"auto": True}
OFF, ON = ({"types": ["boolean"], "default": default} for default in (False, True))
COUNT_OR_NULL: Rule = {"types": ["integer", "null"], "minimum": 1}
STRING_OR_NULL: Rule = {"types": ["string", "null"]}
#: The spellings that DeepSpeed has for the types of tensors.
DTYPES = {
    "fp32": FP32_NAMES,
    "fp16": ("fp16", "float16", "half", "torch.float16"),
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
}

#: Sections that DeepSpeed documents and that have no effect in this training loop: removed unchecked, with a note if they are switched on.
#: `launch.config.combinations.REFUSED` has keys in them that would train something else.
WITHOUT_EFFECT = {
    "autotuning": "the autotuner runs under `deepspeed --autotuning` only",
    "datastates_ckpt": "checkpoints are written beside training already, by DeepSpeed's plain writer",
    "data_efficiency": "the batches come from data_pipeline/",
    "dataloader_drop_last": "the batches come from data_pipeline/, which has no short ones",
    "disable_allgather": "DeepSpeed reads it and does not use it",
    "hybrid_engine": "training generates no text",
    "torch_autocast": "'bf16' and 'fp16' set the precision",
    "compile": "the keys are those of deepcompile, which is off",
    "weight_quantization": "this project trains all weights",
    **dict.fromkeys(
        ("data_parallel_size", "expert_parallel", "mesh_param", "pipeline", "tensor_parallel"),
        "every rank has the whole model",
    ),
    "seq_parallel_communication_data_type": "the gradients of all ranks are reduced alike",
    "use_data_before_expert_parallelism": "every rank has all experts",
}
#: Keys that DeepSpeed reads from the JSON without a model (deepspeed/runtime/config.py).
READ_BY_HAND: Rules = {
    **{
        key: _count() | {"maximum": 10**12, **AUTO}
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    },
    **dict.fromkeys(("steps_per_print", "vocabulary_size"), COUNT_OR_NULL),
    **dict.fromkeys(("disable_python_gc", "dump_state", "memory_breakdown", "prescale_gradients", "wall_clock_breakdown"), OFF),
    "zero_allow_untested_optimizer": OFF,
    **dict.fromkeys(("managed_gradient_accumulation", "zero_force_ds_cpu_optimizer"), ON),
    "gradient_clipping": {"types": ["number"], "minimum": 0, "default": 1.0, **AUTO},
    "gradient_predivide_factor": {"types": ["number"], "minimum": 1e-6, "default": 1.0},
    "gradient_allreduce_op": _choice("mean", "sum", default="mean"),
    "communication_data_type": _choice("fp32", "fp16", "bf16", None),
    "log_level": _choice("debug", "info", "warning", "error", "critical", None),
    "optimizer": _section({"type": {"types": ["string"]}, "params": _section()}),
    "scheduler": _section({"type": {"types": ["string"]}, "params": _section()}),
    "checkpoint": _section(
        {
            "tag_validation": _choice(*(f(word) for word in ("warn", "ignore", "fail") for f in (str.title, str.lower, str.upper))),
            "load_universal": OFF,
            "use_node_local_storage": OFF,
            "checkpoint_serialization": ON,
            "parallel_write": _section({"pipeline_stage": {"types": ["boolean"]}}),
            "writer": _section(None, "null"),
        }
    ),
    "data_types": _section(
        {
            **dict.fromkeys(("grad_accum_dtype", "param_dtype", "buffer_dtype"), _choice(*sum(DTYPES.values(), ()), None)),
            "keep_in_fp32_modules": {"types": ["array"], "items": ["string"], "default": "auto", **AUTO},
        }
    ),
    "timers": _section({"throughput": _section({"enabled": {"types": ["boolean"]}, "synchronized": {"types": ["boolean"]}})}),
    **dict.fromkeys(WITHOUT_EFFECT, AUTO),
}
_TOTAL: Rules = {"total_num_steps": _count() | AUTO}
_WARMUP: Rules = {"warmup_num_steps": _count(1000) | AUTO, "warmup_type": _choice("log", "linear"), "last_batch_iteration": _choice(-1)}
_RATES: Rules = {
    "warmup_min_lr": {"types": ["number"], "minimum": 0, "maximum": MAX_LR, "default": 0.0, **AUTO},
    "warmup_max_lr": {"types": ["number"], "above": 0, "maximum": MAX_LR, **AUTO},
}
#: The parameters of DeepSpeed's schedules (deepspeed/runtime/lr_schedules.py).
SCHEDULES: dict[str, Rules] = {
    "WarmupLR": {**_RATES, **_WARMUP},
    "WarmupDecayLR": {**_TOTAL, **_RATES, **_WARMUP, "warmup_max_lr": _RATES["warmup_max_lr"] | {"default": 0.001}},
    "WarmupCosineLR": {
        **_TOTAL,
        **_WARMUP,
        **{key: {"types": ["number"], "minimum": 0, "maximum": 1} for key in ("warmup_min_ratio", "cos_min_ratio")},
    },
}
#: Rules that the models lack: the engine checks them later, or not at all.
BOUNDS: dict[str, Rule] = {
    "zero_optimization.stage": {"auto_is_default": False},
    # In elements, allocated as a whole: no device holds more than 10^11.
    "zero_optimization.reduce_bucket_size": {"minimum": 1, "maximum": 10**11, **AUTO},
    "zero_optimization.allgather_bucket_size": {"minimum": 1, "maximum": 10**11},
    **dict.fromkeys(("zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.stage3_param_persistence_threshold"), AUTO),
    **dict.fromkeys(("zero_optimization.zero_hpz_partition_size", "bf16.enabled", "fp16.enabled"), AUTO),
    **{f"zero_optimization.{key}.nvme_path": STRING_OR_NULL | AUTO for key in ("offload_optimizer", "offload_param")},
    # On NVMe, Adam has four tensors: weights, two moments, gradients.
    "zero_optimization.offload_optimizer.buffer_count": {"minimum": 4},
    **{f"zero_optimization.offload_param.{key}": {"minimum": 1} for key in ("buffer_count", "buffer_size")},
    **{f"zero_optimization.leaf_module.{key}": {"items": ["string"]} for key in ("classes", "names", "name_suffixes")},
    "fp16.loss_scale": {"minimum": 0, "maximum": 2**24},  # at 2^24 a gradient of 0.004 exceeds fp16's largest number
    "fp16.initial_scale_power": {"minimum": 0, "maximum": 32},
    **{f"fp16.{key}": {"minimum": 1} for key in ("loss_scale_window", "hysteresis", "min_loss_scale")},
    "comet.samples_log_interval": {"minimum": 1},
    **{f"flops_profiler.{key}": {"minimum": 0} for key in ("profile_step", "top_modules", "recompute_fwd_factor")},
    "flops_profiler.module_depth": {"minimum": -1},
    "flops_profiler.output_file": STRING_OR_NULL,
    **{f"aio.{key}": {"minimum": 1} for key in ("block_size", "queue_depth", "intra_op_parallelism")},
    "comms_logger.prof_ops": {"items": ["string"]},
}
#: Key that is gone, or has no effect any more -> what to write instead, where DeepSpeed's own advice does not apply here.
INSTEAD = {
    "amp": "Write 'bf16' or 'fp16' instead.",
    "sparse_gradients": "The gradients of the embedding are dense.",
    "aio.thread_count": "Write 'intra_op_parallelism' instead.",
    "zero_optimization.cpu_offload_use_pin_memory": "Write 'pin_memory' in 'offload_optimizer' or 'offload_param' instead.",
}
#: Type of a JSON value -> Python's type, and the words for it in a message.
KINDS: dict[str, tuple[type, str]] = {
    "integer": (int, "a whole number"),
    "number": (float, "a number"),
    "boolean": (bool, "true or false"),
    "string": (str, "a string"),
    "object": (dict, "an object"),
    "array": (list, "a list"),
    "null": (type(None), "null"),
}
TYPES: dict[Any, str] = {python: kind for kind, (python, _) in KINDS.items()}


@cache
def deepspeed_schema() -> DeepSpeedSchema:
    """The rules of the installed DeepSpeed."""
    quiet_deepspeed()
    # DeepSpeed takes a second to import: not for --help, and only when it has been silenced.
    import deepspeed
    from deepspeed.monitor.config import DeepSpeedMonitorConfig
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
    from deepspeed.runtime import config
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "comms_logger": type(config.DeepSpeedCommsConfig({"comms_logger": {}}).comms_logger),
        **{name: item.annotation for name, item in DeepSpeedMonitorConfig.model_fields.items()},
    }
    keys = READ_BY_HAND | {name: _section(_model_rules(model)) for name, model in models.items()}
    for name, defaults in (("aio", AIO_DEFAULT_DICT), ("flops_profiler", vars(DeepSpeedFlopsProfilerConfig({})))):
        keys[name] = _section({key: {"types": [TYPES[type(default)]], "default": default} for key, default in defaults.items()})
    for path, bounds in BOUNDS.items():
        *sections, last = path.split(".")
        rules = keys
        for section in sections:
            rules = rules[section]["keys"]
        rules[last] = rules[last] | bounds
    gone = config._REMOVED_TOP_LEVEL_CONFIG_KEYS | {
        f"zero_optimization.{key}": why for key, why in config._REMOVED_ZERO_CONFIG_KEYS.items()
    }
    removed = {key: " ".join(why.split()) for key, why in gone.items()} | INSTEAD
    other_names: OtherNames = {"bfloat16": ("bf16", None)}
    for name, model in models.items():
        other_names |= {f"{name}.{old}": (f"{name}.{new}", if_true) for old, (new, if_true) in _other_names(model).items()}
    return DeepSpeedSchema(deepspeed.__version__.split("+")[0], keys, removed, other_names)


def _model_rules(model: Any) -> Rules:
    """The rules of a pydantic model's fields, under their documented names; deprecated fields are left out."""
    rules: Rules = {}
    for name, item in model.model_fields.items():
        if (item.json_schema_extra or {}).get("deprecated"):
            continue
        rule = _annotation_rule(item.annotation)
        for constraint in item.metadata:
            bounds = {"minimum": getattr(constraint, "ge", None), "maximum": getattr(constraint, "le", None)}
            rule |= {bound: value for bound, value in bounds.items() if value is not None}
        default = getattr(item.default, "value", item.default)  # of an enum
        if isinstance(default, (bool, int, float, str)):
            # DeepSpeed's `pp_int`, which prints itself as 5e8, becomes an int.
            rule["default"] = default if type(default) in (bool, float, str) else int(default)
        rules[item.alias or name] = rule | {"auto_is_default": True}  # DeepSpeedConfigModel drops it
    return rules


def _other_names(model: Any) -> OtherNames:
    """The names that a pydantic model accepts beside the documented ones: those of fields with an alias, and of deprecated fields."""
    names: OtherNames = {}
    for name, item in model.model_fields.items():
        extra = item.json_schema_extra or {}
        if extra.get("deprecated") and extra.get("set_new_param", True):
            new, switch = extra["new_param"], extra.get("new_param_fn")
            names[name] = (model.model_fields[new].alias or new, switch(True).model_dump(exclude_unset=True) if switch else None)
        elif item.alias not in (None, name):
            names[name] = (item.alias, None)
    return names


def _annotation_rule(annotation: Any) -> Rule:
    """The rule of a type, such as `{"types": ["integer", "null"]}` for `Optional[int]`; {} for types that are not simple."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        parts = [_annotation_rule(part) for part in typing.get_args(annotation)]
        if not all(parts):
            return {}
        kinds = [kind for part in parts for kind in part.get("types", ())]
        keys = {key: rule for part in parts for key, rule in part.get("keys", {}).items()}
        choices = [value for part in parts for value in part.get("enum", ())]
        if choices:
            return _choice(*choices, *([None] if "null" in kinds else []))
        return {"types": kinds} | ({"keys": keys} if keys else {})
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        return _section(_model_rules(annotation))
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _choice(*(member.value for member in annotation))
    base = typing.get_origin(annotation) or annotation
    return {"types": [TYPES[base]]} if base in TYPES else {}


# --- the import of DeepSpeed ------------------------------------------------------------------------------------------------------------


def quiet_deepspeed() -> None:
    """Import DeepSpeed without the lines that it logs at import, and keep only warnings and errors of its logger from then on.

    Where torch finds no accelerator, DS_ACCELERATOR is set to "cpu": DeepSpeed would warn at every start that it may have missed a GPU.
    torch's deprecation warnings about collectives that DeepSpeed calls are silenced too.
    """
    import torch  # as above

    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with deepspeed_silenced():
        import deepspeed.utils  # here, because it logs when it is imported
    deepspeed.utils.logger.setLevel(logging.WARNING)
    deepspeed.utils.logger.addFilter(_is_actionable)
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\..*` is deprecated", category=FutureWarning)


@contextmanager
def deepspeed_silenced() -> Iterator[None]:
    """Drop log lines below errors in the body."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _is_actionable(record: logging.LogRecord) -> bool:
    """False for two warnings: that a rate is read before its schedule's first step, which DeepSpeed's schedules cause at every start; and
    that an optimizer is untested with ZeRO, which --explain shows and recipes test.
    """
    return not any(words in record.getMessage() for words in ("before it has started", "with an untested optimizer"))
