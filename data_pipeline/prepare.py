"""Text to token shards: `python data_pipeline/prepare.py --source stdlib --out data/stdlib`

Reads the sources twice where a tokenizer is trained: once for that, on the training documents, once to encode everything. The standard
library (731 documents, 12 MB) becomes 3.2 M tokens of `bpe:8192`, 6.4 MB of shards, in three seconds.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a script, Python puts this folder first on the path. The root there instead makes `data_pipeline` importable
    # without an installation, and keeps `tokenizer`, `errors` and so on from shadowing anybody's modules.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tqdm import tqdm

from data_pipeline.documents import TRAINING_BYTES, Documents, chunks, pieces, training_texts
from data_pipeline.encoding import encode_chunks
from data_pipeline.errors import DataError, print_line
from data_pipeline.progress import Progress
from data_pipeline.records import MAX_RECORD_MIB, Problems
from data_pipeline.shards import MAX_SHARD_TOKENS, SPLITS, Corpus, open_corpus
from data_pipeline.sources import ALLOWED, open_sources
from data_pipeline.staging import staged_folder
from data_pipeline.tokenizer import Tokenizer, make_tokenizer, parse_spec
from data_pipeline.writing import CorpusWriter, forget_progress, read_progress, write_manifest

# Below this much text, starting processes (half a second) costs more than they save (a core encodes about 15 MB/s).
BYTES_THAT_PAY_FOR_WORKERS = 64 * 2**20
MOST_RECORD_MIB = 2**20
#: The flags that decide what the corpus holds, recorded in its manifest.
OPTIONS = ("tokenizer", "end_of_text", "val_fraction", "shard_tokens", "text_column", "max_docs", "max_record_mib", "dedup", "on_error")
Say = Callable[[str], None]


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    say: Say = (lambda line: None) if args.quiet else (lambda line: print_line(line, sys.stdout))
    try:
        verify(args, say) if args.verify else prepare(args, say)
        return 0
    except DataError as error:
        print_line(f"error: {error}", sys.stderr)
        return 2
    except KeyboardInterrupt:
        print_line(f"interrupted: nothing was written to {args.out}{_kept(args)}", sys.stderr)
        return 130
    except BrokenProcessPool:
        why = "most likely for lack of memory; run again with fewer --workers"
        print_line(f"failed: a worker process died, {why}{_kept(args)}", sys.stderr)
        return 1
    except OSError as error:
        print_line(f"failed: {error}; nothing was written to {args.out}{_kept(args)}", sys.stderr)
        return 1


def prepare(args: argparse.Namespace, say: Say) -> None:
    """Prepares the corpus that `args` describe, or finds that it is there already. DataError for what the user can mend."""
    started = time.monotonic()
    _check(args)
    problems = Problems(args.on_error, args.max_record_mib * 2**20)
    sources, weights = open_sources(args.source, args.text_column, args.max_docs, problems)
    described = [source.describe() for source in sources]
    options = {key: getattr(args, key) for key in OPTIONS}
    mixture = weights or [1.0]
    if os.path.lexists(args.out):
        _check_same(args.out, {**options, "sources": described, "mixture": mixture})
        forget_progress(args.out)  # a run that was killed when it had done all but this
        say(f"{args.out} is already prepared from this source with these options: nothing to do")
        return
    documents = Documents(sources, args.val_fraction, grouped=weights is not None, dedup=args.dedup == "exact")
    identity = {**options, "sources": described, "state": [source.state() for source in sources], "mixture": mixture}
    del identity["on_error"]  # no record that was passed over was bad
    with staged_folder(args.out, _worth_keeping, args.resume) as folder:
        progress = read_progress(folder)
        if progress is None:
            tokenizer, entry = _make_tokenizer(args, documents, folder, say)
        else:
            _check_resumable(args.out, identity, progress["identity"])
            entry = progress["tokenizer"]
            tokenizer = Tokenizer.load(folder, entry)
        workers = args.workers or (len(os.sched_getaffinity(0)) if documents.n_bytes >= BYTES_THAT_PAY_FOR_WORKERS else 1)
        writer = CorpusWriter(folder, tokenizer.vocab_size, args.shard_tokens, identity, entry, progress)
        try:
            behind = writer.chunks
            if behind:
                say(f"going on behind the first {behind:,} chunks of text")
            say(f"encoding with {workers} process{'es' if workers > 1 else ''}")
            todo = islice(chunks(pieces(documents, tokenizer)), behind, None)  # what is behind is read again, and not encoded
            with Progress(documents.n_bytes, args.quiet) as bar:
                for chunk in encode_chunks(todo, tokenizer, folder, entry, workers):
                    writer.write(chunk)
                    counts = [(len(part.ends), len(part.ids), part.n_bytes) for part in chunk]
                    bar.update(documents.n_read, *map(sum, zip(*counts, strict=True)))
            splits = writer.finish()
        except DataError as reason:
            if not _worth_keeping(folder):
                raise
            raise DataError(
                f"{reason}; what came before it is kept: --resume goes on there, past bad records with --on_error skip"
            ) from None
        finally:
            writer.close()
        dropped = documents.dropped + problems.counts
        try:
            _check_splits(splits, args, len(mixture), dropped)
        except DataError:
            forget_progress(folder)  # with these options nothing comes of it
            raise
        write_manifest(
            folder,
            tokenizer.vocab_size,
            tokenizer.eot_id,
            tokenizer=entry,
            sources=described,
            options=options,
            mixture=mixture,
            dropped=dict(sorted(dropped.items())),
            splits=splits,
        )
    forget_progress(args.out)
    _summarize(open_corpus(args.out), dropped, problems, time.monotonic() - started, say)


def verify(args: argparse.Namespace, say: Say) -> None:
    """Reads every byte of a corpus that is there; DataError on the first that is not what the manifest says."""
    corpus = open_corpus(args.out)
    total = sum(shard["tokens"] for split in SPLITS for shard in corpus.manifest["splits"][split]["shards"]) * corpus.dtype.itemsize
    hidden = args.quiet or not sys.stderr.isatty()
    with tqdm(total=total, unit="B", unit_scale=True, desc="verifying", leave=False, disable=hidden) as bar:
        corpus.verify(bar.update)
    for split in SPLITS:
        entry = corpus.manifest["splits"][split]
        documents = f"{entry['documents']:,} documents, " if "documents" in entry else ""  # nobody counted nanoGPT's
        shards = f"{len(entry['shards'])} shard{'s' if len(entry['shards']) > 1 else ''}"
        say(f"{corpus.path}: {split}: {documents}{entry['tokens']:,} tokens in {shards}, as written")


def _make_tokenizer(args: argparse.Namespace, documents: Documents, folder: Path, say: Say) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer, saved in `folder`, and its entry of the manifest."""
    kind, asked = parse_spec(args.tokenizer)
    if kind == "bpe":
        size = f"{documents.n_bytes / 1e6:,.1f} MB" if documents.n_bytes else "a stream"
        sample = f"{TRAINING_BYTES / 1e6:,.0f} MB of " if not 0 < documents.n_bytes <= TRAINING_BYTES else ""
        say(f"training the tokenizer {args.tokenizer} on {sample}the training documents of {', '.join(args.source)} ({size} in all)")
    tokenizer = make_tokenizer(args.tokenizer, training_texts(documents), args.end_of_text)
    if kind == "bpe" and tokenizer.vocab_size < asked:
        say(f"the text has no more pairs to merge: the vocabulary has {tokenizer.vocab_size:,} ids instead of {asked:,}")
    return tokenizer, tokenizer.save(folder)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python data_pipeline/prepare.py",
        description="Turns text into token shards: trains or loads a tokenizer, encodes everything, writes --out.",
        epilog="--out appears whole or not at all. Exit codes: 0 done or already there, 1 failed, 2 user's mistake, 130 interrupted.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--source",
        nargs="+",
        action="extend",
        default=[],
        metavar="SOURCE",
        help=f"where the text is, one or several: {ALLOWED}. stdlib is the Python standard library, no download. With weights, such as"
        " a.txt@0.7 b@0.3, training draws from each by its weight at every moment",
    )
    parser.add_argument("--out", type=Path, help="the corpus folder to make; must not exist, or be this very corpus")
    parser.add_argument(
        "--tokenizer",
        default="bpe:8192",
        help="bpe:N (byte-level BPE of N ids, trained on the source), bytes (257 ids), an encoding of tiktoken (gpt2, cl100k_base, ...),"
        " a tokenizer.json, or a folder that AutoTokenizer reads; default %(default)s",
    )
    parser.add_argument("--end_of_text", metavar="TOKEN", help="the token that ends a document; default: the tokenizer's own")
    parser.add_argument("--text_column", default="text", help="the column of tables and JSON that holds the text; default %(default)s")
    parser.add_argument("--max_docs", type=int, metavar="N", help="take the first N documents of each source")
    parser.add_argument("--dedup", choices=["none", "exact"], default="none", help="exact: leave out documents whose text came before")
    parser.add_argument(
        "--on_error",
        choices=["stop", "skip"],
        default="stop",
        help="a record that cannot be used (not UTF-8, no text column, broken JSON): stop with its place, or count it; default stop",
    )
    parser.add_argument(
        "--max_record_mib",
        type=int,
        default=MAX_RECORD_MIB,
        metavar="N",
        help="the largest record of .jsonl, .json, .csv, .parquet in MiB, decompressed; a larger one cannot be used; default %(default)s",
    )
    parser.add_argument(
        "--val_fraction", type=float, default=0.05, help="share of the documents (of a lone file's text) to validate; default %(default)s"
    )
    parser.add_argument("--workers", type=int, help="encoding processes, the result is the same; default: 1 below 64 MB, else one a core")
    parser.add_argument("--shard_tokens", type=int, default=100_000_000, help="tokens in each shard file; default %(default)s (200 MB)")
    parser.add_argument("--resume", action="store_true", help="go on where an interrupted run of the same command stopped")
    parser.add_argument(
        "--verify", nargs="?", type=Path, const=True, metavar="DIR", help="read every byte of the corpus DIR (or --out), and write nothing"
    )
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    args = parser.parse_args(argv)
    if args.verify:
        args.out = args.out if args.verify is True else args.verify
    missing = [name for name, value in (("--source", args.source or args.verify), ("--out", args.out)) if not value]
    if missing:
        parser.error(f"the following arguments are required: {', '.join(missing)}")
    return args


