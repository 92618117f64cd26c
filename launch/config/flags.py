"""The values of a run, each declared once, and the flags of `launch/pretrain.py`, which give them.

`RunValues` declares for each value its flag, its default, where it comes from without a flag, and what a change of it means: on a
resume, between hosts, between two compared runs. To add one, declare it there and use it; a field of the model goes into `OTHER_FLAGS`
instead, a path also into `PATHS`, what a later start must not repeat also into `NOT_REPEATED`. What a value means together with the
DeepSpeed JSON and the preset is decided in `launch.config.run_config`.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from launch.errors import UsageError, is_local_rank_0, nearest
from launch.formats.checkpoint_files import checkpoint_at
from launch.formats.metrics import read_run_json
from model.accounting import KNOWN_DEVICES, known_device
from model.presets import ARCHITECTURES, CHOICES, FIELDS, MODELS_IN_WORDS, PRESETS, SIZES
from recipes.registry import Recipe, read_recipe

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

DEFAULT_DATA = "data/stdlib"
#: The largest learning rate. A larger one is a typo (3e3 for 3e-3) and gives NaN.
MAX_LR = 100.0
#: Positions in the data are int64.
MAX_TOKENS = 10**18
#: Suffix of a whole number -> the power of ten.
SUFFIXES = {"K": 3, "M": 6, "B": 9, "T": 12}
#: The default of --save_every is at most this.
MOST_STEPS_UNSAVED = 1_000
#: `--resume=must` refuses to start without a checkpoint; plain `--resume` then starts at step 0.
MUST = "must"
#: Flags that `--resume FOLDER` does not repeat.
NOT_REPEATED = {"help", "resume", "explain", "local_rank", "deepspeed", "run_name", "runs_dir", "branch_from", "ranks", "quiet", "profile"}
#: Flags that are paths, which hold also where the run is continued from another folder.
PATHS = {"deepspeed_config", "recipe", "data", "init_from"}
#: Flags that replace each other.
ALTERNATIVES = ({"steps", "tokens"}, {"deepspeed_config", "recipe"})
#: The values of a flag for a field that is true or false. They stay strings, so that other commands can pass them on.
TRUTH = {"true": True, "false": False}


class Parser(argparse.ArgumentParser):
    """argparse with our errors (one line, exit code 2, no usage text, the nearest flag). Only one rank prints the help."""

    def __init__(self, prog: str, description: str, epilog: str):
        super().__init__(prog=prog, description=description, epilog=f"Defaults are in parentheses. {epilog}", allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        hint = nearest(choice[1], re.findall(r"\w+", choice[2])) if choice else ""
        raise UsageError(f"{message.removeprefix('argument ')}{hint}; see --help")

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        """`parse_args`, with the nearest flag in the error for an unknown argument."""
        namespace, unknown = self.parse_known_args(arguments)
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            raise UsageError(f"unknown argument {unknown[0]!r}{nearest(unknown[0].split('=')[0], known)}; see --help")
        return namespace

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        if is_local_rank_0():
            super()._print_message(message, file)


def whole_number(minimum: int, maximum: int = 10**12) -> Callable[[str], int]:
    """A type for argparse: a whole number from `minimum` to `maximum`. It may be written as 1e9, 300B or 1.4T."""

    def parse(text: str) -> int:
        scaled = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)(?:[eE]\+?([0-9]{1,2})|([KMBT]))", text)
        if scaled and (number := Fraction(scaled[1]) * 10 ** int(scaled[2] or SUFFIXES[scaled[3]])).denominator == 1:
            value = int(number)
        elif re.fullmatch(r"-?[0-9]{1,40}", text):
            value = int(text)
        else:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(
                f"{text} is out of range: it must be a whole number of at least {minimum} and at most {maximum:,}"
            )
        return value

    return parse


def real_number(minimum: float, maximum: float = math.inf, above: bool = False, below: bool = False) -> Callable[[str], float]:
    """A type for argparse: a finite number from `minimum` to `maximum`; with `above` or `below`, without that bound itself."""
    bounds = f"{'above' if above else 'at least'} {minimum:g}" + (
        f" and {'below' if below else 'at most'} {maximum:g}" if maximum < math.inf else ""
    )

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {bounds}") from None
        if not math.isfinite(value) or not minimum <= value <= maximum or (above and value == minimum) or (below and value == maximum):
            raise argparse.ArgumentTypeError(f"{text} is out of range: it must be {bounds if math.isfinite(value) else 'finite'}")
        return value

    return parse


def profiled(text: str) -> str:
    """A type for argparse: the value of --profile, as it is written."""
    if re.fullmatch(r"([1-9]\d{0,11}:[1-9]\d{0,11}|memory)(:all)?", text, re.ASCII) is None:
        raise argparse.ArgumentTypeError(f"{text!r} must be START:COUNT or memory, with :all for all ranks, such as 10:3 or memory:all")
    return text


def device(text: str) -> str:
    """A type for argparse: "cuda", "cpu", or a GPU with a known peak."""
    if text not in ("cuda", "cpu") and known_device(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no known device; known are cuda, cpu, {', '.join(KNOWN_DEVICES)}")
    return text


def bits_per_second(text: str) -> float:
    """A type for argparse: the rate of a network, in bits per second."""
    rate = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?) ?([mgt])bit", text.strip().lower())
    if not rate or not float(rate[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not the rate of a network; write 100mbit, 25gbit or 3.2tbit")
    return float(rate[1]) * {"m": 1e6, "g": 1e9, "t": 1e12}[rate[2]]


# --- the registry ---------------------------------------------------------------------------------------------------------------------

#: What a change of a value means. FIXED: another value is another run, so a resume must not change it; `_fixed_flags` of
#: launch/training/run_folder/run_json.py adds the model's sizes and what the JSON fixes. TRAINING: it changes the numbers of later steps,
#: of training or evaluation; a resume may change it, and lists the change. INITIAL: it sets the weights before step 1; a resume ignores it.
#: RECORD: it changes no number; a resume lists the change. START: it is about the process; a resume may change it, and does not list it.
FIXED, TRAINING, INITIAL, RECORD, START = "fixed", "training", "initial", "record", "start"
#: The groups of flags, with their titles in --help.
TECHNIQUE, MODEL, LENGTH = "technique (give --deepspeed_config or --recipe)", "model", "data and length"
AUTO, EVALUATION, RUN = 'values that the JSON leaves "auto"', "evaluation", "run"
PLAN = "the plan (launch/pretrain.py: with --explain)"
#: The groups whose flags a recipe may suggest, except `data`: the model and its training, not the run or the machine.
OF_RECIPES = (MODEL, LENGTH, AUTO, EVALUATION)


class Value(NamedTuple):
    """The declaration of a value of the run.

    Attributes:
        kind: what a change of it means: `FIXED`, `TRAINING`, `INITIAL`, `RECORD` or `START`.
        group: the group of its flag; empty: it has none.
        flag: the arguments of `add_argument`.
        origin: where it comes from without a flag, for `--explain`; the flags fill in `{preset}`.
        local: it is of one host, such as a path: hosts may differ in it, and it is not published.
        same_steps: values that make the same steps, so that a branch may have another of them. Without it, a branch may change what a
            resume may change.
    """

    kind: str
    group: str
    flag: dict[str, Any]
    origin: str
    local: bool
    same_steps: tuple[str, ...]


def value(
    group: str = "",
    kind: str = TRAINING,
    origin: str = "default",
    local: bool = False,
    same_steps: tuple[str, ...] = (),
    **flag: Any,
) -> Any:
    """Declare a field of `RunValues`; see `Value`."""
    return field(metadata={"value": Value(kind, group, flag, origin, local, same_steps)})


_positive, _natural, _size, _number = whole_number(1), whole_number(0), whole_number(1, 100_000), whole_number(0, 100_000)


@dataclass(frozen=True, kw_only=True)
class RunValues:
    """The values of a run that `run.json` records beside the DeepSpeed JSON; `RunConfig` has them resolved."""

    config_file: str = value(kind=RECORD, local=True)
    recipe: str | None = value(kind=RECORD)
    preset: str = value(
        MODEL, RECORD, default="nano", metavar="NAME", help=f"size and suggested training values: {', '.join(PRESETS)} (nano)"
    )
    architecture: str = value(
        MODEL, FIXED, origin="preset {preset}", choices=ARCHITECTURES, help="sets the fields below; a flag overrides one field (preset)"
    )
    no_cross_document: bool = value(
        MODEL,
        FIXED,
        action="store_true",
        help="restrict attention to one document and start positions at 0 in each; default: attention crosses document boundaries",
    )
    data: str = value(
        LENGTH, RECORD, local=True, default=DEFAULT_DATA, metavar="DIR", help=f"corpus written by data_pipeline/prepare.py ({DEFAULT_DATA})"
    )
    steps: int = value(LENGTH, type=_positive, help="optimizer steps (preset)")
    micro_batch_size: int = value(AUTO, type=_positive, help="sequences per rank and forward pass (preset)")
    global_batch_size: int = value(AUTO, FIXED, type=_positive, help="sequences per optimizer step, over all ranks (preset)")
    lr: float = value(AUTO, type=real_number(0, MAX_LR, above=True), help="peak learning rate (preset)")
    warmup_steps: int = value(AUTO, type=_natural, help="steps of linear warm-up (preset; at most 40%% of the run)")
    eval_every: int = value(
        EVALUATION,
        origin="a tenth of the run",
        type=_natural,
        help="steps between evaluations on validation text; 0 is off (a tenth of the run)",
    )
    eval_batches: int = value(EVALUATION, type=_positive, default=16, help="global batches of validation text per evaluation (16)")
    whole_eval: bool = value(
        EVALUATION, action="store_true", help="after the last step, also evaluate the whole validation split: whole_val_loss"
    )
    run_name: str = value(
        RUN,
        RECORD,
        origin="the JSON's or the recipe's name",
        metavar="NAME",
        help="folder of the run in --runs_dir (the JSON's or the recipe's name)",
    )
    runs_dir: str = value(RUN, RECORD, local=True, default="runs", metavar="DIR", help="where run folders are made (runs)")
    seed: int = value(RUN, FIXED, type=whole_number(0, 2**63 - 1), default=1, help="random seed of the weights and of the data order (1)")
    init_from: str | None = value(
        RUN,
        INITIAL,
        local=True,
        metavar="DIR",
        help="start from the model in a Hugging Face folder, whose config.json sets architecture and sizes: an exported run or a published "
        + MODELS_IN_WORDS,
    )
    branch_from: str | None = value(
        RUN,
        START,
        local=True,
        metavar="CHECKPOINT",
        help="start from a checkpoint of another run, before the decay of its learning rate: weights, optimizer state and position in the "
        "data; for example runs/long/checkpoints/step-00000300; without a JSON or a recipe, also with the flags of that run",
    )
    resume: bool | str = value(
        RUN,
        START,
        nargs="?",
        const=True,
        default=False,
        metavar="FOLDER",
        help="--resume runs/first continues that run with the flags of its last start; other flags change them. Without a folder: continue "
        "--run_name from its newest complete checkpoint, or from step 0 if it has none; --resume=must refuses to start at step 0",
    )
    save_every: int = value(
        RUN,
        RECORD,
        origin=f"a quarter of the run, at most {MOST_STEPS_UNSAVED:,} steps",
        type=_natural,
        help="steps between checkpoints; 0 saves at the end only (a quarter of the run, at most 1,000)",
    )
    keep: int = value(
        RUN, RECORD, type=_positive, default=3, help="newest checkpoints to keep, in addition to the best by validation loss (3)"
    )
    checkpoint_store: str | None = value(
        RUN,
        START,
        metavar="URL",
        help="also upload each complete checkpoint to this object store while training continues; --resume reads from it too: "
        "s3://bucket/folder (pip install -e .[s3]) or file:///folder; other schemes of fsspec are not tested",
    )
    hang_timeout: int = value(
        RUN,
        START,
        type=_natural,
        default=300,
        metavar="SECONDS",
        help="end the run and name the rank if a rank makes no progress for this time; set it above the longest forward pass, backward "
        "pass or update; 0 is off (300)",
    )
    spike_rule: str = value(
        RUN,
        same_steps=("off", "log"),
        choices=("off", "log", "skip", "rewind"),
        default="off",
        help="if the loss of a step is more than 6 standard deviations above the mean of the last 128 steps: log it, skip "
        "its update, or rewind to the newest checkpoint and skip the data up to and including this step (off)",
    )
    ranks: int = value(RUN, type=_positive, help="refuse another number of ranks; the number to assume for --explain without a launcher")
    profile: str | None = value(
        RUN,
        START,
        type=profiled,
        metavar="START:COUNT",
        help="trace these steps with torch.profiler on rank 0 (START:COUNT:all: on all ranks) into profile/ of the run's folder, for "
        "https://ui.perfetto.dev, and log the largest entries; memory: record the GPU memory of this start's first 3 steps (off)",
    )
    quiet: bool = value(RUN, START, local=True, action="store_true", help="no progress bar; print only warnings and the final result")


#: The values of `RunValues` by name.
VALUES: dict[str, Value] = {one.name: one.metadata["value"] for one in fields(RunValues)}
#: The other flags: the fields of the model, and what becomes part of another value.
OTHER_FLAGS: dict[str, dict[str, dict[str, Any]]] = {
    TECHNIQUE: {
        "deepspeed_config": {"metavar": "FILE", "help": "DeepSpeed JSON, for example one of ds_configs/"},
        "deepspeed": {"action": "store_true", "help": argparse.SUPPRESS},  # the switch of `deepspeed.add_config_arguments`
        "recipe": {"metavar": "DIR", "help": "a recipe folder: its JSON and its suggested flags; see recipes/README.md"},
        "set": {
            "metavar": "KEY=VALUE",
            "action": "append",
            "default": [],
            "dest": "overrides",
            "help": "change one value of the JSON, e.g. --set gradient_clipping=0.5 or --set zero_optimization.stage=2; may be repeated",
        },
    },
    MODEL: {
        "n_layer": {"type": _size, "help": "number of blocks (preset)"},
        "n_head": {"type": _size, "help": "number of attention heads (preset)"},
        "d_model": {"type": _size, "help": "width, a multiple of n_head (preset)"},
        "seq_len": {"type": whole_number(1), "help": "context length in tokens (preset)"},
        "dropout": {"type": real_number(0, 1, below=True), "help": "dropout probability (preset: 0)"},
        "n_kv_head": {"type": _size, "help": "heads of keys and values, a divisor of n_head (gpt2: n_head; else about n_head / 4)"},
        "d_head": {"type": _size, "help": "width of a head (d_model / n_head)"},
        "d_ff": {"type": _size, "help": "width of the MLP's hidden layer (gelu: 4 d_model; swiglu: 8/3 d_model, in multiples of 128)"},
        "n_expert": {"type": _number, "help": "experts of each block, 0 for one MLP (architecture)"},
        "n_expert_active": {"type": _number, "help": "experts that each token goes through (architecture)"},
        "d_expert": {"type": _number, "help": "width of an expert's hidden layer (d_ff / n_expert_active)"},
        "positions": {"choices": CHOICES["positions"], "help": "learned position embeddings or rotary positions (architecture)"},
        "norm": {"choices": CHOICES["norm"], "help": "normalization layer (architecture)"},
        "mlp": {"choices": CHOICES["mlp"], "help": "activation of the MLP (architecture)"},
        "qk_norm": {"choices": TRUTH, "help": "an RMSNorm over each head's queries and keys (architecture)"},
        "bias": {"choices": TRUTH, "help": "biases in linear layers and layernorms (architecture)"},
        "tied_head": {"choices": TRUTH, "help": "share the weight of the output layer and the token embedding (architecture)"},
        "rope_theta": {"type": real_number(0, above=True), "help": "base of the rotary frequencies (architecture)"},
        "norm_eps": {"type": real_number(0, 1, above=True), "help": "added under the square root of norms (architecture)"},
    },
    LENGTH: {
        "tokens": {"type": whole_number(1, MAX_TOKENS), "help": "tokens to train on, instead of --steps; rounded up to whole steps"},
    },
    AUTO: {
        "min_lr": {"type": real_number(0, MAX_LR), "help": "learning rate at the end (cosine: a tenth of the peak; else 0)"},
    },
    RUN: {
        "explain": {
            "nargs": "?",
            "const": "text",
            "choices": ("text", "full", "json"),
            "help": "print the resolved run and stop: text, full (with DeepSpeed's defaults) or json; needs no launcher, corpus or GPU",
        },
        "local_rank": {"type": int, "default": 0, "help": argparse.SUPPRESS},  # the launcher appends it
    },
    PLAN: {
        "gpus": {"type": _positive, "dest": "ranks", "help": "the same as --ranks"},
        "device": {"type": device, "help": "cuda, cpu, or the GPU to plan for, such as h100, which also plans the time"},
        "mfu": {"type": real_number(0, 1, above=True), "help": "MFU without communication (measured: benchmarks/gpu/utilization.json)"},
        "interconnect": {
            "type": bits_per_second,
            "metavar": "RATE",
            "help": "rate of all network adapters of a host, or on one host of a GPU's link, e.g. 400gbit (communication takes no time)",
        },
        "gpu_link": {
            "type": bits_per_second,
            "metavar": "RATE",
            "help": "of several hosts: rate of a GPU's link in its host, where slices of sequences are exchanged (that of --interconnect)",
        },
    },
}


def flags_of(group: str) -> dict[str, dict[str, Any]]:
    """The flags of a group by name, with the arguments of `add_argument`."""
    return {name: one.flag for name, one in VALUES.items() if one.group == group} | OTHER_FLAGS.get(group, {})


def add_flags(parser: Parser, *groups: str) -> None:
    """Add the flags of `groups` to a command."""
    for group in groups:
        added = parser.add_argument_group(group)
        for name, arguments in flags_of(group).items():
            added.add_argument(f"--{name}", **arguments)


def build_parser() -> Parser:
    """The flags of `launch/pretrain.py`."""
    parser = Parser(
        prog="deepspeed launch/pretrain.py",
        description="Train a GPT with the DeepSpeed engine. The JSON sets the technique; the preset and the flags set size and length.",
        epilog="Example: deepspeed launch/pretrain.py --deepspeed_config ds_configs/zero1_bf16.json --preset nano --run_name demo",
    )
    add_flags(parser, TECHNIQUE, *OF_RECIPES, RUN, PLAN)
    return parser


def given_fields(flags: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The fields of the model among `names` that flags give, with their values."""
    return {name: TRUTH.get(value, value) for name in names if (value := getattr(flags, name)) is not None}


