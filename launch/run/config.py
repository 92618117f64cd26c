"""The configuration of a run: flags and engine JSON in, one resolved `RunConfig` out, before torch is imported.

Order of authority for a value that the JSON leaves `"auto"` (or leaves out): the flag, then the preset. A concrete value in the JSON
that disagrees with a flag is an error that names both. What cannot work is refused here, in one line for each fault.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from data_pipeline.shards import Corpus, open_corpus
from launch.run.engine_schema import check_engine_keys
from launch.run.errors import UsageError, nearest
from launch.run.json_lines import KeyPath, dotted, read_json
from model.presets import PRESETS, ModelShape, Preset
from recipes.registry import Recipe, read_recipe, technique_classes

if TYPE_CHECKING:
    from data_pipeline.loader import Loader
    from launch.engine.distributed import Collectives

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_DATA = "data/stdlib"

#: Our own schedule: linear warm-up, then cosine over tokens (`launch.run.schedule`).
TOKEN_SCHEDULE = "WarmupCosineTokens"
TOKEN_SCHEDULE_PARAMS = ("min_lr", "warmup_steps", "total_tokens")
#: DeepSpeed's schedules, by steps (deepspeed/runtime/lr_schedules.py).
ENGINE_SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
#: Optimizers that this project builds itself, with the fused kernel of torch; anything else is left to DeepSpeed.
ADAM_TYPES = ("Adam", "AdamW")
ENGINE_OPTIMIZERS = (*ADAM_TYPES, "Adagrad", "Lamb", "Lion", "Muon", "MuAdam", "MuAdamW", "MuSGD", "SGD")


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


# --- flags ------------------------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """argparse with our errors: one line, and the nearest flag for one that does not exist."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see --help")


def _whole_number(minimum: int):
    def parse(text: str) -> int:
        try:
            value = int(float(text)) if "e" in text.lower() and float(text).is_integer() else int(text)
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{text} is too small: it must be a whole number of at least {minimum}")
        return value

    return parse


def _real_number(minimum: float, below: float = math.inf, above: bool = False):
    bounds = (f"above {minimum:g}" if above else f"at least {minimum:g}") + (f" and below {below:g}" if below < math.inf else "")

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {bounds}") from None
        if not math.isfinite(value) or value >= below or value < minimum or (above and value == minimum):
            raise argparse.ArgumentTypeError(f"{text} is out of range: it must be {bounds}")
        return value

    return parse