def _check(args: argparse.Namespace) -> None:
    parse_spec(args.tokenizer)
    if not 0 < args.val_fraction < 1:
        raise DataError(f"--val_fraction {args.val_fraction}: not a share; allowed: above 0 and below 1, such as 0.05")
    if not 0 < args.shard_tokens <= MAX_SHARD_TOKENS:
        raise DataError(f"--shard_tokens {args.shard_tokens}: allowed: 1 or more, up to {MAX_SHARD_TOKENS}, such as 100000000")
    if args.max_record_mib > MOST_RECORD_MIB:
        raise DataError(f"--max_record_mib {args.max_record_mib}: allowed: 1 to {MOST_RECORD_MIB}, such as {MAX_RECORD_MIB}")
    for name in ("workers", "max_docs", "max_record_mib"):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            raise DataError(f"--{name} {getattr(args, name)}: allowed: 1 or more; or leave it out")
    if not args.out.name:
        raise DataError(f"--out {args.out}: not the name of a new folder; give one, such as data/stdlib")


def _check_same(out: Path, asked: dict[str, Any]) -> None:
    try:
        manifest = open_corpus(out).manifest
    except DataError as error:
        raise DataError(f"--out {out} is there and no complete corpus; remove it or choose another --out ({error})") from None
    found = {**manifest["options"], "sources": manifest["sources"], "mixture": manifest["mixture"]}
    found.setdefault("max_record_mib", asked["max_record_mib"])  # older corpora do not say it
    for key in asked:
        if asked[key] != found.get(key):
            raise DataError(f"--out {out} is there and was prepared otherwise ({_difference(key, found.get(key), asked[key])});"
                " remove it or choose another --out")  # fmt: skip