def parse_flags(argv: list[str]) -> tuple[argparse.Namespace, Recipe | None]:
    """Parse `argv`; the user's flags override a recipe's suggested ones.

    The namespace has additional entries. `origins`: where each given value came from (`--lr`, or a file). `given`: the flags that
    `--resume FOLDER` repeats.

    Raises:
        UsageError: an unknown flag (with the nearest one), a value out of range, wrong flags in a recipe, no run to continue.
        RecipeError: the recipe is missing, or its recipe.json is wrong.
    """
    parser = build_parser()

    def parse(arguments: list[str]) -> argparse.Namespace:
        namespace = parser.parse(arguments)
        if namespace.steps is not None and namespace.tokens is not None:
            raise UsageError(f"--steps {namespace.steps} and --tokens {namespace.tokens} both set the run's length; give one of them")
        return namespace

    if sum(argument.partition("=")[0] == "--recipe" for argument in argv) > 1:
        raise UsageError("--recipe is given twice; give one, and add the other's section with --set, as recipes/README.md says")
    parse(argv)
    now = given(build_parser(), argv)
    argv, run_json = with_recorded(argv)
    flags = parse(argv)
    if (flags.deepspeed_config is None) == (flags.recipe is None):
        raise UsageError("give one of --deepspeed_config FILE (shipped ones: ds_configs/) and --recipe DIR (recipes/README.md)")
    recipe, suggestions, origins = None, list[str](), dict[str, str]()
    if flags.recipe is not None:
        recipe = open_recipe(flags.recipe)
        try:
            parse(recipe.flags)
        except UsageError as reason:
            raise UsageError(f"{Path(flags.recipe) / 'recipe.json'}: 'flags': {reason}") from None
        suggestions = suggested_flags(recipe, argv)
        origins = dict.fromkeys(given(build_parser(), suggestions), f"{Path(flags.recipe) / 'recipe.json'}")
    shape = shape_flags(flags.init_from) if flags.init_from else {}
    origins |= dict.fromkeys(shape, f"{flags.init_from}/config.json")
    flags = parse([*suggestions, *as_words(shape), *argv])
    _check_names(flags)
    _check_shape(flags, shape)
    origins |= {name: f"--{name}" if name in now else run_json for name in given(build_parser(), argv)}
    keys = [setting.partition("=")[0] for setting in flags.overrides]
    settings = [setting for at, setting in enumerate(flags.overrides) if keys[at] not in keys[at + 1 :]]  # the last one of each key
    repeated = {name: getattr(flags, name) for name in sorted({*origins, "data"} - NOT_REPEATED)} | {"overrides": settings}
    flags.origins, flags.given = origins, repeated
    return flags, recipe


