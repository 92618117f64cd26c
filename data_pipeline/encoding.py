"""Documents to ids, in this process or in several, in the same order either way.

Threads lose here (tiktoken holds the interpreter's lock while it hands over its results), so more than one core means more
than one process: chunks of about 1 MB of text go out, ids come back.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_pipeline.shards import SPLITS, token_dtype
from data_pipeline.tokenizer import Tokenizer

CHUNK_BYTES = 2**20
_worker_tokenizer: Tokenizer  # in a worker only


class Encoded(NamedTuple):
    """The documents of one split within one chunk: how many, their bytes of text, and their ids with an end of text each."""

    split: str
    documents: int
    n_bytes: int
    ids: np.ndarray


def encode_documents(
    documents: Iterable[tuple[str, str, int]], tokenizer: Tokenizer, folder: Path, entry: dict[str, Any], workers: int
) -> Iterator[list[Encoded]]:
    """Encodes (split, text, bytes of text) documents, chunk by chunk. `folder` and `entry` are where `tokenizer` was saved."""
    if workers == 1:
        yield from (encode_chunk(tokenizer, chunk) for chunk in _chunks(documents))
        return
    # spawn, not fork: `tokenizers` has started threads by now, and a fork copies their locks but not the threads.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (folder, entry))
    pending: deque[Future[list[Encoded]]] = deque()
    try:
        for chunk in _chunks(documents):
            pending.append(_submit(pool, chunk))
            if len(pending) >= 4 * workers:  # this much text is in memory, however large the source
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, chunk: list[tuple[str, str, int]]) -> Future[list[Encoded]]:
    """Submits `chunk`, which starts a worker as long as none is idle; the worker is deaf to Ctrl-C, the parent's to handle.

    A blocked signal stays blocked in a process started meanwhile, from its first instruction on, and reaches this one after.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(_encode_in_worker, chunk)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def encode_chunk(tokenizer: Tokenizer, chunk: list[tuple[str, str, int]]) -> list[Encoded]:
    """One entry for each split that has documents in `chunk`."""
    dtype = token_dtype(tokenizer.vocab_size)
    end_of_text = np.array([tokenizer.eot_id], dtype=dtype)
    results = []
    for split in SPLITS:
        mine = [(text, n_bytes) for name, text, n_bytes in chunk if name == split]
        if mine:
            parts = [part for text, _ in mine for part in (tokenizer.encode(text).astype(dtype), end_of_text)]
            results.append(Encoded(split, len(mine), sum(n_bytes for _, n_bytes in mine), np.concatenate(parts)))
    return results


def _chunks(documents: Iterable[tuple[str, str, int]]) -> Iterator[list[tuple[str, str, int]]]:
    chunk, size = [], 0
    for document in documents:
        chunk.append(document)
        size += document[2]
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _start_worker(folder: Path, entry: dict[str, Any]) -> None:
    global _worker_tokenizer
    _worker_tokenizer = Tokenizer.load(folder, entry)
    # Killed, the parent cannot stop its workers, and they would wait for work for ever.
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "only a worker calls this, and it was started by a parent"
    parent.join()
    os._exit(1)


def _encode_in_worker(chunk: list[tuple[str, str, int]]) -> list[Encoded]:
    return encode_chunk(_worker_tokenizer, chunk)