def _check_resumable(out: Path, asked: dict[str, Any], found: dict[str, Any]) -> None:
    for key in asked:
        if asked[key] != found.get(key):
            what = "a source was changed meanwhile" if key == "state" else _difference(key, found.get(key), asked[key])
            partial = out.parent / f".{out.name}.partial"
            raise DataError(f"--resume: the interrupted run was another ({what}); give its own values, or remove {partial} and start anew")


def _difference(key: str, found: Any, asked: Any) -> str:
    """The first thing in which two values of an option or of the sources differ."""
    if isinstance(found, list) and isinstance(asked, list) and len(found) == len(asked):
        found, asked = next(pair for pair in zip(found, asked, strict=True) if pair[0] != pair[1])
        if isinstance(found, dict) and isinstance(asked, dict):
            key = next(name for name in {**found, **asked} if found.get(name) != asked.get(name))
            found, asked = found.get(key), asked.get(key)
    return f"{key} was {found}, now {asked}"


def _worth_keeping(folder: Path) -> bool:
    """Whether an interrupted run has written anything that would not be there again in a moment."""
    progress = read_progress(folder)
    return progress is not None and progress["chunks"] > 0


def _kept(args: argparse.Namespace) -> str:
    partial = args.out.parent / f".{args.out.name}.partial"
    return "; the same command with --resume goes on from here" if partial.exists() and _worth_keeping(partial) else ""


