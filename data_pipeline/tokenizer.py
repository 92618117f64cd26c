"""Text to ids and back, by whatever tokenizer a corpus names.

    bpe:8192            byte-level BPE of so many ids in all, trained on the source with `tokenizers`, applied with `tiktoken`
    bytes               id = byte, and 256 ends a text
    gpt2, cl100k_base   an encoding of tiktoken; gpt2 is r50k_base, the same ranks in one file
    tokenizer.json      a file of `tokenizers`
    FOLDER              a folder that `transformers.AutoTokenizer` reads

What a text says is text: `<|endoftext|>` written in a document is not the end of one, whatever the library would make of it.

A trained BPE has the same ids in both libraries. A BPE token is always built from its parts in the same way, whatever stands around it
(a merge across its border would have kept it from forming), so tiktoken's rule "join the neighbours whose concatenation has the
lowest rank" meets the same merges in the same order. tiktoken is about six times faster.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import tiktoken
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HuggingFaceTokenizer

from data_pipeline import hugging_face_form
from data_pipeline.errors import DataError, one_line
from data_pipeline.shards import check_sha256
from data_pipeline.torch_hidden import torch_hidden

END_OF_TEXT = "<|endoftext|>"
HUGGING_FACE_FILE = "tokenizer.json"
RANKS_FILE = "tokenizer.tiktoken"
# How GPT-2 cuts text before merging. Possessive (++) and with \s++$ in front, it cuts the same and backtracks less.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
MIN_VOCAB_SIZE, MAX_VOCAB_SIZE = 257, 1_000_000
# The regex's \s, spelled out: Python's own \s also holds \x1c-\x1f.
_LONG_SPACE = re.compile(r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]{10000,}")


# The same ranks under another name: gpt2 of tiktoken is two files in an older form, r50k_base one.
TIKTOKEN_ALIASES = {"gpt2": "r50k_base"}
#: What ends a text in the vocabularies that people have, tried in this order where --end_of_text names none.
USUAL_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[SEP]", "[EOS]")


def parse_spec(spec: str) -> tuple[str, Any]:
    """The kind that `spec` asks for and its argument: ("bpe", 8192), ("bytes", 257), ("tiktoken", "r50k_base"), ("tokenizers", path),
    ("transformers", path).

    Raises:
        DataError: it is none of these.
    """
    if spec == "bytes":
        return "bytes", 257
    kind, _, size = spec.partition(":")
    if kind == "bpe" and size.isascii() and size.isdigit() and len(size) < 10 and MIN_VOCAB_SIZE <= int(size) <= MAX_VOCAB_SIZE:
        return "bpe", int(size)
    if spec in tiktoken.list_encoding_names():
        return "tiktoken", TIKTOKEN_ALIASES.get(spec, spec)
    if os.path.isfile(spec) and spec.endswith(".json"):
        return "tokenizers", Path(spec)
    if spec and os.path.isdir(spec):
        return "transformers", Path(spec)
    raise DataError(
        f"--tokenizer {spec}: not a tokenizer; allowed: bytes, or bpe:N with N ids in all from {MIN_VOCAB_SIZE} to {MAX_VOCAB_SIZE:,}"
        f" (such as bpe:8192), an encoding of tiktoken ({', '.join(tiktoken.list_encoding_names())}), a tokenizer.json, or a folder that"
        " AutoTokenizer reads"
    )


def make_tokenizer(spec: str, texts: Iterable[str], end_of_text: str | None = None) -> Tokenizer:
    """The tokenizer that `spec` asks for; a `bpe:N` is trained on `texts`, the others do not read them.

    Args:
        end_of_text: the token that ends a document, for a tokenizer whose own is not known.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    kind, argument = parse_spec(spec)
    if kind in ("bpe", "bytes"):
        if end_of_text is not None:
            raise DataError(f"--end_of_text {end_of_text}: {spec} has its own, {END_OF_TEXT}; leave it out")
        return train_tokenizer(spec, texts)
    if kind == "tiktoken":
        return Tiktoken.from_cache(argument, end_of_text)
    return (HuggingFaceFile if kind == "tokenizers" else HuggingFaceFolder)(argument, end_of_text, f"--tokenizer {spec}")


