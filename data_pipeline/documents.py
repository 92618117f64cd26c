"""From sources to pieces of text for a tokenizer: assigns documents to splits, drops empty ones and duplicates, cuts long ones."""

from __future__ import annotations

import hashlib
import heapq
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, count, islice, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from data_pipeline.records import Text
from data_pipeline.sources import Source
from data_pipeline.tokenizer import Tokenizer

#: Characters per piece; a longer document is cut, if possible where no id changes.
PIECE = 2**20
#: Longest piece: a document is cut here even if ids change, since encoding takes up to 60 times the memory of the text.
MAX_PIECE = 4 * PIECE
CHUNK_BYTES = 2**20
#: Maximum memory of the text that a tokenizer is trained on. More text changes few merges, and memory grows with the distinct words.
TRAINING_BYTES = 64_000_000
TRAINING_PART = 2**14
#: Longer words are cut, since training time is quadratic in their length: 11 seconds for this many equal characters.
TRAINING_WORD = 4 * TRAINING_PART
# Where to cut: after a line end without spaces around it, or else before a single space.
_LINE_END = re.compile(r"(?<=\S\n)(?=\S)")
_WORD_END = re.compile(r"(?<=\S)(?= \S)")
_CONTEXT, _TRIES = 200, 21  # characters that are encoded again on each side of a cut, and cuts that are tried


class Document(NamedTuple):
    """A document. `text` yields its blocks, from the beginning at every call; `key` is a hash of the whole text."""

    split_name: str
    group: int
    text: Callable[[], Iterable[str]]
    key: bytes


class Piece(NamedTuple):
    """A part of a document. `n_bytes` is its size in UTF-8; `ends` tells whether it is the last part."""

    split_name: str
    group: int
    text: str
    n_bytes: int
    ends: bool


class Documents:
    """The documents of all sources, one source after the other; the same in every pass.

    The split depends on a document's text alone, so it does not change with reordering, renaming and additions, and copies of one text
    are in the same split. If there is only one document (in a mixture: in a source), it is cut in two at a line end, and the tail is the
    validation split.

    Args:
        grouped: whether each source is a separate group, as in a mixture.
        dedup: drop documents with the same text as an earlier one. Keeps a hash of 16 bytes, about 100 bytes of memory, per document.

    `dropped` counts the documents that the current pass has dropped, by reason.
    """

    def __init__(self, sources: list[Source], val_fraction: float, grouped: bool = False, dedup: bool = False):
        self.sources, self.val_fraction, self.grouped, self.dedup = sources, val_fraction, grouped, dedup
        self.dropped: Counter[str] = Counter()

    @property
    def n_bytes(self) -> int:
        """The size of all sources; 0 if that of any source is unknown."""
        sizes = [source.n_bytes for source in self.sources if source.n_bytes is not None]
        return sum(sizes) if len(sizes) == len(self.sources) else 0

    @property
    def n_read(self) -> int:
        """Bytes that the current pass has read, of `n_bytes`."""
        return sum(source.n_read for source in self.sources)

    def __iter__(self) -> Iterator[Document]:
        self.dropped.clear()
        seen: set[bytes] = set()
        for source in self.sources:
            source.problems.start()
            source.n_read = 0
        texts = [self._kept(source, seen) for source in self.sources]
        for group, group_texts in enumerate(texts if self.grouped else [chain.from_iterable(texts)]):
            yield from self._split(group_texts, group)

    def _kept(self, source: Source, seen: set[bytes]) -> Iterator[Text]:
        for text in islice(source.documents(), source.max_docs):
            if not text.n_bytes:
                self.dropped["empty"] += 1
                continue
            if self.dedup:
                if text.sha256[:16] in seen:
                    self.dropped["duplicate"] += 1
                    continue
                seen.add(text.sha256[:16])
            yield text

    def _split(self, texts: Iterator[Text], group: int) -> Iterator[Document]:
        first, second = next(texts, None), next(texts, None)
        if first is None:
            return
        if second is None:
            cut = _cut_in_two(first, self.val_fraction)
            for split_name, begin, end in (("train", 0, cut), ("val", cut, first.n_bytes)):
                if begin < end:
                    yield Document(split_name, group, partial(_part, first, begin, end), first.sha256)
            return
        for text in chain((first, second), texts):
            place = int.from_bytes(text.sha256[:8], "big") / 2**64
            yield Document("val" if place < self.val_fraction else "train", group, text.blocks, text.sha256)