def shape_flags(folder: str) -> dict[str, Any]:
    """The flags of the model in the folder of `--init_from`; empty without its config.json, which `resolve` then refuses."""
    if not (Path(folder) / "config.json").is_file():
        return {}
    from launch.formats.hf_folder import read_config  # imports torch, which --help does without
    from model.hf import hf_form

    model, _ = read_config(Path(folder))
    shape = {name: getattr(model, name) for name in (*SIZES, *FIELDS) if name != "dropout"}
    in_words = {name: str(value).lower() for name, value in shape.items() if isinstance(value, bool)}  # as in `TRUTH`
    return {"architecture": hf_form(model)} | shape | in_words


def _check_shape(flags: argparse.Namespace, shape: dict[str, Any]) -> None:
    """Refuse flags that contradict the model of `--init_from`. Rotary positions have no weights: another length and theta may be given."""
    allowed = {"seq_len", "rope_theta"} if shape.get("positions") == "rotary" else set[str]()
    if wrong := [name for name in shape.keys() - allowed if getattr(flags, name) != shape[name]]:
        theirs, own = (" ".join(f"--{name} {one[name]}" for name in sorted(wrong)) for one in (shape, vars(flags)))
        raise UsageError(f"--init_from {flags.init_from}: its model has {theirs}, and the command {own}; leave the flags out")


