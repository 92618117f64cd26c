"""What cannot work together in an engine JSON, and what does nothing in this training loop.

DeepSpeed finds most of these late, by an assertion in the middle of its start, or never. Each is one row of a table here: the key to
name, when it is wrong, and the line that says why and what to write instead. Old names of keys are put right on the way.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from launch.config.engine_json import EngineJson
from launch.config.hardware import bf16_arithmetic
from launch.errors import nearest_name
from launch.formats.json_lines import KeyPath, dotted
from recipes.technique import Technique, largest_divisor

#: What `"auto"` means for the sizes of ZeRO's buffers, from the model's width d: what transformers fills in.
ZERO_AUTO: dict[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda d: d * d,
    "stage3_prefetch_bucket_size": lambda d: d * d * 9 // 10,
    "stage3_param_persistence_threshold": lambda d: 10 * d,
}
#: Sections that DeepSpeed documents and that do nothing in this training loop: taken out, with a word, when they are switched on.
NOT_DRIVEN = {
    "autotuning": "the autotuner acts under `deepspeed --autotuning` only, which starts runs of its own",
    "compile": "the engine is not compiled",
    "datastates_ckpt": "checkpoints are written beside training already, by DeepSpeed's plain writer",
    "data_efficiency": "the batches come from data_pipeline/; of it only a seqlen curriculum and random_ltd act, where they are on",
    "dataloader_drop_last": "the batches come from data_pipeline/, which has no short ones",
    "expert_parallel": "the model has no experts",
    "hybrid_engine": "there is nothing to generate during training",
    "pipeline": "the ranks share the data, not the model",
    "sequence_parallel_size": "the ranks share the data, not the sequences",
    "tensor_parallel": "the ranks share the data, not the model, which each of them must hold (ZeRO-3 partitions it)",
    "use_data_before_expert_parallelism": "the model has no experts",
    "weight_quantization": "it is for inference",
}
#: Sections that have no `enabled` of their own, on the way to another form of a technique's section.
WITHOUT_SWITCH = ("curriculum_metrics",)
#: Keys of ZeRO that DeepSpeed reads without their prefix `stage3_` too.
UNPREFIXED = (
    *("allgather_sequential", "gather_16bit_weights_on_model_save", "max_live_parameters", "max_reuse_distance"),
    *("model_persistence_threshold", "module_granularity_threshold", "param_persistence_threshold", "prefetch_bucket_size"),
    "use_all_reduce_for_fetch_params",
)
#: Older names that DeepSpeed still documents, by section: the new name, and the value there for a value here.
RENAMED: dict[KeyPath, tuple[KeyPath, Callable[[Any], Any]]] = {
    **{("zero_optimization", key): (("zero_optimization", f"stage3_{key}"), lambda value: value) for key in UNPREFIXED},
    ("bfloat16",): (("bf16",), lambda section: section),
    ("aio", "thread_count"): (("aio", "intra_op_parallelism"), lambda count: count),
    ("zero_optimization", "cpu_offload"): (("zero_optimization", "offload_optimizer"), lambda on: {"device": "cpu"} if on else None),
    ("zero_optimization", "cpu_offload_param"): (("zero_optimization", "offload_param"), lambda on: {"device": "cpu"} if on else None),
    ("zero_optimization", "stage3_gather_fp16_weights_on_model_save"): (
        ("zero_optimization", "stage3_gather_16bit_weights_on_model_save"),
        lambda on: on,
    ),
}
#: What DeepSpeed has kernels for on CUDA only.
CUDA_ONLY = (
    "zero_optimization.zero_quantized_weights",
    "zero_optimization.offload_optimizer.super_offload",
    "aio.use_gds",
)
#: Weights that DeepSpeed's quantizer takes at a time: a rank's part of each parameter must be a multiple.
QUANTIZED_TOGETHER = 8
#: Ranks of a host where no launcher says: the GPUs of a DGX or HGX.
GPUS_OF_A_HOST = 8
DTYPES = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
#: Packages that a monitor needs.
MONITORS = {"wandb": "wandb", "comet": "comet_ml"}


class Facts(NamedTuple):
    """What the rules below ask of a JSON."""

    engine: EngineJson
    ranks: int
    d_model: int
    stage: int
    precision: str  # fp32, bf16 or fp16
    offload_optimizer: str  # none, cpu or nvme
    offload_param: str

    def zero(self, key: str) -> Any:
        return self.engine.get("zero_optimization", key)

    def dtype(self, key: str) -> str | None:
        """`fp32`, `bf16` or `fp16` for an entry of `data_types` in any of its spellings."""
        name = self.engine.get("data_types", key)
        return DTYPES.get(str(name).removeprefix("torch."), str(name)) if name is not None else None

    def on(self, *path: str) -> bool:
        return bool(self.engine.get(*path))


class Combination(NamedTuple):
    """A pair of values that cannot stand together; `path` is named, `why` is filled in with the facts."""

    path: str
    broken: Callable[[Facts], Any]
    why: str


def _has_no_use_below_stage_3(key: str) -> Combination:
    path = f"zero_optimization.{key}"
    return Combination(
        path, lambda f: _is_active(f.zero(key)) and f.stage != 3, "works at stage 3 only, and this JSON is at stage {f.stage}; leave it out"
    )


def _nvme_needs_a_path(key: str) -> Combination:
    section = ("zero_optimization", key)
    return Combination(
        ".".join(section),
        lambda f: f.engine.get(*section, "device") == "nvme" and not f.on(*section, "nvme_path"),
        'device "nvme" needs "nvme_path", a folder on the drive, or "auto" for one in the run\'s own folder; add it',
    )


def _master_weights_at_stage_0(precision: str) -> Combination:
    return Combination(
        f"{precision}.{precision}_master_weights_and_grads",
        lambda f: _master_weights(f, precision) and f.stage == 0,
        "works at stage 1, 2 or 3, and this JSON is at stage 0; change one of them",
    )


def _master_weights_without_offload(precision: str) -> Combination:
    return Combination(
        f"{precision}.{precision}_master_weights_and_grads",
        lambda f: _master_weights(f, precision) and f.offload_optimizer == "none" and not f.on("bf16", "bf16_optimizer_states"),
        'needs the optimizer on the CPU; add "offload_optimizer": {{"device": "cpu"}}, or remove it',
    )


def _incomplete_checkpoint(key: str) -> Combination:
    return Combination(
        f"checkpoint.{key}",
        lambda f: _is_active(f.engine.get("checkpoint", key)),
        "has no place here: a checkpoint must be complete when the engine returns; remove it",
    )


def _reduces_by_scatter(f: Facts) -> bool:
    return f.stage in (2, 3) and f.zero("reduce_scatter") is not False


def _initial_scale(f: Facts) -> float:
    power = f.engine.get("fp16", "initial_scale_power")
    return 2.0 ** (16 if power is None else power)


def _master_weights(f: Facts, precision: str) -> bool:
    return f.on(precision, f"{precision}_master_weights_and_grads")


#: Sources, in deepspeed/runtime: config.py, engine.py (_configure_optimizer, get_data_types), base_optimizer.py, zero/config.py,
#: zero/stage_1_and_2.py, zero/stage3.py, precision_config.py, torch_autocast.py.
COMBINATIONS = [
    Combination(
        "fp16.enabled",
        lambda f: f.on("fp16", "enabled") and f.on("bf16", "enabled"),
        "fp16 and bf16 are both enabled; set one of them to false",
    ),
    Combination(
        "torch_autocast.enabled",
        lambda f: f.on("torch_autocast", "enabled") and f.precision != "fp32",
        "casts fp32 weights, and {f.precision} is enabled too; set one of them to false",
    ),
    Combination(
        "torch_autocast.dtype",
        lambda f: (
            f.on("torch_autocast", "enabled")
            and str(f.engine.get("torch_autocast", "dtype")).endswith(("fp16", "float16"))
            and "bfloat16" not in f.engine.get("torch_autocast", "dtype")
        ),
        "is half precision, whose gradients need a loss scale; use the 'fp16' section, or \"bfloat16\"",
    ),
    Combination(
        "torch_autocast.enabled",
        lambda f: f.on("torch_autocast", "enabled") and f.zero("zero_quantized_weights"),
        "does not go with 'zero_quantized_weights'; switch one of them off",
    ),
    # --- offload
    Combination(
        "zero_optimization.offload_optimizer",
        lambda f: f.offload_optimizer != "none" and f.stage == 0,
        "offload works at stage 1 or 2 or 3, and this JSON is at stage 0; change one of them",
    ),
    Combination(
        "zero_optimization.offload_param",
        lambda f: f.offload_param != "none" and f.stage != 3,
        "offload works at stage 3, and this JSON is at stage {f.stage}; change one of them",
    ),
    Combination(
        "zero_optimization.offload_optimizer.device",
        lambda f: f.offload_optimizer == "nvme" and f.stage in (1, 2),
        'is "nvme", which stage {f.stage} does not have; write "cpu", or use stage 3',
    ),
    _nvme_needs_a_path("offload_optimizer"),
    _nvme_needs_a_path("offload_param"),
    Combination(
        "zero_optimization.offload_optimizer.buffer_count",
        lambda f: f.offload_optimizer == "nvme" and (f.engine.get("zero_optimization", "offload_optimizer", "buffer_count") or 4) < 4,
        "is too small for Adam, which has four tensors on the drive at a time (weights, two moments, gradients); write 4 or more",
    ),
    Combination(
        "zero_optimization.offload_optimizer.ratio",
        lambda f: (1 if (ratio := f.engine.get("zero_optimization", "offload_optimizer", "ratio")) is None else ratio) < 1 and f.stage != 3,
        "is below 1: a part of the optimizer on the CPU works at stage 3 only, and this JSON is at stage {f.stage}; leave it out",
    ),
    Combination(
        "zero_optimization.offload_optimizer.super_offload",
        lambda f: f.on("zero_optimization", "offload_optimizer", "super_offload") and f.stage != 3,
        "works at stage 3 only, and this JSON is at stage {f.stage}; leave it out",
    ),
    Combination(
        "zero_optimization.zenflow",
        lambda f: f.zero("zenflow") is not None,
        "trains to other losses, or to NaN, from the first step on (DeepSpeed 0.19.8, measured); leave it out",
    ),
    # --- ZeRO
    *map(_has_no_use_below_stage_3, ("zero_hpz_partition_size", "zero_quantized_weights")),
    Combination(
        "zero_optimization.zero_hpz_partition_size",
        lambda f: f.ranks % min(f.zero("zero_hpz_partition_size") or 1, f.ranks),
        'does not divide the {f.ranks} ranks; write a divisor of it, such as the GPUs of a host, or "auto"',
    ),
    Combination(
        "zero_optimization.zero_quantized_weights",
        # Otherwise an assertion in the first forward pass, or from padded partitions other weights (zero/partition_parameters.py).
        lambda f: f.on("zero_optimization", "zero_quantized_weights") and f.d_model % (QUANTIZED_TOGETHER * f.ranks),
        f"takes {QUANTIZED_TOGETHER} weights at a time, of which a rank's part of each parameter must be a multiple; make d_model, which "
        f"is {{f.d_model}}, a multiple of {QUANTIZED_TOGETHER} x {{f.ranks}} ranks, or leave the key out",
    ),
    Combination(
        "zero_optimization.zero_quantized_gradients",
        # csrc/quantization/pt_binding.cpp casts the pointer to __half; quant_reduce.cu divides by no number of GPUs, and
        # runtime/comm/coalesced_collectives.py by that of the hosts alone. On one host stage3.py does not come there.
        lambda f: f.on("zero_optimization", "zero_quantized_gradients"),
        "is wrong over several hosts in DeepSpeed 0.19.8, which takes the bits of bf16 and fp32 gradients for fp16, and adds up those of a "
        "host's GPUs where it should average them; on one host it does nothing; leave it out",
    ),
    Combination(
        "zero_optimization.zero_quantized_nontrainable_weights",
        lambda f: f.on("zero_optimization", "zero_quantized_nontrainable_weights"),
        "is for weights that are not trained, and all are; leave it out",
    ),
    Combination(
        "zero_optimization.compute_grad_norm",
        lambda f: f.zero("compute_grad_norm") is False,
        "is false, but the norm is clipped and logged at every step; leave the key out",
    ),
    Combination(
        "zero_optimization.stage3_module_granularity_threshold",
        lambda f: (f.zero("stage3_module_granularity_threshold") or 0) > 0 and f.stage == 3,
        "releases parameters that the backward pass still needs; leave it out",
    ),
    Combination("zero_optimization.legacy_stage1", lambda f: f.zero("legacy_stage1"), "is gone from DeepSpeed; leave the key out"),
    Combination(
        "zero_optimization.allgather_bucket_size",
        lambda f: f.stage in (1, 2) and (f.zero("allgather_bucket_size") or 0) % 2,
        "is odd, and stage {f.stage} aligns its buckets to 2 elements; write an even number",
    ),
    Combination(
        "prescale_gradients",
        lambda f: f.on("prescale_gradients") and _reduces_by_scatter(f),
        'does not go with "reduce_scatter" at stage {f.stage}; leave it out, or set "reduce_scatter": false',
    ),
    Combination(
        "gradient_predivide_factor",
        lambda f: f.engine.get("gradient_predivide_factor") not in (None, 1) and _reduces_by_scatter(f),
        'other than 1 does not go with "reduce_scatter" at stage {f.stage}; leave it out, or set "reduce_scatter": false',
    ),
    Combination(
        "gradient_predivide_factor",
        lambda f: f.engine.get("gradient_predivide_factor") not in (None, 1) and f.stage == 3,
        "other than 1 is not multiplied back at stage 3, so that the gradients are wrong by it; leave it out",
    ),
    Combination(
        "gradient_allreduce_op",
        lambda f: f.engine.get("gradient_allreduce_op") == "sum" and f.stage == 3,
        'is "sum", which stage 3 does not do; write "mean"',
    ),
    # --- precision
    *map(_master_weights_at_stage_0, ("fp16", "bf16")),
    Combination(
        "fp16.fp16_master_weights_and_grads",
        lambda f: _master_weights(f, "fp16") and _master_weights(f, "bf16"),
        "and bf16_master_weights_and_grads exclude each other; remove one of them",
    ),
    *map(_master_weights_without_offload, ("fp16", "bf16")),
    Combination(
        "bf16.bf16_optimizer_states",
        lambda f: (
            f.on("bf16", "bf16_optimizer_states")
            and not _master_weights(f, "bf16")
            and not f.engine.is_faulty("bf16", "bf16_master_weights_and_grads")
        ),
        "needs 'bf16_master_weights_and_grads': true beside it",
    ),
    Combination(
        "fp16.min_loss_scale",
        lambda f: not f.engine.get("fp16", "loss_scale") and (f.engine.get("fp16", "min_loss_scale") or 1) > _initial_scale(f),
        "is above the initial scale, 2^initial_scale_power; lower it, or raise 'initial_scale_power'",
    ),
    Combination(
        "bf16.check_grad_overflow",
        lambda f: f.engine.get("bf16", "check_grad_overflow") is False and f.on("bf16", "enabled"),
        "is false, with which a gradient that is not finite is applied and ruins the weights; leave it out",
    ),
    Combination(
        "data_types.param_dtype",
        lambda f: f.dtype("param_dtype") not in (None, f.precision),
        "is not the {f.precision} that this JSON trains in; leave it out",
    ),
    Combination(
        "data_types.grad_accum_dtype",
        lambda f: f.dtype("grad_accum_dtype") not in (None, f.precision) and f.stage == 0,
        "is not the {f.precision} that this JSON trains in, which stage 0 cannot mix; leave it out, or use stage 1, 2 or 3",
    ),
    Combination(
        "data_types.grad_accum_dtype",
        lambda f: f.dtype("grad_accum_dtype") == "fp16" and f.precision != "fp16",
        'is fp16 without its loss scale, so that small gradients vanish; write "fp32"',
    ),
    Combination(
        "communication_data_type",
        lambda f: f.engine.get("communication_data_type") == "fp16" and f.precision != "fp16",
        'is fp16 without its loss scale, so that small gradients vanish; write "bf16" or "fp32"',
    ),
    # --- what this loop does not leave to the engine
    Combination(
        "managed_gradient_accumulation",
        lambda f: f.engine.get("managed_gradient_accumulation") is False,
        "is false, but the loop steps the engine once a micro-batch; remove it",
    ),
    *map(_incomplete_checkpoint, ("writer", "load_universal")),
]


def check_combinations(engine: EngineJson, ranks: int, d_model: int, claimed: Mapping[str, type[Technique]]) -> None:
    """Note what cannot work together in `engine`, put old names right, fill in the stage and the sizes of ZeRO's buffers.

    Args:
        ranks: how many share the run.
        d_model: the model's width, from which `"auto"` sizes follow.
        claimed: the top-level sections that our own techniques take, with the technique.
    """
    _rename(engine)
    precision = _precision(engine)
    if engine.get("zero_optimization") is None:
        engine.settle(("zero_optimization",), {}, "DeepSpeed's default")
    if "stage" not in engine.values["zero_optimization"] and not engine.is_faulty("zero_optimization", "stage"):
        engine.settle(("zero_optimization", "stage"), 0, "DeepSpeed's default")
    _drop_what_does_nothing(engine, claimed)
    if not engine.is_faulty("zero_optimization", "stage"):  # else what the stage allows cannot be said
        devices = [engine.get("zero_optimization", key, "device") or "none" for key in ("offload_optimizer", "offload_param")]
        facts = Facts(engine, ranks, d_model, engine.get("zero_optimization", "stage"), precision, *devices)
        for path, broken, why in COMBINATIONS:
            keys = tuple(path.split("."))
            if not engine.is_faulty(*keys) and broken(facts):
                engine.fault(keys, why.format(f=facts))
    for key, size in ZERO_AUTO.items():
        if engine.values["zero_optimization"].get(key) == "auto":
            engine.settle(("zero_optimization", key), size(d_model), f"from d_model {d_model}")
    _settle_second_partition(engine, ranks)
    _check_machine(engine)


def _settle_second_partition(engine: EngineJson, ranks: int) -> None:
    """`zero_hpz_partition_size`: "auto" is the ranks of a host where there are several; and a word where a size does nothing."""
    path = ("zero_optimization", "zero_hpz_partition_size")
    size = engine.values["zero_optimization"].get(path[-1])
    if size == "auto":
        local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
        of_a_host = int(local) if local and local.isdecimal() and int(local) else GPUS_OF_A_HOST
        if engine.get("zero_optimization", "stage") != 3 or ranks <= of_a_host:
            engine.settle(path, 1, "auto: off, all ranks are on one host" if ranks <= of_a_host else "auto: off below stage 3")
        else:
            whose = "the ranks of a host" if local else f"{GPUS_OF_A_HOST} GPUs a host, without a launcher"
            engine.settle(path, largest_divisor(ranks, of_a_host), f"auto: {whose}")
    elif size is not None and 1 < ranks <= size:
        engine.note(path, f"takes memory and saves nothing: the {ranks} ranks are one group, and each keeps its part of the weights twice")


def adopt_other_forms(engine: EngineJson, techniques: Iterable[type[Technique]]) -> None:
    """Move what stands at another documented place of a technique's section to the place where the technique looks for it.

    The sections on the way have DeepSpeed's default for `enabled`, which is false. A section that is "auto" is one whose keys all are.
    """
    for cls in techniques:
        declared = cls.declaration
        section = declared.section
        if engine.values.get(section) == "auto" and (keys := [key for key, rule in declared.keys.items() if rule.get("auto")]):
            engine.settle((section,), dict.fromkeys(keys, "auto"), '"auto"')
        places: list[KeyPath] = []
        for place, convert in declared.other_forms.items():
            *above, key = path = tuple(place.split("."))
            holder = engine.get(*above)
            if not isinstance(holder, dict):
                continue
            known = [form.rpartition(".")[2] for form in declared.other_forms if form.rpartition(".")[0] == dotted(tuple(above))]
            for name in [name for name in holder if name not in known]:
                if (meant := nearest_name(name, known)) is not None:
                    engine.fault((*above, name), f"unknown key; did you mean '{meant}'?")
            if key not in holder:
                continue
            switches = [path[:end] for end in range(1, len(path)) if path[end - 1] not in WITHOUT_SWITCH]
            off = [switch for switch in switches if engine.get(*switch, "enabled") is not True]
            if off:
                if not any("enabled" in engine.get(*switch) for switch in off):
                    engine.note(path, f"is off: '{dotted(off[0])}' has no \"enabled\": true, and DeepSpeed's default is false")
            elif section in engine.values:
                other = dotted(places[0]) if places else section
                engine.fault(path, f"is another form of '{other}', and both are there; keep one of them")
            else:
                value = holder[key]
                engine.rename(path, (section,), convert(value) if isinstance(value, dict) else value)
                places.append(path)


def _rename(engine: EngineJson) -> None:
    for old, (new, convert) in RENAMED.items():
        section: Any = engine.get(*old[:-1])
        if not isinstance(section, dict) or old[-1] not in section:
            continue
        if new[-1] in section:
            engine.fault(old, f"is the old name of '{new[-1]}', and both are there; keep '{new[-1]}'")
        elif (value := convert(section[old[-1]])) is None:
            section.pop(old[-1])
        else:
            engine.rename(old, new, value)


def _precision(engine: EngineJson) -> str:
    """fp32, bf16 or fp16; `"auto"` is bf16 where the machine has arithmetic for it and fp16, in a file that serves both, is not on."""
    if engine.values.get("fp16", {}).get("enabled") == "auto":
        engine.settle(("fp16", "enabled"), False, "auto: fp16 only where it says true")
    if engine.values.get("bf16", {}).get("enabled") == "auto":
        if engine.get("fp16", "enabled"):
            engine.settle(("bf16", "enabled"), False, "auto: fp16 is on")
        else:
            found, why = bf16_arithmetic()
            engine.note(("bf16", "enabled"), f'"auto" is {json.dumps(found)}: {why}')
            engine.settle(("bf16", "enabled"), found, f"auto: {why}")
    return "fp16" if engine.get("fp16", "enabled") else "bf16" if engine.get("bf16", "enabled") else "fp32"


def _drop_what_does_nothing(engine: EngineJson, claimed: Mapping[str, type[Technique]]) -> None:
    """Take out what cannot do here what it says: sections that none of our techniques claims, and keys in those that one does."""
    for section, cls in claimed.items():
        for key, reason in cls.declaration.ignored.items():
            if (value := engine.get(section, key)) is not None and _is_active(value) and cls.declaration.is_on(engine.values[section]):
                engine.note((section, key), f"has no effect here and is left out: {reason}")
    for key, reason in NOT_DRIVEN.items():
        if key not in claimed and key in engine.values:
            if _is_active(engine.values[key]):
                engine.note((key,), f"has no effect here and is left out: {reason}")
            del engine.values[key]
    if engine.values.get("checkpoint", {}).get("use_node_local_storage") == "auto":
        engine.settle(("checkpoint", "use_node_local_storage"), False, "auto: off")


def _check_machine(engine: EngineJson) -> None:
    """What a valid JSON asks for and this machine does not have; `--explain` prints it, training is refused."""
    for key, package in MONITORS.items():
        if engine.get(key, "enabled") and importlib.util.find_spec(package) is None:
            engine.lack((key, "enabled"), f"needs the package {package}, which is not installed; pip install {package}")
    for key in ("offload_optimizer", "offload_param"):
        path = ("zero_optimization", key, "nvme_path")
        folder, ours = str(engine.get(*path)), (engine.origin(path) or "").startswith("auto")  # the run makes its own
        if engine.get("zero_optimization", key, "device") == "nvme" and not ours and not os.path.isdir(folder):
            engine.lack(path, f"is {folder!r}, which is no folder on this host; make it, on the drive to use")


def _is_active(value: Any) -> bool:
    """Whether a section, or a value in it, asks for something: `{"enabled": false}`, `false`, 0 and 1 (of a group's size) do not."""
    if isinstance(value, dict):
        return value["enabled"] is True if "enabled" in value else any(map(_is_active, value.values()))
    return value > 1 if isinstance(value, (int, float)) and not isinstance(value, bool) else bool(value)
