"""Refuses values of a DeepSpeed JSON that cannot work, alone or together, and removes sections without effect in this training loop.

DeepSpeed checks some combinations when it reads its JSON (`check_with_deepspeed`). Refused here is what would fail only when the engine
starts, fail after some steps of training, or train something else without a message.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from launch.config.deepspeed_json import DeepSpeedJson
from launch.config.deepspeed_schema import DTYPES, WITHOUT_EFFECT, deepspeed_silenced
from launch.config.hardware import bf16_arithmetic
from launch.config.ranks import ranks_of_host
from model.accounting import block_tensors
from model.presets import ModelShape
from recipes.technique import Technique, largest_divisor

#: `"auto"` for the sizes of ZeRO's buffers, from the model's width d, as in transformers.
ZERO_AUTO: dict[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda d: d * d,
    "stage3_prefetch_bucket_size": lambda d: d * d * 9 // 10,
    "stage3_param_persistence_threshold": lambda d: 10 * d,
}
#: Keys for which DeepSpeed has only CUDA kernels.
CUDA_ONLY = (
    "zero_optimization.zero_quantized_weights",
    "aio.use_gds",
)
#: Weights that DeepSpeed's quantizer takes at a time: a rank's part of each parameter must be a multiple.
QUANTIZED_TOGETHER = 8
#: Assumed ranks of a host without a launcher: the GPUs of a DGX or HGX.
GPUS_OF_A_HOST = 8
#: Packages that a monitor needs.
MONITORS = {"wandb": "wandb", "comet": "comet_ml"}
#: torch's `Optimizer.load_state_dict` converts fp32 moments to the type of the master weights; in fp16, a small variance becomes 0.
ROUNDS_MOMENTS = "rounds Adam's moments on a resume in DeepSpeed 0.19.8"
#: The reason for what would split the model or the sequences over the ranks.
SHARE_DATA = "is for ranks that share a model, and these do not; stage 3 partitions a model that does not fit on a device"
#: DeepSpeed's other ways to slices of sequences, wrong in silence at stage 3 (DeepSpeed#5248, #6582).
ONE_WAY = 'is not supported; "sequence_parallel_size" alone gives the slices of a sequence to several ranks'
Harmless = tuple[Any, ...]
#: Values with which a key changes nothing: a switch that must be off, one that must be on, and a number of ranks.
OFF: Harmless = (None, False, 0)
ON: Harmless = (None, True)
ONE: Harmless = (None, False, 0, 1, {}, [])
#: Keys that must not be switched on or off here, or that split over several ranks -> the harmless values, and what is wrong with others.
REFUSED: dict[str, tuple[Harmless, str]] = {
    "zero_optimization.zenflow": (OFF, "gives wrong losses, or NaN, from the first step on (DeepSpeed 0.19.8, measured)"),
    # csrc/quantization/pt_binding.cpp casts the pointer to __half; quant_reduce.cu does not divide by the number of GPUs, and
    # runtime/comm/coalesced_collectives.py only by the number of hosts. On one host stage3.py calls neither.
    "zero_optimization.zero_quantized_gradients": (OFF, "gives wrong gradients over several hosts in DeepSpeed 0.19.8"),
    "zero_optimization.zero_quantized_nontrainable_weights": (OFF, "is for frozen weights, and this project trains all weights"),
    "zero_optimization.stage3_module_granularity_threshold": (OFF, "releases parameters that the backward pass still needs"),
    "zero_optimization.elastic_checkpoint": (OFF, "writes checkpoints that DeepSpeed 0.19.8 cannot load; a resume may change the ranks"),
    "zero_optimization.legacy_stage1": (OFF, "is no longer in DeepSpeed"),
    # superoffload_stage3.py keeps Adam's moments in another process and has no code to save them.
    "zero_optimization.offload_optimizer.super_offload": (OFF, "loses Adam's moments on a resume in DeepSpeed 0.19.8"),
    "data_types.keep_in_fp32_modules": (OFF, "has no effect here: it is for buffers, and the model has none"),
    "torch_autocast.enabled": (OFF, "is not supported: enable 'bf16', which keeps fp32 master weights"),
    "fp16.fp16_master_weights_and_grads": (OFF, ROUNDS_MOMENTS),
    "checkpoint.parallel_write.pipeline_stage": (OFF, "is for pipelines, and the ranks share the data, not the model"),
    "checkpoint.use_node_local_storage": (OFF, "spreads a checkpoint over the hosts, but a resume reads all of its files"),
    "checkpoint.writer": (OFF, "is not supported: a checkpoint must be complete when the engine returns"),
    "checkpoint.load_universal": (OFF, "is not supported: a checkpoint must be complete when the engine returns"),
    "checkpoint.checkpoint_serialization": (ON, "is false, which is torch's old file format, and checkpoints are zip files"),
    "zero_optimization.compute_grad_norm": (ON, "is false, but every step clips the gradients by their norm and logs it"),
    # stage_1_and_2.py; stage 3 does not read it.
    "zero_optimization.load_from_fp32_weights": (ON, "is false, so a resume would round the master weights"),
    "managed_gradient_accumulation": (ON, "is false, but the loop steps the engine once per micro-batch"),
    "bf16.check_grad_overflow": (ON, "is false, so a non-finite gradient would corrupt the weights"),
    "gradient_allreduce_op": ((None, "mean"), 'is "sum", so training would depend on the number of ranks'),
    "compile.deepcompile": (OFF, 'is not supported: "fused_kernels": "auto" compiles the blocks'),
    "weight_quantization": (ONE, "is for weights that are not trained, and this project trains all weights"),
    "expert_parallel.enabled": (OFF, SHARE_DATA),
    "mesh_param": (ONE, ONE_WAY),
    "pipeline.stages": (ONE, SHARE_DATA),
    "tensor_parallel.autotp_size": (ONE, SHARE_DATA),
    "tensor_parallel.tp.tp_size": (ONE, SHARE_DATA),
}
#: The stages at which a key works; at the others it has no effect, or fails.
STAGES: dict[str, tuple[int, ...]] = {
    "zero_optimization.pipeline_loading_checkpoint": (3,),  # a resume at stage 1 or 2 fails
    "zero_optimization.zero_hpz_partition_size": (3,),
    "zero_optimization.zero_quantized_weights": (3,),
    "data_types.grad_accum_dtype": (1, 2, 3),  # at stage 0, DeepSpeed refuses another type than the run's when the engine starts
    "prescale_gradients": (0, 1),  # with reduce_scatter, at stages 2 and 3, DeepSpeed refuses it when the engine starts
    "gradient_predivide_factor": (0, 1),  # stage 3 does not multiply the gradients back
}
OFFLOAD_STAGES: dict[str, dict[str, tuple[int, ...]]] = {
    "offload_optimizer": {"cpu": (1, 2, 3), "nvme": (3,)},
    "offload_param": {"cpu": (3,), "nvme": (3,)},
}


def impossible_values(values: dict[str, Any], ranks: int, shape: ModelShape, precision: str) -> Iterator[tuple[str, str]]:
    """Each key that cannot be used with the others, as a dotted path, and the reason with the fix. values: by dotted path."""
    zero, value = "zero_optimization.", values.get
    stage: int = values["zero_optimization.stage"]
    if stage == 3 and value(ratio := f"{zero}offload_optimizer.ratio") not in (None, 1):
        # stage3.py makes a second optimizer for the rest, with its own parameter groups.
        yield ratio, "is not 1: the weights that stay on the GPU do not follow the learning rate in DeepSpeed 0.19.8; leave it out"
    for path, stages in STAGES.items():
        if _is_active(value(path)) and stage not in stages:
            yield path, f"works at stage {_or(stages)} only, and this JSON is at stage {stage}; leave it out, or change the stage"
    for key, stages_of in OFFLOAD_STAGES.items():
        section = value(zero + key) or {}
        device = section.get("device") or "none"
        if stage not in (stages := stages_of.get(device, (0, 1, 2, 3))):
            yield zero + key, f"{device} offload works at stage {_or(stages)}, and this JSON is at stage {stage}; change one of them"
        if device == "nvme" and not section.get("nvme_path"):
            yield zero + key, 'device "nvme" needs "nvme_path": a folder on the drive, or "auto" for one in the run\'s folder; add it'
    group = value(f"{zero}zero_hpz_partition_size") or 1
    if stage == 3 and group < ranks and ranks % group:  # DeepSpeed asserts it when the engine starts
        yield f"{zero}zero_hpz_partition_size", f'is {group}, which does not divide {ranks} ranks; write a divisor, or "auto"'
    # Padded partitions give wrong weights, or an assertion in the first forward pass (zero/partition_parameters.py).
    multiple, sizes = QUANTIZED_TOGETHER * ranks, {name: math.prod(sides) for name, sides in block_tensors(shape).items()}
    if value(path := zero + "zero_quantized_weights") and (odd := [name for name, size in sizes.items() if size % multiple]):
        needed = f"needs a multiple of {QUANTIZED_TOGETHER} x {ranks} ranks of weights in each tensor, and {odd[0]} has {sizes[odd[0]]}"
        yield path, f"{needed}; change the model's sizes, or leave the key out"
    if value(path := "bf16.bf16_master_weights_and_grads"):
        if precision != "bf16":  # DeepSpeed would keep the master weights in bf16
            yield path, f"is for a run in bf16, and this run is in {precision}; leave it out"
        elif stage and not value("bf16.bf16_optimizer_states"):
            yield path, f'{ROUNDS_MOMENTS}; add "bf16_optimizer_states": true, or leave it out'
    power = value("fp16.initial_scale_power")
    if not value("fp16.loss_scale") and (value("fp16.min_loss_scale") or 1) > 2.0 ** (16 if power is None else power):
        yield "fp16.min_loss_scale", "is above the initial scale, 2^initial_scale_power; lower it, or raise 'initial_scale_power'"
    for path in ("data_types.grad_accum_dtype", "communication_data_type"):
        if value(path) in DTYPES["fp16"] and precision != "fp16":
            yield path, 'is fp16 without its loss scale, so that small gradients vanish; write "fp32"'
    if value(path := "data_types.param_dtype") not in (None, *DTYPES[precision]):  # DeepSpeed refuses it when the engine starts
        yield path, f"is not the type of the run, which is in {precision}; leave it out"


def _or(stages: tuple[int, ...]) -> str:
    *first, last = map(str, stages)
    return f"{', '.join(first)} or {last}" if first else last


def check_with_deepspeed(ds_json: DeepSpeedJson, ours: Iterable[str]) -> None:
    """Note the first fault that DeepSpeed itself finds in `ds_json`, if any. ours: the top-level sections that it does not get."""
    from deepspeed.runtime.config import DeepSpeedConfig  # here, because --help does without DeepSpeed

    # DeepSpeed would compare the global batch with the ranks of this process's group, which may not exist yet.
    left_out = {*ours, "optimizer", "scheduler", "train_batch_size"}
    values = copy.deepcopy({key: value for key, value in ds_json.values.items() if key not in left_out})
    try:
        with deepspeed_silenced():
            DeepSpeedConfig(values)
    except Exception as reason:  # assertions, errors of pydantic, a DeepSpeedConfigError
        details: list[dict[str, Any]] = getattr(reason, "errors", list)()
        message = details[0]["msg"].partition(", ")[2] if details else str(reason)
        named = [path for path in ds_json.paths() if str(path[-1]) in message.lower()]
        if named:
            ds_json.fault(max(named, key=lambda path: len(str(path[-1]))), f"DeepSpeed refuses this: {message}")
        else:
            ds_json.fault_of_run(f"{ds_json.file}: DeepSpeed refuses this: {message}")


def check_combinations(ds_json: DeepSpeedJson, ranks: int, shape: ModelShape, claimed: Mapping[str, type[Technique]]) -> None:
    """Note the values of `ds_json` that cannot work, and fill in the stage and the sizes of ZeRO's buffers.

    Args:
        ranks: of the run.
        shape: of the model; its width sets the `"auto"` sizes.
        claimed: top-level section -> the technique that reads it.
    """
    precision = _precision(ds_json)
    if ds_json.get("zero_optimization") is None:
        ds_json.fill(("zero_optimization",), {}, "DeepSpeed's default", replace=True)
    ds_json.fill(("zero_optimization", "stage"), 0, "DeepSpeed's default")
    values = ds_json.by_path()
    found = [(path, f"{why}; leave it out") for path, (harmless, why) in REFUSED.items() if values.get(path) not in harmless]
    for cls in claimed.values():  # sections of techniques, at the other places where DeepSpeed documents them
        found += [(path, f"is read at the top level only; move it to '{cls.declaration.section}'") for path in _elsewhere(values, cls)]
    if not ds_json.is_faulty("zero_optimization", "stage"):  # else the stage is unknown
        found += impossible_values(values, ranks, shape, precision)
    for path, why in found:
        if not ds_json.is_faulty(*path.split(".")):
            ds_json.fault(tuple(path.split(".")), why)
    _drop_without_effect(ds_json, claimed)
    for key, size in ZERO_AUTO.items():
        if ds_json.values["zero_optimization"].get(key) == "auto":
            ds_json.fill(("zero_optimization", key), size(shape.d_model), f"from d_model {shape.d_model}")
    if ds_json.values["zero_optimization"].get("zero_hpz_partition_size") == "auto":  # the ranks of a host if there are several, else off
        of_a_host = ranks_of_host() or GPUS_OF_A_HOST
        several = ds_json.get("zero_optimization", "stage") == 3 and ranks > of_a_host
        origin = f"auto: {of_a_host} ranks per host" if several else "auto: off below stage 3 and on one host"
        ds_json.fill(("zero_optimization", "zero_hpz_partition_size"), largest_divisor(ranks, of_a_host) if several else 1, origin)
    _check_machine(ds_json, ranks)


def _elsewhere(values: dict[str, Any], cls: type[Technique]) -> Iterator[str]:
    """The places other than the top level at which a technique's section is switched on."""
    for place in cls.declaration.other_places:
        path = place.split(".")
        off = any(values.get(".".join((*path[:depth], "enabled"))) is False for depth in range(1, len(path)))
        if not off and _is_active(values.get(place)):
            yield place


