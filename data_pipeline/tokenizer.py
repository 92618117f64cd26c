"""Byte-level BPE: trained with `tokenizers`, applied with `tiktoken`.

The two give the same ids. A BPE token is always built from its parts in the same way, whatever stands around it (a merge
across its border would have kept it from forming), so tiktoken's rule "join the neighbours whose concatenation has the
lowest rank" meets the same merges in the same order. tiktoken is about six times faster.

`bpe:N` has N ids in all: 256 bytes, the merges, and last the end of text. `bytes` is the same without a merge: id = byte,
and 256 ends a text.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HuggingFaceTokenizer

from data_pipeline.errors import DataError
from data_pipeline.shards import check_sha256

END_OF_TEXT = "<|endoftext|>"
HUGGING_FACE_FILE = "tokenizer.json"
RANKS_FILE = "tokenizer.tiktoken"
# How GPT-2 cuts text before merging. Possessive (++) and with \s++$ in front, it cuts the same and backtracks less.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
MIN_VOCAB_SIZE, MAX_VOCAB_SIZE = 257, 1_000_000
# The regex's \s, spelled out: Python's own \s also holds \x1c-\x1f.
_LONG_SPACE = re.compile(r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]{10000,}")


def parse_spec(spec: str) -> tuple[str, int]:
    """("bpe", 8192) of "bpe:8192", ("bytes", 257) of "bytes"; DataError for anything else."""
    if spec == "bytes":
        return "bytes", 257
    kind, _, size = spec.partition(":")
    if kind == "bpe" and size.isascii() and size.isdigit() and MIN_VOCAB_SIZE <= int(size) <= MAX_VOCAB_SIZE:
        return "bpe", int(size)
    raise DataError(
        f"--tokenizer {spec}: not a tokenizer; allowed: bytes, or bpe:N with N ids in all from {MIN_VOCAB_SIZE} to {MAX_VOCAB_SIZE:,}"
        " (such as bpe:8192)"
    )


def train_tokenizer(spec: str, texts: Iterable[str]) -> "Tokenizer":
    """The tokenizer that `spec` asks for, trained on `texts` (not read for `bytes`).

    Deterministic: equal counts are decided by the ids of the pair. A small corpus may run out of pairs to merge, and then
    `vocab_size` is what was reached.
    """
    kind, vocab_size = parse_spec(spec)
    characters = _byte_characters()
    if kind == "bytes":
        original = HuggingFaceTokenizer(models.BPE(vocab={character: byte for byte, character in enumerate(characters)}, merges=[]))
    else:
        original = HuggingFaceTokenizer(models.BPE())
    original.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    original.decoder = decoders.ByteLevel()
    if kind == "bpe":
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        # One less: the end of text is added behind the trained ids, as in GPT-2.
        trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
        original.train_from_iterator(texts, trainer)
    byte_of = {character: byte for byte, character in enumerate(characters)}
    ranks = {bytes(byte_of[character] for character in token): rank for token, rank in original.get_vocab().items()}
    original.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return Tokenizer(ranks, original.to_str(pretty=True))


class Tokenizer:
    """Text to ids and back."""

    def __init__(self, ranks: dict[bytes, int], hugging_face_json: str):
        self.eot_id = len(ranks)
        self.vocab_size = len(ranks) + 1
        self._ranks = ranks
        self._hugging_face_json = hugging_face_json
        self._encoding = tiktoken.Encoding(
            "corpus",
            pat_str=GPT2_PATTERN,
            mergeable_ranks=ranks,
            special_tokens={END_OF_TEXT: self.eot_id},
            explicit_n_vocab=self.vocab_size,
        )

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, uint32 of shape (n,). `<|endoftext|>` written in the text is text, not the end of one."""
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:  # half of a surrogate pair, which UTF-8 cannot hold
            return self.encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        except ValueError:
            # The regex gives up in front of about a million spaces. It would cut one character before the end of the run;
            # cut there beforehand, and `\s++$` takes each part's tail without backtracking.
            cuts = [0, *(match.end() - 1 for match in _LONG_SPACE.finditer(text)), len(text)]
            if len(cuts) == 2:
                raise
            parts = [text[start:end] for start, end in pairwise(cuts)]
            return np.concatenate([self._encoding.encode_to_numpy(part, disallowed_special=()) for part in parts])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD. DataError for an id that is not in the vocabulary."""
        ids = np.asarray(ids, dtype=np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            wrong = ids[(ids < 0) | (ids >= self.vocab_size)][0]
            raise DataError(f"token id {wrong}: not in the vocabulary; allowed: 0 to {self.vocab_size - 1}; use the corpus's own tokenizer")
        return self._encoding.decode(ids.tolist())

    def save(self, folder: Path) -> dict[str, Any]:
        """Writes both files into `folder` and returns the manifest's entry, with their hashes."""
        lines = (b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in sorted(self._ranks.items(), key=lambda item: item[1]))
        contents = {HUGGING_FACE_FILE: self._hugging_face_json.encode(), RANKS_FILE: b"".join(lines)}
        for name, content in contents.items():
            Path(folder, name).write_bytes(content)
        return {"files": {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}}

    @classmethod
    def load(cls, folder: Path, manifest_entry: dict[str, Any]) -> "Tokenizer":
        """The tokenizer that `save` wrote; DataError when a file is missing or is not the one that the manifest names."""
        contents = {}
        for name in (HUGGING_FACE_FILE, RANKS_FILE):
            file = Path(folder, name)
            try:
                contents[name] = file.read_bytes()
            except FileNotFoundError:
                raise DataError(f"{file}: missing, the corpus is not complete; prepare it again") from None
            check_sha256(file, hashlib.sha256(contents[name]).hexdigest(), manifest_entry["files"].get(name))
        pairs = (line.split() for line in contents[RANKS_FILE].splitlines())
        return cls({base64.b64decode(token): int(rank) for token, rank in pairs}, contents[HUGGING_FACE_FILE].decode())


def _byte_characters() -> list[str]:
    """For each byte the printable character that stands for it in a `tokenizers` vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
