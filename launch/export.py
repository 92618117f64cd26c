"""A trained model as a folder that other people's tools read: Hugging Face's GPT2LMHeadModel, or plain safetensors.

    python launch/export.py runs/first --out exported/first
    python launch/export.py runs/first --out exported/first_bf16 --dtype bf16
    python launch/export.py runs/first --out exported/first_plain --format plain
    python launch/export.py runs/first --out exported/first_int8 --int8

One process, whatever ranks, ZeRO stage, offload, precision and recipe trained it, in the memory of its fp32 weights. The folder appears
whole or not at all, and nothing is overwritten.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import math
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

# As in launch/pretrain.py: this script's folder is not where its modules are.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import psutil

from data_pipeline.errors import DataError
from data_pipeline.shards import Corpus, open_corpus
from launch.config.flags import Parser
from launch.errors import UsageError, run_command, say
from launch.formats.hf_folder import other_ids, write_config, write_tokenizer, write_weights
from launch.formats.metrics import read_metrics
from launch.formats.safetensors_file import ITEMSIZE, TORCH_NAMES
from launch.trained_model.card import model_card
from launch.trained_model.flags import add_source_flags, check_choice
from launch.trained_model.int8 import check_int8
from launch.trained_model.load import Source, open_trained
from launch.trained_model.plain import PLAIN_FILE, write_plain
from model.hf import hf_shapes

if TYPE_CHECKING:
    from data_pipeline.tokenizer import Tokenizer

DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
FORMATS = ("hf", "plain")
#: On how many windows of validation text the written tokenizer is compared with the corpus's.
COMPARED_TEXTS = 100


def build_parser() -> Parser:
    """The flags of `launch/export.py`."""
    parser = Parser(
        prog="python launch/export.py",
        description="Write a trained model as a Hugging Face folder of GPT2LMHeadModel, or as plain safetensors. One process, no engine.",
        epilog="Example: python launch/export.py runs/first --out exported/first",
        allow_abbrev=False,
    )
    add_source_flags(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to be made; one that is there is never written to")
    parser.add_argument(
        "--format", metavar="NAME", help="hf (what transformers reads) or plain (weights.safetensors alone) (hf; plain with --int8)"
    )
    parser.add_argument("--dtype", metavar="NAME", help="of the weights: fp32, bf16 or fp16 (a run's fp32 master weights; a folder's own)")
    parser.add_argument(
        "--int8", action="store_true", help="the blocks' matrices as int8 with a scale a row; says what it costs on validation text"
    )
    parser.add_argument("--data", metavar="DIR", help="where the corpus is now, for its tokenizer and for --int8 (where it was)")
    parser.add_argument("--quiet", action="store_true", help="the last line only")
    return parser


def main() -> int:
    """Write the folder."""
    flags = build_parser().parse(sys.argv[1:])
    _check_choices(flags)
    out = Path(flags.out)
    _check_out(out, Path(flags.source))
    # With --int8, of a Hugging Face folder too: the corpus on which it is measured.
    of_run = None if flags.int8 and not (Path(flags.source) / "run.json").exists() else flags.data
    source = open_trained(flags.source, checkpoint=flags.checkpoint, data=of_run, allow_pickle=flags.allow_pickle)
    if flags.int8:
        _corpus_for_int8(source, flags.data)
    dtype = DTYPES[flags.dtype] if flags.dtype else source.hf.dtype_name if source.hf else "F32"
    _check_room(out, source, dtype)
    _remove_left_over(out)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    made = [folder for folder in out.absolute().parents if not folder.exists()]  # innermost first
    try:
        temporary.mkdir(parents=True)
        if flags.int8:
            notes = export_int8(source, temporary, dtype, flags.data)
        else:
            notes = export_plain(source, temporary, dtype) if flags.format == "plain" else export_hf(source, temporary, dtype, out.name)
        _sync(temporary)
        os.rename(temporary, out)  # refused by the system where somebody has made a folder with something in it meanwhile
    except OSError as reason:
        raise UsageError(f"--out {out}: cannot be written ({reason.strerror}); give another folder") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        for folder in made:
            with contextlib.suppress(OSError):  # what is not empty stays
                folder.rmdir()
    for note in notes:
        if not flags.quiet or flags.int8:
            say(f"note: {note}")
    parameters = sum(math.prod(shape) for shape in hf_shapes(source.config).values())
    kinds = f"int8 and {TORCH_NAMES[dtype]}" if flags.int8 else TORCH_NAMES[dtype]
    say(f"{out}: {parameters / 1e6:,.1f} M parameters in {kinds}, {_where(source)}")
    return 0


def export_hf(source: Source, folder: Path, dtype: str, name: str) -> list[str]:
    """Write GPT2LMHeadModel into `folder`; what the user should know."""
    notes = []
    # First what fails fast: the tokenizer.
    if source.tokenizer is None:
        notes.append(f"no tokenizer is in the folder: {source.no_tokenizer}")
    else:
        try:
            _write_tokenizer(source, source.tokenizer, folder, notes)
        except DataError as reason:
            notes.append(f"no tokenizer is in the folder: {reason}")
    if source.config.document_end is not None:
        notes.append(
            "it was trained with attention within documents (--no_cross_document), which transformers does not mask: give it one document"
            " at a time"
        )
    trained = source.load()
    write_weights(trained.model, source.config, folder, dtype)
    write_config(folder, source.config, source.eot_id, TORCH_NAMES[dtype])
    card = model_card(name, source.config, TORCH_NAMES[dtype], source.description, source.state, _lines(source), source.corpus, notes)
    (folder / "README.md").write_text(card, encoding="utf-8")
    return notes


def export_plain(source: Source, folder: Path, dtype: str) -> list[str]:
    """Write `PLAIN_FILE` into `folder`: GPT-2's names, every matrix (out, in), no padded rows, the sizes in the metadata."""
    trained = source.load()
    write_plain(trained.model, source.config, folder / PLAIN_FILE, dtype, source.eot_id, _where(source))
    return []