def _precision(ds_json: DeepSpeedJson) -> str:
    """fp32, bf16 or fp16; `"auto"` is bf16 if the device has bf16 arithmetic and fp16 is not enabled."""
    if ds_json.values.get("fp16", {}).get("enabled") == "auto":
        ds_json.fill(("fp16", "enabled"), False, "auto: fp16 is on only if it is true")
    if ds_json.values.get("bf16", {}).get("enabled") == "auto":
        if ds_json.get("fp16", "enabled"):
            ds_json.fill(("bf16", "enabled"), False, "auto: fp16 is on")
        else:
            found, why = bf16_arithmetic()
            ds_json.note(("bf16", "enabled"), f'"auto" is {json.dumps(found)}: {why}')
            ds_json.fill(("bf16", "enabled"), found, f"auto: {why}")
    return "fp16" if ds_json.get("fp16", "enabled") else "bf16" if ds_json.get("bf16", "enabled") else "fp32"


def _drop_without_effect(ds_json: DeepSpeedJson, claimed: Mapping[str, type[Technique]]) -> None:
    """Remove sections and keys that have no effect in this training loop, with a note for each that is switched on."""
    for section, cls in claimed.items():
        for key, reason in cls.declaration.ignored.items():
            if key in ds_json.values.get(section, {}):
                if _is_active(ds_json.get(section, key)) and ds_json.get(section, "enabled") is not False:
                    ds_json.note((section, key), f"has no effect here and is left out: {reason}")
                del ds_json.values[section][key]
    for key, reason in WITHOUT_EFFECT.items():
        if key not in claimed and key in ds_json.values:
            if _is_active(ds_json.values[key]):
                ds_json.note((key,), f"has no effect here and is left out: {reason}")
            del ds_json.values[key]


