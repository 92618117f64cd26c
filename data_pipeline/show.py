"""What is in a corpus: counts, a picture of the documents' lengths, samples: `python data_pipeline/show.py data/stdlib`"""

import argparse
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # as in prepare.py

import numpy as np

from data_pipeline.errors import DataError, print_line
from data_pipeline.shards import SPLITS, Corpus, open_corpus, readable, shown
from data_pipeline.tokenizer import Tokenizer

PICTURE = "lengths.png"
SAMPLE_CHARACTERS = 300
#: Of a corpus that has no list of its documents' ends, so many tokens of a split are searched for them.
SEARCHED_TOKENS = 100_000_000
#: For each group of a split: its tokens, and where its documents begin and end, from 0 on: one entry more than there are documents.
Documents = dict[str, list[tuple["_Joined", np.ndarray]]]


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    try:
        show(args)
        return 0
    except DataError as error:
        print(f"error: {_printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


@readable()
def show(args: argparse.Namespace) -> None:
    """Print what is in the corpus and draw its lengths. DataError for what the user can mend."""
    for name in ("samples", "seed"):
        if getattr(args, name) < 0:
            raise DataError(f"--{name} {getattr(args, name)}: allowed: 0 or more")
    corpus = open_corpus(args.corpus)
    documents = {split: list(_documents(corpus, split)) for split in SPLITS}
    lengths = {split: np.concatenate([np.zeros(0, int), *(np.diff(ends) for _, ends in documents[split])]) for split in SPLITS}
    if not args.quiet:
        _print([*_counts(corpus), *_lengths(corpus, lengths), *_samples(corpus, documents, args.samples, args.seed)])
    if any(len(found) for found in lengths.values()):
        picture = args.picture or corpus.path / PICTURE
        _draw(lengths, corpus, picture)
        if not args.quiet:
            _print(["", f"the lengths are drawn in {_printable(str(picture))}"])


def _print(lines: Iterable[str]) -> None:
    try:
        for line in lines:
            print_line(line, sys.stdout)
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _printable(text: str, allowed: str = "") -> str:
    """`text` with everything escaped that does not print, such as what a terminal would obey."""
    return "".join(c if c.isprintable() or c in allowed else c.encode("unicode_escape").decode() for c in text)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python data_pipeline/show.py",
        description="Shows what is in a corpus: counts by split and source, the lengths of its documents as a picture, decoded samples.",
        epilog="Exit codes: 0 done, 2 user's mistake, 130 interrupted.",
        allow_abbrev=False,
    )
    parser.add_argument("corpus", type=Path, help="a folder that prepare.py made, or one of nanoGPT's")
    parser.add_argument("--samples", type=int, default=3, help="documents of each split to show the beginning of; default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="which ones; default %(default)s")
    parser.add_argument("--picture", type=Path, metavar="FILE", help=f"where to draw the lengths; default: {PICTURE} in the corpus folder")
    parser.add_argument("--quiet", action="store_true", help="draw the picture and print errors only")
    return parser.parse_args(argv)


def _documents(corpus: Corpus, split: str) -> Iterator[tuple["_Joined", np.ndarray]]:
    """Group by group, as documents may cross from one shard of a group to the next."""
    shards = corpus.manifest["splits"][split]["shards"]
    for group in sorted({shard["group"] for shard in shards}):
        mine = [shard for shard in shards if shard["group"] == group and shard["tokens"]]
        maps = [np.memmap(corpus.path / shard["file"], dtype=corpus.dtype, mode="r") for shard in mine]
        starts = np.cumsum([0, *(shard["tokens"] for shard in mine)])
        ends = [np.zeros(1, np.int64)]
        for shard, tokens, start in zip(mine, maps, starts.tolist(), strict=False):
            if "ends" in shard:
                ends.append(corpus.ends(shard) + start)
            elif corpus.eot_id is not None:
                ends.append(np.flatnonzero(tokens[:SEARCHED_TOKENS] == corpus.eot_id) + 1 + start)
        yield _Joined(maps, starts), np.concatenate(ends)


class _Joined:
    """The tokens of several shards as one sequence."""

    def __init__(self, maps: Sequence[np.ndarray], starts: np.ndarray):
        self.maps, self.starts = maps, starts

    def __getitem__(self, place: slice) -> np.ndarray:
        parts = [
            tokens[max(0, place.start - start) : max(0, place.stop - start)]
            for tokens, start in zip(self.maps, self.starts.tolist(), strict=False)
            if place.start < start + len(tokens) and place.stop > start
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _counts(corpus: Corpus) -> Iterator[str]:
    manifest = corpus.manifest
    tokenizer = _said(manifest["tokenizer"].get("name") or manifest["tokenizer"].get("kind"))
    yield f"{_printable(str(corpus.path))}: {corpus.vocab_size:,} ids, {corpus.dtype.name}, tokenizer {tokenizer}"
    for number, source in enumerate(manifest["sources"]):
        weight = f" weight {corpus.mixture[number]:.4g}" if len(corpus.mixture) == len(manifest["sources"]) > 1 else ""
        source = source if isinstance(source, dict) else {"name": source}
        rest = ", ".join(f"{_said(key)} {_said(value)}" for key, value in source.items() if key not in ("name", "listing_sha256"))
        yield f"source{weight} {_said(source.get('name'))}" + (f" ({rest})" if rest else "")
    if manifest["options"]:
        given = {key: value for key, value in manifest["options"].items() if value is not None}
        yield "options: " + ", ".join(f"{_said(key)} {_said(value)}" for key, value in given.items())
    if manifest["dropped"]:
        yield "left out: " + ", ".join(f"{_said(count)} {_said(reason)}" for reason, count in manifest["dropped"].items())
    yield f"{'split':8}{'group':>6}{'documents':>12}{'tokens':>16}{'bytes/token':>13}{'shards':>8}{'MB':>11}"
    for split in SPLITS:
        entry = manifest["splits"][split]
        groups = sorted({shard["group"] for shard in entry["shards"]})
        for group in groups if len(groups) > 1 else []:
            yield _row(corpus, split, str(group), [shard for shard in entry["shards"] if shard["group"] == group], None)
        yield _row(corpus, split, "all" if len(groups) > 1 else "", entry["shards"], entry.get("bytes"))


def _said(value: object) -> str:
    """A value of the manifest that is only there for people to read."""
    return f"{value:,}" if type(value) is int else _printable(value) if isinstance(value, str) else shown(value)


def _row(corpus: Corpus, split: str, group: str, shards: list[dict[str, Any]], n_bytes: int | None) -> str:
    tokens = sum(shard["tokens"] for shard in shards)
    documents = f"{sum(shard['documents'] for shard in shards):,}" if all("documents" in shard for shard in shards) else "-"
    ratio = f"{n_bytes / tokens:.2f}" if n_bytes and tokens else "-"
    return f"{split:8}{group:>6}{documents:>12}{tokens:>16,}{ratio:>13}{len(shards):>8,}{tokens * corpus.dtype.itemsize / 1e6:>11,.1f}"


def _lengths(corpus: Corpus, lengths: dict[str, np.ndarray]) -> Iterator[str]:
    for split, found in lengths.items():
        shards = corpus.manifest["splits"][split]["shards"]
        partly = any("ends" not in shard and shard["tokens"] > SEARCHED_TOKENS for shard in shards)
        where = f" in the first {SEARCHED_TOKENS:,} tokens" if partly else ""
        if len(found):
            at = [f"{int(value):,}" for value in np.percentile(found, [0, 10, 50, 90, 100])]
            yield (
                f"{split}: {len(found):,} documents{where}; tokens in a document:"
                f" {at[0]} at least, {at[1]} (10%), {at[2]} (median), {at[3]} (90%), {at[4]} at most"
            )
        elif corpus.manifest["splits"][split]["tokens"]:
            yield f"{split}: no end of a document{where}, so there are no lengths"


def _samples(corpus: Corpus, documents: Documents, count: int, seed: int) -> Iterator[str]:
    """The beginning of some documents; of a split where nobody knows where one ends, of the split."""
    if not count:
        return
    try:
        tokenizer = Tokenizer.load(corpus.path, corpus.manifest["tokenizer"])
    except DataError as reason:
        yield f"no samples: {_printable(str(reason))}"
        return

    def text(tokens: _Joined, start: int, stop: int) -> str:
        try:
            found = tokenizer.decode(tokens[start : min(stop, start + 4 * SAMPLE_CHARACTERS)])  # a character is up to four bytes
        except DataError as reason:
            return f"({_printable(str(reason))})"
        return _printable(found[:SAMPLE_CHARACTERS], "\n\t") + ("..." if len(found) > SAMPLE_CHARACTERS else "")

    generator = np.random.default_rng(seed)
    for split in SPLITS:
        before = np.cumsum([0, *(len(ends) - 1 for _, ends in documents[split])])  # documents in front of each group
        total = int(before[-1])
        for number in sorted(generator.choice(total, min(count, total), replace=False).tolist()):
            group = int(np.searchsorted(before, number, side="right")) - 1
            tokens, ends = documents[split][group]
            start, stop = ends[number - before[group] :][:2].tolist()
            yield from ("", f"--- {split}, document {number:,}: {stop - start:,} tokens", text(tokens, start, stop - 1))
        if not total:
            for tokens, _ in documents[split][:1]:
                yield from ("", f"--- {split}, its beginning", text(tokens, 0, 4 * SAMPLE_CHARACTERS))


def _draw(lengths: dict[str, np.ndarray], corpus: Corpus, picture: Path) -> None:
    """How large a share of a split's documents has so many tokens, in bins even in the logarithm."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shortest, longest = (int(pick([pick(found) for found in lengths.values() if len(found)])) for pick in (np.min, np.max))
    edges = np.unique(np.round(np.geomspace(shortest, longest + 1, 41)).astype(np.int64))
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for (split, found), color in zip(lengths.items(), ("#3b6fb6", "#d9822b"), strict=True):
        if len(found):
            counts, _ = np.histogram(found, edges)
            label = f"{split}: {len(found):,} documents, median {int(np.median(found)):,} tokens"
            style: dict[str, Any] = {"fill": True, "alpha": 0.55} if split == "train" else {"linewidth": 1.6}
            axes.stairs(100 * counts / len(found), edges, color=color, label=label, **style)
    axes.set(xscale="log", xlabel="tokens in a document, its end of text included", ylabel="share of the split's documents, %")
    axes.set_title(f"Lengths in {_printable(corpus.path.resolve().name)}", parse_math=False)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph")  # the folder's name is in letters that the font lacks
            figure.savefig(picture, dpi=150, format=picture.suffix[1:] or "png")
    except (OSError, ValueError) as reason:
        said = reason.strerror if isinstance(reason, OSError) else " ".join(str(reason).split())
        raise DataError(f"{picture}: cannot be written ({said}); name another place with --picture FILE.png") from None
    finally:
        pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
