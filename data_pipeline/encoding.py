"""Encodes pieces of text, in this process or in several, with the same result.

Threads do not help, because tiktoken holds the GIL while it converts its results. So worker processes get chunks of about 1 MB of text
and return ids.
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

from data_pipeline.documents import Piece
from data_pipeline.errors import DataError
from data_pipeline.manifest import token_dtype
from data_pipeline.tokenizer import Tokenizer

_worker_tokenizer: Tokenizer  # in a worker only


class Encoded(NamedTuple):
    """The ids of one split and group in a chunk, and the size of their text in UTF-8."""

    split_name: str
    group: int
    n_bytes: int
    ids: np.ndarray


def encode_chunks(
    chunks: Iterable[list[Piece]], tokenizer: Tokenizer, folder: Path, entry: dict[str, Any], workers: int
) -> Iterator[list[Encoded]]:
    """The ids of each chunk, in order. `entry` is what `tokenizer.save(folder)` returned, from which workers load it."""
    if workers == 1:
        yield from (encode_chunk(tokenizer, chunk) for chunk in chunks)
        return
    # spawn, not fork: `tokenizers` has started threads, and a fork copies their locks but not the threads.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (folder, entry))
    pending: deque[Future[list[Encoded]]] = deque()
    try:
        for chunk in chunks:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a worker that this starts inherits it: the parent handles Ctrl-C
            pending.append(pool.submit(_encode_in_worker, chunk))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            if len(pending) >= 4 * workers:  # limits the text in memory
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def encode_chunk(tokenizer: Tokenizer, chunk: list[Piece]) -> list[Encoded]:
    """One entry for each split and group that has pieces in `chunk`."""
    dtype = token_dtype(tokenizer.vocab_size)
    end_of_text = np.array([tokenizer.eot_id], dtype=dtype)
    results = []
    for split_name, group in sorted({(piece.split_name, piece.group) for piece in chunk}, key=lambda pair: (pair[1], pair[0])):
        mine = [piece for piece in chunk if (piece.split_name, piece.group) == (split_name, group)]
        parts = []
        for piece, ids in zip(mine, tokenizer.encode_many([piece.text for piece in mine]), strict=True):
            if (ids == tokenizer.eot_id).any():
                raise DataError(
                    f"--tokenizer: a {split_name} text contains {tokenizer.decode([tokenizer.eot_id])!r}, which this tokenizer encodes as"
                    " its end of text; name another one with --end_of_text"
                )
            parts += [ids.astype(dtype), end_of_text] if piece.ends else [ids.astype(dtype)]
        results.append(Encoded(split_name, group, sum(piece.n_bytes for piece in mine), np.concatenate(parts)))
    return results


def _start_worker(folder: Path, entry: dict[str, Any]) -> None:
    global _worker_tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core per worker
    _worker_tokenizer = Tokenizer.load(folder, entry)
    # If the parent is killed, it cannot stop its workers, and they would wait forever.
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "only a worker calls this, and it was started by a parent"
    parent.join()
    os._exit(1)


def _encode_in_worker(chunk: list[Piece]) -> list[Encoded]:
    return encode_chunk(_worker_tokenizer, chunk)