def _check_machine(ds_json: DeepSpeedJson, ranks: int) -> None:
    """Note what the JSON needs and this machine lacks. `--explain` prints it; training is refused."""
    for key, package in MONITORS.items():
        if ds_json.get(key, "enabled") and importlib.util.find_spec(package) is None:
            ds_json.lack((key, "enabled"), f"needs the package {package}, which is not installed; pip install {package}")
    for key in OFFLOAD_STAGES:
        path = ("zero_optimization", key, "nvme_path")
        ours = ds_json.is_filled(path)  # the run makes its own
        if ds_json.get("zero_optimization", key, "device") != "nvme":
            continue
        if ours and ranks > (ranks_of_host() or GPUS_OF_A_HOST):
            say = ds_json.lack if ranks_of_host() else ds_json.note
            say(path, '"auto" is in --runs_dir, which several hosts share; write a folder on each host\'s own drive')
        elif not ours and not os.path.isdir(folder := str(ds_json.get(*path))):
            ds_json.lack(path, f"is {folder!r}, which is not a folder on this host; create it on the NVMe drive")


def _is_active(value: Any) -> bool:
    """Whether a section, or a value in it, is switched on: `{"enabled": false}`, `false`, 0, 1 (a group of one) and `"auto"` are not."""
    if isinstance(value, dict):
        return value["enabled"] is True if "enabled" in value else any(map(_is_active, value.values()))
    return value not in (0, 1) if isinstance(value, (int, float)) and not isinstance(value, bool) else bool(value) and value != "auto"