def export_int8(source: Source, folder: Path, dtype: str, data: str | None) -> list[str]:
    """Write `PLAIN_FILE` into `folder`, the blocks' matrices in int8; what that costs."""
    from launch.trained_model.int8 import measured_windows, quantize, round_others
    from launch.trained_model.scoring import estimate, window_losses

    corpus = _corpus_for_int8(source, data)
    seq_len, asked = source.config.seq_len, 128
    if source.description is not None:  # on the windows of the run's own log, as far as they go
        asked = source.description.get("eval_batches", 16) * source.description.get("global_batch_size", 8)
    windows = measured_windows(corpus, seq_len, asked)
    model = source.load().model.float()
    before = window_losses(model, corpus, corpus.val, windows)
    quantize(model)
    round_others(model, dtype)
    after = window_losses(model, corpus, corpus.val, windows)
    write_plain(model, source.config, folder / PLAIN_FILE, dtype, source.eot_id, _where(source), int8=True)
    cost = estimate(after - before)  # window by window: of the difference, whose error is far below that of either loss
    spread = "" if cost.error is None else f" +- {cost.error:.1g}"
    return [
        f"int8 costs {cost.loss:+.2g}{spread} nats a token: the validation loss is {after.mean():.5f}, and {before.mean():.5f} in fp32"
        f" ({windows:,} windows of {seq_len:,} tokens)"
    ]


def _where(source: Source) -> str:
    """Whose weights they are."""
    step = "the folder's weights" if source.step is None else f"step {source.step:,}"
    return f"{step} of {source.folder}"


def _corpus_for_int8(source: Source, data: str | None) -> Corpus:
    """The corpus whose validation text is read: the run's, or of a folder the one given."""
    if source.corpus is not None:
        return source.corpus
    if data is None:
        lacking = source.no_tokenizer if source.description else "a folder brings none"
        raise UsageError(f"--int8: is measured on validation text, and {lacking}; --data says where a corpus is")
    corpus = open_corpus(data)
    if corpus.vocab_size != source.config.vocab_size:
        raise UsageError(
            f"--data {data}: has a vocabulary of {corpus.vocab_size:,}, the model of {source.config.vocab_size:,}; give its own"
        )
    corpus.val.windows(source.config.seq_len)
    return corpus


