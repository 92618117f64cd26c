"""Generate text with a trained model: a run's folder, or a Hugging Face folder.

    python launch/generate.py runs/demo --prompt "def "
    python launch/generate.py runs/demo --prompt "import " --samples 3 --temperature 0.7 --top_p 0.9 --seed 5
    python launch/generate.py exported/first --temperature 0

The text is printed while it is generated, the speed on standard error. A KV cache reduces the work per token
to that of one token. Beyond the model's context, the window moves with every token and is recomputed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# As in launch/pretrain.py: import from the checkout's root, not from this script's folder.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch.config.flags import Parser, real_number, whole_number
from launch.errors import UsageError, run_command
from launch.trained_model.flags import add_source_flags


def build_parser() -> Parser:
    """The flags of `launch/generate.py`."""
    parser = Parser(
        prog="python launch/generate.py",
        description="Generate text with a trained model.",
        epilog='Example: python launch/generate.py runs/demo --prompt "def " --temperature 0.7 --samples 3',
    )
    data = "current path of a run's corpus, for the tokenizer (the path in run.json)"
    add_source_flags(parser, data, "dtype of weights and activations (fp32)", "fp32")
    parser.add_argument("--prompt", metavar="TEXT", default="", help="beginning of the text; - reads standard input (none: a new document)")
    parser.add_argument("--document_start", action="store_true", help="the prompt begins a document: put an end-of-text token before it")
    parser.add_argument("--max_new_tokens", type=whole_number(1), default=100, metavar="N", help="maximum tokens of a sample (100)")
    parser.add_argument("--ignore_eos", action="store_true", help="continue after an end of text, up to --max_new_tokens")
    parser.add_argument("--samples", type=whole_number(1, 10_000), default=1, metavar="N", help="number of texts (1)")
    parser.add_argument("--temperature", type=real_number(0), default=0.8, help="divides the logits; 0: the most likely token (0.8)")
    parser.add_argument("--top_k", type=whole_number(0), default=50, metavar="K", help="draw from the K most likely tokens; 0: all (50)")
    top_p = real_number(0, 1, above=True)
    parser.add_argument("--top_p", type=top_p, metavar="P", help="draw from the most likely tokens whose probabilities sum to P (all)")
    parser.add_argument("--seed", type=whole_number(0, 2**62), default=1, help="seed of the first sample; each further sample adds 1 (1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per sample")
    parser.add_argument("--quiet", action="store_true", help="no notes and no speed")
    return parser


def main() -> int:
    """Read the prompt, load the model, print its texts."""
    flags = build_parser().parse(sys.argv[1:])
    prompt = _prompt(flags)
    from launch.trained_model.text import print_samples  # after parsing: imports torch

    print_samples(flags, prompt)
    return 0


def _prompt(flags: argparse.Namespace) -> str:
    data = sys.stdin.buffer.read() if flags.prompt == "-" else flags.prompt.encode("utf-8", "surrogateescape")
    try:
        return data.decode()
    except UnicodeDecodeError as reason:
        raise UsageError(f"--prompt: is not UTF-8 (byte {reason.start}); give text") from None


if __name__ == "__main__":
    run_command(main)