def build_parser() -> argparse.ArgumentParser:
    """The flags of `launch/pretrain.py`. Their help texts are the documentation."""
    positive, natural = _whole_number(1), _whole_number(0)
    parser = _Parser(
        prog="deepspeed launch/pretrain.py",
        description="Train a GPT through the DeepSpeed engine. The JSON says how, the preset and the flags say what and how long.",
        epilog="Example: deepspeed launch/pretrain.py --deepspeed_config ds_configs/zero1_bf16.json --preset nano --run_name demo",
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what is switched on (one of the two)")
    what.add_argument("--deepspeed_config", metavar="FILE", help="engine JSON; those that ship are in ds_configs/")
    what.add_argument("--recipe", metavar="DIR", help="a recipe folder: its JSON and its suggested flags (recipes/README.md)")
    what.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="change one value of the JSON, e.g. --set gradient_clipping=0.5 or --set zero_optimization.stage=2; may be repeated",
    )

    model = parser.add_argument_group("model")
    model.add_argument("--preset", default="nano", metavar="NAME", help=f"size and suggested training values: {', '.join(PRESETS)} (nano)")
    model.add_argument("--n_layer", type=positive, help="blocks, over the preset's")
    model.add_argument("--n_head", type=positive, help="attention heads, over the preset's")
    model.add_argument("--d_model", type=positive, help="width, a multiple of n_head, over the preset's")
    model.add_argument("--seq_len", type=positive, help="context length in tokens, over the preset's")
    model.add_argument("--dropout", type=_real_number(0, below=1), help="dropout probability, over the preset's (0)")

    data = parser.add_argument_group("data and length")
    data.add_argument("--data", default=DEFAULT_DATA, metavar="DIR", help=f"corpus written by data_pipeline/prepare.py ({DEFAULT_DATA})")
    data.add_argument("--steps", type=positive, help="optimizer steps (preset)")
    data.add_argument("--tokens", type=positive, help="tokens to train on, instead of --steps; rounded up to whole steps")
    data.add_argument("--seed", type=natural, default=1, help="of the weights and of the order of the data (1)")

    values = parser.add_argument_group('values that the JSON leaves "auto"')
    values.add_argument("--micro_batch_size", type=positive, help="sequences a rank takes at once (preset)")
    values.add_argument("--global_batch_size", type=positive, help="sequences an optimizer step takes over all ranks (preset)")
    values.add_argument("--lr", type=_real_number(0, above=True), help="peak learning rate (preset)")
    values.add_argument("--min_lr", type=_real_number(0), help="learning rate at the end (a tenth of the peak)")
    values.add_argument("--warmup_steps", type=natural, help="steps of linear warm-up (preset; at most a tenth of the run)")

    run = parser.add_argument_group("run")
    run.add_argument("--run_name", metavar="NAME", help="folder of the run in --runs_dir (the JSON's or the recipe's name)")
    run.add_argument("--runs_dir", default="runs", metavar="DIR", help="where run folders are made (runs)")
    run.add_argument("--resume", action="store_true", help="go on from the run's newest complete checkpoint; from step 0 if it has none")
    run.add_argument("--eval_every", type=natural, help="steps between evaluations on validation text; 0 is off (a tenth of the run)")
    run.add_argument("--eval_batches", type=positive, default=8, help="global batches of validation text an evaluation reads (8)")
    run.add_argument("--save_every", type=natural, help="steps between checkpoints; 0 saves at the end only (a quarter of the run)")
    run.add_argument("--keep", type=positive, default=3, help="newest checkpoints that stay, beside the best by validation (3)")
    run.add_argument("--sample_tokens", type=natural, default=0, help="length of the text sampled at the end; 0 is off (0)")
    run.add_argument("--prompt", default="def ", help="what the sample starts with ('def ')")
    run.add_argument("--ranks", type=positive, help="number of ranks to check the batch arithmetic for, where no launcher says it")
    run.add_argument("--explain", action="store_true", help="print the resolved run as JSON and stop; needs no launcher")
    run.add_argument("--quiet", action="store_true", help="no progress bar; warnings and the last line only")
    run.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # the launcher appends it
    return parser


def parse_flags(argv: list[str]) -> tuple[argparse.Namespace, Recipe | None]:
    """Parse `argv`; a recipe's suggested flags come first, so that the user's own win.

    Raises:
        UsageError: an unknown flag (with the nearest one), a value out of range, a recipe that is none.
    """
    parser = build_parser()
    known = [option for action in parser._actions for option in action.option_strings]

    def parse(arguments: list[str]) -> argparse.Namespace:
        namespace, unknown = parser.parse_known_args(arguments)
        if unknown:
            raise UsageError(f"unknown argument {unknown[0]!r}{nearest(unknown[0].split('=')[0], known)}; see --help")
        return namespace

    flags = parse(argv)
    if (flags.deepspeed_config is None) == (flags.recipe is None):
        raise UsageError("give one of --deepspeed_config FILE (those that ship are in ds_configs/) and --recipe DIR (recipes/README.md)")
    if flags.recipe is None:
        return flags, None
    try:
        recipe = read_recipe(flags.recipe)
    except ValueError as reason:
        raise UsageError(str(reason)) from None
    flags = parse([*recipe.flags, *argv])
    flags.deepspeed_config = str(ROOT / recipe.config)
    return flags, recipe


# --- resolution -------------------------------------------------------------------------------------------------------------------


