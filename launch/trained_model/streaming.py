"""Text as it comes: of ids that arrive one by one, what can be said of them so far."""

from __future__ import annotations

from data_pipeline.tokenizer import Tokenizer

#: What half a character is decoded to, until its other half has come.
INCOMPLETE = "\ufffd"


class TextStream:
    """The text of ids that arrive one by one: the parts that `add` and `rest` return are, put together, the text of all of them.

    Some tokenizers write a token in other ways at the beginning of a text than within: what follows is decoded together with what stands
    before it.
    """

    def __init__(self, tokenizer: Tokenizer, before: list[int]):
        self._tokenizer, self._ids = tokenizer, list(before[-8:])
        self._begin, self._said = 0, len(self._ids)  # decoded from `_begin` on, and said up to `_said`

    def add(self, token: int) -> str:
        """What can be said now; nothing while a character is incomplete."""
        self._ids.append(token)
        return self._new(final=False)

    def rest(self) -> str:
        """What is left at the end."""
        return self._new(final=True)

    def _new(self, final: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._begin : self._said])
        text = self._tokenizer.decode(self._ids[self._begin :])
        if not final and text.endswith(INCOMPLETE):
            return ""
        self._begin, self._said = self._said, len(self._ids)
        return text[len(before) :]