def _write_tokenizer(source: Source, tokenizer: Tokenizer, folder: Path, notes: list[str]) -> None:
    """The tokenizer's files, compared with what they were made of. Raises DataError before there are any."""
    texts = _texts(source, tokenizer)
    write_tokenizer(tokenizer, folder, source.config.seq_len)
    # AutoTokenizer looks for the model's type, unless the tokenizer's class is enough for it.
    write_config(folder, source.config, source.eot_id, "float32")
    if other := other_ids(tokenizer, folder, texts):
        notes.append(f"AutoTokenizer gives other ids than the corpus's tokenizer in {other} of {len(texts)} texts of its validation split")


def _texts(source: Source, tokenizer: Tokenizer) -> list[str]:
    """Some validation text, and the token that ends a text as people write it."""
    texts = [f"a {tokenizer.end_name} b"] if tokenizer.end_name else []
    if source.corpus is not None:
        split, seq_len = source.corpus.val, source.config.seq_len
        windows = split.windows(seq_len)
        chosen = np.unique(np.linspace(0, windows - 1, min(COMPARED_TEXTS, windows)).astype(np.int64))
        texts += [tokenizer.decode(row[row != source.corpus.eot_id]) for row in split.read(chosen, seq_len).astype(np.int64)]
    return texts


def _lines(source: Source) -> list[dict[str, Any]]:
    """The lines of the run's metrics up to the step that is exported."""
    file = source.folder / "metrics.jsonl"
    if source.state is None or not file.exists():
        return []
    return [line for line in read_metrics(file) if line["step"] <= source.state["step"]]


def _check_choices(flags: argparse.Namespace) -> None:
    for name, allowed in (("format", FORMATS), ("dtype", tuple(DTYPES))):
        value = getattr(flags, name)
        if value is not None:
            check_choice(name, value, allowed)
    if flags.int8:
        if flags.format == "hf":
            raise UsageError(
                "--int8 with --format hf: transformers quantizes layers of its class Linear, and its GPT-2 has Conv1D, so that it could"
                " not read the folder; leave --format out, for plain"
            )
        check_int8()


def _check_out(out: Path, source: Path) -> None:
    """Refuse a folder that is there, that cannot be made, or that is within the source. Creates nothing."""
    if not out.name or out.name in (".", ".."):
        raise UsageError(f"--out {out}: give the name of a folder to be made")
    if os.path.lexists(out):
        raise UsageError(f"--out {out}: {'exists' if out.is_dir() else 'is a file'}, and nothing is overwritten; give another folder")
    if source.resolve() in out.resolve().parents:
        raise UsageError(f"--out {out}: is within {source}, which is only read; give another folder")
    above = out.absolute().parent
    while not above.exists():
        above = above.parent
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise UsageError(f"--out {out}: cannot be made, {above} is {'not writable' if above.is_dir() else 'a file'}; give another folder")


def _check_room(out: Path, source: Source, dtype: str) -> None:
    above = out.absolute().parent
    while not above.exists():
        above = above.parent
    needed = sum(math.prod(shape) for shape in hf_shapes(source.config).values()) * ITEMSIZE[dtype]
    free = shutil.disk_usage(above).free
    if needed > free:
        raise UsageError(f"--out {out}: takes {needed / 2**30:,.2f} GiB, and {above} has {free / 2**30:,.2f} left; give another folder")


def _remove_left_over(out: Path) -> None:
    """Remove what exports into `out` had begun and were killed over."""
    for path in out.absolute().parent.glob(f".{glob.escape(out.name)}.*.tmp"):
        number = path.suffixes[-2][1:] if len(path.suffixes) > 1 else ""
        if number.isdecimal() and not psutil.pid_exists(int(number)):
            shutil.rmtree(path, ignore_errors=True)


def _sync(folder: Path) -> None:
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that what was begun is removed
    run_command(main)
