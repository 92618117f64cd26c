"""Describes a corpus for `prepare.py --show`: its sources, options and counts, and the beginnings of some documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from data_pipeline.errors import DataError, printable
from data_pipeline.manifest import SPLITS
from data_pipeline.shards import Corpus, readable
from data_pipeline.tokenizer import Tokenizer

#: Documents shown of the first shard of each group, and characters of each.
SAMPLES, SAMPLE_CHARACTERS = 3, 300
#: Tokens of a shard among which documents are chosen.
SEARCHED_TOKENS = 2**24
NEWLINE_AND_TAB = "\n\t"


def counts(corpus: Corpus) -> Iterator[str]:
    """A table with the counts of each split, and of each source of a mixture."""
    width = max(len(name) for name in (*corpus.names, "source")) + 2
    yield f"{'split':8}{'source':>{width}}{'documents':>12}{'tokens':>16}{'bytes/token':>13}{'shards':>8}{'MB':>11}"
    for split in SPLITS:
        entry = corpus.manifest["splits"][split]
        groups = [(name, [shard for shard in entry["shards"] if shard["group"] == number]) for number, name in enumerate(corpus.names)]
        for name, shards in [*groups, ("all", entry["shards"])]:
            tokens = sum(shard["tokens"] for shard in shards)
            documents = f"{sum(shard['documents'] for shard in shards):,}" if "documents" in entry else "-"  # nanoGPT's are not counted
            ratio = f"{entry['bytes'] / tokens:.2f}" if shards is entry["shards"] and tokens and "bytes" in entry else "-"
            size = tokens * corpus.dtype.itemsize / 1e6
            yield f"{split:8}{name:>{width}}{documents:>12}{tokens:>16,}{ratio:>13}{len(shards):>8,}{size:>11,.1f}"


def show(corpus: Corpus) -> Iterator[str]:
    """The lines that `prepare.py --show` prints, non-printable characters escaped."""
    manifest = corpus.manifest
    tokenizer = manifest["tokenizer"]
    name = tokenizer.get("name") or tokenizer.get("kind")
    yield printable(f"{corpus.path}: {corpus.vocab_size:,} ids, {corpus.dtype.name}, tokenizer {name}")
    mixed = len(corpus.mixture) == len(manifest["sources"]) > 1
    for place, source in enumerate(manifest["sources"]):
        yield printable(f"source{f' {corpus.names[place]}, weight {corpus.mixture[place]:.4g}' if mixed else ''}: {source}")
    yield printable(f"options: {manifest['options']}")
    yield printable(f"left out: {manifest['dropped'] or 'nothing'}")
    yield from counts(corpus)
    try:
        decoder = Tokenizer.load(corpus.path, tokenizer)
    except DataError as reason:
        yield printable(f"no samples: {reason}")
        return
    for split in SPLITS:
        groups = set[int]()
        for shard in manifest["splits"][split]["shards"]:
            if shard["tokens"] and shard["group"] not in groups:
                groups.add(shard["group"])
                yield from _samples(corpus, decoder, shard)


@readable()
def _samples(corpus: Corpus, tokenizer: Tokenizer, shard: dict[str, Any]) -> list[str]:
    """Evenly spaced documents of the first SEARCHED_TOKENS tokens of a shard."""
    tokens = np.memmap(corpus.path / shard["file"], corpus.dtype, "r", corpus.header)[:SEARCHED_TOKENS]
    bounds = [0, *(np.flatnonzero(tokens == corpus.eot_id) + 1).tolist()]
    bounds += [len(tokens)] if len(bounds) == 1 else []
    lines = []
    for number in sorted({(len(bounds) - 1) * i // SAMPLES for i in range(SAMPLES)}):
        start, stop = bounds[number : number + 2]
        text = tokenizer.decode(tokens[start : min(stop, start + 4 * SAMPLE_CHARACTERS)])[:SAMPLE_CHARACTERS]  # up to 4 bytes each
        lines.append(f"\n--- {shard['file']}, document {number:,}, {stop - start:,} tokens\n{printable(text, NEWLINE_AND_TAB)}")
    return lines
