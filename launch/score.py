"""How good a trained model is: loss, perplexity and bits per byte on the validation text of a corpus, each with its standard error.

    python launch/score.py runs/demo
    python launch/score.py exported --data data/texts

Of a run it also compares with its own log: the windows that training evaluated are among those scored here. Bits per byte does not depend
on the tokenizer, so that models of different ones can be compared on the same text. Benchmarks such as HellaSwag and LAMBADA are run by
lm-evaluation-harness on an exported model: `lm_eval --model hf --model_args pretrained=exported --tasks hellaswag,lambada_openai`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

# As in launch/pretrain.py: this script's folder is not where its modules are.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from data_pipeline.shards import Corpus, open_corpus
from launch.config.flags import Parser, whole_number
from launch.config.hardware import device_type
from launch.errors import UsageError, is_speaker, run_command, say
from launch.formats.folder_tokenizer import difference, tokenizer_of_corpus
from launch.trained_model.flags import DTYPES, add_source_flags, check_dtype, torch_dtype
from launch.trained_model.load import Source, open_trained

if TYPE_CHECKING:
    from launch.trained_model.load import Trained

PLAIN_SECONDS = 10.0  # between two plain lines of progress


def build_parser() -> Parser:
    """The flags of `launch/score.py`."""
    positive = whole_number(1)
    parser = Parser(
        prog="python launch/score.py",
        description="Loss, perplexity and bits per byte of a trained model on validation text.",
        epilog="Example: python launch/score.py runs/demo",
        allow_abbrev=False,
    )
    add_source_flags(parser)
    parser.add_argument("--data", metavar="DIR", help="corpus written by data_pipeline/prepare.py, or nanoGPT's (of a run: its own)")
    parser.add_argument("--split", default="val", metavar="NAME", help="which text of it: val or train (val)")
    parser.add_argument("--windows", type=positive, metavar="N", help="windows of the model's context, spread evenly (all of them)")
    parser.add_argument("--batch_size", type=positive, metavar="N", help="windows at once (by the device)")
    parser.add_argument("--dtype", default="fp32", metavar="NAME", help=f"the weights while it computes: {', '.join(DTYPES)} (fp32)")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    parser.add_argument("--quiet", action="store_true", help="no progress and no notes")
    return parser


def main() -> int:
    """Check, load, score."""
    flags = build_parser().parse(sys.argv[1:])
    check_dtype(flags)
    if flags.split not in ("val", "train"):
        raise UsageError(f"--split {flags.split}: no such split; there are val, train")
    source = open_trained(flags.source, checkpoint=flags.checkpoint, allow_pickle=flags.allow_pickle)
    corpus, notes = _corpus(flags, source)
    report = _score(flags, source.load(), corpus, notes)
    say(json.dumps(report, allow_nan=False) if flags.json else "\n".join(_table(report)))
    return 0


# --- which text -----------------------------------------------------------------------------------------------------------------------


def _corpus(flags: argparse.Namespace, source: Source) -> tuple[Corpus, list[str]]:
    """The corpus, whose ids must be those of the model, and what should be known about it."""
    if flags.data is None:
        if source.description is None:
            raise UsageError(f"{source.folder}: does not say on what it is to be scored; give --data DIR, a corpus with its tokenizer")
        if source.corpus is None:
            raise UsageError(f"{source.folder}: {source.no_tokenizer}")
        return source.corpus, []
    corpus = open_corpus(flags.data)
    if source.description is not None and source.description.get("corpus_fingerprint") == corpus.fingerprint:
        return corpus, []
    vocab_size = source.config.vocab_size
    if corpus.vocab_size > vocab_size:
        raise UsageError(f"--data {flags.data}: has {corpus.vocab_size:,} ids, and the model {vocab_size:,}; prepare it with its tokenizer")
    if source.tokenizer is None:
        if source.description is not None:
            raise UsageError(f"--data {flags.data}: is not the run's own corpus, and its tokenizer is not to be had: {source.no_tokenizer}")
        return corpus, [f"whether {flags.data} was made with the model's tokenizer is not known: {source.no_tokenizer}"]
    own, why = tokenizer_of_corpus(corpus)
    if own is None:
        return corpus, [f"whether {flags.data} was made with the model's tokenizer is not known: {why}"]
    if (differs := difference(corpus, own, source.tokenizer)) is not None:
        raise UsageError(
            f"--data {flags.data}: was made with another tokenizer than the model's: {differs}; prepare the text again with --tokenizer"
            f" and the model's own"
        )
    return corpus, []


# --- the score ------------------------------------------------------------------------------------------------------------------------


def _score(flags: argparse.Namespace, trained: Trained, corpus: Corpus, notes: list[str]) -> dict[str, Any]:
    """What is printed, as an object."""
    import torch

    from launch.trained_model.scoring import estimate, text_bytes, window_losses

    config, split = trained.config, getattr(corpus, flags.split)
    total = split.windows(config.seq_len)
    windows = min(flags.windows or total, total)
    device = torch.device(device_type())
    model = trained.model.to(device, torch_dtype(flags.dtype))
    for note in notes if not flags.quiet else ():
        say(f"note: {note}", sys.stderr)
    start = time.monotonic()
    with _Progress(windows, flags.quiet) as progress:
        losses = window_losses(model, corpus, split, windows, flags.batch_size, progress.update)
    seconds = time.monotonic() - start
    found = estimate(losses)
    if not math.isfinite(found.loss):
        raise UsageError(f"{trained.name}: its loss is {found.loss} in {flags.dtype}; try --dtype fp32, or an earlier --checkpoint")
    n_bytes = text_bytes(corpus, split, tokenizer_of_corpus(corpus)[0])
    # Of the split as a whole, so that everyone who has a loss of it (a training log, another program) comes to the same figure.
    per_byte = None if n_bytes is None else split.n_tokens / n_bytes / math.log(2)
    report: dict[str, Any] = {
        "model": str(trained.folder),
        "checkpoint": trained.source.checkpoint_name,
        "step": trained.source.step,
        "data": str(corpus.path),
        "split": flags.split,
        "dtype": flags.dtype,
        "seq_len": config.seq_len,
        "windows": windows,
        "tokens": windows * config.seq_len,
        "split_tokens": split.n_tokens,
        "split_bytes": n_bytes,
        "loss": found.loss,
        "loss_stderr": found.error,
        "perplexity": found.perplexity if math.isfinite(found.perplexity) else None,
        "perplexity_stderr": found.perplexity_error if math.isfinite(found.perplexity) else None,
        "bits_per_byte": None if per_byte is None else found.loss * per_byte,
        "bits_per_byte_stderr": None if per_byte is None or found.error is None else found.error * per_byte,
        "seconds": round(seconds, 2),
        "notes": notes,
    }
    training = _as_training(flags, trained, corpus, losses, total)
    if training is not None and per_byte is not None:
        training |= {f"{name}_bits_per_byte": None if training[name] is None else training[name] * per_byte for name in ("loss", "logged")}
    return report | {"training": training}


def _as_training(flags: argparse.Namespace, trained: Trained, corpus: Corpus, losses: Any, total: int) -> dict[str, Any] | None:
    """Of a run on its own corpus, the loss on the windows that its evaluations read, and what its log says of them."""
    from launch.trained_model.scoring import training_windows, window_losses

    run, state = trained.description, trained.source.state
    if run is None or state is None or flags.split != "val" or run.get("corpus_fingerprint") != corpus.fingerprint:
        return None
    asked = run.get("eval_batches", 0) * run.get("global_batch_size", 0)
    if not asked or state.get("val_loss") is None:
        return None
    chosen = training_windows(total, asked)
    precision = run.get("precision", flags.dtype)
    if precision == flags.dtype and len(losses) == total:
        loss = float(losses[chosen].mean())
    else:  # as training did: in its precision, of its own weights and not of what --dtype has made of them
        own = trained if flags.dtype == "fp32" else trained.source.load()
        model = own.model.to(trained.model.wte.weight.device, torch_dtype(precision))
        loss = float(window_losses(model, corpus, corpus.val, asked, run.get("micro_batch_size")).mean())
    return {"windows": len(chosen), "dtype": precision, "loss": loss, "logged": state["val_loss"]}


class _Progress:
    """A bar over the windows on a terminal, plain lines elsewhere."""

    def __init__(self, total: int, quiet: bool):
        self._total, self._done, self._quiet, self._last = total, 0, quiet, time.monotonic()
        self._bar: Any = None
        if not quiet and is_speaker() and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="window", dynamic_ncols=True, leave=False)

    def update(self, windows: int) -> None:
        self._done += windows
        if self._bar is not None:
            self._bar.update(windows)
        elif not self._quiet and time.monotonic() - self._last > PLAIN_SECONDS:
            self._last = time.monotonic()
            say(f"{self._done:,} of {self._total:,} windows", sys.stderr)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


# --- what is printed ------------------------------------------------------------------------------------------------------------------


def _table(report: dict[str, Any]) -> list[str]:
    def figure(name: str, digits: int) -> str:
        value, error = report[name], report[f"{name}_stderr"]
        return "-" if value is None else f"{value:,.{digits}f}" + ("" if error is None else f" +- {error:,.{digits}f}")

    at = "" if report["step"] is None else f", step {report['step']:,}"
    lines = [
        f"{report['model']}{at}, {report['dtype']}, on {report['data']} ({report['split']}): "
        f"{report['windows']:,} windows of {report['seq_len']:,} tokens, {report['tokens']:,} of {report['split_tokens']:,}",
        f"loss            {figure('loss', 4)}  nats a token",
        f"perplexity      {figure('perplexity', 3)}",
    ]
    if report["bits_per_byte"] is None:
        lines.append("bits per byte   -  (how many bytes the text has is not known)")
    else:
        ratio = report["split_bytes"] / report["split_tokens"]
        lines.append(f"bits per byte   {figure('bits_per_byte', 4)}  ({ratio:.3f} bytes a token)")
    if (training := report["training"]) is not None:
        in_bits = ""
        if training.get("loss_bits_per_byte") is not None:
            in_bits = f"; {training['loss_bits_per_byte']:.4f} and {training['logged_bits_per_byte']:.4f} bits per byte"
        lines.append(
            f"the {training['windows']:,} windows of the run's evaluations, in {training['dtype']}: loss {training['loss']:.4f}, "
            f"its log says {training['logged']:.4f}{in_bits}"
        )
    return lines


if __name__ == "__main__":
    run_command(main)