def with_recorded(argv: list[str]) -> tuple[list[str], str]:
    """`argv`, after the recorded flags of the run that it continues by its folder; and their file, "" without such a run.

    `--resume FOLDER` continues that run. `--branch_from CHECKPOINT` without a JSON or a recipe repeats the flags of the checkpoint's run.

    Raises:
        UsageError: there is no such run, or the command names another one.
    """
    flags, names = build_parser().parse(argv), given(build_parser(), argv)
    left_out = NOT_REPEATED.union(*(group for group in ALTERNATIVES if group & names))
    if flags.resume not in (False, True, MUST):
        if names & {"run_name", "runs_dir"}:
            raise UsageError(f"--resume {flags.resume} names the run; leave out --run_name and --runs_dir")
        run = Path(flags.resume) if Path(flags.resume).name else Path.cwd()
        if not (flags.resume and run.is_dir()):
            raise UsageError(f"--resume {flags.resume}: no such folder; give the folder of a run, such as runs/first")
        argv = [*argv, "--runs_dir", str(run.parent), "--run_name", run.name, "--resume"]
    elif flags.branch_from and not names & {"deepspeed_config", "recipe"}:
        checkpoint = checkpoint_at(flags.branch_from)
        run = checkpoint.parents[1]
        argv = ["--runs_dir", str(run.parent), "--run_name", f"{run.name}-from-{checkpoint.name}", *argv]
        left_out |= {"init_from"}
    else:
        return argv, ""
    description = read_run_json(run / "run.json")
    last = [description, *description.get("resumes", [])][-1]
    recorded = last.get("flags")
    if recorded is None:  # an earlier version wrote it
        recorded = _given(build_parser(), last.get("command", description["command"])[1:])
    recorded = {name: value for name, value in recorded.items() if name not in left_out}
    for name in PATHS & recorded.keys():
        there = os.path.join(last.get("folder") or "", recorded[name])
        if last.get("folder") != os.getcwd() and os.path.exists(there):
            recorded[name] = there
    return [*as_words(recorded), *argv], str(run / "run.json")


