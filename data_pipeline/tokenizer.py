"""Text to ids and back. The tokenizers that `--tokenizer` can name:

    bpe:8192            byte-level BPE with this number of ids, trained on the source with `tokenizers`, applied with `tiktoken`
    bytes               id = byte, and 256 ends a text
    gpt2, cl100k_base   an encoding of tiktoken; gpt2 is r50k_base, the same ranks in one file
    tokenizer.json      a file of `tokenizers`
    FOLDER              a folder that `transformers.AutoTokenizer` reads (a `tokenizer.model` alone needs the package sentencepiece)

Special-token strings in the input are tokenized as plain text: `<|endoftext|>` written in a document does not end it.

A trained BPE has the same ids in both libraries. A BPE token is always built by the same merges, independent of its neighbors (a merge
across its boundary would have prevented it), so tiktoken's rule "merge the adjacent pair whose concatenation has the lowest rank" applies
the same merges in the same order. tiktoken is about six times faster.
"""

from __future__ import annotations

import hashlib
import os
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HuggingFaceTokenizer

from data_pipeline import hugging_face_form
from data_pipeline.errors import DataError, one_line
from data_pipeline.hugging_face_form import GPT2_PATTERN
from data_pipeline.manifest import MANIFEST_FILE, check_sha256, read_manifest
from data_pipeline.staging import require_regular

END_OF_TEXT = "<|endoftext|>"
HUGGING_FACE_FILE = "tokenizer.json"
RANKS_FILE = "tokenizer.tiktoken"
MIN_VOCAB_SIZE, MAX_VOCAB_SIZE = 257, 1_000_000
#: Common end-of-text tokens, tried in this order if --end_of_text is not given.
USUAL_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[SEP]", "[EOS]")


def parse_spec(spec: str) -> tuple[str, Any]:
    """The kind of tokenizer that `spec` names, and its argument: ("bpe", 8192), ("bytes", 257), ("tiktoken", "r50k_base"),
    ("corpus", path), ("hugging_face", path).

    Raises:
        DataError: it is none of these.
    """
    if spec == "bytes":
        return "bytes", 257
    kind, _, size = spec.partition(":")
    if kind == "bpe" and size.isascii() and size.isdigit() and len(size) < 10 and MIN_VOCAB_SIZE <= int(size) <= MAX_VOCAB_SIZE:
        return "bpe", int(size)
    if spec in tiktoken.list_encoding_names():
        # The same ranks: gpt2 of tiktoken is two files in an older format, r50k_base one.
        return "tiktoken", "r50k_base" if spec == "gpt2" else spec
    if spec and os.path.isfile(os.path.join(spec, MANIFEST_FILE)):
        return "corpus", Path(spec)
    if (os.path.isfile(spec) and spec.endswith(".json")) or (spec and os.path.isdir(spec)):
        return "hugging_face", Path(spec)
    raise DataError(
        f"--tokenizer {spec}: not a tokenizer; allowed: bytes, bpe:N with N ids in total from {MIN_VOCAB_SIZE} to {MAX_VOCAB_SIZE:,}"
        f" (such as bpe:8192), a tiktoken encoding ({', '.join(tiktoken.list_encoding_names())}), a prepared corpus, a"
        " tokenizer.json, or a folder that AutoTokenizer reads"
    )


def make_tokenizer(spec: str, texts: Iterable[str], end_of_text: str | None = None) -> Tokenizer:
    """The tokenizer that `spec` names. Only `bpe:N` reads `texts`, to train on them.

    Args:
        end_of_text: the token that ends a document, if the tokenizer has none of the common ones.

    Raises:
        DataError: there is no such tokenizer or token, or it cannot be read.
    """
    kind, argument = parse_spec(spec)
    if kind in ("bpe", "bytes", "corpus") and end_of_text is not None:
        raise DataError(f"--end_of_text {end_of_text}: the tokenizer {spec} has its own; omit the flag")
    if kind in ("bpe", "bytes"):
        return train_tokenizer(spec, texts)
    if kind == "tiktoken":
        return Tiktoken.from_library(argument, end_of_text)
    if kind == "corpus":
        return Tokenizer.load(argument, read_manifest(argument / MANIFEST_FILE)["tokenizer"])
    tokenizer = HuggingFace.read(argument, end_of_text, f"--tokenizer {spec}")
    if tokenizer.end_name is None:
        ends = ", ".join(USUAL_ENDS)
        raise DataError(f"--tokenizer {spec}: none of {ends} is in its vocabulary; name the token that ends a text with --end_of_text")
    return tokenizer


