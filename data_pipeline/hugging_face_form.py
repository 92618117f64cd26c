"""Converts a tokenizer to a `tokenizer.json` of Hugging Face's library, which `AutoTokenizer` reads beside an exported model.

tiktoken stores tokens and their ranks, but not the two parts that each is merged from. These are recovered by merging the token's bytes
with all merges of lower rank. Its patterns are for another regular-expression engine, and are rewritten.
"""

from __future__ import annotations

import json
import re
from typing import Any

#: The pre-tokenizer that has GPT-2's pattern built in.
_BUILT_IN = "ByteLevel"


def byte_pairs(ranks: dict[bytes, int], pattern: str, special_tokens: dict[str, int], byte_characters: list[str], gpt2_pattern: str) -> str:
    """The `tokenizer.json` of an encoding of tiktoken.

    Args:
        ranks: the rank of each token, which is its id.
        pattern: the regular expression that splits a text, in tiktoken's dialect.
        byte_characters: for each byte, the character that represents it.
        gpt2_pattern: the pattern that the library has built in.
    """

    def shown(token: bytes) -> str:
        return "".join(byte_characters[byte] for byte in token)

    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1 and len(parts := _merged(ranks, token, rank)) == 2:
            merges.append([shown(parts[0]), shown(parts[1])])
    built_in = pattern == gpt2_pattern
    cut = {"type": _BUILT_IN, "add_prefix_space": False, "trim_offsets": True, "use_regex": built_in}
    pre_tokenizer: dict[str, Any] = cut
    if not built_in:
        split = {"type": "Split", "pattern": {"Regex": for_oniguruma(pattern)}, "behavior": "Isolated", "invert": False}
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [split, cut]}
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        # tiktoken looks up a whole piece before it merges, which yields a few tokens that no merges produce.
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": True,
        "vocab": {shown(token): rank for token, rank in ranks.items()},
        "merges": merges,
    }
    if sorted(special_tokens.values()) != list(range(len(ranks), len(ranks) + len(special_tokens))):
        # The library gives added tokens the next free ids unless they are in the vocabulary; some encodings have gaps between theirs.
        model["vocab"] |= special_tokens
    return _tokenizer(model, pre_tokenizer, {**cut, "use_regex": True}, special_tokens)


def characters(known: str) -> str:
    """The `tokenizer.json` of character-level ids: the id of the n-th of `known` is n. Unknown characters are dropped."""
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
    }
    model |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    model |= {"vocab": {character: index for index, character in enumerate(known)}, "merges": []}
    # Text is split into characters before the model is applied; otherwise a text of a million characters would be one word.
    split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
    return _tokenizer(model, split, {"type": "Fuse"}, {})


def without_template(text: str) -> str:
    """The `tokenizer.json` without the template that adds tokens around a text, since training has none."""
    described = json.loads(text)
    if (described.get("post_processor") or {}).get("type") not in (None, _BUILT_IN):
        described["post_processor"] = None
    return json.dumps(described, ensure_ascii=False)


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


def _tokenizer(model: dict[str, Any], pre_tokenizer: dict[str, Any], decoder: dict[str, Any], special_tokens: dict[str, int]) -> str:
    added = [
        {"id": number, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for name, number in sorted(special_tokens.items(), key=lambda item: item[1])
    ]
    described: dict[str, Any] = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None}
    described |= {"pre_tokenizer": pre_tokenizer, "post_processor": None, "decoder": decoder, "model": model}
    return json.dumps(described, ensure_ascii=False)
