"""Score a trained model: loss, perplexity and bits per byte on the validation text of a corpus, each with its standard error.

    python launch/score.py runs/demo
    python launch/score.py exported --data data/texts
    python launch/score.py runs/demo --against runs/other

Bits per byte does not depend on the tokenizer, so models with different tokenizers can be compared on the same text. `--against` scores a
second model on the same windows; the standard error of their difference, taken window by window, is much smaller than those of the losses.
lm-evaluation-harness runs benchmarks such as HellaSwag and LAMBADA on an exported model: `lm_eval --model hf --model_args
pretrained=exported --tasks hellaswag,lambada_openai`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# As in launch/pretrain.py: import from the checkout's root, not from this script's folder.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch.config.flags import Parser, whole_number
from launch.errors import print_once, run_command
from launch.trained_model.flags import add_source_flags


def build_parser() -> Parser:
    """The flags of `launch/score.py`."""
    parser = Parser(
        prog="python launch/score.py",
        description="Loss, perplexity and bits per byte of a trained model on validation text.",
        epilog="Example: python launch/score.py runs/demo",
    )
    data = "corpus folder from prepare.py or nanoGPT; a Hugging Face folder needs this flag (the run's)"
    add_source_flags(parser, data, "dtype of weights and activations (fp32)", "fp32")
    parser.add_argument("--against", metavar="RUN|DIR", help="second model, with the same tokenizer: the difference on the same windows")
    parser.add_argument("--split", choices=("val", "train"), default="val", metavar="NAME", help="text to score: val or train (val)")
    parser.add_argument("--windows", type=whole_number(1), metavar="N", help="number of windows to score, spread evenly (all)")
    parser.add_argument("--batch_size", type=whole_number(1), metavar="N", help="windows per forward pass (depends on the device)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no notes")
    return parser


def main() -> int:
    """Score, and print."""
    flags = build_parser().parse(sys.argv[1:])
    from launch.trained_model.scoring import score  # after parsing: imports torch

    report = score(flags)
    print_once(json.dumps(report, allow_nan=False) if flags.json else "\n".join(_table(report)))
    return 0


def _table(report: dict[str, Any]) -> list[str]:
    def figure(name: str, digits: int) -> str:
        value, error = report[name], report[f"{name}_stderr"]
        return "-" if value is None else f"{value:,.{digits}f}" + ("" if error is None else f" +- {error:,.{digits}f}")

    at = "" if report["step"] is None else f", step {report['step']:,}"
    lines = [
        f"{report['model']}{at}, {report['dtype']}, on {report['data']} ({report['split']}): "
        f"{report['windows']:,} windows of {report['seq_len']:,} tokens, {report['tokens']:,} of {report['split_tokens']:,}",
        f"loss            {figure('loss', 4)}  nats per token",
        f"perplexity      {figure('perplexity', 3)}",
    ]
    if report["bits_per_byte"] is None:
        lines.append("bits per byte   -  (the bytes of the text are unknown)")
    else:
        ratio = report["split_bytes"] / report["split_tokens"]
        lines.append(f"bits per byte   {figure('bits_per_byte', 4)}  ({ratio:.3f} bytes per token)")
    return [*lines, *_difference(report)]


def _difference(report: dict[str, Any]) -> list[str]:
    """The lines of `--against`."""
    if (other := report.get("against")) is None:
        return []
    mean, error, interval = other["difference"], other["difference_stderr"], other["difference_interval"]
    noise = "" if error is None else f" +- {error:.4f}"
    inside = "" if interval is None else f" (95%: {interval[0]:+.4f} to {interval[1]:+.4f})"
    bits = "" if other["difference_bits_per_byte"] is None else f", {other['difference_bits_per_byte']:+.4f} bits per byte"
    at = "" if other["step"] is None else f", step {other['step']:,}"
    return [
        f"against         {other['loss']:.4f}  {other['model']}{at}",
        f"difference      {mean:+.4f}{noise}  nats per token{inside}{bits}, {report['model']} - {other['model']} on the same windows",
    ]


if __name__ == "__main__":
    run_command(main)
