"""Write a trained model as a Hugging Face folder.

    python launch/export.py runs/first --out exported/first
    python launch/export.py runs/first --out exported/first_bf16 --dtype bf16

Runs in one process, for any number of training ranks, ZeRO stage, offload, precision and recipe. Needs memory for the model's fp32 weights.
The folder appears complete or not at all, and nothing is overwritten. A killed export leaves `.NAME.partial`
and `.NAME.lock`, which the next export to the same --out removes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# As in launch/pretrain.py: import from the checkout's root, not from this script's folder.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from safetensors import SafetensorError

from data_pipeline.staging import staged_folder
from launch.config.flags import Parser
from launch.errors import UsageError, print_once, run_command
from launch.trained_model.flags import add_source_flags
from model.presets import MODELS_IN_WORDS


def build_parser() -> Parser:
    """The flags of `launch/export.py`."""
    parser = Parser(
        prog="python launch/export.py",
        description=f"Export a trained model to a Hugging Face folder: a {MODELS_IN_WORDS}.",
        epilog="Example: python launch/export.py runs/first --out exported/first",
    )
    data = "current path of a run's corpus, for the tokenizer (the path in run.json)"
    add_source_flags(parser, data, "dtype of the weights (run: fp32; folder: unchanged)")
    parser.add_argument("--out", required=True, metavar="DIR", help="new folder; an existing one is never written to")
    parser.add_argument("--quiet", action="store_true", help="print the last line only")
    return parser


def main() -> int:
    """Check, load, and write the folder under a temporary name that is renamed at the end."""
    flags = build_parser().parse(sys.argv[1:])
    out = Path(flags.out)
    if os.path.lexists(out):
        raise UsageError(f"--out {out}: exists, and nothing is overwritten; give another folder")
    from launch.trained_model.hf_export import export  # after parsing: imports torch

    try:
        with staged_folder(out, worth_keeping=lambda folder: False, resume=False) as folder:
            trained, weights, notes = export(flags, folder, out.name)
    except SafetensorError as reason:  # its own error for a full disk
        raise UsageError(f"--out {out}: cannot be written ({reason}); give another folder") from None
    for note in () if flags.quiet else notes:
        print_once(f"note: {note}")
    parameters, dtype = sum(weight.numel() for weight in weights.values()), next(iter(weights.values())).dtype
    step = "the weights" if trained.step is None else f"step {trained.step:,}"
    print_once(f"{out}: {parameters / 1e6:,.1f} M parameters in {str(dtype).removeprefix('torch.')}, {step} of {trained.folder}")
    return 0


if __name__ == "__main__":
    run_command(main)