class _EngineJson:
    """The engine JSON while it is resolved: values with where they stand, and the faults found so far."""

    def __init__(self, file: str, overrides: list[str]):
        self.file = file
        self.values, self.lines = read_json(file)
        self.faults: list[str] = []
        for override in overrides:
            self._override(override)

    def _override(self, text: str) -> None:
        """Apply `--set key.path=value`; the value is JSON, or a string where it is none."""
        keys, equals, raw = text.partition("=")
        if not equals or not all(keys.split(".")):
            raise UsageError(f"--set {text}: must be KEY=VALUE, e.g. --set zero_optimization.stage=2")
        try:
            value = json.loads(raw)
        except json.JSONDecodeError:
            value = raw
        section, path = self.values, tuple(keys.split("."))
        for part in path[:-1]:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise UsageError(f"--set {text}: '{part}' is a value in {self.file}, not a section")
        section[path[-1]] = value
        self.lines.pop(path, None)

    def where(self, path: KeyPath) -> str:
        line = self.lines.get(path)
        return f"{self.file}: " + (f"line {line}: " if line else "") + f"'{dotted(path)}'"

    def fault(self, path: KeyPath, message: str) -> None:
        self.faults.append(f"{self.where(path)}: {message}")

    def get(self, *path: str) -> Any:
        """The value at `path`, or None where it is missing or `"auto"`."""
        value: Any = self.values
        for part in path:
            if not isinstance(value, dict) or part not in value:
                return None
            value = value[part]
        return None if value == "auto" else value

    def number(self, *path: str, minimum: float, whole: bool = False, above: bool = False) -> float | None:
        """The number at `path`, checked, or None where it is missing, `"auto"` or wrong (then a fault is noted)."""
        value = self.get(*path)
        if value is None:
            return None
        kind = "a whole number" if whole else "a number"
        right_type = isinstance(value, (int, float)) and not isinstance(value, bool) and (not whole or float(value).is_integer())
        if not right_type or value < minimum or (above and value == minimum):
            bound = f"above {minimum:g}" if above else f"of at least {minimum:g}" if whole else f"at least {minimum:g}"
            self.fault(path, f'is {json.dumps(value)}, must be {kind} {bound}, or "auto"')
            return None
        return int(value) if whole else value

    def agree(self, path: KeyPath, flag: str, given: Any) -> Any:
        """The value at `path` and the flag's, which must not contradict each other."""
        value = self.get(*path)
        if value is not None and given is not None and value != given:
            self.fault(path, f'is {json.dumps(value)}, but --{flag} says {given}; write "auto" in the JSON or leave the flag out')
        return given if value is None else value

    def raise_faults(self) -> None:
        if self.faults:
            raise UsageError(*self.faults)