def _check_splits(splits: dict[str, Any], args: argparse.Namespace, n_groups: int, dropped: Counter[str]) -> None:
    documents = {split: splits[split]["documents"] for split in SPLITS}
    for split, way in (("train", "lower"), ("val", "raise")):
        if not documents[split]:
            left_out = f", {sum(dropped.values())} left out" if dropped else ""
            raise DataError(
                f"--source {' '.join(args.source)}: no document for {split} ({sum(documents.values())} in all{left_out}, --val_fraction"
                f" {args.val_fraction}); {way} --val_fraction, or give more documents (a single file is cut in two)"
            )
    for group in range(n_groups):
        if not any(shard["group"] == group for shard in splits["train"]["shards"]):
            raise DataError(f"--source {args.source[group]}: no document for train, so its weight cannot be kept; give more of it")


def _summarize(corpus: Corpus, dropped: Counter[str], problems: Problems, seconds: float, say: Say) -> None:
    say(f"{'split':8}{'documents':>12}{'tokens':>16}{'bytes/token':>14}{'shards':>9}{'MB':>12}")
    for split in SPLITS:
        entry = corpus.manifest["splits"][split]
        size = entry["tokens"] * corpus.dtype.itemsize / 1e6
        ratio = entry["bytes"] / entry["tokens"]
        say(f"{split:8}{entry['documents']:>12,}{entry['tokens']:>16,}{ratio:>14.2f}{len(entry['shards']):>9,}{size:>12,.1f}")
    if dropped:
        say("left out: " + ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items())))
    for cases in problems.cases.values():
        for case in cases:
            say(f"  {case}")
    text_bytes = sum(corpus.manifest["splits"][split]["bytes"] for split in SPLITS)
    say(f"{corpus.path}: {corpus.vocab_size:,} ids, {corpus.dtype.name}, {seconds:.1f} s, {text_bytes / 1e6 / seconds:,.1f} MB/s")
    for file in sorted(corpus.path.iterdir()):
        say(f"  {file.name:22}{file.stat().st_size:>16,} bytes")


if __name__ == "__main__":
    sys.exit(main())
