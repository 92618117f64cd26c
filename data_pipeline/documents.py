"""From sources to pieces of text, ready for a tokenizer: which split a document belongs to, what is left out, where long ones are cut."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np

from data_pipeline.records import LargeText
from data_pipeline.sources import Source

#: Characters of a document that are tokenized at once; a longer one is cut, where that changes no id.
PIECE = 2**20
#: Characters after which a document is cut anywhere, where no such place was found: encoding takes up to 60 times their memory.
MAX_PIECE = 4 * PIECE
CHUNK_BYTES = 2**20
#: Text that a tokenizer is trained on, at most: its merges change little with more, and memory grows with the distinct words.
TRAINING_BYTES = 64_000_000
TRAINING_PART = 2**14
#: A longer word is cut: training takes the square of its length, 11 seconds for so many equal characters.
TRAINING_WORD = 4 * TRAINING_PART
# Between a line and the next, neither of which begins or ends with a space; or, where there are no lines, in front of a lone space.
_LINE_END = re.compile(r"(?<=\S\n)(?=\S)")
_WORD_END = re.compile(r"(?<=\S)(?= \S)")
_CONTEXT = 200


class Encoder(Protocol):
    """What finding a cut needs of a tokenizer."""

    cuttable: bool

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, (n,)."""


class Document(NamedTuple):
    """A document of one split and group. `text` reads it in blocks, anew at every call; `key` is a hash of the whole."""

    split: str
    group: int
    text: Callable[[], Iterable[str]]
    key: bytes


class Piece(NamedTuple):
    """A part of a document of one split and group: its text, the bytes of it in UTF-8, and whether the document ends with it."""

    split: str
    group: int
    text: str
    n_bytes: int
    ends: bool


class Documents:
    """The documents of all sources in turn; the same at every pass.

    The split depends on a document's text alone, so it survives reordering, renaming and additions, and two copies of one text can
    never end up on both sides. Where a source has but one document, that is cut in two at a line end instead, the tail being "val".

    Args:
        grouped: whether each source is a group of its own, as in a mixture.
        dedup: leave out a document whose text came before. Remembers 16 bytes of hash a document: about 100 bytes of memory.

    `dropped` counts what the latest pass left out, by reason.
    """

    def __init__(self, sources: list[Source], val_fraction: float, grouped: bool = False, dedup: bool = False):
        self.sources, self.val_fraction, self.grouped, self.dedup = sources, val_fraction, grouped, dedup
        self.dropped: Counter[str] = Counter()

    @property
    def n_bytes(self) -> int:
        """The size of what a pass reads; 0 where a source's is not known."""
        sizes = [source.n_bytes for source in self.sources]
        return sum(sizes) if all(sizes) else 0

    @property
    def n_read(self) -> int:
        """How much of `n_bytes` the latest pass has behind it."""
        return sum(source.n_read for source in self.sources)

    def __iter__(self) -> Iterator[Document]:
        self.dropped.clear()
        seen: set[bytes] = set()
        for source in self.sources:
            source.problems.start()
            source.n_read = 0
        for number, source in enumerate(self.sources):
            yield from self._split(self._kept(source, seen), number if self.grouped else 0)

    def _kept(self, source: Source, seen: set[bytes]) -> Iterator[tuple[str | LargeText, bytes]]:
        for _, text in source.documents():
            if not text:
                self.dropped["empty"] += 1
                continue
            key = text.sha256 if isinstance(text, LargeText) else hashlib.sha256(text.encode()).digest()
            if self.dedup:
                if key[:16] in seen:
                    self.dropped["duplicate"] += 1
                    continue
                seen.add(key[:16])
            yield text, key

    def _split(self, texts: Iterator[tuple[str | LargeText, bytes]], group: int) -> Iterator[Document]:
        first, second = next(texts, None), next(texts, None)
        if first is None:
            return
        if second is None:
            text, key = first
            n_bytes = text.n_bytes if isinstance(text, LargeText) else len(text.encode())
            cut = _cut_in_two(_blocks(text), n_bytes, self.val_fraction)
            for split, begin, end in (("train", 0, cut), ("val", cut, n_bytes)):
                if begin < end:
                    yield Document(split, group, partial(_part, text, begin, end), key)
            return
        bound = int(self.val_fraction * 2**64)
        for text, key in chain((first, second), texts):
            split = "val" if int.from_bytes(key[:8], "big") < bound else "train"
            yield Document(split, group, partial(_blocks, text), key)


def _blocks(text: str | LargeText) -> Iterable[str]:
    return text.blocks() if isinstance(text, LargeText) else (text,)