def resolve(argv: list[str], ranks: int | None = None) -> tuple[RunConfig, argparse.Namespace]:
    """Resolve flags and JSON into a `RunConfig`. Imports no torch.

    Args:
        argv: the flags of `launch/pretrain.py`.
        ranks: how many ranks the launcher started; default: WORLD_SIZE, else `--ranks`, else 1.

    Raises:
        UsageError: every fault of the file and the flags, a line each.
        DataError: the corpus is missing or damaged.
    """
    flags, recipe = parse_flags(argv)
    if ranks is None:
        ranks = int(os.environ.get("WORLD_SIZE", flags.ranks or 1))
    preset, shape = _model(flags)
    engine = _EngineJson(flags.deepspeed_config, flags.overrides)
    sections = {name for cls in technique_classes() for name in cls.sections}
    for path, message in check_engine_keys(engine.values, sections):
        engine.fault(path, message)
    engine.raise_faults()  # what follows relies on sections being objects

    _check_precision(engine)
    stage = _check_zero(engine)
    optimizer = _optimizer(engine)
    engine.number("optimizer", "params", "lr", minimum=0, above=True)
    lr = engine.agree(("optimizer", "params", "lr"), "lr", flags.lr) or preset.lr
    optimizer["params"]["lr"] = lr
    global_batch, micro_batch, accumulation = _batch(engine, flags, preset, ranks)
    engine.raise_faults()

    tokens_per_step = global_batch * shape.seq_len
    steps, total_tokens = _length(engine, flags, preset, tokens_per_step)
    scheduler, min_lr, warmup_steps = _schedule(engine, flags, preset, lr, steps, total_tokens)
    engine.number("gradient_clipping", minimum=0)
    engine.raise_faults()

    corpus = open_corpus(flags.data)
    for split in (corpus.train, corpus.val):
        split.windows(shape.seq_len)  # refuses a split that is too small for one sequence, by name
    name = flags.run_name or (recipe.name if recipe else Path(flags.deepspeed_config).stem)
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise UsageError(f"--run_name {name!r}: must be a plain folder name; --runs_dir says where it is made")

    own = {key: engine.values[key] for key in sections if key in engine.values}
    complete = {key: value for key, value in engine.values.items() if key not in own and key not in ("optimizer", "scheduler")}
    complete |= {
        "train_batch_size": global_batch,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {**complete.get("zero_optimization", {}), "stage": stage},
    }
    if left := [dotted(path) for path in _auto_paths(complete)]:
        raise UsageError(
            *(f'{engine.where(tuple(path.split(".")))}: "auto" has no meaning here; write a value or leave the key out' for path in left)
        )

    config = RunConfig(
        run_name=name,
        runs_dir=flags.runs_dir,
        resume=flags.resume,
        data=flags.data,
        seed=flags.seed,
        preset=flags.preset,
        shape=shape,
        recipe=recipe.name if recipe else None,
        config_file=flags.deepspeed_config,
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
    return config, flags


def _model(flags: argparse.Namespace) -> tuple[Preset, ModelShape]:
    if flags.preset not in PRESETS:
        raise UsageError(f"--preset {flags.preset}: no such preset{nearest(flags.preset, PRESETS)}; there are {', '.join(PRESETS)}")
    preset = PRESETS[flags.preset]
    given = {key: value for key in asdict(preset.shape) if (value := getattr(flags, key)) is not None}
    try:
        return preset, ModelShape(**{**asdict(preset.shape), **given})
    except ValueError as reason:
        raise UsageError(
            f"--preset {flags.preset} with {', '.join(f'--{key} {value}' for key, value in given.items())}: {reason}"
        ) from None


def _check_precision(engine: _EngineJson) -> None:
    if "bfloat16" in engine.values and "bf16" in engine.values:
        engine.fault(("bfloat16",), "is the old name of 'bf16', and both are there; keep 'bf16'")
    elif "bfloat16" in engine.values:
        engine.values["bf16"] = engine.values.pop("bfloat16")
    if engine.get("fp16", "enabled") and engine.get("bf16", "enabled"):
        engine.fault(("fp16", "enabled"), "fp16 and bf16 are both enabled; set one of them to false")


def _check_zero(engine: _EngineJson) -> int:
    stage = engine.get("zero_optimization", "stage") or 0
    for offload, stages in (("offload_optimizer", (1, 2, 3)), ("offload_param", (3,))):
        device = engine.get("zero_optimization", offload, "device")
        if device not in (None, "none") and stage not in stages:
            engine.fault(
                ("zero_optimization", offload),
                f"offload works at stage {', '.join(map(str, stages))} and this JSON is at stage {stage}; change one of them",
            )
    return stage


def _optimizer(engine: _EngineJson) -> dict[str, Any]:
    section = engine.values.get("optimizer")
    if not isinstance(section, dict) or not isinstance(section.get("type"), str):
        engine.fault(("optimizer",), 'must name an optimizer: "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}')
        engine.raise_faults()
    for key in section:
        if key not in ("type", "params", "legacy_fusion"):
            engine.fault(
                ("optimizer", key), f"unknown key{nearest(key, ('type', 'params', 'legacy_fusion')) or '; allowed are type, params'}"
            )
    ours = [name for cls in technique_classes() for name in cls.optimizer_types]
    canonical = {name.lower(): name for name in (*ENGINE_OPTIMIZERS, *ours)}
    kind = canonical.get(section["type"].lower())
    if kind is None:
        engine.fault(
            ("optimizer", "type"),
            f'is "{section["type"]}"{nearest(section["type"], canonical.values())}; there are {", ".join(canonical.values())}',
        )
        engine.raise_faults()
    params = section.get("params", {})
    if not isinstance(params, dict):
        engine.fault(("optimizer", "params"), f'is {json.dumps(params)}, must be an object: {{"lr": "auto"}}')
        engine.raise_faults()
    if kind in ADAM_TYPES:
        defaults = {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
        allowed = ("lr", "betas", "eps", "weight_decay", "amsgrad", "bias_correction", "adam_w_mode", "torch_adam", "fused")
        for key in params:
            if key not in allowed:
                engine.fault(
                    ("optimizer", "params", key),
                    'moved: write "gradient_clipping" at the top level'
                    if key == "max_grad_norm"
                    else f"unknown key{nearest(key, allowed) or '; allowed are ' + ', '.join(allowed)}",
                )
        if params.get("bias_correction") is False:
            engine.fault(("optimizer", "params", "bias_correction"), "torch's Adam always corrects the bias; leave the key out")
        params = {**params, **{key: value for key, value in defaults.items() if params.get(key, "auto") == "auto"}}
        betas = params["betas"]
        if not (isinstance(betas, list) and len(betas) == 2 and all(isinstance(b, (int, float)) and 0 <= b < 1 for b in betas)):
            engine.fault(("optimizer", "params", "betas"), f"is {json.dumps(betas)}, must be two numbers from 0 to below 1")
        engine.number("optimizer", "params", "eps", minimum=0)
        engine.number("optimizer", "params", "weight_decay", minimum=0)
    return {"type": kind, "params": dict(params)}


def _batch(engine: _EngineJson, flags: argparse.Namespace, preset: Preset, ranks: int) -> tuple[int, int, int]:
    """Global batch, micro-batch, accumulation: global = micro x accumulation x ranks. What is not given follows from the rest."""
    keys = {"global": "train_batch_size", "micro": "train_micro_batch_size_per_gpu", "accumulation": "gradient_accumulation_steps"}
    faults_before = len(engine.faults)
    for key in keys.values():
        engine.number(key, minimum=1, whole=True)
    if len(engine.faults) > faults_before:
        engine.raise_faults()
    total = engine.agree((keys["global"],), "global_batch_size", flags.global_batch_size)
    micro = engine.agree((keys["micro"],), "micro_batch_size", flags.micro_batch_size)
    accumulation = engine.get(keys["accumulation"])
    engine.raise_faults()
    source = f"{engine.file}, flags and --preset {flags.preset}"
    if total is None:
        total = micro * accumulation * ranks if micro and accumulation else preset.global_batch_size
    per_rank, rest = divmod(int(total), ranks)
    if rest:
        lower, upper = total - rest, total - rest + ranks
        raise UsageError(
            f"{source}: a global batch of {total} sequences cannot be shared evenly by {ranks} ranks; "
            f"--global_batch_size {lower or upper} or {upper} can"
        )
    if micro is None and accumulation is not None:
        micro, rest = divmod(per_rank, accumulation)
        if rest or not micro:
            raise UsageError(
                f"{source}: {total} sequences over {ranks} ranks are {per_rank} a rank, "
                f"which {accumulation} accumulation steps do not divide; change '{keys['accumulation']}' or --global_batch_size"
            )
    if micro is None:  # the largest micro-batch up to the preset's that divides a rank's share
        micro = next(size for size in range(min(preset.micro_batch_size, per_rank), 0, -1) if per_rank % size == 0)
    if accumulation is None:
        accumulation = per_rank // micro
    if micro * accumulation * ranks != total:
        raise UsageError(
            f"{source}: micro-batch {micro} x accumulation {accumulation or 1} x {ranks} ranks = {micro * (accumulation or 1) * ranks} "
            f"sequences, but the global batch is {total}; change --global_batch_size or --micro_batch_size so that they multiply"
        )
    return int(total), int(micro), int(accumulation)


def _length(engine: _EngineJson, flags: argparse.Namespace, preset: Preset, tokens_per_step: int) -> tuple[int, int]:
    """Steps and tokens of the run: --steps, --tokens, the JSON's total_tokens, or the preset's steps."""
    if flags.steps is not None and flags.tokens is not None:
        raise UsageError(f"--steps {flags.steps} and --tokens {flags.tokens} both say how long the run is; give one of them")
    tokens = flags.tokens
    if tokens is None and flags.steps is None and engine.get("scheduler", "type") == TOKEN_SCHEDULE:
        tokens = engine.number("scheduler", "params", "total_tokens", minimum=1, whole=True)
    steps = -(-tokens // tokens_per_step) if tokens is not None else flags.steps or preset.steps
    return int(steps), int(steps) * tokens_per_step


def _schedule(
    engine: _EngineJson, flags: argparse.Namespace, preset: Preset, lr: float, steps: int, total_tokens: int
) -> tuple[dict[str, Any], float, int]:
    section = engine.values.get("scheduler", {"type": TOKEN_SCHEDULE})
    kind = section.get("type") if isinstance(section, dict) else None
    if kind not in (TOKEN_SCHEDULE, *ENGINE_SCHEDULES):
        engine.fault(
            ("scheduler", "type"),
            f"is {json.dumps(kind)}{nearest(str(kind), (TOKEN_SCHEDULE, *ENGINE_SCHEDULES))}; "
            f"there are {', '.join((TOKEN_SCHEDULE, *ENGINE_SCHEDULES))}",
        )
        engine.raise_faults()
    params = section.get("params", {})
    if not isinstance(params, dict):
        engine.fault(("scheduler", "params"), f"is {json.dumps(params)}, must be an object")
        engine.raise_faults()
    # A preset's warm-up is meant for the preset's length; a shorter run warms up over a tenth of itself.
    warmup = flags.warmup_steps if flags.warmup_steps is not None else min(preset.warmup_steps, max(1, steps // 10))
    if kind != TOKEN_SCHEDULE:  # DeepSpeed's own, by steps: fill "auto" as transformers does
        auto = {"warmup_num_steps": warmup, "total_num_steps": steps, "warmup_max_lr": lr, "warmup_min_lr": 0.0}
        params = {key: auto.get(key, value) if value == "auto" else value for key, value in params.items()}
        for key, value in params.items():
            if value == "auto":
                engine.fault(("scheduler", "params", key), '"auto" has no meaning here; write a value or leave the key out')
        return {"type": kind, "params": params}, flags.min_lr or 0.0, warmup
    for key in params:
        if key not in TOKEN_SCHEDULE_PARAMS:
            engine.fault(
                ("scheduler", "params", key),
                f"unknown key{nearest(key, TOKEN_SCHEDULE_PARAMS) or ''}; allowed are {', '.join(TOKEN_SCHEDULE_PARAMS)}",
            )
    engine.number("scheduler", "params", "min_lr", minimum=0)
    engine.number("scheduler", "params", "warmup_steps", minimum=0, whole=True)
    engine.number("scheduler", "params", "total_tokens", minimum=1, whole=True)
    engine.raise_faults()
    min_lr = engine.agree(("scheduler", "params", "min_lr"), "min_lr", flags.min_lr)
    min_lr = lr / 10 if min_lr is None else min_lr
    asked = engine.agree(("scheduler", "params", "warmup_steps"), "warmup_steps", flags.warmup_steps)
    warmup = int(warmup if asked is None else asked)
    planned = engine.get("scheduler", "params", "total_tokens")
    planned = total_tokens if planned is None else int(planned)
    if min_lr > lr:
        engine.fault(
            ("scheduler", "params", "min_lr"), f"is {min_lr:g}, above the peak learning rate of {lr:g}; lower --min_lr or raise --lr"
        )
    if warmup >= steps and warmup > 0 and asked is not None:
        engine.fault(
            ("scheduler", "params", "warmup_steps"), f"is {warmup}, but the run has {steps} steps; lower --warmup_steps or raise --steps"
        )
    engine.raise_faults()
    return {"type": kind, "params": {"min_lr": min_lr, "warmup_steps": warmup, "total_tokens": planned}}, min_lr, warmup


def _auto_paths(value: Any, path: KeyPath = ()) -> list[KeyPath]:
    """Paths below `value` that still say `"auto"`; data_types.keep_in_fp32_modules is DeepSpeed's own "auto"."""
    if value == "auto":
        return [] if path[:1] in (("data_types",), ("pipeline",)) else [path]
    if isinstance(value, dict):
        return [found for key, item in value.items() for found in _auto_paths(item, (*path, key))]
    return []
