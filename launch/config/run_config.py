"""The configuration of a run: flags and DeepSpeed JSON in, one resolved and immutable `RunConfig` out, before ranks meet.

A value that the JSON leaves `"auto"` (or leaves out) comes from the flag, or else from the preset. A concrete value in the JSON that
disagrees with a flag is an error that names both. What cannot work is refused here, in one line for each fault.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import re
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_pipeline.errors import DataError
from data_pipeline.sampler import GlobalSampler
from data_pipeline.shards import Corpus, open_corpus
from launch.config.combinations import CUDA_ONLY, OFFLOAD_STAGES, check_combinations, check_with_deepspeed
from launch.config.deepspeed_json import DeepSpeedJson, check_keys, drop_removed_if_off, fill_defaults, section_rule, value_at
from launch.config.deepspeed_schema import BUFFER_SIZE, MAX_IN_CPU
from launch.config.flags import MAX_TOKENS, MOST_STEPS_UNSAVED, VALUES, RunValues, given_fields, parse_flags
from launch.config.optimizer import check_schedule, fill_optimizer, resolve_optimizer, resolve_schedule
from launch.config.store_url import check_url
from launch.config.token_schedule import TOKEN_SCHEDULES, TokenSchedule, token_schedule
from launch.errors import UsageError, nearest
from launch.formats.checkpoint_files import complete_checkpoints
from model.accounting import model_tensors
from model.presets import FIELDS, PRESETS, SIZES, GPTConfig, ModelShape, Preset, shape_of
from recipes import registry
from recipes.technique import (
    FP32_NAMES,
    SEQUENCE_PARALLEL,
    RunForTechniques,
    Techniques,
    divisors,
    largest_divisor,
    planned_steps,
    ranks_in_words,
)

if TYPE_CHECKING:
    from data_pipeline.loader import Loader
    from launch.formats.hf_folder import HFFolder

ROOT = Path(__file__).resolve().parents[2]
#: The sections of `zero_optimization` that keep states off the device.
OFFLOADS = tuple(OFFLOAD_STAGES)
#: The folder for `"nvme_path": "auto"`, in the run's folder.
SCRATCH = "nvme"
FROM_THE_BATCH = "from the global batch"
#: A run of more epochs, also of one source of a mixture, gets a note.
MANY_EPOCHS = 10
#: A bf16 run that sums more micro-batches in bf16 gets a note. At this number the sum is 3% off, which is 0.06 of the gradient's noise.
MANY_SUMS = 256
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True, kw_only=True)
class RunConfig(RunValues, RunForTechniques):
    """A resolved run, as data. Batch sizes count sequences, lengths and budgets count tokens.

    Attributes:
        found_corpus: None where a run is explained without it; its vocabulary size is then `assumed_vocab_size`.
        start: the folder of the initial weights; None also if a checkpoint is loaded.
        steps_to_make: optimizer steps that the run's tokens take: `steps`, or more where techniques make steps of less than a whole batch.
        cuda_only: the place of each key that is switched on and needs CUDA -> the least compute capability.
        notes: for the log and `--explain`.
        lacks: what the run needs and this machine does not have.
        origins: name of a value, or dotted path in the DeepSpeed JSON -> where it came from, in a few words.
        given: the flags that a start by the run's folder repeats.
    """

    found_corpus: Corpus | None = field(repr=False, compare=False)
    assumed_vocab_size: int = 0
    start: HFFolder | None = field(default=None, repr=False, compare=False)
    steps_to_make: int = 0
    cuda_only: dict[str, tuple[int, int]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    origins: dict[str, str] = field(default_factory=dict, repr=False, compare=False)
    given: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def vocab_size(self) -> int:
        return self.found_corpus.vocab_size if self.found_corpus else self.assumed_vocab_size

    @property
    def corpus(self) -> Corpus:
        assert self.found_corpus is not None, "a run is trained with its corpus only"
        return self.found_corpus

    @property
    def model_config(self) -> GPTConfig:
        # Without a corpus: our tokenizers, and GPT-2's, have the end of text last.
        end = self.found_corpus.eot_id if self.found_corpus else self.vocab_size - 1
        return GPTConfig(
            **asdict(self.shape),
            vocab_size=self.vocab_size,
            init_seed=self.seed,
            document_end=end if self.no_cross_document else None,
        )

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.shape.seq_len

    @property
    def token_schedule(self) -> TokenSchedule | None:
        return token_schedule(self.scheduler, self.lr, self.tokens_per_step)

    @property
    def saves_beside_training(self) -> bool:
        """Whether any checkpoint but the last is saved, so that training continues while it is written."""
        return 0 < self.save_every < self.steps_to_make

    @property
    def uses_nvme(self) -> bool:
        """Whether anything is offloaded to NVMe."""
        return any(self.offload(key) == "nvme" for key in OFFLOADS)

    @property
    def quantizes_weights(self) -> bool:
        """Whether weights are gathered as int8."""
        return bool(self.ds_config["zero_optimization"].get("zero_quantized_weights"))

    @property
    def swap_folders(self) -> dict[str, Path]:
        """The folder on NVMe of each of `OFFLOADS` that is there. It is this run's own, because DeepSpeed names the files in it by rank
        only, and is deleted after the run."""
        run = Path(self.runs_dir).absolute() / self.run_name
        own = f"{self.run_name}-{hashlib.sha256(os.fsencode(run)).hexdigest()[:8]}"
        folders = {key: Path(self.ds_config["zero_optimization"][key]["nvme_path"]) for key in OFFLOADS if self.offload(key) == "nvme"}
        return {key: folder if folder.absolute() == run / SCRATCH else folder / own for key, folder in folders.items()}

    def training_loader(self, collectives: Any) -> Loader:
        """This rank's loader of the training split, in the run's order. collectives: has rank, world_size and device."""
        from data_pipeline.loader import Loader  # imports torch, which --help does without

        groups = self.corpus.train.group_windows(self.shape.seq_len, len(self.corpus.mixture))
        sampler = GlobalSampler(groups, self.seed, self.corpus.fingerprint, self.corpus.mixture)
        return Loader(
            self.corpus.train,
            sampler,
            self.shape.seq_len,
            self.corpus.vocab_size,
            self.data_rank(collectives.rank),
            collectives.world_size // self.ranks_per_row,
            collectives.device,
        )

    def as_json(self) -> dict[str, Any]:
        """The configuration as `run.json` records it."""
        # The shape has what the architecture sets.
        names = [
            one.name
            for cls in (RunValues, RunForTechniques)
            for one in fields(cls)
            if one.name not in ("architecture", "shape", "ds_config")
        ]
        own = {name: getattr(self, name) for name in names}
        return {**own, "engine": self.ds_config, "shape": self.shape.recorded(), "zero_stage": self.zero_stage, "precision": self.precision}


def cuda_requirement(place: str, capability: tuple[int, int]) -> str:
    """The message that the key at `place` needs CUDA."""
    return f"{place} needs CUDA" + (f" and compute capability {capability[0]}.{capability[1]} or higher" if any(capability) else "")


def _placed(ds_json: DeepSpeedJson, reason: str) -> str:
    """`reason` of a technique, with the quoted key at its beginning replaced by the key's place in the file."""
    key = re.match(r"'([\w.]+)'", reason)
    return ds_json.where(tuple(key[1].split("."))) + reason[key.end() :] if key else f"{ds_json.file}: {reason}"