def train_tokenizer(spec: str, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer `bpe:N`, trained on `texts`, or `bytes`, which is not trained.

    Deterministic: ties between counts are broken by the ids of the pair. A small corpus may run out of pairs to merge; `vocab_size` is then
    smaller. The N ids of `bpe:N` are 256 bytes, the merges, and the end of text.
    """
    kind, vocab_size = parse_spec(spec)
    byte_of = {character: byte for byte, character in enumerate(hugging_face_form.byte_characters())}
    original = HuggingFaceTokenizer(models.BPE(vocab=byte_of, merges=[]) if kind == "bytes" else models.BPE())
    original.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    original.decoder = decoders.ByteLevel()
    if kind == "bpe":
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        # One less: the end of text is added after the trained ids, as in GPT-2.
        trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
        original.train_from_iterator(texts, trainer)
    ranks = {bytes(byte_of[character] for character in token): rank for token, rank in original.get_vocab().items()}
    original.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return Tiktoken({"kind": kind}, ranks, GPT2_PATTERN, {END_OF_TEXT: len(ranks)}, len(ranks), original.to_str(pretty=True))


class Tokenizer:
    """Text to ids and back. Ids are below `vocab_size`; `eot_id` ends a document and never occurs within one."""

    vocab_size: int
    eot_id: int
    #: The end-of-text token as a string; None if there is none, and then there is no `eot_id`.
    end_name: str | None
    #: Whether a text may be encoded in two parts if the ids around the cut are the same as without it.
    cuttable = True

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, uint32 of shape (n,). Special-token strings are plain text."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD. DataError for an id that is not in the vocabulary."""
        ids = np.asarray(ids, dtype=np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            wrong = ids[(ids < 0) | (ids >= self.vocab_size)][0]
            raise DataError(
                f"token id {wrong}: not in the vocabulary; allowed: 0 to {self.vocab_size - 1}; use the tokenizer of the corpus"
            )
        return self._decode(ids.tolist())

    def _decode(self, ids: list[int]) -> str:
        raise NotImplementedError

    def save(self, folder: Path) -> dict[str, Any]:
        """Writes the files that `load` needs to `folder`; returns the manifest entry with their hashes."""
        raise NotImplementedError

    def hugging_face_json(self) -> str:
        """A `tokenizer.json` that gives the same ids if special-token strings are tokenized as plain text (`split_special_tokens`)."""
        raise NotImplementedError

    @staticmethod
    def load(folder: Path, manifest_entry: dict[str, Any]) -> Tokenizer:
        """The tokenizer that `save` wrote; DataError if a file is missing or differs from the manifest."""
        kind = manifest_entry.get("kind")
        try:
            for name, expected in manifest_entry["files"].items():
                check_sha256(Path(folder, name), expected)
            if kind == "tiktoken" and not manifest_entry["files"]:  # nanoGPT's corpora have no tokenizer files
                return Tiktoken.from_library(manifest_entry["name"], where=str(folder))
            if kind in ("bpe", "bytes", "tiktoken"):
                return Tiktoken.from_folder(folder, manifest_entry)
            if kind == "characters":
                return Characters(manifest_entry["characters"])
            if kind in ("tokenizers", "transformers"):  # the second in corpora of earlier versions
                return HuggingFace.read(Path(folder, HUGGING_FACE_FILE), manifest_entry["end_of_text"], str(folder))
        except (KeyError, TypeError, ValueError, OSError) as reason:
            if isinstance(reason, DataError):
                raise
            raise DataError(f"{folder}: its tokenizer cannot be read ({one_line(reason)}); prepare the corpus again") from None
        raise DataError(f"{folder}: unknown kind of tokenizer {kind!r}; prepare the corpus again with this version")


class Tiktoken(Tokenizer):
    """Byte pairs by rank: trained ones, `bytes`, and tiktoken's own encodings."""

    def __init__(
        self,
        entry: dict[str, Any],
        ranks: dict[bytes, int],
        pattern: str,
        special_tokens: dict[str, int],
        eot_id: int,
        hugging_face_json: str | None = None,
        library: tiktoken.Encoding | None = None,
    ):
        self.eot_id = eot_id
        self.vocab_size = max(*ranks.values(), *special_tokens.values()) + 1
        self._pattern = pattern
        self._entry, self._ranks, self._hugging_face_json = entry, ranks, hugging_face_json
        self._special_tokens = special_tokens
        self.end_name = next(name for name, number in special_tokens.items() if number == eot_id)
        #: The encoding of tiktoken.
        self.library = library or tiktoken.Encoding("corpus", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens)

    def encode(self, text: str) -> np.ndarray:
        try:
            return self.library.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:  # half of a surrogate pair, which UTF-8 cannot hold
            return self.encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        except ValueError:  # the regex fails on runs of about a million spaces
            middle = len(text) // 2
            return np.concatenate([self.encode(text[:middle]), self.encode(text[middle:])])

    def _decode(self, ids: list[int]) -> str:
        try:
            return self.library.decode_bytes(ids).decode("utf-8", "replace")
        except KeyError:  # some encodings have gaps between their special tokens
            return "\ufffd" if len(ids) == 1 else "".join(self._decode([i]) for i in ids)

    def hugging_face_json(self) -> str:
        if self._hugging_face_json is not None:
            return self._hugging_face_json
        return hugging_face_form.byte_pairs(self._ranks, self._pattern, self._special_tokens)

    def save(self, folder: Path) -> dict[str, Any]:
        by_rank = sorted(self._ranks, key=self._ranks.__getitem__)
        contents = {RANKS_FILE: b"".join([b"%s %d\n" % (b2a_base64(token, newline=False), self._ranks[token]) for token in by_rank])}
        if self._hugging_face_json is not None:
            contents = {HUGGING_FACE_FILE: self._hugging_face_json.encode(), **contents}
        return {**self._entry, "files": _write(folder, contents)}

    @classmethod
    def from_folder(cls, folder: Path, entry: dict[str, Any]) -> Tiktoken:
        """The tokenizer that `save` wrote. KeyError, TypeError, ValueError or OSError if something is missing or damaged."""
        pairs = (line.split() for line in Path(folder, RANKS_FILE).read_bytes().splitlines())
        ranks = {a2b_base64(token): int(rank) for token, rank in pairs}
        if len(set(ranks.values())) < len(ranks):  # tiktoken would panic
            raise ValueError("a duplicate rank")
        own_entry = {key: entry[key] for key in entry if key != "files"}
        if entry["kind"] != "tiktoken":
            text = Path(folder, HUGGING_FACE_FILE).read_text(encoding="utf-8")
            return cls(own_entry, ranks, GPT2_PATTERN, {END_OF_TEXT: len(ranks)}, len(ranks), text)
        special = entry["special_tokens"]
        return cls(own_entry, ranks, entry["pattern"], special, special[entry["end_of_text"]])

    @classmethod
    def from_library(cls, name: str, end_of_text: str | None = None, where: str = "--tokenizer") -> Tiktoken:
        """tiktoken's encoding `name`, from its cache folder, or downloaded to it. `where` begins error messages.

        Raises:
            DataError: it is not in the cache and cannot be downloaded, or has no token `end_of_text`.
        """
        try:
            encoding = tiktoken.get_encoding(name)
        except Exception as reason:  # exceptions of any type, from requests, urllib3 and tiktoken
            raise DataError(
                f"{where}: {name} is not in tiktoken's cache, and the download failed ({type(reason).__name__}); set TIKTOKEN_CACHE_DIR"
                " to a folder into which a host with a network has downloaded it"
            ) from None
        special = dict(encoding._special_tokens)
        end = end_of_text or (END_OF_TEXT if END_OF_TEXT in special else None)
        if end not in special:
            raise DataError(f"{where}: {name} has no token {end!r} to end a text; allowed for --end_of_text: {', '.join(special)}")
        entry = {"kind": "tiktoken", "name": name, "pattern": encoding._pat_str, "special_tokens": special, "end_of_text": end}
        return cls(entry, encoding._mergeable_ranks, encoding._pat_str, special, special[end], library=encoding)


class HuggingFace(Tokenizer):
    """A tokenizer of `tokenizers`, from `json`, the text of its `tokenizer.json`. Without an end-of-text token it has no `eot_id`."""

    def __init__(self, text: str, end_of_text: str | None, where: str):
        self.json, self._tokenizer = text, HuggingFaceTokenizer.from_str(text)
        self._encoder = _encoder(self._tokenizer, text)
        self.cuttable = _cuttable(self._tokenizer)
        added = {str(token.content) for token in self._tokenizer.get_added_tokens_decoder().values()}
        if not self._tokenizer.get_vocab(with_added_tokens=False).keys() - added:  # transformers makes it of a folder without its files
            raise DataError(f"{where}: the tokenizer has no vocabulary, so every text would be lost; copy its vocabulary there, too")
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_name = _find_end(vocabulary, end_of_text, where)
        if self.end_name is not None:
            self.eot_id = vocabulary[self.end_name]

    @classmethod
    def read(cls, path: Path, end_of_text: str | None, where: str) -> HuggingFace:
        """The tokenizer of a `tokenizer.json`, or of a folder that AutoTokenizer reads, without running code from the folder."""
        what = f"{where}: {path} is not a valid tokenizer.json or folder of AutoTokenizer with a fast tokenizer"
        fix = "use a tokenizer.json, or a folder with tokenizer_config.json and a vocabulary (tokenizer.model: install sentencepiece)"
        with _one_line_of_library(what, fix):
            for file in path.iterdir() if path.is_dir() else [path]:
                if not file.is_dir():
                    require_regular(file)
            if not path.is_dir():
                return cls(path.read_text(encoding="utf-8"), end_of_text, where)
            from transformers import AutoTokenizer  # here, as it takes two seconds and only folders need it

            pretrained = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
            pretrained.backend_tokenizer.encode_special_tokens = False  # slow tokenizers have no backend_tokenizer
            return cls(pretrained.backend_tokenizer.to_str(), end_of_text or pretrained.eos_token, where)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        with _one_line_of_library("the tokenizer cannot encode a text", "use another tokenizer"):
            encodings = self._encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def hugging_face_json(self) -> str:
        return hugging_face_form.for_export(self.json)

    def save(self, folder: Path) -> dict[str, Any]:
        return {"kind": "tokenizers", "end_of_text": self.end_name, "files": _write(folder, {HUGGING_FACE_FILE: self.json.encode()})}


class Characters(HuggingFace):
    """nanoGPT's character-level ids: the id of the n-th of `characters` is n. There is no end-of-text token and no `eot_id`."""

    def __init__(self, characters: str):
        super().__init__(hugging_face_form.characters(characters), None, "characters")
        self._characters = set(characters)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text; DataError for an unknown character."""
        if unknown := set().union(*texts) - self._characters:
            raise DataError(f"characters {sorted(unknown)}: not among the {self.vocab_size} of this corpus; remove them from the text")
        return super().encode_many(texts)


@contextmanager
def _one_line_of_library(what: str, fix: str) -> Iterator[None]:
    """Turns what `tokenizers`, or the class of a folder's tokenizer, raises inside into a DataError.

    That may be of any type. A panic of the library's Rust code is not even an Exception.
    """
    try:
        yield
    except DataError:
        raise
    except BaseException as reason:
        if not isinstance(reason, Exception) and type(reason).__name__ != "PanicException":
            raise
        raise DataError(f"{what} ({one_line(reason)}); {fix}") from None


def _encoder(tokenizer: HuggingFaceTokenizer, text: str) -> HuggingFaceTokenizer:
    """A copy of `tokenizer`, whose JSON is `text`, that tokenizes special-token strings as plain text.

    `encode_special_tokens` switches off the search for them before the model is applied. But a model other than BPE may still produce
    them from its vocabulary (`</s>` of a Unigram model has the best score of all), so they are renamed there to strings no text has.
    """

    def rename(description: dict[str, Any]) -> None:
        model, added = description["model"], description["added_tokens"]
        known = set(model["vocab"]) if isinstance(model["vocab"], dict) else {name for name, _ in model["vocab"]}
        special = {token["content"] for token in added if token["special"]} & known - {model.get("unk_token")}
        names = {name: f"\uffff{name}\uffff" for name in special}
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(name, name): number for name, number in model["vocab"].items()}
        else:
            model["vocab"] = [[names.get(name, name), score] for name, score in model["vocab"]]
        # The model no longer has them, so they get the next free ids: last, to keep the ids of the other added tokens.
        description["added_tokens"] = sorted(added, key=lambda token: token["content"] in special)

    if not isinstance(tokenizer.model, models.BPE):
        text = hugging_face_form.edited(text, rename)
    encoder = HuggingFaceTokenizer.from_str(text)
    if isinstance(encoder.model, models.BPE):
        encoder.model.dropout = None  # the same text has the same ids
    encoder.encode_special_tokens = True
    encoder.no_truncation()
    encoder.no_padding()
    return encoder


def _cuttable(tokenizer: HuggingFaceTokenizer) -> bool:
    """See `Tokenizer.cuttable`. False for a Unigram model without pre-tokenization.

    It sums scores over the whole text, and rounding breaks ties.
    """
    whole = tokenizer.pre_tokenizer is None or len(tokenizer.pre_tokenizer.pre_tokenize_str("a b")) == 1
    return not (whole and isinstance(tokenizer.model, models.Unigram))


def _find_end(vocabulary: dict[str, int], requested: str | None, where: str) -> str | None:
    """The token that ends a text: the requested one, else the first of USUAL_ENDS in the vocabulary; None without any."""
    if requested is not None and requested not in vocabulary:
        raise DataError(f"{where}: its vocabulary has no token {requested!r} to end a text; name one that it has with --end_of_text")
    return requested if requested is not None else next((token for token in USUAL_ENDS if token in vocabulary), None)


def _write(folder: Path, contents: dict[str, bytes]) -> dict[str, str]:
    """Write files and return their hashes by name."""
    for name, content in contents.items():
        Path(folder, name).write_bytes(content)
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
