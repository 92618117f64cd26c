"""Sample texts from a trained model and print them as they are generated, or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from data_pipeline.tokenizer import Tokenizer
from launch.config.hardware import device_type
from launch.errors import UsageError, print_once
from launch.trained_model.flags import DTYPES
from launch.trained_model.load import TrainedModel, open_trained
from model.cache import KVCache
from model.sampling import Sampling, stream

#: The replacement for an incomplete UTF-8 character.
INCOMPLETE = "\ufffd"


def print_samples(flags: argparse.Namespace, prompt: str) -> None:
    """Load the model that the flags of `launch/generate.py` name, and print its texts. Raises UsageError, one line."""
    trained = open_trained(flags.source, checkpoint=flags.checkpoint, data=flags.data)
    tokenizer, ids = _prompt_ids(flags, trained, prompt)
    device = torch.device(device_type())
    cache = KVCache(trained.load_model().to(device, getattr(torch, DTYPES[flags.dtype])))
    sampling = Sampling(flags.temperature, flags.top_k or None, flags.top_p)
    end = None if flags.ignore_eos else trained.eot_id

    def next_logits(ids: list[int]) -> torch.Tensor:
        return cache(ids)[: tokenizer.vocab_size]  # without the ids with which published models pad their embedding

    total, start = 0, time.perf_counter()
    for seed in range(flags.seed, flags.seed + flags.samples):
        generated: list[int] = []
        drawn = stream(next_logits, ids, flags.max_new_tokens, sampling, torch.Generator().manual_seed(seed), end)
        if not flags.json:
            number = seed - flags.seed + 1
            print((f"--- sample {number} of {flags.samples}, seed {seed}\n" if flags.samples > 1 else "") + prompt, end="", flush=True)
        text = ""
        try:
            for part in text_parts(tokenizer, ids, _recorded(drawn, end, generated)):
                text += part
                if not flags.json:
                    print(part, end="", flush=True)
        except FloatingPointError as reason:  # the activations overflow in this dtype
            raise UsageError(f"{trained.folder}: {reason} in {flags.dtype}; try --dtype fp32, or an earlier --checkpoint") from None
        total += len(generated)
        if flags.json:  # with everything that the text depends on
            names = ("temperature", "top_k", "top_p", "dtype")
            found: dict[str, Any] = {"model": str(trained.folder), "checkpoint": trained.checkpoint_name, "seed": seed}
            found |= {"prompt": prompt, "text": text}
            found |= {"ids": generated, "ended_by": "length" if len(generated) == flags.max_new_tokens else "end of text"}
            print_once(json.dumps(found | {"prompt_tokens": len(ids)} | {name: getattr(flags, name) for name in names}))
        else:
            print(flush=True)
    seconds = time.perf_counter() - start
    if not flags.quiet:
        print_once(f"{total:,} tokens in {seconds:.2f} s: {total / seconds:,.1f} tokens/s ({device.type}, {flags.dtype})", sys.stderr)


def _recorded(tokens: Iterable[int], end: int | None, record: list[int]) -> Iterator[int]:
    """The tokens without `end`, which are also appended to `record`."""
    for token in tokens:
        if token != end:
            record.append(token)
            yield token


def text_parts(tokenizer: Tokenizer, before: list[int], tokens: Iterable[int]) -> Iterator[str]:
    """Decodes tokens one by one; the parts concatenated are the text of all tokens. A part never ends within a character.

    before: the preceding tokens: some tokenizers decode a token at the beginning of a text in another way.
    """
    ids = list(before[-8:])
    begin, shown = 0, len(ids)  # the text of ids[:shown] has been yielded; decoding starts at `begin`

    def new_text() -> str:
        return tokenizer.decode(ids[begin:])[len(tokenizer.decode(ids[begin:shown])) :]

    for token in tokens:
        ids.append(token)
        if not (part := new_text()).endswith(INCOMPLETE):
            yield part
            begin, shown = shown, len(ids)
    yield new_text()


def _prompt_ids(flags: argparse.Namespace, trained: TrainedModel, prompt: str) -> tuple[Tokenizer, list[int]]:
    """The tokenizer and the prompt's ids, after the end-of-text token where a document begins."""
    tokenizer, where = trained.tokenizer, trained.folder
    if tokenizer is None:
        raise UsageError(f"{where}: its tokenizer is needed: {trained.no_tokenizer}")
    ids: list[int] = tokenizer.encode(prompt).tolist()
    vocab_size, seq_len = trained.config.vocab_size, trained.config.seq_len
    if ids and max(ids) >= vocab_size:
        raise UsageError(f"{where}: its tokenizer gives id {max(ids)}, but the model has {vocab_size:,} ids; copy or export it again")
    if flags.document_start or not ids:
        if trained.eot_id is None:
            fix = "--document_start: leave it out" if ids else "the prompt is empty: give --prompt TEXT"
            raise UsageError(f"{fix}; this model has no end-of-text token")
        ids = [trained.eot_id, *ids]
    if len(ids) > seq_len and not flags.quiet:
        print_once(f"note: the prompt has {len(ids):,} tokens; the model reads the last {seq_len:,}", sys.stderr)
    return tokenizer, ids
