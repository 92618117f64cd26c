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

from launch.config.deepspeed_json import DeepSpeedJson, leaves
from launch.config.deepspeed_schema import DTYPES
from launch.config.hardware import bf16_arithmetic, deepspeed_silenced
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
#: Sections that DeepSpeed documents and that have no effect in this training loop: removed, with a note if they are switched on.
WITHOUT_EFFECT = {
    "autotuning": "the autotuner runs under `deepspeed --autotuning` only",
    "datastates_ckpt": "checkpoints are written beside training already, by DeepSpeed's plain writer",
    "data_efficiency": "the batches come from data_pipeline/",
    "dataloader_drop_last": "the batches come from data_pipeline/, which has no short ones",
    "disable_allgather": "DeepSpeed reads it and does not use it",
    "hybrid_engine": "training generates no text",
    "seq_parallel_communication_data_type": "the ranks share the data, not the sequences",
    "use_data_before_expert_parallelism": "the model has no experts",
}
#: The reason and the fix for what would split the model or the sequences over the ranks.
SHARE_DATA = "but the ranks share the data only; leave it out: ZeRO stage 3 partitions a model that does not fit on a device"
#: Sections of DeepSpeed that train something else than this loop does -> the keys that switch them on (empty: any), the reason and the fix.
#: They are refused if they are on, else removed.
OF_OTHER_LOOPS: dict[str, tuple[tuple[str, ...], str]] = {
    "compile": (("deepcompile",), 'which is not supported; leave it out: "fused_kernels": "auto" compiles the blocks'),
    "expert_parallel": (("enabled", "autoep_size", "expert_tensor_parallel_size"), SHARE_DATA),
    "mesh_param": ((), SHARE_DATA),
    "pipeline": (("stages",), SHARE_DATA),
    "sequence_parallel_size": ((), SHARE_DATA),
    "tensor_parallel": (("autotp_size", "tp_size"), SHARE_DATA),
    "weight_quantization": ((), "which is for weights that are not trained, and this project trains all weights; leave it out"),
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


#: Keys that must not be switched on or off here -> the reason and the fix.
MUST_BE_OFF = {
    "zero_optimization.zenflow": "gives wrong losses, or NaN, from the first step on (DeepSpeed 0.19.8, measured); leave it out",
    # csrc/quantization/pt_binding.cpp casts the pointer to __half; quant_reduce.cu does not divide by the number of GPUs, and
    # runtime/comm/coalesced_collectives.py only by the number of hosts. On one host stage3.py calls neither.
    "zero_optimization.zero_quantized_gradients": "gives wrong gradients over several hosts in DeepSpeed 0.19.8 (bf16 and fp32 bits are "
    "read as fp16, and a host's GPUs are summed instead of averaged), and has no effect on one host; leave it out",
    "zero_optimization.zero_quantized_nontrainable_weights": "is for frozen weights, and this project trains all weights; leave it out",
    "zero_optimization.stage3_module_granularity_threshold": "releases parameters that the backward pass still needs; leave it out",
    "zero_optimization.elastic_checkpoint": "writes checkpoints that DeepSpeed 0.19.8 cannot load; leave it out: a resume may change the "
    "number of ranks without it",
    "zero_optimization.legacy_stage1": "is no longer in DeepSpeed; leave it out",
    # superoffload_stage3.py keeps Adam's moments in another process and has no code to save them.
    "zero_optimization.offload_optimizer.super_offload": "loses Adam's moments on a resume in DeepSpeed 0.19.8; leave it out",
    "data_types.keep_in_fp32_modules": "has no effect here: it is for buffers, and the model has none that a lower precision would round; "
    "leave it out",
    "torch_autocast.enabled": "is not supported: enable 'bf16', which keeps fp32 master weights, and leave the section out",
    "fp16.fp16_master_weights_and_grads": f"{ROUNDS_MOMENTS}; leave it out",
    "checkpoint.parallel_write.pipeline_stage": "is for pipelines, and the ranks share the data, not the model; leave it out",
    "checkpoint.use_node_local_storage": "spreads a checkpoint over the hosts, but a resume reads all of its files; leave it out",
    **dict.fromkeys(
        ("checkpoint.writer", "checkpoint.load_universal"),
        "is not supported: a checkpoint must be complete when the engine returns; leave it out",
    ),
}
MUST_BE_ON = {
    "checkpoint.checkpoint_serialization": "is false, which is torch's old file format, and checkpoints are zip files; leave it out",
    "zero_optimization.compute_grad_norm": "is false, but every step clips the gradients by their norm and logs it; leave it out",
    # stage_1_and_2.py; stage 3 does not read it.
    "zero_optimization.load_from_fp32_weights": "is false, so a resume would round the master weights; leave it out",
    "managed_gradient_accumulation": "is false, but the loop steps the engine once per micro-batch; leave it out",
    "bf16.check_grad_overflow": "is false, so a non-finite gradient would corrupt the weights; leave it out",
}
#: The stages at which a key works; at the others it has no effect, or fails.
STAGES: dict[str, tuple[int, ...]] = {
    "zero_optimization.pipeline_loading_checkpoint": (3,),  # a resume at stage 1 or 2 fails
    "zero_optimization.zero_hpz_partition_size": (3,),
    "zero_optimization.zero_quantized_weights": (3,),
    "data_types.grad_accum_dtype": (1, 2, 3),  # at stage 0, DeepSpeed refuses another type than the run's when the engine starts
    "prescale_gradients": (0, 1),  # with reduce_scatter, at stages 2 and 3, DeepSpeed refuses it when the engine starts
}
OFFLOAD_STAGES: dict[str, dict[str, tuple[int, ...]]] = {
    "offload_optimizer": {"cpu": (1, 2, 3), "nvme": (3,)},
    "offload_param": {"cpu": (3,), "nvme": (3,)},
}


def impossible_values(ds_json: DeepSpeedJson, ranks: int, shape: ModelShape, stage: int, precision: str) -> Iterator[tuple[str, str]]:
    """Each key that cannot be used, alone or with the others, as a dotted path, and the reason with the fix."""
    zero = "zero_optimization."

    def value(path: str) -> Any:
        return ds_json.get(*path.split("."))

    yield from ((path, why) for path, why in MUST_BE_OFF.items() if value(path) not in (None, False, 0))
    yield from ((path, why) for path, why in MUST_BE_ON.items() if value(path) is False)
    if value("gradient_allreduce_op") == "sum":
        yield "gradient_allreduce_op", 'is "sum", so training would depend on the number of ranks; write "mean", or leave it out'
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
    if value(zero + "zero_quantized_weights"):
        for name, sides in block_tensors(shape).items():
            if math.prod(sides) % (QUANTIZED_TOGETHER * ranks):
                yield (
                    zero + "zero_quantized_weights",
                    f"quantizes {QUANTIZED_TOGETHER} weights at a time, so each tensor needs a multiple of {QUANTIZED_TOGETHER} x {ranks} "
                    f"ranks of them, and {name} has {math.prod(sides)}; change the model's sizes, or leave the key out",
                )
                break
    if value("gradient_predivide_factor") not in (None, 1) and stage > 1:  # stage 3 does not multiply the gradients back
        yield "gradient_predivide_factor", f"is not 1, which is wrong at stage {stage}; leave it out, or use stage 0 or 1"
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
    _refuse_other_places(ds_json, claimed.values())
    precision = _precision(ds_json)
    if ds_json.get("zero_optimization") is None:
        ds_json.fill(("zero_optimization",), {}, "DeepSpeed's default")
    ds_json.fill(("zero_optimization", "stage"), 0, "DeepSpeed's default")
    _refuse_other_loops(ds_json, ranks)
    _drop_without_effect(ds_json, claimed)
    if not ds_json.is_faulty("zero_optimization", "stage"):  # else the stage is unknown
        for path, why in list(impossible_values(ds_json, ranks, shape, ds_json.get("zero_optimization", "stage"), precision)):
            if not ds_json.is_faulty(*path.split(".")):
                ds_json.fault(tuple(path.split(".")), why)
    for key, size in ZERO_AUTO.items():
        if ds_json.values["zero_optimization"].get(key) == "auto":
            ds_json.fill(("zero_optimization", key), size(shape.d_model), f"from d_model {shape.d_model}")
    _settle_second_partition(ds_json, ranks)
    _check_machine(ds_json, ranks)


def _settle_second_partition(ds_json: DeepSpeedJson, ranks: int) -> None:
    """`zero_hpz_partition_size`: "auto" is the ranks of a host if there are several hosts, else off."""
    path = ("zero_optimization", "zero_hpz_partition_size")
    if ds_json.values["zero_optimization"].get(path[-1]) == "auto":
        of_a_host = ranks_of_host() or GPUS_OF_A_HOST
        several = ds_json.get("zero_optimization", "stage") == 3 and ranks > of_a_host
        origin = f"auto: {of_a_host} ranks per host" if several else "auto: off below stage 3 and on one host"
        ds_json.fill(path, largest_divisor(ranks, of_a_host) if several else 1, origin)


def _refuse_other_places(ds_json: DeepSpeedJson, techniques: Iterable[type[Technique]]) -> None:
    """Refuse a technique's section at the other places where DeepSpeed documents it."""
    for cls in techniques:
        for place in cls.declaration.other_places:
            path = tuple(place.split("."))
            off = any(ds_json.get(*path[:depth], "enabled") is False for depth in range(1, len(path)))
            if not off and _is_active(ds_json.get(*path)):
                ds_json.fault(path, f"is read at the top level only; move it to '{cls.declaration.section}'")


def _refuse_other_loops(ds_json: DeepSpeedJson, ranks: int) -> None:
    """Refuse the sections in OF_OTHER_LOOPS that are on, and remove the others."""
    for key, (switches, why) in OF_OTHER_LOOPS.items():
        for path, value in list(leaves({key: ds_json.get(key)})) if ds_json.get(key, "enabled") is not False else ():
            if _is_active(value) and (not switches or path[-1] in switches):
                ds_json.fault(path, f"is {json.dumps(value)}, {why}")
                break
        ds_json.values.pop(key, None)
    if (wanted := ds_json.values.pop("data_parallel_size", "auto")) not in ("auto", ranks):
        ds_json.fault(("data_parallel_size",), f"is {wanted}, but the run has {ranks} ranks, and all of them share the data; leave it out")


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
        folder, ours = str(ds_json.get(*path)), (ds_json.origin(path) or "").startswith("auto")  # the run makes its own
        if ds_json.get("zero_optimization", key, "device") != "nvme":
            continue
        if ours and ranks > (ranks_of_host() or GPUS_OF_A_HOST):
            say = ds_json.lack if ranks_of_host() else ds_json.note
            say(path, '"auto" is in --runs_dir, which several hosts share; write a folder on each host\'s own drive')
        elif not ours and not os.path.isdir(folder):
            ds_json.lack(path, f"is {folder!r}, which is not a folder on this host; create it on the NVMe drive")


def _is_active(value: Any) -> bool:
    """Whether a section, or a value in it, is switched on: `{"enabled": false}`, `false`, 0, 1 (a group of one) and `"auto"` are not."""
    if isinstance(value, dict):
        return value["enabled"] is True if "enabled" in value else any(map(_is_active, value.values()))
    return value > 1 if isinstance(value, (int, float)) and not isinstance(value, bool) else bool(value) and value != "auto"