def _cut_in_two(text: Text, val_fraction: float) -> int:
    """The byte at which to cut a single document: after the last line end before its last `val_fraction`, or exactly there.

    A line end that would more than double the validation split is not used.
    """
    bound = int(text.n_bytes * (1 - val_fraction))
    line_end = character = read = 0
    for block in text.blocks():
        head = block.encode()[: bound - read]
        if b"\n" in head:
            line_end = read + head.rindex(b"\n") + 1
        character = read + len(head.decode("utf-8", "ignore").encode())
        read += len(head)
        if read == bound:
            break
    return line_end if line_end > max(0, 2 * bound - text.n_bytes) else character


def _part(text: Text, begin: int, end: int) -> Iterator[str]:
    """Yields the text between two positions in bytes."""
    read = 0
    for block in text.blocks():
        data = block.encode()
        part = data[max(0, begin - read) : max(0, end - read)]
        read += len(data)
        if part:
            yield block if len(part) == len(data) else part.decode()
        if read >= end:
            return


def _in_parts(blocks: Iterable[str]) -> Iterator[str]:
    """The text in parts of at least TRAINING_PART characters, cut between words. Training takes 60 times the memory of a part."""
    rest = ""
    for block in blocks:
        rest, begin = rest + block, 0
        while len(rest) - begin > 2 * TRAINING_PART:
            place = begin + TRAINING_PART, min(begin + TRAINING_WORD, len(rest) - 1)
            match = _LINE_END.search(rest, *place) or _WORD_END.search(rest, *place)
            if match is None and len(rest) - begin <= TRAINING_WORD:
                break  # the end of this word is in the next block
            end = match.start() if match else begin + TRAINING_WORD
            yield rest[begin:end]
            begin = end
        rest = rest[begin:]
    if rest:
        yield rest


def _memory(part: str) -> int:
    """Bytes of a heap entry: the text (up to 4 bytes per character), a tuple and two numbers."""
    return sys.getsizeof(part) + 150


def training_texts(documents: Documents, watch: Callable[[], Any] = lambda: None) -> Iterator[str]:
    """Text to train a tokenizer on: the training documents, or a random sample of their parts if these take more than TRAINING_BYTES.

    All documents are read before the first text is yielded. watch: called after each document.
    """
    drawn = list[tuple[int, int, str]]()  # a heap: the part with the largest hash first
    size, place = 0, count()
    for document in documents:
        if document.split_name == "train":
            for number, part in enumerate(_in_parts(document.text())):
                # A new hash: the key alone determines the split.
                draw = int.from_bytes(hashlib.sha256(document.key + number.to_bytes(8, "big")).digest()[:8], "big")
                heapq.heappush(drawn, (-draw, next(place), part))
                size += _memory(part)
                while size > TRAINING_BYTES:
                    size -= _memory(heapq.heappop(drawn)[2])
        watch()
    for _, _, part in sorted(drawn, key=itemgetter(1)):
        yield part


def pieces(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Piece]:
    """The text of documents, long ones cut into pieces whose concatenated ids are those of the whole document."""
    for document in documents:
        for text, following in pairwise(chain(_cut(document.text(), tokenizer), ("",))):
            yield Piece(document.split_name, document.group, text, len(text.encode()), ends=not following)


def _cut(blocks: Iterable[str], tokenizer: Tokenizer) -> Iterator[str]:
    rest = ""
    for block in blocks:
        for start in range(0, len(block), PIECE):
            rest += block[start : start + PIECE]
            while len(rest) > 2 * PIECE:
                position = _find_cut(rest, tokenizer) if tokenizer.cuttable else 0
                if not position and len(rest) <= MAX_PIECE:
                    break
                position = position or MAX_PIECE
                yield rest[:position]
                rest = rest[position:]
    if rest:
        yield rest


def _find_cut(text: str, tokenizer: Tokenizer) -> int:
    """A token boundary after PIECE characters at which cutting changes no id; 0 if none is found.

    A tokenizer that splits text into words before it merges has a boundary at every such line end. Others (a Unigram model, or one that
    puts a space before every text) may not, so the text around the position must have the same ids when encoded in two parts.
    """
    for pattern in (_LINE_END, _WORD_END):
        for match in islice(pattern.finditer(text, PIECE, len(text) - _CONTEXT), _TRIES):
            position = match.start()
            before, after = text[position - _CONTEXT : position], text[position : position + _CONTEXT]
            apart = np.concatenate([tokenizer.encode(before), tokenizer.encode(after)])
            if np.array_equal(tokenizer.encode(before + after), apart):
                return position
    return 0


def chunks(parts: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in lists of about CHUNK_BYTES: the unit of encoding, and of resuming an interrupted run."""
    chunk, size = list[Piece](), 0
    for piece in parts:
        chunk.append(piece)
        size += piece.n_bytes
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
