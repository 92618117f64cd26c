"""Plans what a model needs on each rank at every ZeRO stage: memory by part, and bytes sent. Does not train.

    python launch/plan.py --preset gpt3-13b --ranks 64 --device cuda --memory 80GB
    python launch/plan.py --preset gpt2 --ranks 2 --micro_batch_size 8 --offload optimizer
    python launch/plan.py --preset gpt3-6.7b --architecture llama --ranks 8 --json

A column is a stage as `ds_configs/zero<stage>_<precision>.json` runs it, with the batch that `launch/pretrain.py` would take; a row is
a part, as `launch/config/memory.py` computes it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

# As in launch/pretrain.py: import from the checkout's root, not from this script's folder.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch.config.explain import bytes_of, memory_of, memory_table
from launch.config.flags import DEFAULT_DATA, MODEL, Parser, add_flags, as_words, whole_number
from launch.config.hardware import device_type
from launch.config.run_config import ROOT, RunConfig, resolve
from launch.errors import print_once, run_command
from model.accounting import parameter_count
from model.presets import FIELDS, SIZES, GPTConfig

STAGES = (0, 1, 2, 3)
PRECISIONS = ("fp32", "bf16", "fp16")
UNITS = {"GB": 10**9, "GIB": 2**30}
ON_CPU = '={"device": "cpu"}'
#: Value of --offload -> (its stages, the changes of the JSON).
OFFLOAD_COLUMNS: dict[str, tuple[tuple[int, ...], list[str]]] = {
    "optimizer": ((1, 2, 3), ["--set", f"zero_optimization.offload_optimizer{ON_CPU}"]),
    "param": ((3,), ["--set", f"zero_optimization.offload_optimizer{ON_CPU}", "--set", f"zero_optimization.offload_param{ON_CPU}"]),
}
#: Flags that are passed to `resolve` unchanged.
PASSED_ON = ("preset", "architecture", *SIZES, *FIELDS, "data", "micro_batch_size", "global_batch_size")


def build_parser() -> Parser:
    """The flags of `launch/plan.py`."""
    parser = Parser(
        prog="python launch/plan.py",
        description="Print the memory of each rank by part and the bytes it sends, at every ZeRO stage. Does not train.",
        epilog="Example: python launch/plan.py --preset gpt3-13b --ranks 64 --device cuda --memory 80GB",
    )
    add_flags(parser, MODEL)
    parser.add_argument(
        "--data", default=DEFAULT_DATA, metavar="DIR", help=f"corpus that gives the vocabulary size; it may be missing ({DEFAULT_DATA})"
    )
    parser.add_argument("--vocab_size", type=whole_number(1, 10**9), help="vocabulary size (the corpus's; without one, GPT-2's 50257)")
    how = parser.add_argument_group("training")
    how.add_argument("--ranks", type=whole_number(1, 1_000_000), default=1, help="processes that share the batch (1)")
    how.add_argument("--precision", default="bf16", choices=PRECISIONS, help="precision of the run (bf16)")
    how.add_argument("--micro_batch_size", type=whole_number(1), help="sequences per rank at once (preset)")
    how.add_argument("--global_batch_size", type=whole_number(1), help="sequences per step over all ranks (preset)")
    how.add_argument("--offload", choices=OFFLOAD_COLUMNS, help="add columns with offload; param offloads the optimizer too (stage 3)")
    how.add_argument("--device", choices=("cuda", "cpu"), help="device to plan for (that of this machine)")
    parser.add_argument("--memory", type=_bytes, metavar="SIZE", help="memory of one rank, e.g. 80GB or 24GiB; prints which columns fit")
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
    device = flags.device or device_type()
    runs = _runs(flags)
    first = next(iter(runs.values()))
    vocab_size = flags.vocab_size or first.vocab_size
    # The id of the end of text does not affect memory.
    model = GPTConfig(**asdict(first.shape), vocab_size=vocab_size, document_end=vocab_size - 1 if flags.no_cross_document else None)
    columns = {name: memory_of(run, model, device) | {"sent": bytes_of(run, model)} for name, run in runs.items()}
    if flags.json:
        batch = {key: getattr(first, key) for key in ("ranks", "micro_batch_size", "gradient_accumulation_steps", "global_batch_size")}
        report = {"model": {**asdict(model), "parameters": parameter_count(model)}, "precision": flags.precision, "device": device, **batch}
        print_once(json.dumps(report | {"columns": columns} | (_fitting(flags.memory, columns) if flags.memory else {}), indent=2))
        return 0
    print_once(
        f"{parameter_count(model) / 1e6:,.1f} M parameters ({model.n_layer} layers, {model.d_model} wide, {model.seq_len} tokens"
        f"{model.components}, vocabulary {model.vocab_size:,}), {flags.precision}\n"
        f"{first.micro_batch_size} sequences x {first.gradient_accumulation_steps} accumulation x {first.ranks} rank(s); "
        f"what one rank needs on {'a GPU' if device == 'cuda' else 'a CPU'} (--device)\n"
    )
    print_once("\n".join(memory_table(columns)))
    if flags.memory:
        fitting = _fitting(flags.memory, columns)
        more = f"; with activation checkpointing also {', '.join(names)}" if (names := fitting["fit_checkpointed"]) else ""
        print_once(f"\nIn {flags.memory / 1e9:,.4g} GB a rank fit: {', '.join(fitting['fit']) or 'nothing'}{more}.")
    return 0


def _runs(flags: argparse.Namespace) -> dict[str, RunConfig]:
    """The run of every column, resolved from the JSONs that ship."""
    given = as_words({name: getattr(flags, name) for name in (*PASSED_ON, "no_cross_document")})

    def run(stage: int, changes: list[str]) -> RunConfig:
        file = ROOT / "ds_configs" / f"zero{stage}_{flags.precision}.json"
        return resolve(["--deepspeed_config", str(file), "--explain", *given, *changes], ranks=flags.ranks)[0]

    runs = {f"ZeRO {stage}": run(stage, []) for stage in STAGES}
    if flags.offload:
        stages, changes = OFFLOAD_COLUMNS[flags.offload]
        runs |= {f"ZeRO {stage} + {flags.offload}": run(stage, changes) for stage in stages}
    return runs


def _fitting(memory: int, columns: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """The columns that fit, and those that fit only with activation checkpointing."""
    plain = [name for name, plan in columns.items() if plan["peak"] <= memory]
    checkpointed = [name for name, plan in columns.items() if plan["checkpointed_peak"] <= memory and name not in plain]
    return {"fit": plain, "fit_checkpointed": checkpointed}


if __name__ == "__main__":
    run_command(main)
