"""Plans what a model needs on each rank at every ZeRO stage: memory by part, bytes sent, and the days of a run. Does not train.

    python launch/plan.py --preset gpt3-13b --ranks 64 --device cuda --memory 80GB
    python launch/plan.py --preset gpt2 --ranks 2 --micro_batch_size 8 --offload optimizer
    python launch/plan.py --preset llama3-8b --gpus 16 --device h100 --memory 80GB --tokens 1T --interconnect 400gbit

A column is a stage as `ds_configs/zero<stage>_<precision>.json` runs it, or a recipe, with the batch that `launch/pretrain.py` would
take. A row is a part, as `launch/config/memory.py` computes it, or a time, as `launch/config/step_time.py` does.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

# As in launch/pretrain.py: import from the checkout's root, not from this script's folder.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch.config.explain import bytes_of, memory_of, memory_table, over_the_run_of, time_table
from launch.config.flags import DEFAULT_DATA, LENGTH, MODEL, OTHER_FLAGS, PLAN, TECHNIQUE, Parser, add_flags, as_words, whole_number
from launch.config.hardware import device_type
from launch.config.run_config import ROOT, RunConfig, resolve
from launch.config.step_time import Hardware, hardware_of, time_of
from launch.errors import UsageError, print_once, run_command
from model.accounting import parameter_count, parameters_in_words
from model.presets import FIELDS, PRESETS, SIZES
from recipes import registry

STAGES = (0, 1, 2, 3)
PRECISIONS = ("fp32", "bf16", "fp16")
UNITS = {"GB": 10**9, "GIB": 2**30}
ON_CPU = '={"device": "cpu"}'
#: Value of --offload -> (its stages, the changes of the JSON).
OFFLOAD_COLUMNS: dict[str, tuple[tuple[int, ...], list[str]]] = {
    "optimizer": ((1, 2, 3), ["--set", f"zero_optimization.offload_optimizer{ON_CPU}"]),
    "param": ((3,), ["--set", f"zero_optimization.offload_optimizer{ON_CPU}", "--set", f"zero_optimization.offload_param{ON_CPU}"]),
}
CHECKPOINTED = ("--set", "activation_checkpointing.enabled=true")
#: Flags that are passed to `resolve` unchanged.
PASSED_ON = ("preset", "architecture", *SIZES, *FIELDS, "data", "tokens", "micro_batch_size", "global_batch_size")


def build_parser() -> Parser:
    """The flags of `launch/plan.py`."""
    parser = Parser(
        prog="python launch/plan.py",
        description="Print the memory of each rank by part, the bytes it sends and the time of a run, at every ZeRO stage. Does not train.",
        epilog="Example: python launch/plan.py --preset llama3-8b --gpus 16 --device h100 --memory 80GB --tokens 1T --interconnect 400gbit",
    )
    add_flags(parser, MODEL)
    corpus = f"corpus that gives the vocabulary size; it may be missing (the published model's size, or {DEFAULT_DATA})"
    parser.add_argument("--data", metavar="DIR", help=corpus)
    parser.add_argument("--vocab_size", type=whole_number(1, 10**9), help="vocabulary size (the corpus's; without one, the preset's)")
    how = parser.add_argument_group("training")
    how.add_argument("--ranks", type=whole_number(1, 1_000_000), help="processes that share the batch (as many as share a row)")
    for name in ("recipe", "set"):
        how.add_argument(f"--{name}", **OTHER_FLAGS[TECHNIQUE][name])
    how.add_argument("--tokens", **OTHER_FLAGS[LENGTH]["tokens"])
    how.add_argument("--precision", choices=PRECISIONS, help="precision of the run (bf16)")
    how.add_argument("--micro_batch_size", type=whole_number(1), help="sequences per rank at once (preset)")
    how.add_argument("--global_batch_size", type=whole_number(1), help="sequences per step over all ranks (preset)")
    how.add_argument("--offload", choices=OFFLOAD_COLUMNS, help="add columns with offload; param offloads the optimizer too (stage 3)")
    add_flags(parser, PLAN)
    parser.add_argument("--memory", type=_bytes, metavar="SIZE", help="memory of one rank, e.g. 80GB or 24GiB; prints which columns fit")
    longest = "print the longest sequence of each column that fits into --memory (with micro-batches of 1, unless given)"
    parser.add_argument("--longest_sequence", action="store_true", help=longest)
    parser.add_argument("--json", action="store_true", help="bytes of every part as JSON")
    return parser


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?) ?(gi?b)", text.strip(), re.IGNORECASE)
    size = round(float(found[1]) * UNITS[found[2].upper()]) if found else 0
    if not size:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount of memory; write 80GB or 24GiB")
    return size


def main() -> int:
    """Print the plan."""
    flags = build_parser().parse(sys.argv[1:])
    device = "cpu" if (flags.device or device_type()) == "cpu" else "cuda"
    if flags.longest_sequence:
        if flags.seq_len:
            raise UsageError("--longest_sequence: looks for the longest --seq_len; leave --seq_len out")
        if not flags.memory:
            raise UsageError("--longest_sequence: fits into --memory, which is not given; give it, for example --memory 80GB")
        flags.micro_batch_size = flags.micro_batch_size or 1
    runs = _runs(flags)
    first = next(iter(runs.values()))
    model, hardware = first.model_config, hardware_of(flags, first)
    if flags.tokens and not hardware:
        raise UsageError(f"--tokens {flags.tokens:,} plans the time on a GPU; name one, such as --device h100, or leave --tokens out")
    if flags.longest_sequence:
        return _print_longest(runs, device, flags)
    columns = {name: _plan(run, device, hardware) for name, run in runs.items()}
    if flags.json:
        batch = {key: getattr(first, key) for key in ("ranks", "micro_batch_size", "gradient_accumulation_steps", "global_batch_size")}
        counts = {"parameters": parameter_count(model), "active": parameter_count(model, active=True)}
        report = {"model": {**asdict(model), **counts}, "precision": first.precision, "device": device, **batch}
        report |= {"hardware": hardware._asdict()} if hardware else {}
        print_once(json.dumps(report | {"columns": columns} | (_fitting(flags.memory, columns) if flags.memory else {}), indent=2))
        return 0
    print_once(
        f"{parameters_in_words(model)} ({model.n_layer} layers, {model.d_model} wide, {model.seq_len} tokens"
        f"{model.components}, vocabulary {model.vocab_size:,}), {first.precision}\n"
        f"{first.micro_batch_size} sequence{'s' * (first.micro_batch_size > 1)} x "
        f"{first.gradient_accumulation_steps} accumulation x {first.ranks_in_words}; "
        f"what one rank needs on {'a GPU' if device == 'cuda' else 'a CPU'} (--device)\n"
        + "".join(f"{note}\n" for note in dict.fromkeys(note for run in runs.values() for note in registry.make_techniques(run).notes))
    )
    print_once("\n".join(memory_table(columns)))
    memory = flags.memory or math.inf
    fitting = _fitting(memory, columns)
    if hardware:
        times = {name: columns[name]["time"] for name in fitting["fit"]}
        checkpointed = _runs(flags, *CHECKPOINTED) if fitting["fit_checkpointed"] else {}
        times |= {f"{name} checkpointed": _plan(checkpointed[name], device, hardware)["time"] for name in fitting["fit_checkpointed"]}
        if not flags.memory:
            print_once("\nWhether they fit is not asked; --memory, such as --memory 80GB, times only what does.")
        if times:
            print_once("\n" + "\n".join(time_table(first.ranks, first.total_tokens, hardware._asdict(), times)))
    if flags.memory:
        fit = ", ".join(f"{name} ({columns[name]['peak'] / memory:.0%} full)" for name in fitting["fit"])
        also = ", ".join(f"{name} ({columns[name]['checkpointed_peak'] / memory:.0%} full)" for name in fitting["fit_checkpointed"])
        more = f" With {' '.join(CHECKPOINTED)} also {also}." if also else ""
        fit = fit or "nothing; docs/memory.md and docs/long-sequences.md have more switches"
        print_once(f"\nIn {memory / 1e9:,.4g} GB ({memory / 2**30:,.4g} GiB) a rank fit: {fit}.{more}")
    return 0


def _runs(flags: argparse.Namespace, *more: str) -> dict[str, RunConfig]:
    """The run of every column: the recipe's, or those of the JSONs that ship, with `more` words of flags."""
    given = as_words({name: getattr(flags, name) for name in (*PASSED_ON, "no_cross_document")})
    given += [*more, *(word for one in flags.overrides for word in ("--set", one))]

    def run(*technique: str) -> RunConfig:
        found = resolve([*technique, "--explain", *given], ranks=flags.ranks)[0]
        preset = PRESETS[found.preset]
        published = preset.vocab_size if preset.published and flags.data is None else None
        return replace(found, found_corpus=None, assumed_vocab_size=flags.vocab_size or published or found.vocab_size)

    def stage(number: int, *changes: str) -> RunConfig:
        return run("--deepspeed_config", str(ROOT / "ds_configs" / f"zero{number}_{flags.precision or 'bf16'}.json"), *changes)

    if flags.recipe:
        if flags.precision or flags.offload:
            raise UsageError("--precision and --offload choose JSONs, and a recipe has its own; leave them out, or change it with --set")
        return {Path(flags.recipe).name: run("--recipe", flags.recipe)}
    runs = {f"ZeRO {number}": stage(number) for number in STAGES}
    if flags.offload:
        stages, changes = OFFLOAD_COLUMNS[flags.offload]
        runs |= {f"ZeRO {number} + {flags.offload}": stage(number, *changes) for number in stages}
    return runs


