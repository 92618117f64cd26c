"""What a model needs on each rank at every ZeRO stage: memory by part, and bytes on the wire, without starting anything.

    python launch/plan.py --preset gpt3-13b --ranks 64 --memory 80GB
    python launch/plan.py --preset gpt2 --ranks 2 --device cpu --micro_batch_size 8 --offload optimizer
    python launch/plan.py --preset gpt2 --ranks 8 --d_model 1024 --n_head 16 --json

A row is a stage, with the buffer sizes of `ds_configs/zero<stage>_<precision>.json`; a column is a part, as `launch/run/memory.py` derives
it. Not all parts live at once, so that a row's peak is less than its sum. It takes a tenth of a second and imports no torch.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

# As in launch/pretrain.py: this script's folder is not where its modules are.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch.run.errors import UsageError, nearest, run_command, say
from launch.run.flags import _Parser, _whole_number
from launch.run.memory import bytes_sent_per_step, memory_per_rank
from model.accounting import parameter_count
from model.presets import PRESETS, GPTConfig

ROOT = Path(__file__).resolve().parents[1]
STAGES = (0, 1, 2, 3)
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
#: Offloaded form -> (its stages, what the section gets).
OFFLOADS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "optimizer": ((1, 2, 3), {"offload_optimizer": {"device": "cpu"}}),
    "param": ((3,), {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
}


def build_parser() -> argparse.ArgumentParser:
    """The flags of `launch/plan.py`."""
    positive, size = _whole_number(1), _whole_number(1, 100_000)
    parser = _Parser(
        prog="python launch/plan.py",
        description="Memory of each rank by part, and bytes on the wire, at every ZeRO stage. Starts nothing.",
        epilog="Example: python launch/plan.py --preset gpt3-13b --ranks 64 --precision bf16 --memory 80GB",
        allow_abbrev=False,
    )
    parser.add_argument("--preset", default="gpt2", metavar="NAME", help=f"model size: {', '.join(PRESETS)} (gpt2)")
    parser.add_argument("--n_layer", type=size, help="blocks, over the preset's")
    parser.add_argument("--n_head", type=size, help="attention heads, over the preset's")
    parser.add_argument("--d_model", type=size, help="width, a multiple of n_head, over the preset's")
    parser.add_argument("--seq_len", type=positive, help="tokens of a sequence, over the preset's")
    parser.add_argument("--vocab_size", type=_whole_number(1, 10**9), default=50_257, help="tokens of the vocabulary (50257, GPT-2's)")
    parser.add_argument("--ranks", type=_whole_number(1, 1_000_000), default=1, help="processes that share the batch (1)")
    parser.add_argument("--precision", default="bf16", metavar="NAME", help="fp32, bf16 or fp16 (bf16)")
    parser.add_argument("--micro_batch_size", type=positive, help="sequences a rank takes at once (preset)")
    parser.add_argument("--gradient_accumulation_steps", type=positive, default=1, help="micro-batches of a step (1)")
    parser.add_argument("--device", default="cuda", metavar="NAME", help="cuda (torch's allocator) or cpu (the process) (cuda)")
    parser.add_argument("--offload", metavar="WHAT", help="rows with offloading too: optimizer, or param (with the optimizer, stage 3)")
    parser.add_argument("--memory", type=_bytes, metavar="SIZE", help="what a rank has, e.g. 80GB or 24GiB: says which rows fit")
    parser.add_argument("--json", action="store_true", help="bytes of every part and moment as JSON")
    return parser


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?) ?([kmgt]i?b)", text.strip(), re.IGNORECASE)
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount of memory; write 80GB or 24GiB")
    return round(float(found[1]) * UNITS[found[2].upper()])


def main() -> int:
    """Print the plan."""
    parser = build_parser()
    flags, unknown = parser.parse_known_args(sys.argv[1:])
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        raise UsageError(f"unknown argument {unknown[0]!r}{nearest(unknown[0].split('=')[0], known)}; see --help")
    model = _model(flags)
    for name, allowed in (("precision", ("fp32", "bf16", "fp16")), ("device", ("cuda", "cpu")), ("offload", tuple(OFFLOADS))):
        value = getattr(flags, name)
        if value is not None and value not in allowed:
            raise UsageError(f"--{name} {value}: no such choice{nearest(value, allowed)}; there are {', '.join(allowed)}")
    micro = flags.micro_batch_size or PRESETS[flags.preset].micro_batch_size
    rows = {name: _plan(model, flags, micro, section) for name, section in _sections(flags).items()}
    if flags.json:
        report = {
            "model": {**asdict(model), "parameters": parameter_count(model)},
            "ranks": flags.ranks,
            "precision": flags.precision,
            "micro_batch_size": micro,
            "gradient_accumulation_steps": flags.gradient_accumulation_steps,
            "device": flags.device,
            "rows": rows,
        }
        say(json.dumps(report, indent=2))
        return 0
    say(_table(model, flags, micro, rows))
    return 0


def _model(flags: argparse.Namespace) -> GPTConfig:
    if flags.preset not in PRESETS:
        raise UsageError(f"--preset {flags.preset}: no such preset{nearest(flags.preset, PRESETS)}; there are {', '.join(PRESETS)}")
    shape = asdict(PRESETS[flags.preset].shape)
    given = {key: value for key in shape if (value := getattr(flags, key, None)) is not None}
    try:
        return GPTConfig(**{**shape, **given}, vocab_size=flags.vocab_size)
    except ValueError as reason:
        text = ", ".join(f"--{key} {value}" for key, value in given.items())
        raise UsageError(f"--preset {flags.preset} with {text}: {reason}") from None


def _sections(flags: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The `zero_optimization` section of every row, from the JSONs that ship."""
    sections = {}
    for stage in STAGES:
        file = ROOT / "ds_configs" / f"zero{stage}_{flags.precision}.json"
        sections[f"ZeRO {stage}"] = json.loads(file.read_text(encoding="utf-8"))["zero_optimization"]
    if flags.offload:
        stages, extra = OFFLOADS[flags.offload]
        sections |= {f"ZeRO {stage} + {flags.offload}": {**sections[f"ZeRO {stage}"], **extra} for stage in stages}
    return sections


