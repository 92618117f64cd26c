"""Write a trained model as a Hugging Face folder of GPT2LMHeadModel.

    python launch/export.py runs/first --out exported/first
    python launch/export.py runs/first --out exported/first_bf16 --dtype bf16

One process, whatever ranks, ZeRO stage, offload, precision and recipe trained the model, in the memory of its fp32 weights. The folder
appears complete or not at all, and nothing is overwritten.
"""

from __future__ import annotations

import glob
import os
import shutil
import signal
import sys
from pathlib import Path

# As in launch/pretrain.py: this script's folder is not where its modules are.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import psutil

from data_pipeline.staging import fsync
from launch.config.flags import Parser
from launch.errors import UsageError, run_command, say
from launch.trained_model.flags import DTYPES, add_source_flags, one_of


def build_parser() -> Parser:
    """The flags of `launch/export.py`."""
    parser = Parser(
        prog="python launch/export.py",
        description="Write a trained model as a Hugging Face folder of GPT2LMHeadModel, in one process without an engine.",
        epilog="Example: python launch/export.py runs/first --out exported/first",
        allow_abbrev=False,
    )
    add_source_flags(parser, data_help="of a run: where its corpus is now, for the tokenizer (the path in run.json)")
    parser.add_argument("--out", required=True, metavar="DIR", help="new folder; an existing one is never written to")
    parser.add_argument(
        "--dtype", type=one_of(*DTYPES), metavar="NAME", help="of the weights: fp32, bf16 or fp16 (run: fp32; folder: its own)"
    )
    parser.add_argument("--quiet", action="store_true", help="print the last line only")
    return parser


def main() -> int:
    """Check, load, and write the folder under a temporary name that is renamed at the end."""
    flags = build_parser().parse(sys.argv[1:])
    out = Path(flags.out)
    _check_out(out, Path(flags.source))
    # After parsing: these import torch.
    import torch

    from launch.trained_model.hf_export import converted_weights, write_folder
    from launch.trained_model.load import open_trained

    trained = open_trained(flags.source, checkpoint=flags.checkpoint, data=flags.data, allow_pickle=flags.allow_pickle)
    model = trained.load_model()
    dtype = getattr(torch, DTYPES[flags.dtype]) if flags.dtype else model.wte.weight.dtype
    weights = converted_weights(model, trained.config, dtype)
    _remove_left_over(out)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        notes = write_folder(trained, weights, temporary, out.name)
        for path in (*temporary.iterdir(), temporary):
            fsync(path)
        os.rename(temporary, out)  # fails where somebody has made a folder with files in it meanwhile
    except OSError as reason:
        raise UsageError(f"--out {out}: cannot be written ({reason.strerror}); give another folder") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for note in () if flags.quiet else notes:
        say(f"note: {note}")
    parameters = sum(weight.numel() for weight in weights.values())
    step = "the weights" if trained.step is None else f"step {trained.step:,}"
    say(f"{out}: {parameters / 1e6:,.1f} M parameters in {str(dtype).removeprefix('torch.')}, {step} of {trained.folder}")
    return 0


def _check_out(out: Path, source: Path) -> None:
    """Raises UsageError for a folder that exists, cannot be made, or is within the source. Creates nothing."""
    if not out.name or out.name in (".", ".."):
        raise UsageError(f"--out {out}: give the name of a new folder")
    if os.path.lexists(out):
        raise UsageError(f"--out {out}: exists, and nothing is overwritten; give another folder")
    if source.resolve() in out.resolve().parents:
        raise UsageError(f"--out {out}: is within {source}, which is only read; give another folder")
    above = next(folder for folder in out.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise UsageError(f"--out {out}: cannot be made, {above} is {'not writable' if above.is_dir() else 'a file'}; give another folder")


def _remove_left_over(out: Path) -> None:
    """Remove the temporary folders of exports into `out` that were killed."""
    for path in out.absolute().parent.glob(f".{glob.escape(out.name)}.*.tmp"):
        number = path.suffixes[-2][1:] if len(path.suffixes) > 1 else ""
        if number.isdecimal() and not psutil.pid_exists(int(number)):
            shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # runs the clean-up
    run_command(main)
