"""The configuration of a run: flags and engine JSON in, one resolved `RunConfig` out, before torch is imported.

Order of authority for a value that the JSON leaves `"auto"` (or leaves out): the flag, then the preset. A concrete value in the JSON
that disagrees with a flag is an error that names both. What cannot work is refused here, in one line for each fault.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_pipeline.shards import Corpus, open_corpus
from launch.run.engine_json import EngineJson
from launch.run.engine_schema import check_section, engine_schema
from launch.run.errors import UsageError, nearest
from launch.run.flags import MAX_LR, parse_flags
from model.presets import PRESETS, ModelShape, Preset
from recipes.registry import make_techniques, technique_classes

if TYPE_CHECKING:
    from data_pipeline.loader import Loader
    from launch.engine.distributed import Collectives

ROOT = Path(__file__).resolve().parents[2]
#: Our own schedule: linear warm-up, then cosine over tokens (`launch.run.schedule`).
TOKEN_SCHEDULE = "WarmupCosineTokens"
#: Optimizers that this project builds itself, with the fused kernel of torch; the others are left to DeepSpeed.
ADAM_TYPES = ("Adam", "AdamW")
ADAM_PARAMS = {
    **{key: {} for key in ("lr", "betas", "eps", "weight_decay")},
    **{key: {"types": ["boolean"]} for key in ("amsgrad", "bias_correction", "adam_w_mode", "torch_adam")},
}
#: What `"auto"` means for an optimizer's parameters, beside `lr` (GPT-3, appendix B).
OPTIMIZER_AUTO = {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
#: What `"auto"` means for the sizes of ZeRO's buffers, from the model's width d: what transformers fills in.
ZERO_AUTO = {
    "reduce_bucket_size": lambda d: d * d,
    "stage3_prefetch_bucket_size": lambda d: d * d * 9 // 10,
    "stage3_param_persistence_threshold": lambda d: 10 * d,
}
#: Every key for which `"auto"` has a meaning.
AUTO_KEYS = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "fp16.enabled",
    "bf16.enabled",
    "checkpoint.use_node_local_storage",
    "data_types.keep_in_fp32_modules",  # DeepSpeed's own "auto"
    *(f"optimizer.params.{key}" for key in ("lr", *OPTIMIZER_AUTO)),
    *(f"scheduler.params.{key}" for key in ("min_lr", "warmup_steps", "total_tokens")),
    *(f"scheduler.params.{key}" for key in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")),
    *(f"zero_optimization.{key}" for key in ZERO_AUTO),
}
#: Sections that DeepSpeed reads and that do nothing, or break, in this training loop: refused when they are switched on.
NOT_DRIVEN = {
    "activation_checkpointing": "the model keeps its activations and never calls deepspeed.checkpointing",
    "autotuning": "the autotuner rewrites the JSON and starts runs of its own",
    "compile": "the engine is never compiled",
    "datastates_ckpt": "checkpoints are written by launch/run/checkpoint.py, which needs their files when the engine returns",
    "data_efficiency": "the batches come from data_pipeline/, not from DeepSpeed's data loader",
    "dataloader_drop_last": "the batches come from data_pipeline/, which has no short ones",
    "expert_parallel": "the ranks share the data, not the model",
    "hybrid_engine": "there is nothing to generate during training",
    "pipeline": "the ranks share the data, not the model",
    "sequence_parallel_size": "the ranks share the data, not the sequences",
    "tensor_parallel": "the ranks share the data, not the model",
    "torch_autocast": "the log, the metrics and the checkpoints know fp32, bf16 and fp16 only; use the 'bf16' section",
    "weight_quantization": "it is for inference",
}
MAX_TOKENS = 10**18  # positions in the data are int64


@dataclass(frozen=True)
class RunConfig:
    """A run as resolved: what is here is what happens. Batch sizes count sequences, lengths and budgets count tokens."""

    run_name: str
    runs_dir: str
    resume: bool
    data: str
    seed: int
    preset: str
    shape: ModelShape
    recipe: str | None
    config_file: str
    engine: dict[str, Any]  # the JSON for DeepSpeed, complete: no "auto", none of our own sections
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    techniques: dict[str, dict[str, Any]]  # our own sections, by name
    ranks: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    global_batch_size: int
    steps: int
    total_tokens: int
    lr: float
    min_lr: float
    warmup_steps: int
    eval_every: int
    eval_batches: int
    save_every: int
    keep: int
    sample_tokens: int
    prompt: str
    quiet: bool
    corpus: Corpus = field(repr=False, compare=False)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.shape.seq_len

    @property
    def zero_stage(self) -> int:
        return self.engine["zero_optimization"]["stage"]

    @property
    def precision(self) -> str:
        """`fp16`, `bf16` or `fp32`."""
        return next((name for name in ("fp16", "bf16") if self.engine.get(name, {}).get("enabled")), "fp32")

    def training_loader(self, collectives: Collectives) -> Loader:
        """This rank's loader of the training split, in the run's order."""
        from data_pipeline.loader import Loader
        from data_pipeline.sampler import GlobalSampler

        windows = self.corpus.train.windows(self.shape.seq_len)
        sampler = GlobalSampler(windows, self.seed, self.corpus.fingerprint)
        return Loader(
            self.corpus.train,
            sampler,
            self.shape.seq_len,
            self.corpus.vocab_size,
            collectives.rank,
            collectives.world_size,
            collectives.device,
        )

    def as_json(self) -> dict[str, Any]:
        """What `run.json` records."""
        fields = {key: value for key, value in vars(self).items() if key not in ("corpus", "shape")}
        return {**fields, "shape": asdict(self.shape), "zero_stage": self.zero_stage, "precision": self.precision}


def resolve(argv: list[str], ranks: int | None = None) -> tuple[RunConfig, argparse.Namespace]:
    """Resolve flags and JSON into a `RunConfig`. Imports no torch.

    Args:
        argv: the flags of `launch/pretrain.py`.
        ranks: how many ranks the launcher started; default: WORLD_SIZE, else `--ranks`, else 1.

    Raises:
        UsageError: every fault of the file, a line each, or the first of the flags.
        DataError: the corpus is missing or damaged.
    """
    flags, recipe = parse_flags(argv)
    ranks = ranks or _ranks(flags)
    preset, shape = _model(flags)
    file = str(ROOT / recipe.config) if recipe else flags.deepspeed_config
    engine = EngineJson(file, flags.overrides)
    sections = {name for cls in technique_classes() for name in cls.sections}
    engine.check_keys(sections, AUTO_KEYS)
    _check_precision(engine)
    zero = _zero(engine, shape)
    _check_sections(engine, sections)
    optimizer, lr = _optimizer(engine, flags, preset, zero)
    global_batch, micro_batch, accumulation = _batch(engine, flags, preset, ranks)
    steps, total_tokens = _length(engine, flags, preset, global_batch * shape.seq_len)
    scheduler, min_lr, warmup_steps = _schedule(engine, flags, preset, lr, steps, total_tokens)
    engine.raise_faults()

    corpus = open_corpus(flags.data)
    for split in (corpus.train, corpus.val):
        split.windows(shape.seq_len)  # refuses a split that is too small for one sequence, by name

    own = {key: engine.values[key] for key in sections if key in engine.values}
    complete = {key: value for key, value in engine.values.items() if key not in own and key not in ("optimizer", "scheduler")}
    complete |= {
        "train_batch_size": global_batch,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0 if engine.get("gradient_clipping") is None else engine.get("gradient_clipping"),  # DeepSpeed's default
        "zero_optimization": zero,
    }
    config = RunConfig(
        run_name=flags.run_name or (recipe.name if recipe else Path(file).stem),
        runs_dir=flags.runs_dir,
        resume=flags.resume,
        data=flags.data,
        seed=flags.seed,
        preset=flags.preset,
        shape=shape,
        recipe=recipe.name if recipe else None,
        config_file=file,
        engine=complete,
        optimizer=optimizer,
        scheduler=scheduler,
        techniques={key: value for key, value in own.items() if value.get("enabled", True)},
        ranks=ranks,
        micro_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        global_batch_size=global_batch,
        steps=steps,
        total_tokens=total_tokens,
        lr=lr,
        min_lr=min_lr,
        warmup_steps=warmup_steps,
        eval_every=flags.eval_every if flags.eval_every is not None else -(-steps // 10),
        eval_batches=flags.eval_batches,
        save_every=flags.save_every if flags.save_every is not None else -(-steps // 4),
        keep=flags.keep,
        sample_tokens=flags.sample_tokens,
        prompt=flags.prompt,
        quiet=flags.quiet,
        corpus=corpus,
    )
    try:
        make_techniques(config)  # each checks its own section when it is built
    except ValueError as reason:
        raise UsageError(f"{file}: {reason}") from None
    return config, flags


def _ranks(flags: argparse.Namespace) -> int:
    """How many ranks there are: what the launcher says, else `--ranks`, else 1."""
    launched = os.environ.get("WORLD_SIZE")
    if launched is None:
        return flags.ranks or 1
    if not launched.isdecimal() or int(launched) < 1:
        raise UsageError(f"the environment variable WORLD_SIZE is {launched!r}: it must be the number of ranks, or not set")
    if flags.ranks not in (None, int(launched)):
        raise UsageError(f"--ranks {flags.ranks}: the launcher started {launched} ranks; leave the flag out")
    return int(launched)


def _model(flags: argparse.Namespace) -> tuple[Preset, ModelShape]:
    if flags.preset not in PRESETS:
        raise UsageError(f"--preset {flags.preset}: no such preset{nearest(flags.preset, PRESETS)}; there are {', '.join(PRESETS)}")
    preset = PRESETS[flags.preset]
    given = {key: value for key in asdict(preset.shape) if (value := getattr(flags, key)) is not None}
    try:
        return preset, ModelShape(**{**asdict(preset.shape), **given})
    except ValueError as reason:
        given_flags = ", ".join(f"--{key} {value}" for key, value in given.items())
        raise UsageError(f"--preset {flags.preset} with {given_flags}: {reason}") from None


def _check_precision(engine: EngineJson) -> None:
    """At most one of fp16 and bf16; `"auto"`, as in files that serve both, is bf16 unless fp16 is switched on."""
    if "bfloat16" in engine.values and "bf16" in engine.values:
        engine.fault(("bfloat16",), "is the old name of 'bf16', and both are there; keep 'bf16'")
    elif "bfloat16" in engine.values:
        engine.values["bf16"] = engine.values.pop("bfloat16")
    if engine.values.get("fp16", {}).get("enabled") == "auto":
        engine.values["fp16"]["enabled"] = False
    if engine.values.get("bf16", {}).get("enabled") == "auto":
        engine.values["bf16"]["enabled"] = not engine.get("fp16", "enabled")
    if engine.get("fp16", "enabled") and engine.get("bf16", "enabled"):
        engine.fault(("fp16", "enabled"), "fp16 and bf16 are both enabled; set one of them to false")


def _zero(engine: EngineJson, shape: ModelShape) -> dict[str, Any]:
    """The `zero_optimization` section with its stage, and with sizes where it says `"auto"`."""
    zero = engine.values.setdefault("zero_optimization", {})
    stage = zero.setdefault("stage", 0)
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if old in zero and new in zero:
            engine.fault(("zero_optimization", old), f"is the old name of '{new}', and both are there; keep '{new}'")
        elif zero.pop(old, False):
            zero[new] = {"device": "cpu"}
    if engine.is_faulty("zero_optimization", "stage"):
        return zero  # what the stage allows cannot be said
    for offload, stages in (("offload_optimizer", (1, 2, 3)), ("offload_param", (3,))):
        device = engine.get("zero_optimization", offload, "device") or "none"
        if device != "none" and stage not in stages:
            allowed = " or ".join(map(str, stages))
            engine.fault(
                ("zero_optimization", offload), f"offload works at stage {allowed}, and this JSON is at stage {stage}; change one of them"
            )
        elif device == "nvme" and not engine.get("zero_optimization", offload, "nvme_path"):
            engine.fault(("zero_optimization", offload), 'device "nvme" needs "nvme_path", a folder on the drive; add it')
    if zero.get("compute_grad_norm") is False:
        engine.fault(("zero_optimization", "compute_grad_norm"), "the norm is clipped and logged at every step; leave the key out")
    for key, size in ZERO_AUTO.items():
        if zero.get(key) == "auto":
            zero[key] = size(shape.d_model)
    return zero


def _check_sections(engine: EngineJson, claimed: set[str]) -> None:
    """Sections that cannot do here what they say, unless one of our techniques claims them."""
    for key, reason in NOT_DRIVEN.items():
        if key not in claimed and _is_active(engine.values.get(key)):
            engine.fault((key,), f"has no effect here: {reason}; remove it")
    for key, package in (("wandb", "wandb"), ("comet", "comet_ml")):
        if engine.get(key, "enabled") and importlib.util.find_spec(package) is None:
            engine.fault((key, "enabled"), f"needs the package {package}, which is not installed; pip install {package}")
    if engine.get("managed_gradient_accumulation") is False:
        engine.fault(("managed_gradient_accumulation",), "is false, but the loop steps the engine once a micro-batch; remove it")
    for key in ("writer", "load_universal"):
        if _is_active(engine.get("checkpoint", key)):
            engine.fault(("checkpoint", key), "has no place here: a checkpoint must be complete when the engine returns; remove it")
    stage, allreduce = engine.get("zero_optimization", "stage"), engine.get("gradient_allreduce_op")
    if allreduce == "sum" and stage == 3:
        engine.fault(("gradient_allreduce_op",), 'is "sum", which stage 3 does not do; write "mean"')
    for section, key in (
        ("fp16", "fp16_master_weights_and_grads"),
        ("bf16", "bf16_master_weights_and_grads"),
        ("bf16", "bf16_optimizer_states"),
    ):
        if engine.get(section, key) and stage == 0:
            engine.fault((section, key), "works at stage 1, 2 or 3, and this JSON is at stage 0; change one of them")
    if engine.get("bf16", "bf16_optimizer_states") and not engine.get("bf16", "bf16_master_weights_and_grads"):
        engine.fault(("bf16", "bf16_optimizer_states"), "needs 'bf16_master_weights_and_grads': true beside it")
    if engine.values.get("checkpoint", {}).get("use_node_local_storage") == "auto":
        engine.values["checkpoint"]["use_node_local_storage"] = False


def _is_active(value: Any) -> bool:
    """Whether a section, or a value in it, asks for something: `{"enabled": false}`, `false`, 0 and 1 (of a group's size) do not."""
    if isinstance(value, dict):
        return value["enabled"] is True if "enabled" in value else any(map(_is_active, value.values()))
    return value > 1 if isinstance(value, (int, float)) and not isinstance(value, bool) else bool(value)


def _optimizer(engine: EngineJson, flags: argparse.Namespace, preset: Preset, zero: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """The optimizer with its type's canonical name and all of its parameters, and the peak learning rate."""
    engine.number("optimizer", "params", "lr", minimum=0, maximum=MAX_LR, above=True)
    lr = engine.agree(("optimizer", "params", "lr"), "lr", flags.lr) or preset.lr
    builtin = engine_schema()["optimizers"]
    ours = [name for cls in technique_classes() for name in cls.optimizer_types]
    canonical = {name.lower(): name for name in (*ADAM_TYPES, *builtin, *ours)}
    asked = engine.get("optimizer", "type")
    kind = canonical.get(str(asked).lower())
    if kind is None:
        if asked is not None:
            names = ", ".join(canonical.values())
            engine.fault(("optimizer", "type"), f'is "{asked}"{nearest(asked, canonical.values())}; there are {names}')
        elif not engine.is_faulty("optimizer"):
            engine.fault(("optimizer", "type"), 'must name an optimizer: "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}')
        return {}, lr
    path = ("optimizer", "params")
    params = engine.get(*path) or {}
    if kind not in ours:
        rules = ADAM_PARAMS if kind in ADAM_TYPES else {**builtin[kind], "lr": {}, "weight_decay": {}}
        for key_path, message in check_section(path, params, {"keys": rules}, AUTO_KEYS):
            moved = 'write "gradient_clipping" at the top level instead' if key_path[-1] == "max_grad_norm" else message
            engine.fault(key_path, moved)
    params = {**params, **{key: value for key, value in OPTIMIZER_AUTO.items() if params.get(key) == "auto"}}
    if kind in ADAM_TYPES:
        params = {**OPTIMIZER_AUTO, **params}
        if params.get("bias_correction") is False:
            engine.fault((*path, "bias_correction"), "torch's Adam always corrects the bias; leave the key out")
    betas = params.get("betas", [0, 0])
    if not (isinstance(betas, list) and len(betas) == 2 and all(type(beta) in (int, float) and 0 <= beta < 1 for beta in betas)):
        engine.fault((*path, "betas"), f"is {json.dumps(betas)}, must be two numbers from 0 to below 1")
    for key, above in (("eps", True), ("weight_decay", False)):
        engine.number(*path, key, minimum=0, maximum=1, above=above)
    if kind == "Adagrad" and (zero.get("stage") or engine.get("fp16", "enabled") or engine.get("bf16", "enabled")):
        # It makes its state for the parameters it is given, which DeepSpeed then replaces by master weights.
        engine.fault(("optimizer", "type"), "is Adagrad, which works at stage 0 in fp32 only; change these, or use another type")
    elif kind not in (*ADAM_TYPES, *ours) and zero.get("stage"):
        if (zero.get("offload_optimizer") or {}).get("device", "none") != "none":
            engine.fault(("optimizer", "type"), f"is {kind}, which has no form for an offloaded optimizer; use AdamW, or do not offload it")
        elif not engine.get("zero_allow_untested_optimizer"):
            engine.fault(
                ("optimizer", "type"),
                f'is {kind}, which DeepSpeed has not tested with ZeRO; add "zero_allow_untested_optimizer": true, or use stage 0',
            )
    return {"type": kind, "params": {**params, "lr": lr}}, lr


def _batch(engine: EngineJson, flags: argparse.Namespace, preset: Preset, ranks: int) -> tuple[int, int, int]:
    """Global batch, micro-batch, accumulation: global = micro x accumulation x ranks. What is not given follows from the rest."""
    total = engine.agree(("train_batch_size",), "global_batch_size", flags.global_batch_size)
    micro = engine.agree(("train_micro_batch_size_per_gpu",), "micro_batch_size", flags.micro_batch_size)
    accumulation = engine.get("gradient_accumulation_steps")
    source = f"{engine.file}, flags and --preset {flags.preset}"
    if total is None:
        total = micro * accumulation * ranks if micro and accumulation else preset.global_batch_size
    per_rank, rest = divmod(total, ranks)
    if rest:
        sizes = " or ".join(str(size) for size in (total - rest, total - rest + ranks) if size)
        engine.fault_of_run(
            f"{source}: a global batch of {total} sequences cannot be shared evenly by {ranks} ranks; --global_batch_size {sizes} can"
        )
        return total, 1, 1
    if micro is None and accumulation is not None:
        micro, rest = divmod(per_rank, accumulation)
        if rest or not micro:
            engine.fault_of_run(
                f"{source}: {total} sequences over {ranks} ranks are {per_rank} a rank, which {accumulation} accumulation steps do not "
                "divide; change 'gradient_accumulation_steps' or --global_batch_size"
            )
            return total, 1, 1
    if micro is None:  # the largest micro-batch up to the preset's that divides a rank's share
        micro = next(size for size in range(min(preset.micro_batch_size, per_rank), 0, -1) if per_rank % size == 0)
    if accumulation is None:
        accumulation = max(1, per_rank // micro)
    if micro * accumulation * ranks != total:
        engine.fault_of_run(
            f"{source}: micro-batch {micro} x accumulation {accumulation} x {ranks} ranks = {micro * accumulation * ranks} sequences, "
            f"but the global batch is {total}; change --global_batch_size or --micro_batch_size so that they multiply"
        )
    return total, micro, accumulation


def _length(engine: EngineJson, flags: argparse.Namespace, preset: Preset, tokens_per_step: int) -> tuple[int, int]:
    """Steps and tokens of the run: --steps, --tokens, the JSON's total_tokens, or the preset's steps. Tokens make whole steps."""
    tokens = flags.tokens
    if engine.get("scheduler", "type") == TOKEN_SCHEDULE:
        path = ("scheduler", "params", "total_tokens")
        planned = engine.number(*path, minimum=1, whole=True)
        if planned is not None and flags.steps is not None and -(-planned // tokens_per_step) != flags.steps:
            engine.fault(
                path,
                f"is {planned}, {-(-planned // tokens_per_step)} steps of {tokens_per_step} tokens, but --steps says {flags.steps}; "
                'write "auto" in the JSON or leave the flag out',
            )
        tokens = engine.agree(path, "tokens", flags.tokens)
    steps = -(-tokens // tokens_per_step) if tokens is not None else flags.steps or preset.steps
    if steps * tokens_per_step > MAX_TOKENS:
        engine.fault_of_run(
            f"{engine.file} and flags: {steps:,} steps of {tokens_per_step:,} tokens are more than 10^18 tokens; "
            "lower --steps, --tokens or --global_batch_size"
        )
    return steps, steps * tokens_per_step


def _schedule(
    engine: EngineJson, flags: argparse.Namespace, preset: Preset, lr: float, steps: int, total_tokens: int
) -> tuple[dict[str, Any], float, int]:
    """The scheduler with all of its parameters, the learning rate at the end, and the steps of warm-up."""
    engine_schedules = engine_schema()["schedulers"]
    kind = TOKEN_SCHEDULE
    if "scheduler" in engine.values:
        kinds = (TOKEN_SCHEDULE, *engine_schedules)
        kind = engine.get("scheduler", "type")
        if kind not in kinds:
            if not engine.is_faulty("scheduler", "type"):
                engine.fault(("scheduler", "type"), f"is {json.dumps(kind)}{nearest(str(kind), kinds)}; there are {', '.join(kinds)}")
            return {}, 0.0, 0
    path = ("scheduler", "params")
    params = engine.get(*path) or {}
    # A preset's warm-up is meant for the preset's length; a shorter run warms up over a tenth of itself.
    warmup = flags.warmup_steps if flags.warmup_steps is not None else min(preset.warmup_steps, max(1, steps // 10))
    if kind != TOKEN_SCHEDULE:
        return _engine_schedule(engine, flags, kind, lr, steps, warmup)
    for key_path, message in check_section(path, params, {"keys": {"min_lr": {}, "warmup_steps": {}, "total_tokens": {}}}, AUTO_KEYS):
        engine.fault(key_path, message)
    engine.number(*path, "min_lr", minimum=0, maximum=MAX_LR)
    engine.number(*path, "warmup_steps", minimum=0, whole=True)
    min_lr = engine.agree((*path, "min_lr"), "min_lr", flags.min_lr)
    asked = engine.agree((*path, "warmup_steps"), "warmup_steps", flags.warmup_steps)
    if min_lr is None:
        min_lr = lr / 10
    elif min_lr > lr:
        fix = "lower it, or raise --lr"
        if flags.min_lr is None:
            engine.fault((*path, "min_lr"), f"is {min_lr:g}, above the peak learning rate of {lr:g}; {fix}")
        else:
            engine.fault_of_run(f"--min_lr {min_lr:g} is above the peak learning rate of {lr:g}; {fix}")
    if asked is not None and asked >= steps:
        fix = f"but the run has {steps} steps; lower it, or raise --steps"
        if flags.warmup_steps is None:
            engine.fault((*path, "warmup_steps"), f"is {asked}, {fix}")
        elif asked:
            engine.fault_of_run(f"--warmup_steps is {asked}, {fix}")
    warmup = warmup if asked is None else int(asked)
    return {"type": kind, "params": {"min_lr": min_lr, "warmup_steps": warmup, "total_tokens": total_tokens}}, min_lr, warmup


def _engine_schedule(
    engine: EngineJson, flags: argparse.Namespace, kind: str, lr: float, steps: int, warmup: int
) -> tuple[dict[str, Any], float, int]:
    """A schedule of DeepSpeed's own, by steps; `"auto"` is filled as transformers fills it."""
    path = ("scheduler", "params")
    rules = engine_schema()["schedulers"][kind]
    params = engine.get(*path) or {}
    for key_path, message in check_section(path, params, {"keys": rules}, AUTO_KEYS):
        engine.fault(key_path, message)
    for key in ("warmup_num_steps", "total_num_steps", "lr_range_test_step_size", "cycle_first_step_size"):
        engine.number(*path, key, minimum=1, whole=True)
    for key in ("warmup_min_lr", "warmup_max_lr", "cycle_min_lr", "cycle_max_lr", "lr_range_test_min_lr"):
        engine.number(*path, key, minimum=0, maximum=MAX_LR)
    if engine.get(*path, "warmup_type") not in (None, "log", "linear"):
        engine.fault((*path, "warmup_type"), f'is {json.dumps(params["warmup_type"])}, must be "log" or "linear"')
    for key, flag, given in (
        ("warmup_num_steps", "warmup_steps", flags.warmup_steps),
        ("total_num_steps", "steps", flags.steps),
        ("warmup_max_lr", "lr", flags.lr),
    ):
        if key in rules:
            engine.agree((*path, key), flag, given)
    if flags.min_lr is not None:
        engine.fault_of_run(
            f"--min_lr {flags.min_lr:g}: {kind} ends where its own parameters say; leave the flag out, or use {TOKEN_SCHEDULE}"
        )
    if flags.warmup_steps is not None and "warmup_num_steps" not in rules:
        engine.fault_of_run(f"--warmup_steps {flags.warmup_steps}: {kind} has no warm-up; leave the flag out, or use {TOKEN_SCHEDULE}")
    auto = {"warmup_num_steps": max(1, warmup), "total_num_steps": steps, "warmup_max_lr": lr, "warmup_min_lr": 0.0}
    params = engine.get(*path) or {}
    params = {key: auto[key] if value == "auto" else value for key, value in params.items()}
    if "total_num_steps" in rules:
        params.setdefault("total_num_steps", steps)
    for key in ("cycle_min_lr", "cycle_max_lr"):
        if key in rules and key not in params and not engine.is_faulty(*path, key):
            engine.fault((*path, key), "is missing, and OneCycle needs it; add it, a learning rate")
    return {"type": kind, "params": params}, 0.0, params.get("warmup_num_steps", 0)