def resolve(argv: list[str], ranks: int | None = None) -> tuple[RunConfig, argparse.Namespace]:
    """Resolve flags and JSON into a `RunConfig`.

    Args:
        argv: the flags of `launch/pretrain.py`.
        ranks: how many ranks the launcher started; default: WORLD_SIZE, else `--ranks`, else as many as share a row.

    Raises:
        UsageError: every fault of the file, a line each, or the first of the flags.
        RecipeError: the recipe is missing, or its recipe.json is wrong.
        DataError: the corpus is missing or damaged.
    """
    flags, recipe = parse_flags(argv)
    ranks = ranks or _ranks(flags)
    preset, shape = _model(flags)
    file = str(ROOT / recipe.config) if recipe else flags.deepspeed_config
    run_name = flags.run_name or (recipe.name if recipe else Path(file).stem)
    ds_json = DeepSpeedJson(file, flags)
    claimed = {cls.declaration.section: cls for cls in registry.technique_classes() if cls.declaration.section}
    for section, cls in claimed.items():
        if ds_json.values.get(section) == "auto" and (keys := [key for key, rule in cls.declaration.keys.items() if rule.get("auto")]):
            ds_json.fill((section,), dict.fromkeys(keys, "auto"), '"auto"')
    rules = {name: section_rule(cls) for name, cls in claimed.items()}
    drop_removed_if_off(ds_json, rules)
    check_keys(ds_json, rules)
    for section, cls in claimed.items():
        if section in ds_json.values and cls.declaration.is_on(ds_json.values[section]):
            fill_defaults(ds_json, (section,), section, cls.declaration.keys)
    for key in OFFLOADS:
        if (ds_json.get("zero_optimization", key) or {}).get("nvme_path") == "auto":
            path = ("zero_optimization", key, "nvme_path")
            ds_json.fill(path, str(Path(flags.runs_dir) / run_name / SCRATCH), "auto: in the run's folder")
    ranks = ranks or ds_json.get(SEQUENCE_PARALLEL) or 1
    ranks_per_row = _ranks_per_row(ds_json, ranks)
    check_combinations(ds_json, ranks, shape, claimed)
    optimizer, lr = resolve_optimizer(ds_json, flags, preset)
    global_batch, micro_batch, accumulation = _batch(ds_json, flags, preset, ranks // ranks_per_row, ranks_per_row)
    check_schedule(ds_json)
    steps, total_tokens, length_from = _length(ds_json, flags, preset, global_batch * shape.seq_len)
    schedule = resolve_schedule(ds_json, flags, preset, lr, steps, total_tokens)
    fill_optimizer(ds_json, optimizer.get("type", ""))
    ds_json.fill(("gradient_clipping",), 1.0, "DeepSpeed's default")
    if flags.init_from and flags.branch_from:
        ds_json.fault_of_run("--init_from and --branch_from: each sets the initial weights; give one of them")
    if flags.checkpoint_store is not None and (lacking := check_url(flags.checkpoint_store, flags.runs_dir)):
        ds_json.lacks.append(lacking)
    ours = {cls.declaration.optimizer_type for cls in registry.technique_classes()}
    if flags.spike_rule in ("skip", "rewind") and optimizer.get("type") in ours:
        ds_json.fault_of_run(
            f"--spike_rule {flags.spike_rule} does not support {optimizer['type']}, an optimizer of a recipe; give --spike_rule log"
        )
    ds_json.raise_faults()
    check_with_deepspeed(ds_json, claimed)
    ds_json.raise_faults()

    corpus = _corpus(ds_json, flags, preset, shape, micro_batch)
    if corpus is not None:
        ds_json.notes += _often_repeated(corpus, flags.data, total_tokens)
    start = _start(flags, run_name, corpus, ds_json.notes)
    own = {key: ds_json.values[key] for key in claimed if key in ds_json.values}
    given = {name: getattr(flags, name) for name in VALUES if hasattr(flags, name)}
    settled = {
        "run_name": run_name,
        "recipe": recipe.name if recipe else None,
        "config_file": file,
        "steps": steps,
        "ranks": ranks,
        "micro_batch_size": micro_batch,
        "global_batch_size": global_batch,
        "lr": schedule.lr,
        "warmup_steps": schedule.warmup_steps,
        "eval_every": flags.eval_every if flags.eval_every is not None else -(-steps // 10),
        "save_every": flags.save_every if flags.save_every is not None else min(-(-steps // 4), MOST_STEPS_UNSAVED),
    }
    config = RunConfig(
        **{**given, **settled},
        shape=shape,
        gradient_accumulation_steps=accumulation,
        total_tokens=total_tokens,
        ds_config={key: value for key, value in ds_json.values.items() if key not in own and key not in ("optimizer", "scheduler")},
        optimizer=optimizer,
        scheduler=schedule.scheduler,
        techniques={key: value for key, value in own.items() if claimed[key].declaration.is_on(value)},
        found_corpus=corpus,
        assumed_vocab_size=preset.vocab_size,
        start=start,
        given=flags.given,
    )
    if config.precision == "bf16" and accumulation > MANY_SUMS and ds_json.get("data_types", "grad_accum_dtype") not in FP32_NAMES:
        ds_json.notes.append(
            f"the gradients of {accumulation:,} micro-batches are summed in bf16, whose rounding adds noise: raise the micro-batch, or at"
            ' stages 1 to 3 set data_types.grad_accum_dtype to "fp32" (recipes/bf16/README.md)'
        )
    config = _check_techniques(ds_json, config)
    _check_weights_on_drive(ds_json, config)
    origins = _origins(ds_json, flags) | {"steps": length_from}
    return replace(config, notes=tuple(ds_json.notes), lacks=tuple(ds_json.lacks), origins=origins), flags


def _check_techniques(ds_json: DeepSpeedJson, config: RunConfig) -> RunConfig:
    """`config` with what follows from its techniques. Their notes, missing packages and resolved parameters are added to `ds_json`.

    Raises:
        UsageError: a technique refuses the run, or the run ends before a schedule does whose length the user wrote.
    """
    try:
        techniques = registry.make_techniques(config)  # each checks its own section when it is built
        resizing = [one for one in techniques.members if one.declaration.changes_tokens or one.declaration.section == SEQUENCE_PARALLEL]
        *_, end = planned_steps(config, Techniques(resizing), stride=config.total_tokens)
    except ValueError as reasons:
        raise UsageError(*(_placed(ds_json, str(reason)) for reason in reasons.args)) from None
    what, _, _ = (config.profile or "").partition(":")
    cuda_only = {path: (0, 0) for path in CUDA_ONLY if value_at(config.ds_config, path.split("."))} | techniques.needs_cuda
    config = replace(
        config,
        steps_to_make=end.number + end.repeats - 1,
        cuda_only={ds_json.where(tuple(path.split("."))): capability for path, capability in cuda_only.items()}
        | ({"--profile memory": (0, 0)} if what == "memory" else {}),
    )
    if what.isdecimal() and int(what) > config.steps_to_make:
        raise UsageError(f"--profile {config.profile}: the run ends at step {config.steps_to_make:,}; give an earlier step")
    ds_json.notes += techniques.notes
    if config.shape.n_expert and "expert_balance" not in config.techniques:
        ds_json.notes.append("nothing balances the experts, and a few get most tokens; --set expert_balance.enabled=true does")
    for member in techniques.members:
        ds_json.lacks += [_placed(ds_json, line) for line in member.missing_packages]
        for key, (resolved, origin) in member.resolved_params.items():
            ds_json.fill(("optimizer", "params", key), resolved, origin)  # in `config.optimizer` too
        last = member.stages[-1] if member.stages else 1
        if last <= config.steps or last <= config.steps_to_make:
            continue
        ends = f"the run ends at step {config.steps_to_make:,}"
        if member.schedule_key:
            place = ds_json.where(tuple(member.schedule_key.split(".")))
            raise UsageError(f'{place}: acts from step {last:,} on, but {ends}; lower it, write "auto", or train longer')
        ds_json.notes.append(f"{member.declaration.name}: the last stage of its schedule begins at step {last:,}, and {ends}")
    return config


def _check_weights_on_drive(ds_json: DeepSpeedJson, config: RunConfig) -> None:
    """Refuse a buffer for weights on NVMe that is smaller than a rank's part of the largest weight: the first step would fail.

    Refuse weights that stay on NVMe without the optimizer: DeepSpeed 0.19.8 could not load their checkpoints.
    """
    if config.offload("offload_param") != "nvme":
        return
    path = ("zero_optimization", "offload_param", "buffer_size")
    size = (written := ds_json.get(*path)) or BUFFER_SIZE
    sizes = [math.prod(shape) for shape in model_tensors(config.model_config).values()]
    largest = -(-max(sizes) // config.ranks)
    if largest > size:
        raise UsageError(
            f"{ds_json.where(path)} is {size if written else f'left out, which means {size}'}, but a rank's part of the largest weight has "
            f"{largest:,} elements; write {largest} or more, or use more ranks"
        )
    path = ("zero_optimization", "offload_param", "max_in_cpu")
    kept, own = ds_json.get(*path), sum(-(-size // config.ranks) for size in sizes)  # DeepSpeed pads each tensor
    kept = MAX_IN_CPU if kept is None else int(kept)
    if kept < own and config.offload("offload_optimizer") != "nvme":
        raise UsageError(
            f"{ds_json.where(path)}: {kept:,} of a rank's {own:,} weights are kept in host memory and the others on NVMe, where DeepSpeed"
            f" 0.19.8 cannot load a checkpoint unless the optimizer is on NVMe too; write {own} or more, or set offload_optimizer.device"
            " to nvme"
        )


def _corpus(ds_json: DeepSpeedJson, flags: argparse.Namespace, preset: Preset, shape: ModelShape, micro_batch: int) -> Corpus | None:
    """The corpus. `--explain` works without one; what is wrong is then noted in `ds_json.lacks`.

    Raises:
        DataError: it is missing, damaged or too small, and the run is to be trained.
        UsageError: `--no_cross_document` is set, but the corpus has no end-of-text token.
    """
    corpus = None
    try:
        corpus = open_corpus(flags.data)
        if flags.no_cross_document and corpus.eot_id is None:
            raise UsageError(
                f"--no_cross_document: {flags.data} has no end-of-text token: its ids are characters; leave the flag out, or prepare"
                " the text with data_pipeline/prepare.py"
            )
        # Refuses a split, or a group of a mixture, that is too small for one sequence.
        sequences = corpus.train.windows(shape.seq_len)
        corpus.train.group_windows(shape.seq_len, len(corpus.mixture))
        corpus.val.windows(shape.seq_len)
        if micro_batch > sequences:
            fix = f"the training text of {flags.data} has {sequences:,} sequences of {shape.seq_len} tokens; lower --micro_batch_size"
            ds_json.lack(("train_micro_batch_size_per_gpu",), f"a micro-batch of {micro_batch:,} sequences is too large: {fix}")
    except DataError as reason:
        fault = f"{'' if Path(flags.data).is_dir() else '--data '}{reason}"
        if flags.explain is None:
            raise DataError(fault) from None
        ds_json.lacks.append(fault if corpus else f"{fault} (a vocabulary of {preset.vocab_size:,} is assumed)")
    return corpus


def _often_repeated(corpus: Corpus, data: str, total_tokens: int) -> list[str]:
    """A note on each group of the corpus on which the run trains more than MANY_EPOCHS times."""
    groups = zip(corpus.mixture, corpus.train.group_tokens(len(corpus.mixture)), strict=True)
    which = [f"the tokens of source {name}" for name in corpus.names] or ["each of its tokens"]
    repeats = {name: weight * total_tokens / tokens for name, (weight, tokens) in zip(which, groups, strict=True) if tokens}
    return [f"{data}: the run trains on {name} {times:,.0f} times" for name, times in repeats.items() if times > MANY_EPOCHS]


def _start(flags: argparse.Namespace, run_name: str, corpus: Corpus | None, notes: list[str]) -> HFFolder | None:
    """The folder whose weights the run starts from; None if there is none, or if a checkpoint has newer weights.

    The folder's vocabulary may be larger than the corpus's, as many models pad it; the rest of its rows is then left out. If the
    tokenizers cannot be compared, a line is added to `notes`.

    Raises:
        UsageError: the folder is faulty, or its tokenizer is not that of the run.
    """
    checkpoints = Path(flags.runs_dir) / run_name / "checkpoints"
    if flags.init_from is None or (flags.resume and complete_checkpoints(checkpoints)):
        return None
    if flags.resume and flags.checkpoint_store is not None and not Path(flags.init_from).exists():
        return None  # the store must have newer weights; otherwise `train` refuses
    from launch.formats.hf_folder import open_hf_folder  # imports torch, which --help does without

    folder = open_hf_folder(flags.init_from)
    where = f"--init_from {flags.init_from}"
    if corpus is None:
        return folder
    theirs, own = folder.config.vocab_size, corpus.vocab_size
    again = f"prepare the text with the folder's tokenizer: data_pipeline/prepare.py --tokenizer {flags.init_from}"
    if theirs < own:
        raise UsageError(f"{where}: vocab_size is {theirs:,} there, and {own:,} in {flags.data}; {again}")
    if theirs == own and not folder.has_tokenizer:
        return folder
    from launch.formats.folder_tokenizer import difference, tokenizer_of_corpus, tokenizer_of_folder  # as above

    (their_tokenizer, why), (tokenizer, why_own) = tokenizer_of_folder(folder), tokenizer_of_corpus(corpus)
    if their_tokenizer is None or tokenizer is None:
        unknown = f"{where}: cannot tell whether {flags.data} was made with its tokenizer: {why or why_own}"
        if theirs > own:
            raise UsageError(f"{unknown}; its vocab_size is {theirs:,}, and that of the corpus {own:,}: copy the model's tokenizer there")
        notes.append(unknown)
    elif (differs := difference(corpus, tokenizer, their_tokenizer)) is not None:
        raise UsageError(f"{where}: its tokenizer gives other ids than that of {flags.data}: {differs}; {again}")
    elif theirs > own:
        notes.append(f"{where}: the last {theirs - own:,} of its {theirs:,} ids are not in its tokenizer and are left out")
        return replace(folder, config=replace(folder.config, vocab_size=own))
    return folder


def _origins(ds_json: DeepSpeedJson, flags: argparse.Namespace) -> dict[str, str]:
    """The origin of each of the run's own values, and of each value of the JSON."""
    left_open = {
        **{name: one.origin.format_map(vars(flags)) for name, one in VALUES.items()},
        **dict.fromkeys(SIZES, f"preset {flags.preset}"),
        **dict.fromkeys(FIELDS, f"architecture {flags.architecture}"),
        **dict.fromkeys(PRESETS[flags.preset].fields_in(flags.architecture), f"preset {flags.preset}"),
    }
    launched = {"ranks": "the launcher"} if "WORLD_SIZE" in os.environ else {}
    return left_open | flags.origins | launched | ds_json.origins()


def _ranks(flags: argparse.Namespace) -> int | None:
    """The number of ranks: the launcher's, else `--ranks`, which may be left out."""
    launched = os.environ.get("WORLD_SIZE")
    if launched is None:
        return flags.ranks
    if not launched.isdecimal() or int(launched) < 1:
        raise UsageError(f"the environment variable WORLD_SIZE is {launched!r}: it must be the number of ranks, or not set")
    if flags.ranks not in (None, int(launched)):
        raise UsageError(f"--ranks {flags.ranks}: the launcher started {launched} ranks; start {flags.ranks}, or leave the flag out")
    return int(launched)


def _model(flags: argparse.Namespace) -> tuple[Preset, ModelShape]:
    """The preset and the model. Replaces `flags.architecture`, if it is not given, by the preset's."""
    if flags.preset not in PRESETS:
        meant = nearest(flags.preset, PRESETS) or f"; there are {', '.join(PRESETS)}"
        raise UsageError(f"--preset {flags.preset}: no such preset{meant}")
    preset = PRESETS[flags.preset]
    flags.architecture = flags.architecture or preset.architecture
    given = given_fields(flags, asdict(preset.shape))
    try:
        return preset, shape_of(preset.shape, flags.architecture, {**preset.fields_in(flags.architecture), **given})
    except ValueError as reason:
        given_flags = ", ".join(f"--{key} {str(value).lower()}" for key, value in given.items())
        raise UsageError(f"--preset {flags.preset} --architecture {flags.architecture} with {given_flags}: {reason}") from None


def _ranks_per_row(ds_json: DeepSpeedJson, ranks: int) -> int:
    """The number of consecutive ranks that read the same rows."""
    size = int(ds_json.get(SEQUENCE_PARALLEL) or 1)
    if ranks % size:
        fix = f"write a divisor, or start a multiple of {size} ranks"
        ds_json.fault((SEQUENCE_PARALLEL,), f"is {size}, which does not divide the run's {ranks_in_words(ranks)}; {fix}")
        return 1
    if ds_json.get("data_parallel_size") not in (None, ranks // size):
        ds_json.fault(("data_parallel_size",), f"is not {ranks // size}, the number of ranks that read different rows; leave it out")
    return size


def _key_or_flag(ds_json: DeepSpeedJson, key: str, flag: str) -> str:
    """What the user changes: the key of the JSON, in quotes, if it has a value, else the flag."""
    return f"--{flag}" if ds_json.get(key) is None else f"'{key}'"


def _batch(ds_json: DeepSpeedJson, flags: argparse.Namespace, preset: Preset, data_ranks: int, ranks_per_row: int) -> tuple[int, int, int]:
    """Global batch, micro-batch and accumulation, where global = micro x accumulation x data ranks; computes those that are not given."""
    sharing = ranks_in_words(data_ranks, ranks_per_row)
    written = [(key,) for key in BATCH_KEYS if ds_json.get(key) is not None]
    total = ds_json.asked(("train_batch_size",), "global_batch_size")
    micro = ds_json.asked(("train_micro_batch_size_per_gpu",), "micro_batch_size")
    accumulation = ds_json.get("gradient_accumulation_steps")
    origins = {
        "train_batch_size": flags.origins.get("global_batch_size", f"preset {flags.preset}"),
        "train_micro_batch_size_per_gpu": flags.origins.get("micro_batch_size", f"preset {flags.preset}, at most"),
        "gradient_accumulation_steps": FROM_THE_BATCH,
    }

    def refused(message: str) -> tuple[int, int, int]:
        """Note a fault at the first batch key that the file sets, and return a batch that passes the later checks."""
        if written:
            ds_json.fault(written[0], message)
        else:
            ds_json.fault_of_run(f"{ds_json.file}, flags and --preset {flags.preset}: {message}")
        return data_ranks, 1, 1

    if total is None:
        total = micro * accumulation * data_ranks if micro and accumulation else preset.global_batch_size
        if micro and accumulation:
            origins["train_batch_size"] = "micro-batch x accumulation x ranks"
    per_rank, rest = divmod(total, data_ranks)
    unit = data_ranks * (micro or 1) * (accumulation or 1)
    below = 0 if micro and accumulation else total // unit * unit
    fits = [f"{_key_or_flag(ds_json, 'train_batch_size', 'global_batch_size')} {below or unit}" + (f" or {below + unit}" if below else "")]
    if rest:
        return refused(f"a global batch of {total} sequences cannot be shared evenly by {sharing}; give {fits[0]}")
    if micro and not accumulation:
        near = sorted(sorted(divisors(per_rank), key=lambda size: abs(size - micro))[:2])
        fits.append(f"{_key_or_flag(ds_json, 'train_micro_batch_size_per_gpu', 'micro_batch_size')} {' or '.join(map(str, near))}")
    if micro is None and accumulation is not None:
        micro = max(1, per_rank // accumulation)
        origins["train_micro_batch_size_per_gpu"] = FROM_THE_BATCH
    elif micro is None:  # the largest micro-batch up to the preset's that divides a rank's share
        micro = largest_divisor(per_rank, min(preset.micro_batch_size, per_rank))
    if accumulation is None:
        accumulation = max(1, per_rank // micro)
    if micro * accumulation * data_ranks != total:
        return refused(
            f"micro-batch {micro} x accumulation {accumulation} x {sharing} = {micro * accumulation * data_ranks} sequences, "
            f"but the global batch is {total}; give {', or '.join(fits)}"
        )
    for (key, origin), value in zip(origins.items(), (total, micro, accumulation), strict=True):
        ds_json.fill((key,), value, origin)
    return total, micro, accumulation


def _length(ds_json: DeepSpeedJson, flags: argparse.Namespace, preset: Preset, tokens_per_step: int) -> tuple[int, int, str]:
    """Steps, tokens (of whole steps) and origin of the run's length: --steps, --tokens, the JSON's total_tokens or the preset."""
    tokens = flags.tokens
    origin = flags.origins.get("tokens") or flags.origins.get("steps", f"preset {flags.preset}")
    if ds_json.get("scheduler", "type") in TOKEN_SCHEDULES:
        path = ("scheduler", "params", "total_tokens")
        planned = ds_json.get(*path)
        if planned is not None and flags.steps is not None and -(-planned // tokens_per_step) != flags.steps:
            ds_json.fault(
                path,
                f"is {planned}, {-(-planned // tokens_per_step)} steps of {tokens_per_step} tokens, but --steps is {flags.steps}; "
                'write "auto" in the JSON or leave the flag out',
            )
        tokens = ds_json.asked(path, "tokens")
        if flags.tokens is None and tokens is not None:
            origin = f"{ds_json.origin(path)}, 'total_tokens'"
    steps = -(-tokens // tokens_per_step) if tokens is not None else flags.steps or preset.steps
    if steps * tokens_per_step > MAX_TOKENS:
        ds_json.fault_of_run(
            f"{steps:,} steps of {tokens_per_step:,} tokens are more than 10^18 tokens; lower --steps, --tokens or --global_batch_size"
        )
    return steps, steps * tokens_per_step, origin