def open_recipe(folder: str | Path) -> Recipe:
    """`read_recipe`. Raises UsageError if the recipe sets flags of a run or of a machine, such as --resume or --runs_dir."""
    recipe = read_recipe(folder)
    allowed = {"set", *(name for group in OF_RECIPES for name in flags_of(group))} - {"data"}
    known = {name for group in (TECHNIQUE, *OF_RECIPES, RUN, PLAN) for name in flags_of(group)}
    found = {word.partition("=")[0][2:]: "flags" for word in recipe.flags}
    found |= {flag: f"experiments.{name}.sweep" for name, experiment in recipe.experiments.items() for flag in experiment.sweep}
    for name in sorted(found.keys() & known - allowed):
        why = "is not for a recipe, which sets the model and its training only; leave it out there"
        raise UsageError(f"{Path(folder) / 'recipe.json'}: '{found[name]}': --{name} {why}")
    return recipe


def suggested_flags(recipe: Recipe, arguments: Sequence[str]) -> list[str]:
    """The recipe's suggested flags that apply beside the user's `arguments`.

    A length replaces the suggested one. A preset has its own size and training values, so it replaces all but the architecture.
    """
    names, suggested = ({word.partition("=")[0] for word in words if word.startswith("--")} for words in (arguments, recipe.flags))
    if "--preset" in names:
        return without(recipe.flags, *(suggested - {"--architecture", *(f"--{field}" for field in FIELDS)}))
    return without(recipe.flags, "--steps", "--tokens") if names & {"--steps", "--tokens"} else recipe.flags