def longest_sequence(run: RunConfig, device: str, memory: int) -> tuple[int, int]:
    """The longest sequence with which `run` fits into `memory` bytes, and the bytes of its peak; 0 and those of the shortest if none does.

    It is a multiple of 1,024 tokens, or of 128 for each rank that shares a row if that is less.
    """
    unit = math.lcm(min(1024, 128 * run.ranks_per_row), run.ranks_per_row)

    def peak(units: int) -> int:
        there = replace(run, shape=replace(run.shape, seq_len=units * unit))
        try:
            return int(memory_of(there, there.model_config, device)["peak"])
        except ValueError as reason:
            raise UsageError(
                f"{run.config_file}: {reason} (with sequences of {units * unit} tokens, which --longest_sequence tries)"
            ) from None

    fits, too_long = 0, 1
    while peak(too_long) <= memory:
        fits, too_long = too_long, 2 * too_long
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        fits, too_long = (middle, too_long) if peak(middle) <= memory else (fits, middle)
    return fits * unit, peak(fits or 1)


def _print_longest(runs: dict[str, RunConfig], device: str, flags: argparse.Namespace) -> int:
    """Print the longest sequence of each column."""
    found = {name: longest_sequence(run, device, flags.memory) for name, run in runs.items()}
    if flags.json:
        print_once(json.dumps({"longest_sequence": {name: length for name, (length, _) in found.items()}}, indent=2))
        return 0
    first = next(iter(runs.values()))
    print_once(f"The longest sequence in {flags.memory / 1e9:,.4g} GB a rank, {first.micro_batch_size} at a time, {first.ranks_in_words}:")
    for name, (length, peak) in found.items():
        print_once(f"  {name}: " + (f"{length:,} tokens" if length else f"none; the shortest needs {peak / 1e9:,.4g} GB"))
    return 0


def _plan(run: RunConfig, device: str, hardware: Hardware | None) -> dict[str, Any]:
    """A column: bytes by part, and the times."""
    sent = bytes_of(run, run.model_config)
    plan = memory_of(run, run.model_config, device) | {"sent": sent}
    if hardware:
        over_the_run, flops = over_the_run_of(run, run.model_config)
        plan["time"] = time_of(run, hardware, sent, flops, over_the_run[-1]["step"])
    return plan


def _fitting(memory: float, columns: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """The columns that fit, and those that fit only with activation checkpointing."""
    plain = [name for name, plan in columns.items() if plan["peak"] <= memory]
    checkpointed = [name for name, plan in columns.items() if 0 < plan["checkpointed_peak"] <= memory and name not in plain]
    return {"fit": plain, "fit_checkpointed": checkpointed}


if __name__ == "__main__":
    run_command(main)