def train_tokenizer(spec: str, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer of a `bpe:N`, trained on `texts`, or of `bytes`, which reads none.

    Deterministic: equal counts are decided by the ids of the pair. A small corpus may run out of pairs to merge, and then
    `vocab_size` is what was reached. `bpe:N` has N ids in all: 256 bytes, the merges, and last the end of text.
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
    return Tiktoken({"kind": kind}, ranks, GPT2_PATTERN, {END_OF_TEXT: len(ranks)}, len(ranks), original.to_str(pretty=True))


class Tokenizer:
    """Text to ids and back. Ids are below `vocab_size`; `eot_id` ends a document and never stands in one."""

    vocab_size: int
    eot_id: int
    #: Whether the ids of two parts of a text can be those of the whole, where they are so for the neighbourhood of the border.
    cuttable = True

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, uint32 of shape (n,). `<|endoftext|>` written in the text is text, not the end of one."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD. DataError for an id that is not in the vocabulary."""
        ids = np.asarray(ids, dtype=np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            wrong = ids[(ids < 0) | (ids >= self.vocab_size)][0]
            raise DataError(f"token id {wrong}: not in the vocabulary; allowed: 0 to {self.vocab_size - 1}; use the corpus's own tokenizer")
        return self._decode(ids.tolist())

    def _decode(self, ids: list[int]) -> str:
        raise NotImplementedError

    def save(self, folder: Path) -> dict[str, Any]:
        """Writes what `load` needs into `folder` and returns the manifest's entry, with the files' hashes."""
        raise NotImplementedError

    @property
    def end_name(self) -> str | None:
        """The text of the token that ends a text, None where none does."""
        raise NotImplementedError

    def hugging_face_json(self) -> str:
        """A `tokenizer.json` with the same ids; special tokens written in a text are to be switched off (`split_special_tokens`).

        Raises:
            DataError: there is none of a tokenizer that is no `tokenizers` one.
        """
        raise NotImplementedError

    @staticmethod
    def load(folder: Path, manifest_entry: dict[str, Any]) -> Tokenizer:
        """The tokenizer that `save` wrote; DataError when a file is missing or is not the one that the manifest names."""
        kind = manifest_entry.get("kind")
        if kind == "tiktoken" and not manifest_entry["files"]:  # a corpus that brings no tokenizer of its own
            return Tiktoken.from_cache(str(manifest_entry.get("name")), download=False)
        for name in manifest_entry["files"]:
            file = Path(folder, name)
            try:
                check_sha256(file, hashlib.sha256(file.read_bytes()).hexdigest(), manifest_entry["files"].get(name))
            except FileNotFoundError:
                raise DataError(f"{file}: missing, the corpus is not complete; prepare it again") from None
        if kind in ("bpe", "bytes", "tiktoken"):
            return Tiktoken.from_folder(folder, manifest_entry)
        needed = {"characters": "characters", "tokenizers": "end_of_text", "transformers": "end_of_text"}.get(str(kind), "kind")
        value = manifest_entry.get(needed)
        if not isinstance(value, str) or not value:
            raise DataError(f"{folder}: the tokenizer's {needed} in its manifest is {str(value)[:50]!r}; prepare the corpus again")
        if kind == "characters":
            return Characters(value)
        if kind == "tokenizers":
            return HuggingFaceFile(Path(folder, HUGGING_FACE_FILE), value, f"{folder}")
        if kind == "transformers":
            return HuggingFaceFolder(folder, value, f"{folder}")
        raise DataError(f"{folder}: its tokenizer is of kind {kind!r}, which this version does not know; prepare the corpus again")


class Tiktoken(Tokenizer):
    """Byte pairs by rank: the trained ones, `bytes`, and tiktoken's own encodings."""

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
        #: The encoding of tiktoken that does it.
        self.library = library or tiktoken.Encoding("corpus", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens)

    def encode(self, text: str) -> np.ndarray:
        try:
            return self.library.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:  # half of a surrogate pair, which UTF-8 cannot hold
            return self.encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        except ValueError as reason:
            # The regex gives up in front of about a million spaces. It would cut one character before the end of the run;
            # cut there beforehand, and `\s++$` takes each part's tail without backtracking. Some patterns lack that, or join
            # spaces with a line end behind them.
            runs = list(_LONG_SPACE.finditer(text))
            known = self._pattern == GPT2_PATTERN or (r"\s++$" in self._pattern and not any(re.search(r"[\r\n]", run[0]) for run in runs))
            if not (runs and known):
                raise DataError(
                    f"--tokenizer: it gives up on a text that begins with {text[:40]!r} ({one_line(reason)}); leave it out"
                ) from None
            parts = [text[start:end] for start, end in pairwise([0, *(run.end() - 1 for run in runs), len(text)])]
            return np.concatenate([self.library.encode_to_numpy(part, disallowed_special=()) for part in parts])

    def _decode(self, ids: list[int]) -> str:
        known = self.library.decode_bytes
        try:
            return known(ids).decode("utf-8", "replace")
        except KeyError:  # some encodings have gaps between their special tokens
            return "".join(self._decode([i]) if i in self._ids else "\ufffd" for i in ids)

    @property
    def end_name(self) -> str:
        return next(name for name, number in self._special_tokens.items() if number == self.eot_id)

    def hugging_face_json(self) -> str:
        if self._hugging_face_json is not None:
            return self._hugging_face_json
        return hugging_face_form.byte_pairs(self._ranks, self._pattern, self._special_tokens, _byte_characters(), GPT2_PATTERN)

    @property
    def _ids(self) -> set[int]:
        return {*self._ranks.values(), *(self.library.encode_single_token(name) for name in self.library.special_tokens_set)}

    def save(self, folder: Path) -> dict[str, Any]:
        by_rank = sorted(self._ranks, key=self._ranks.__getitem__)
        contents = {RANKS_FILE: b"".join([b"%s %d\n" % (b2a_base64(token, newline=False), self._ranks[token]) for token in by_rank])}
        if self._hugging_face_json is not None:
            contents = {HUGGING_FACE_FILE: self._hugging_face_json.encode(), **contents}
        return {**self._entry, "files": _write(folder, contents)}

    @classmethod
    def from_folder(cls, folder: Path, entry: dict[str, Any]) -> Tiktoken:
        """What `save` wrote, whose hashes have been compared."""
        try:
            pairs = (line.split() for line in Path(folder, RANKS_FILE).read_bytes().splitlines())
            ranks = {a2b_base64(token): int(rank) for token, rank in pairs}
            if len(set(ranks.values())) < len(ranks):  # tiktoken would panic
                raise ValueError("a rank twice")
            mine = {key: entry[key] for key in entry if key != "files"}
            if entry["kind"] != "tiktoken":
                text = Path(folder, HUGGING_FACE_FILE).read_text(encoding="utf-8")
                return cls(mine, ranks, GPT2_PATTERN, {END_OF_TEXT: len(ranks)}, len(ranks), text)
            special = entry["special_tokens"]
            return cls(mine, ranks, entry["pattern"], special, special[entry["end_of_text"]])
        except (KeyError, TypeError, ValueError, FileNotFoundError) as reason:
            raise DataError(f"{folder}: its tokenizer cannot be read ({reason!r}); prepare the corpus again") from None

    @classmethod
    def from_cache(cls, name: str, end_of_text: str | None = None, download: bool = True) -> Tiktoken:
        """tiktoken's encoding `name`, from its cache folder; where that lacks the file, tiktoken fetches it.

        Raises:
            DataError: it is not in the cache and cannot be fetched; names the folder, the file and its sha256.
        """
        lacking = _lacking_file(name)
        if lacking is not None and not download:
            raise DataError(f"the tokenizer {name} is not here: {lacking}")
        try:
            encoding = tiktoken.get_encoding(name)
        except Exception as reason:  # requests', urllib3's and tiktoken's own
            where = lacking or one_line(reason)
            raise DataError(f"--tokenizer {name}: could not be fetched ({type(reason).__name__}), and {where}") from None
        special = dict(encoding._special_tokens)
        end = end_of_text or (END_OF_TEXT if END_OF_TEXT in special else None)
        if end not in special:
            raise DataError(f"--tokenizer {name}: has no token {end!r} to end a text; allowed for --end_of_text: {', '.join(special)}")
        entry = {"kind": "tiktoken", "name": name, "pattern": encoding._pat_str, "special_tokens": special, "end_of_text": end}
        return cls(entry, encoding._mergeable_ranks, encoding._pat_str, special, special[end], library=encoding)


def _lacking_file(name: str) -> str | None:
    """Which file of tiktoken's cache the encoding needs and lacks, in words; None where it is there."""
    import tiktoken_ext.openai_public as public

    class Found(Exception):
        """Carries the address and the hash out of tiktoken's own definition of the encoding."""

    def look(url: str, expected_hash: str | None = None) -> NoReturn:
        raise Found(url, expected_hash)

    usual = public.load_tiktoken_bpe
    public.load_tiktoken_bpe = look
    try:
        public.ENCODING_CONSTRUCTORS[name]()
        return None
    except (KeyError, TypeError):  # another plugin's encoding, which loads as it likes
        return None
    except Found as found:
        url, sha256 = found.args
    finally:
        public.load_tiktoken_bpe = usual
    # As tiktoken.load.read_file_cached looks.
    default = os.path.join(tempfile.gettempdir(), "data-gym-cache")
    variable = next((key for key in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR") if key in os.environ), None)
    folder = os.environ[variable] if variable else default
    file = Path(folder, hashlib.sha1(url.encode()).hexdigest())
    try:
        found_sha256 = hashlib.sha256(file.read_bytes()).hexdigest() if folder else ""
    except OSError:
        found_sha256 = ""
    if found_sha256 == sha256:
        return None
    is_there = "has another sha256" if found_sha256 else "is not there"
    return (
        f"{file} {is_there}: put {url.rpartition('/')[2]} there under that name (sha256 {sha256}),"
        f" or name the folder that has it with TIKTOKEN_CACHE_DIR ({'now ' + folder if variable else 'not set'})"
    )


class Characters(Tokenizer):
    """nanoGPT's ids of characters: the n-th of `characters` is n. None of them ends a text, so there is no `eot_id`."""

    def __init__(self, characters: str):
        self._characters = characters
        self._ids = {character: i for i, character in enumerate(characters)}
        self.vocab_size = len(characters)

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`; DataError for a character that has none."""
        unknown = next((character for character in text if character not in self._ids), None)
        if unknown is not None:
            raise DataError(f"character {unknown!r}: not among the {self.vocab_size} of this corpus; leave it out of the text")
        return np.array([self._ids[character] for character in text], dtype=np.uint32)

    def _decode(self, ids: list[int]) -> str:
        return "".join(self._characters[i] for i in ids)

    @property
    def end_name(self) -> None:
        return None

    def hugging_face_json(self) -> str:
        return hugging_face_form.characters(self._characters)


class HuggingFaceFile(Tokenizer):
    """A `tokenizer.json` of `tokenizers`, applied by that library."""

    def __init__(self, file: Path, end_of_text: str | None, where: str):
        try:
            self._json = file.read_text(encoding="utf-8")
            self._tokenizer = HuggingFaceTokenizer.from_str(self._json)
        except Exception as reason:  # `tokenizers` raises a bare Exception
            raise DataError(f"{where}: {file} is no tokenizer.json ({one_line(reason)}); give one of `tokenizers`") from None
        self._encoder = _encoder(self._tokenizer, self._json)
        self.cuttable = _cuttable(self._tokenizer)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.end_of_text = _choose_end(vocabulary, end_of_text, where)
        self.eot_id, self.vocab_size = vocabulary[self.end_of_text], max(vocabulary.values()) + 1

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        return _encode(self._encoder, texts)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    @property
    def end_name(self) -> str:
        return self.end_of_text

    def hugging_face_json(self) -> str:
        return hugging_face_form.without_template(self._json)

    def save(self, folder: Path) -> dict[str, Any]:
        return {"kind": "tokenizers", "end_of_text": self.end_of_text, "files": _write(folder, {HUGGING_FACE_FILE: self._json.encode()})}


class HuggingFaceFolder(Tokenizer):
    """A folder of `transformers.AutoTokenizer`, applied by that library; no code of the folder's own is run."""

    def __init__(self, folder: Path, end_of_text: str | None, where: str):
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that it finds no torch
        try:
            with torch_hidden():
                from transformers import AutoTokenizer
            self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as reason:  # whatever the tokenizer's class raises
            raise DataError(
                f"{where}: AutoTokenizer cannot read {folder} ({one_line(reason)}); give a folder with tokenizer.json or"
                " tokenizer_config.json and its vocabulary"
            ) from None
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        self.cuttable = backend is not None and _cuttable(backend)
        # The library's own way, but for models that would find special tokens in a text nevertheless.
        self._encoder = None if backend is None or isinstance(backend.model, models.BPE) else _encoder(backend, backend.to_str())
        vocabulary = self._tokenizer.get_vocab()
        self.end_of_text = _choose_end(vocabulary, end_of_text or self._tokenizer.eos_token, where)
        self.eot_id, self.vocab_size = vocabulary[self.end_of_text], max(vocabulary.values()) + 1

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        if self._encoder is not None:
            return _encode(self._encoder, texts)
        options = {"add_special_tokens": False, "split_special_tokens": True, "return_attention_mask": False, "verbose": False}
        return [np.array(ids, dtype=np.uint32) for ids in self._tokenizer(list(texts), **options)["input_ids"]]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @property
    def end_name(self) -> str:
        return self.end_of_text

    def hugging_face_json(self) -> str:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise DataError(f"{type(self._tokenizer).__name__} has no tokenizer.json; its own files have to be copied")
        backend.encode_special_tokens = False
        return hugging_face_form.without_template(backend.to_str())

    def save(self, folder: Path) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as place:
            self._tokenizer.save_pretrained(place)
            contents = {file.name: file.read_bytes() for file in sorted(Path(place).iterdir()) if file.is_file()}
        return {"kind": "transformers", "end_of_text": self.end_of_text, "files": _write(folder, contents)}


def _encoder(tokenizer: HuggingFaceTokenizer, text: str) -> HuggingFaceTokenizer:
    """`tokenizer`, whose JSON is `text`, made to take special tokens written in a text for text.

    It has a switch by which they are not looked for in front of the model. A model of whole pieces then finds them itself (`</s>` of a
    Unigram model has the best score of all), unless they have names there that no text has.
    """
    if not isinstance(tokenizer.model, models.BPE):
        # Floats are kept to the letter: read and written again, the last bit of a score may change, and with it a tie.
        description = json.loads(text, parse_float=lambda digits: f"\0{digits}\0")
        model, added = description["model"], description["added_tokens"]
        known = set(model["vocab"]) if isinstance(model["vocab"], dict) else {name for name, _ in model["vocab"]}
        special = {token["content"] for token in added if token["special"]} & known - {model.get("unk_token")}
        names = {name: f"\uffff{name}\uffff" for name in special}
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(name, name): number for name, number in model["vocab"].items()}
        else:
            model["vocab"] = [[names.get(name, name), score] for name, score in model["vocab"]]
        # Unknown to the model, they now get the next free ids: behind the others, whose ids stay.
        description["added_tokens"] = sorted(added, key=lambda token: token["content"] in special)
        text = re.sub(r'"\\u0000([^"\\]*)\\u0000"', r"\1", json.dumps(description))
    encoder = HuggingFaceTokenizer.from_str(text)
    encoder.encode_special_tokens = True
    encoder.no_truncation()
    encoder.no_padding()
    return encoder


def _encode(encoder: HuggingFaceTokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    return [np.array(encoding.ids, dtype=np.uint32) for encoding in encoder.encode_batch_fast(list(texts), add_special_tokens=False)]


def _cuttable(tokenizer: HuggingFaceTokenizer) -> bool:
    """Not so for a Unigram model that is shown whole texts: it adds scores from the beginning on, and their rounding decides ties."""
    whole = tokenizer.pre_tokenizer is None or len(tokenizer.pre_tokenizer.pre_tokenize_str("a b")) == 1
    return not (whole and isinstance(tokenizer.model, models.Unigram))


def _choose_end(vocabulary: dict[str, int], asked: str | None, where: str) -> str:
    """The token that ends a text: the one asked for, else the first of USUAL_ENDS that there is."""
    if asked is not None and asked not in vocabulary:
        raise DataError(f"{where}: its vocabulary has no token {asked!r} to end a text; name one of its own with --end_of_text")
    for token in (asked,) if asked is not None else USUAL_ENDS:
        if token in vocabulary:
            return token
    raise DataError(f"{where}: none of {', '.join(USUAL_ENDS)} is in its vocabulary; say which token ends a text with --end_of_text")


def _write(folder: Path, contents: dict[str, bytes]) -> dict[str, str]:
    """Write files and return their hashes by name."""
    for name, content in contents.items():
        Path(folder, name).write_bytes(content)
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def _byte_characters() -> list[str]:
    """For each byte the printable character that stands for it in a `tokenizers` vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
