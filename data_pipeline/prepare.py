"""Text to token shards: `python data_pipeline/prepare.py --source stdlib --out data/stdlib`

Reads the source twice: once to train the tokenizer on the training documents, once to encode everything. The standard
library (731 documents, 12 MB) becomes 3.2 M tokens of `bpe:8192`, 6.4 MB of shards, in three seconds.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

if not __package__:
    # Run as a script, Python puts this folder first on the path. The root there instead makes `data_pipeline` importable
    # without an installation, and keeps `tokenizer`, `errors` and so on from shadowing anybody's modules.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tqdm import tqdm

from data_pipeline.encoding import encode_documents
from data_pipeline.errors import DataError
from data_pipeline.shards import SPLITS, Corpus, ShardWriter, open_corpus, token_dtype, write_manifest
from data_pipeline.sources import TextFiles, open_source, split_documents
from data_pipeline.staging import staged_folder
from data_pipeline.tokenizer import parse_spec, train_tokenizer

# Below this much text, starting processes (half a second) costs more than they save (a core encodes about 15 MB/s).
BYTES_THAT_PAY_FOR_WORKERS = 64 * 2**20
Say = Callable[[str], None]


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    say: Say = (lambda line: None) if args.quiet else (lambda line: print(line, flush=True))
    try:
        prepare(args, say)
        return 0
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted: nothing was written to {args.out}", file=sys.stderr)
        return 130
    except BrokenProcessPool:
        print("failed: a worker process died, most likely for lack of memory; run again with fewer --workers", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"failed: {error}; nothing was written to {args.out}", file=sys.stderr)
        return 1


def prepare(args: argparse.Namespace, say: Say) -> None:
    """Prepares the corpus that `args` describe, or finds that it is there already. DataError for what the user can mend."""
    started = time.monotonic()
    _check(args)
    source = open_source(args.source)
    options = {"tokenizer": args.tokenizer, "val_fraction": args.val_fraction, "shard_tokens": args.shard_tokens}
    if os.path.lexists(args.out):
        _check_same(args.out, source.describe(), options)
        say(f"{args.out} is already prepared from this source with these options: nothing to do")
        return
    with staged_folder(args.out) as folder:
        say(f"training the tokenizer {args.tokenizer} on the training documents of {args.source} ({source.n_bytes / 1e6:,.1f} MB in all)")
        tokenizer = train_tokenizer(
            args.tokenizer, (text for split, text, _ in split_documents(source.documents(), args.val_fraction) if split == "train")
        )
        asked = parse_spec(args.tokenizer)[1]
        if tokenizer.vocab_size < asked:
            say(f"the text has no more pairs to merge: the vocabulary has {tokenizer.vocab_size:,} ids instead of {asked:,}")
        entry = tokenizer.save(folder)
        workers = args.workers or (len(os.sched_getaffinity(0)) if source.n_bytes >= BYTES_THAT_PAY_FOR_WORKERS else 1)
        say(f"encoding with {workers} process{'es' if workers > 1 else ''}")
        dtype = token_dtype(tokenizer.vocab_size)
        writers = {split: ShardWriter(folder, split, dtype, args.shard_tokens) for split in SPLITS}
        documents = split_documents(source.documents(), args.val_fraction)
        with _progress(source, args.quiet) as bar:
            for chunk in encode_documents(documents, tokenizer, folder, entry, workers):
                for encoded in chunk:
                    writers[encoded.split].write(encoded.ids, encoded.documents, encoded.n_bytes)
                    bar.update(encoded.n_bytes)
        splits = {split: writer.close() for split, writer in writers.items()}
        _check_both_splits(splits, args)
        write_manifest(folder, tokenizer.vocab_size, tokenizer.eot_id, entry, source.describe(), options, splits)
    _summarize(open_corpus(args.out), source, time.monotonic() - started, say)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="prepare.py",
        description="Turns text into token shards: trains a tokenizer on the training documents, encodes everything, writes --out.",
        epilog="--out appears whole or not at all. Exit codes: 0 done or already there, 1 failed, 2 user's mistake, 130 interrupted.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--source",
        required=True,
        help="stdlib (the Python standard library, 12 MB, no download), a .txt/.md/.py file, or a folder of those",
    )
    parser.add_argument("--out", required=True, type=Path, help="the corpus folder to make; must not exist, or be this very corpus")
    parser.add_argument(
        "--tokenizer",
        default="bpe:8192",
        help="bpe:N (byte-level BPE of N ids, trained on the source) or bytes (257 ids); default %(default)s",
    )
    parser.add_argument(
        "--val_fraction", type=float, default=0.05, help="share of the documents (of a lone file's text) to validate; default %(default)s"
    )
    parser.add_argument("--workers", type=int, help="encoding processes, the result is the same; default: 1 below 64 MB, else one a core")
    parser.add_argument("--shard_tokens", type=int, default=100_000_000, help="tokens in each shard file; default %(default)s (200 MB)")
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    return parser.parse_args(argv)


def _check(args: argparse.Namespace) -> None:
    parse_spec(args.tokenizer)
    if not 0 < args.val_fraction < 1:
        raise DataError(f"--val_fraction {args.val_fraction}: not a share; allowed: above 0 and below 1, such as 0.05")
    if args.shard_tokens <= 0:
        raise DataError(f"--shard_tokens {args.shard_tokens}: no shard can hold that; allowed: 1 or more, such as 100000000")
    if args.workers is not None and args.workers <= 0:
        raise DataError(f"--workers {args.workers}: allowed: 1 or more; leave it out to let the size of the source decide")
    if not args.out.name:
        raise DataError(f"--out {args.out}: not the name of a new folder; give one, such as data/stdlib")


def _check_same(out: Path, source: dict[str, Any], options: dict[str, Any]) -> None:
    try:
        manifest = open_corpus(out).manifest
    except DataError as error:
        raise DataError(f"--out {out} is there and no complete corpus; remove it or choose another --out ({error})") from None
    for asked, found in ((options, manifest["options"]), (source, manifest["source"])):
        for key in asked:
            if asked[key] != found.get(key):
                raise DataError(
                    f"--out {out} is there and was prepared otherwise ({key} was {found.get(key)}, now {asked[key]});"
                    " remove it or choose another --out"
                )


def _check_both_splits(splits: dict[str, Any], args: argparse.Namespace) -> None:
    documents = {split: splits[split]["documents"] for split in SPLITS}
    for split, way in (("train", "lower"), ("val", "raise")):
        if not documents[split]:
            raise DataError(
                f"--source {args.source}: no document for {split} ({sum(documents.values())} in all, --val_fraction {args.val_fraction});"
                f" {way} --val_fraction, or give more documents (a single file is cut in two)"
            )


def _progress(source: TextFiles, quiet: bool) -> tqdm:
    return tqdm(total=source.n_bytes, unit="B", unit_scale=True, desc="encoding", leave=False, disable=quiet or not sys.stderr.isatty())


def _summarize(corpus: Corpus, source: TextFiles, seconds: float, say: Say) -> None:
    say(f"{'split':8}{'documents':>12}{'tokens':>16}{'bytes/token':>14}{'shards':>9}{'MB':>12}")
    for split in SPLITS:
        entry = corpus.manifest["splits"][split]
        size = entry["tokens"] * corpus.dtype.itemsize / 1e6
        ratio = entry["bytes"] / entry["tokens"]
        say(f"{split:8}{entry['documents']:>12,}{entry['tokens']:>16,}{ratio:>14.2f}{len(entry['shards']):>9,}{size:>12,.1f}")
    if source.skipped:
        say("skipped: " + ", ".join(f"{count} {reason}" for reason, count in sorted(source.skipped.items())))
    say(f"{corpus.path}: {corpus.vocab_size:,} ids, {corpus.dtype.name}, {seconds:.1f} s")
    for file in sorted(corpus.path.iterdir()):
        say(f"  {file.name:22}{file.stat().st_size:>16,} bytes")


if __name__ == "__main__":
    sys.exit(main())