def given(parser: argparse.ArgumentParser, arguments: list[str]) -> set[str]:
    """The names of the flags in `arguments`. Removes the parser's defaults."""
    return set(_given(parser, arguments))


def _given(parser: argparse.ArgumentParser, arguments: list[str]) -> dict[str, Any]:
    """The flags in `arguments` that the parser knows, with their values. Removes the parser's defaults."""
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return vars(parser.parse_known_args(arguments)[0])


def as_words(flags: Mapping[str, object]) -> list[str]:
    """Flags as on a command line: those that are True take no value, and those that are None or False are left out."""
    words: list[str] = []
    for name, value in flags.items():
        if name == "overrides" and isinstance(value, list):
            words += [word for setting in value for word in ("--set", setting)]
        elif value is not None and value is not False:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def without(arguments: Sequence[str], *names: str, values: Callable[[str], bool] = lambda value: True) -> list[str]:
    """`arguments` without the flags `names` and their values (`--steps 5` or `--steps=5`), if `values` is true for the value."""
    kept, rest = list[str](), list(arguments)
    while rest:
        name, equals, value = rest[0].partition("=")
        alone = name not in names or equals or rest[1:2] == [] or rest[1].startswith("--")
        words = rest[: 1 if alone else 2]
        if name not in names or not values(value if equals else words[-1]):
            kept += words
        del rest[: len(words)]
    return kept


def _check_names(flags: argparse.Namespace) -> None:
    """Refuse empty paths, and run names that are not plain folder names."""
    for name in sorted(PATHS | {"runs_dir", "branch_from"}):
        if getattr(flags, name) == "":
            raise UsageError(f"--{name} is empty; give a path")
    for name in ("device", "mfu", "interconnect", "gpu_link"):
        if getattr(flags, name) is not None and flags.explain is None:
            raise UsageError(f"--{name} is for a plan, and trains nothing; add --explain, or leave it out")
    name = "run" if flags.run_name is None else flags.run_name
    too_long = len(os.fsencode(name)) > 200
    if name.strip() in ("", ".", "..") or name != name.strip() or "/" in name or not name.isprintable() or too_long:
        raise UsageError(f"--run_name {name[:40]!r}: must be a plain folder name of at most 200 bytes; --runs_dir sets the folder above it")
