"""Text to token shards: `python data_pipeline/prepare.py --source stdlib --out data/stdlib`

Reads the sources once to train a tokenizer on the training documents (`bpe:N` only) and once to encode all documents. The standard
library (731 documents, 12 MB) becomes 3.2 M tokens of `bpe:8192`, 6.4 MB of shards, in three seconds.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if not __package__:
    # For a script, Python puts this folder first on the path. With the root instead, `data_pipeline` can be imported without an
    # installation, and `tokenizer`, `errors` and so on shadow no other modules.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tqdm import tqdm

from data_pipeline.documents import TRAINING_BYTES, Documents, Piece, chunks, pieces, training_texts
from data_pipeline.encoding import encode_chunks
from data_pipeline.errors import DataError, open_standard_streams, print_line, printable
from data_pipeline.manifest import SPLITS
from data_pipeline.records import MAX_RECORD_MIB, PLAIN, Problems
from data_pipeline.shards import Corpus, open_corpus
from data_pipeline.show import counts, show
from data_pipeline.sources import ALLOWED, listed, open_sources
from data_pipeline.staging import partial_folder, staged_folder
from data_pipeline.tokenizer import END_OF_TEXT, Tokenizer, make_tokenizer, parse_spec
from data_pipeline.writing import CorpusWriter, read_progress, remove_progress, write_manifest

# With less text, starting processes (half a second) costs more time than they save (a core encodes about 17 MB/s).
MIN_BYTES_FOR_WORKERS = 64 * 2**20
#: Seconds between two progress reports if standard error is not a terminal.
SECONDS_BETWEEN_REPORTS = 15.0
#: The flags that do not determine the content of the corpus. The others are recorded in its manifest, in the order of `_parse`.
NO_OPTIONS = ("source", "out", "verify", "show", "workers", "resume", "quiet")
Say = Callable[[str], None]


def main(argv: list[str] | None = None) -> int:
    open_standard_streams()
    args = _parse(argv)
    say: Say = (lambda line: None) if args.quiet else (lambda line: print_line(line, sys.stdout))
    try:
        if args.show:
            for line in show(open_corpus(args.show)):
                print_line(line, sys.stdout)
        elif args.verify:
            verify(args, say)
        else:
            prepare(args, say)
        return 0
    except DataError as error:
        print_line(f"error: {printable(str(error))}", sys.stderr)
        return 2
    except KeyboardInterrupt:
        print_line(f"interrupted{_what_is_left(args.out)}", sys.stderr)
        return 130
    except (BrokenProcessPool, OSError) as error:
        reason = printable(str(error))
        if isinstance(error, BrokenPipeError):  # the reader of the output, such as `head`, has closed it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if args.show:
                return 0
        elif isinstance(error, BrokenProcessPool):
            reason = "a worker process died, most likely out of memory; run again with fewer --workers"
        print_line(f"failed: {reason}{_what_is_left(args.out)}", sys.stderr)
        return 1


def prepare(args: argparse.Namespace, say: Say) -> None:
    """Prepares the corpus that `args` describe, unless it exists already. Raises DataError for a user's mistake."""
    started = time.monotonic()
    _check(args)
    problems = Problems(args.on_error, args.max_record_mib * 2**20)
    sources, mixture = open_sources(args.source, args.text_column, args.max_docs, problems, args.separator)
    if args.separator and not any(source.plain for source in sources):
        raise DataError(f"--separator {args.separator!r}: no source has a file of {' '.join(PLAIN)}, which it cuts; omit the flag")
    options = {key: value for key, value in vars(args).items() if key not in NO_OPTIONS}
    if len(columns := {source.text_column for source in sources}) > 1 or args.text_column not in columns:
        options["text_column"] = [source.text_column for source in sources]
    about = {"sources": [source.describe() for source in sources], "options": options, "mixture": [*mixture.values()] or [1.0]}
    about |= {"names": [*mixture]} if mixture else {}
    if os.path.lexists(args.out):
        _check_same(args, about)
        remove_progress(args.out)  # left by a run that was killed just before this step
        say(f"{args.out} is already prepared from this source (files of these names and sizes) with these options; nothing to do")
        return
    documents = Documents(sources, args.val_fraction, grouped=bool(mixture), dedup=args.dedup == "exact")
    identity = {**about, "state": [source.state() for source in sources]}
    # --on_error may change on resume: the run stopped at the first bad record, so none was skipped before.
    identity["options"] = {key: value for key, value in options.items() if key != "on_error"}
    with staged_folder(args.out, _has_progress, args.resume) as folder:
        progress = read_progress(folder)
        if progress is None:
            tokenizer, entry = _make_tokenizer(args, documents, folder, say)
        else:
            if difference := _difference(progress["identity"], identity):
                raise DataError(
                    f"--resume: the interrupted run was different ({difference}); use its values, or remove {folder} and start again"
                )
            entry = progress["tokenizer"]
            _check_tokenizer(args, entry, folder)
            tokenizer = Tokenizer.load(folder, entry)
        ends = Counter({END_OF_TEXT: 0, tokenizer.end_name or END_OF_TEXT: 0})  # how often they occur in the texts
        workers = args.workers or (1 if 0 < documents.n_bytes < MIN_BYTES_FOR_WORKERS else len(os.sched_getaffinity(0)))
        writer = CorpusWriter(folder, tokenizer, args.shard_tokens, identity, entry, progress)
        try:
            done = writer.chunks
            if done:
                say(f"resuming after {done:,} chunks of text")
            say(f"encoding with {workers} process{'es' if workers > 1 else ''}")
            with _progress_bar(documents.n_bytes, args.quiet) as bar:

                def watched() -> Iterator[list[Piece]]:
                    for chunk in chunks(pieces(documents, tokenizer)):
                        bar.update(documents.n_read - bar.n)
                        for end in ends:
                            ends[end] += sum(piece.text.count(end) for piece in chunk if end[0] in piece.text)  # `in` is faster
                        yield chunk

                todo = islice(watched(), done, None)  # reads the finished chunks again, without encoding them
                for chunk in encode_chunks(todo, tokenizer, folder, entry, workers):
                    writer.write(chunk)
            splits = writer.finish()
        finally:
            writer.close()
        dropped = sum((source.left_out for source in sources), documents.dropped + problems.counts)
        try:
            _check_splits(splits, args, len(about["mixture"]), dropped, problems)
        except DataError:
            remove_progress(folder)  # resuming with these options would fail again
            raise
        about |= {"tokenizer": entry, "dropped": dict(sorted(dropped.items())), "splits": splits}
        write_manifest(folder, tokenizer.vocab_size, tokenizer.eot_id, **about)
    remove_progress(args.out)
    _summarize(open_corpus(args.out), dropped, problems, time.monotonic() - started, done > 0, say)
    for end, n in (+ends).items():
        say(f"{end!r} occurs {n:,} times in the texts: it is text there and ends no document (--separator cuts text files)")