def _cut_in_two(blocks: Iterable[str], n_bytes: int, val_fraction: float) -> int:
    """The byte where a lone document is cut: behind the last line end before a share of `val_fraction` is left, or there."""
    bound = int(n_bytes * (1 - val_fraction))
    line_end = character = read = 0
    for block in blocks:
        head = block.encode()[: bound - read]
        if b"\n" in head:
            line_end = read + head.rindex(b"\n") + 1
        character = read + len(head.decode("utf-8", "ignore").encode())
        read += len(head)
        if read == bound:
            break
    return line_end or character


def _part(text: str | LargeText, begin: int, end: int) -> Iterator[str]:
    """What of `text` lies between two places, counted in bytes."""
    read = 0
    for block in _blocks(text):
        data = block.encode()
        part = data[max(0, begin - read) : max(0, end - read)]
        read += len(data)
        if part:
            yield part.decode()
        if read >= end:
            return


def _in_parts(blocks: Iterable[str]) -> Iterator[str]:
    """The same text in parts of TRAINING_PART characters and more, cut between words: a trainer needs 60 times a text's memory."""
    rest = ""
    for block in blocks:
        rest, begin = rest + block, 0
        while len(rest) - begin > 2 * TRAINING_PART:
            place = begin + TRAINING_PART, min(begin + TRAINING_WORD, len(rest) - 1)
            match = _LINE_END.search(rest, *place) or _WORD_END.search(rest, *place)
            if match is None and len(rest) - begin <= TRAINING_WORD:
                break  # a word so long that only the next block tells its end
            end = match.start() if match else begin + TRAINING_WORD
            yield rest[begin:end]
            begin = end
        rest = rest[begin:]
    if rest:
        yield rest


def training_texts(documents: Documents) -> Iterator[str]:
    """What a tokenizer is trained on: the training documents, or a sample of them by hash, of TRAINING_BYTES of what is read."""
    # Where only the first documents are taken, nobody knows their share of the bytes.
    all_taken = documents.n_bytes > 0 and all(source.max_docs is None for source in documents.sources)
    share = TRAINING_BYTES / documents.n_bytes if all_taken else 1.0
    left = TRAINING_BYTES
    for document in documents:
        if document.split != "train":
            continue
        for number, part in enumerate(_in_parts(document.text())):
            # Its own bits of the hash: the first eight bytes have chosen the split. A long document is sampled part by part.
            draw = int.from_bytes(hashlib.sha256(document.key + number.to_bytes(8, "big")).digest()[:8], "big")
            if draw < share * 2**64 and left > 0:
                left -= len(part)
                yield part
        if left <= 0:
            return


def pieces(documents: Iterable[Document], tokenizer: Encoder) -> Iterator[Piece]:
    """The documents' text, the long ones cut in pieces whose ids in a row are those of the whole."""
    for document in documents:
        earlier = None
        for text in _cut(document.text(), tokenizer):
            if earlier is not None:
                yield Piece(document.split, document.group, earlier, len(earlier.encode()), False)
            earlier = text
        if earlier is not None:
            yield Piece(document.split, document.group, earlier, len(earlier.encode()), True)


def _cut(blocks: Iterable[str], tokenizer: Encoder) -> Iterator[str]:
    rest = ""
    for block in blocks:
        for start in range(0, len(block), PIECE) if len(block) > 2 * PIECE else (0,):
            rest += block[start : start + PIECE] if len(block) > 2 * PIECE else block
            while len(rest) > 2 * PIECE:
                position = _find_cut(rest, tokenizer) if tokenizer.cuttable else 0
                if not position and len(rest) <= MAX_PIECE:
                    break
                position = position or MAX_PIECE
                yield rest[:position]
                rest = rest[position:]
    if rest:
        yield rest


def _find_cut(text: str, tokenizer: Encoder) -> int:
    """A place behind PIECE characters where the tokenizer itself ends a token, whatever follows; 0 where none is found.

    A tokenizer that cuts text into words before it merges has a border at every line end like these. Others (a Unigram model, a
    space put in front of every text) may not: so the ids around the place must be those of both sides, taken apart.
    """
    for pattern in (_LINE_END, _WORD_END):
        for tries, match in enumerate(pattern.finditer(text, PIECE, len(text) - _CONTEXT)):
            position = match.start()
            before, after = text[position - _CONTEXT : position], text[position : position + _CONTEXT]
            apart = np.concatenate([tokenizer.encode(before), tokenizer.encode(after)])
            if np.array_equal(tokenizer.encode(before + after), apart):
                return position
            if tries == 20:
                break
    return 0


def chunks(parts: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces gathered to about CHUNK_BYTES: the unit that is tokenized at once, and that an interrupted run goes on from."""
    chunk, size = list[Piece](), 0
    for piece in parts:
        chunk.append(piece)
        size += piece.n_bytes
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