def _plan(model: GPTConfig, flags: argparse.Namespace, micro: int, zero: dict[str, Any]) -> dict[str, Any]:
    """One row: the plan with and without activation checkpointing, and the bytes on the wire."""
    plain, checkpointed = (
        memory_per_rank(
            model,
            flags.precision,
            zero,
            flags.ranks,
            micro,
            flags.gradient_accumulation_steps,
            checkpointing=checkpointing,
            device=flags.device,
        )
        for checkpointing in (False, True)
    )
    sent = bytes_sent_per_step(model, flags.precision, zero, flags.ranks, flags.gradient_accumulation_steps)
    return {"plain": asdict(plain), "checkpointed": asdict(checkpointed), "bytes_sent_per_step": sent}


#: Heading -> (which of the two plans, its field).
COLUMNS = {
    "weights": ("plain", "weights"),
    "gradients": ("plain", "gradients"),
    "master": ("plain", "master_weights"),
    "optimizer": ("plain", "optimizer_states"),
    "buffers": ("plain", "buffers"),
    "update": ("plain", "update"),
    "loss head": ("plain", "loss_head"),
    "activations": ("plain", "activations"),
    "checkpointed": ("checkpointed", "activations"),
    "process": ("plain", "process"),
    "allocator": ("plain", "allocator"),
    "on host": ("plain", "host"),
    "PEAK": ("plain", "peak"),
    "PEAK ckpt.": ("checkpointed", "peak"),
}


def _table(model: GPTConfig, flags: argparse.Namespace, micro: int, rows: dict[str, dict[str, Any]]) -> str:
    columns = {name: place for name, place in COLUMNS.items() if name not in ("process", "allocator", "on host") or _used(rows, place)}
    unit, divisor = ("GiB", 2**30) if any(row["plain"]["peak"] >= 2**30 for row in rows.values()) else ("MiB", 2**20)
    digits = 2 if divisor == 2**30 else 1
    lines = [
        f"{parameter_count(model) / 1e6:,.1f} M parameters ({model.n_layer} layers, {model.d_model} wide, {model.seq_len} tokens, "
        f"vocabulary {model.vocab_size:,}), {flags.precision}, {flags.ranks} rank(s) on {flags.device}, "
        f"{flags.gradient_accumulation_steps} x {micro} sequences a rank; {unit} of each rank",
        "",
    ]
    table = [["", *columns, "at", f"sent, {unit}"]]
    for name, row in rows.items():
        cells = [f"{row[plan][field] / divisor:,.{digits}f}" for plan, field in columns.values()]
        table.append([name, *cells, row["plain"]["peak_moment"], f"{row['bytes_sent_per_step'] / divisor:,.{digits}f}"])
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    lines += [
        line[0].ljust(widths[0]) + "  " + "  ".join(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        for line in table
    ]
    lines += ["", "Parts do not all live at once: the peak is that of the moment named under 'at'. 'sent' is what a rank sends in a step."]
    if flags.memory:
        lines.append(_fits(flags.memory, rows))
    return "\n".join(lines)


def _used(rows: dict[str, dict[str, Any]], place: tuple[str, str]) -> bool:
    return any(row[place[0]][place[1]] for row in rows.values())


def _fits(memory: int, rows: dict[str, dict[str, Any]]) -> str:
    plain = [name for name, row in rows.items() if row["plain"]["peak"] <= memory]
    checkpointed = [name for name, row in rows.items() if row["checkpointed"]["peak"] <= memory and name not in plain]
    text = f"In {memory / 1e9:,.4g} GB a rank: {', '.join(plain) or 'nothing'} fit{'s' if len(plain) < 2 else ''}"
    if checkpointed:
        text += f"; with activation checkpointing also {', '.join(checkpointed)}"
    return text + "."


if __name__ == "__main__":
    run_command(main)