def verify(args: argparse.Namespace, say: Say) -> None:
    """Reads every byte of an existing corpus. Raises DataError for the first file that differs from its manifest."""
    corpus = open_corpus(args.verify)
    with _progress_bar(corpus.n_bytes, args.quiet, "verifying") as bar:
        corpus.verify(bar.update)
    for split in SPLITS:
        entry = corpus.manifest["splits"][split]
        say(f"{corpus.path}: {split}: {entry['tokens']:,} tokens in {len(entry['shards'])} shard(s), intact")


def _progress_bar(n_bytes: int, quiet: bool, description: str = "encoding") -> tqdm:
    """A progress bar on a terminal, otherwise an occasional line. Without a percentage if `n_bytes` is 0 (not known)."""
    seconds = 0.1 if sys.stderr.isatty() else SECONDS_BETWEEN_REPORTS
    options: dict[str, Any] = {"mininterval": seconds, "maxinterval": 2 * seconds, "delay": seconds, "leave": False, "disable": quiet}
    return tqdm(total=n_bytes or None, unit="B", unit_scale=True, desc=description, **options)


def _make_tokenizer(args: argparse.Namespace, documents: Documents, folder: Path, say: Say) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer, saved in `folder`, and its entry of the manifest."""
    kind, size = parse_spec(args.tokenizer)
    if kind == "bpe":
        say(f"training the tokenizer {args.tokenizer} on up to {TRAINING_BYTES / 1e6:,.0f} MB of {', '.join(args.source)}")
    with _progress_bar(documents.n_bytes, args.quiet, "reading") as bar:
        texts = training_texts(documents, lambda: bar.update(documents.n_read - bar.n))
        tokenizer = make_tokenizer(args.tokenizer, texts, args.end_of_text)
    if kind == "bpe" and tokenizer.vocab_size < size:
        say(f"the text has no more pairs to merge: the vocabulary has {tokenizer.vocab_size:,} ids instead of {size:,}")
    return tokenizer, tokenizer.save(folder)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python data_pipeline/prepare.py",
        description="Turns text into token shards: trains or loads a tokenizer, encodes all documents, and writes the corpus folder --out.",
        epilog="--out is created when the corpus is complete. Exit codes: 0 done, 1 failed, 2 user's mistake, 130 interrupted.",
        allow_abbrev=False,
    )
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument(
        "--source",
        nargs="+",
        action="extend",
        metavar="SOURCE",
        help=f"one or several sources of text: {ALLOWED}. stdlib is the Python standard library and needs no download. With weights, such"
        " as a.txt@0.7 code=b@0.3:content, training draws from each source in proportion to its weight. Each has its own validation loss,"
        " named like its folder or file unless a name stands before =; :content is its text column",
    )
    parser.add_argument("--out", type=Path, help="corpus folder to create; an existing folder must hold the same corpus")
    parser.add_argument(
        "--tokenizer",
        default="bpe:8192",
        help="bpe:N (byte-level BPE with N ids, trained on the source), bytes (257 ids), a tiktoken encoding (gpt2, cl100k_base, ...),"
        " a prepared corpus, a tokenizer.json, or a folder that AutoTokenizer reads; default %(default)s",
    )
    parser.add_argument("--end_of_text", metavar="TOKEN", help="token that ends a document; default: the tokenizer's own")
    parser.add_argument(
        "--val_fraction",
        type=float,
        default=0.05,
        help="fraction of the documents (of the text, if there is one document) for validation; default %(default)s",
    )
    parser.add_argument("--shard_tokens", type=int, default=100_000_000, help="tokens per shard file; default %(default)s (200 MB)")
    parser.add_argument("--text_column", default="text", help="column (or JSON key) that holds the text; default %(default)s")
    parser.add_argument("--max_docs", type=int, metavar="N", help="use only the first N documents of each source")
    parser.add_argument(
        "--max_record_mib",
        type=int,
        default=MAX_RECORD_MIB,
        metavar="N",
        help="largest record (not a text file without --separator) in MiB, decompressed; a larger one is a bad record; default %(default)s",
    )
    parser.add_argument("--dedup", choices=["none", "exact"], default="none", help="exact: drop documents that repeat an earlier one")
    parser.add_argument(
        "--on_error",
        choices=["stop", "skip"],
        default="stop",
        help="bad record (not UTF-8, no text column, broken JSON): stop and print its place, or skip and count it; default %(default)s",
    )
    parser.add_argument(
        "--separator",
        type=lambda text: text.replace("\\n", "\n").replace("\\r", "\r").replace("\\t", "\t"),
        metavar="TEXT",
        help=f"cut {' '.join(PLAIN)} files into documents at each TEXT, such as '<|endoftext|>' or '\\n\\n\\n'; default: none",
    )
    parser.add_argument(
        "--workers",
        type=int,
        help="encoding processes; any number gives the same files; default: 1 for files of less than 64 MiB, else one per core",
    )
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run of the same command")
    task.add_argument("--verify", type=Path, metavar="DIR", help="check every byte of the corpus DIR; write nothing")
    task.add_argument("--show", type=Path, metavar="DIR", help="print counts and a few documents of the corpus DIR; write nothing")
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    args = parser.parse_args(argv)
    given = [name for name, value in vars(args).items() if value != parser.get_default(name) and name not in ("show", "verify", "quiet")]
    if not args.source and given:
        parser.error(f"--{given[0]}: is for preparing a corpus; leave it out beside --show and --verify")
    if args.source and not args.out:
        parser.error("--out: the folder of the corpus is needed")
    return args


def _check(args: argparse.Namespace) -> None:
    parse_spec(args.tokenizer)
    if not 0 < args.val_fraction < 1:
        raise DataError(f"--val_fraction {args.val_fraction}: allowed: above 0 and below 1, such as 0.05")
    for name, largest in (("shard_tokens", sys.maxsize), ("max_record_mib", 2**20), ("workers", 2**20), ("max_docs", sys.maxsize)):
        value = getattr(args, name)
        if value is not None and not 1 <= value <= largest:
            raise DataError(f"--{name} {value}: allowed: 1 or more, up to {largest}, or omit the flag")
    if args.separator == "":
        raise DataError("--separator '': allowed: one character or more, or omit the flag")


def _check_same(args: argparse.Namespace, about: dict[str, Any]) -> None:
    """DataError unless the corpus at `--out` was prepared from the same sources with the same options."""
    out = args.out
    try:
        manifest = open_corpus(out).manifest
    except DataError as error:
        raise DataError(f"--out {out} exists and is not a complete corpus; choose another --out ({error})") from None
    # A newer version has names and options that an older one did not record.
    found = {"names": about.get("names"), **manifest, "options": {**about["options"], "separator": None, **manifest["options"]}}
    if difference := _difference(found, about):
        raise DataError(f"--out {out} exists and was prepared differently ({difference}); remove it or choose another --out")
    _check_tokenizer(args, manifest["tokenizer"], out)


def _check_tokenizer(args: argparse.Namespace, entry: dict[str, Any], folder: Path) -> None:
    """DataError if `--tokenizer` is a file or folder that differs from the copy in `folder`, whose manifest entry is `entry`."""
    if parse_spec(args.tokenizer)[0] in ("corpus", "hugging_face"):
        with TemporaryDirectory() as place:
            now = make_tokenizer(args.tokenizer, (), args.end_of_text).save(Path(place))
        if now["files"] != entry["files"]:
            raise DataError(f"--tokenizer {args.tokenizer}: differs from that in {folder}; remove {folder}, or choose another --out")


def _difference(before: Any, now: Any, key: str = "") -> str:
    """The first value of `now` that differs from `before`, also in nested dicts and lists; "" if there is none."""
    if isinstance(before, dict) and isinstance(now, dict):
        pairs = [(before.get(name), value, name) for name, value in now.items()]
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = [(one, value, key) for one, value in zip(before, now, strict=True)]
    elif before == now:
        return ""
    else:
        return "a source has changed" if key == "state" else f"{key} was {before}, now {now}"
    return next(filter(None, (_difference(*pair) for pair in pairs)), "")


def _has_progress(folder: Path) -> bool:
    """Whether an interrupted run has encoded at least one chunk."""
    progress = read_progress(folder)
    return progress is not None and progress["chunks"] > 0


def _what_is_left(out: Path | None) -> str:
    """The end of the message of a run that did not finish: what it left at `out`."""
    if out is None or os.path.lexists(out):  # complete, or of an earlier run
        return ""
    resume = "; continue with the same command and --resume" if _has_progress(partial_folder(out)) else ""
    return f": nothing was written to {out}{resume}"


def _check_splits(splits: dict[str, Any], args: argparse.Namespace, n_groups: int, dropped: Counter[str], problems: Problems) -> None:
    """DataError if a split, or a group's part of the training split, is empty."""
    documents = {split: splits[split]["documents"] for split in SPLITS}
    for split in SPLITS:
        if not documents[split]:
            left_out = f"; left out: {listed(dropped)}" if dropped else ""
            first = f"; the first: {next(iter(problems.cases.values()))[0]}" if problems.cases else ""
            raise DataError(
                f"--source {' '.join(args.source)}: no document for {split} ({sum(documents.values())} in total{left_out}{first}); change"
                f" --val_fraction {args.val_fraction}, or add documents (a single document is cut in two, and must be long enough)"
            )
    for group in range(n_groups):
        if not any(shard["group"] == group for shard in splits["train"]["shards"]):
            raise DataError(f"--source {args.source[group]}: no document is in the training split; add documents")


def _summarize(corpus: Corpus, dropped: Counter[str], problems: Problems, seconds: float, resumed: bool, say: Say) -> None:
    for line in counts(corpus):
        say(line)
    if dropped:
        say(f"left out: {listed(dropped)}")
    for cases in problems.cases.values():
        for case in cases:
            say(f"  {case}")
    text_bytes = sum(corpus.manifest["splits"][split]["bytes"] for split in SPLITS)
    rate = "" if resumed else f", {text_bytes / 1e6 / seconds:,.1f} MB/s"
    say(f"{corpus.path}: {corpus.vocab_size:,} ids, {corpus.dtype.name}, {seconds:.1f} s{rate}")


if __name__ == "__main__":
    sys.exit(main())
