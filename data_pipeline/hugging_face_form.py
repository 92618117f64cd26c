"""Converts a tokenizer to a `tokenizer.json` of Hugging Face's library, which `AutoTokenizer` reads beside an exported model.

tiktoken stores tokens and their ranks, but not the two parts that each is merged from. These are recovered by merging the token's bytes
with all merges of lower rank. Its patterns are for another regular-expression engine, and are rewritten.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

# GPT-2's pattern that splits text before merging. Possessive (++) and with \s++$ first, it splits the same and backtracks less.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

#: The score of a token that a Unigram model must not find in a text: below the sum of scores of any pieces.
LOWEST_SCORE = -10_000.0


def byte_characters() -> list[str]:
    """For each byte, the printable character that represents it in a vocabulary of `tokenizers` (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def byte_pairs(ranks: dict[bytes, int], pattern: str, special_tokens: dict[str, int]) -> str:
    """The `tokenizer.json` of an encoding of tiktoken.

    Args:
        ranks: the rank of each token, which is its id.
        pattern: the regular expression that splits a text, in tiktoken's dialect.
    """
    character_of = byte_characters()

    def text_of(token: bytes) -> str:
        return "".join(character_of[byte] for byte in token)

    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1 and len(parts := _merged(ranks, token, rank)) == 2:
            merges.append((text_of(parts[0]), text_of(parts[1])))
    vocabulary = {text_of(token): rank for token, rank in ranks.items()}
    if sorted(special_tokens.values()) != list(range(len(ranks), len(ranks) + len(special_tokens))):
        # The library gives added tokens the next free ids unless they are in the vocabulary; some encodings have gaps between theirs.
        vocabulary |= special_tokens
    # tiktoken looks up a whole piece before it merges, which yields a few tokens that no merges produce: ignore_merges.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    built_in = pattern == GPT2_PATTERN
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=built_in)
    split = pre_tokenizers.Split(Regex(for_oniguruma(pattern)), "isolated")
    tokenizer.pre_tokenizer = to_bytes if built_in else pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    names = sorted(special_tokens, key=special_tokens.__getitem__)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return tokenizer.to_str()


def characters(known: str) -> str:
    """The `tokenizer.json` of character-level ids: the id of the n-th of `known` is n. Unknown characters are dropped."""
    tokenizer = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(known)}, merges=[]))
    # Text is split into characters before the model is applied; otherwise a text of a million characters would be one word.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer.to_str()


def edited(text: str, change: Callable[[dict[str, Any]], None]) -> str:
    """A `tokenizer.json` after `change` of its content.

    Floats are kept as text: parsing and printing could change the last bit of a score, and so break a tie differently.
    """
    described = json.loads(text, parse_float=lambda digits: f"\0{digits}\0")
    change(described)
    return re.sub(r'"\\u0000(-?\d[\d.eE+-]*)\\u0000"', r"\1", json.dumps(described, ensure_ascii=False))


def for_export(text: str) -> str:
    """A `tokenizer.json` with which AutoTokenizer gives the ids used in training.

    The template that adds tokens around a text is removed. A Unigram model would find its special tokens in any text, so they get the
    lowest score. This lowers the score of unknown characters too, which matters only if a character is known as part of longer pieces
    alone; trainers leave no such characters.
    """

    def change(described: dict[str, Any]) -> None:
        if (described.get("post_processor") or {}).get("type") not in (None, "ByteLevel"):
            described["post_processor"] = None
        model = described["model"]
        if isinstance(model["vocab"], list):
            special = {token["content"] for token in described["added_tokens"] if token["special"]}
            pairs = enumerate(model["vocab"])
            model["vocab"] = [
                [name, LOWEST_SCORE if name in special and place != model.get("unk_id") else score] for place, (name, score) in pairs
            ]

    return edited(text, change)


def for_oniguruma(pattern: str) -> str:
    """A pattern of tiktoken in the dialect of `tokenizers`.

    There, `$` is the end of a line, and `{1,3}+` a repetition of a repetition. Possessive repetitions become greedy ones, which match the
    same in these patterns, since giving back characters never makes the rest match.
    """
    pattern = re.sub(r"([+*?}])\+", r"\1", pattern)
    return re.sub(r"(?<!\\)\$", r"\\z", pattern)


def _merged(ranks: dict[bytes, int], token: bytes, limit: int) -> list[bytes]:
    """The parts of `token` after all merges of rank below `limit`, lowest rank first, ties from the left."""
    parts = [token[index : index + 1] for index in range(len(token))]
    while len(parts) > 1:
        pairs = [(ranks.get(parts[index] + parts[index + 1], limit), index) for index in range(len(parts) - 1)]
        rank, index = min(pairs)
        if rank >= limit:
            break
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return parts
