"""A corpus of two billion tokens is opened and read without reading it: no more than what a batch needs."""

from __future__ import annotations

import numpy as np

from data_pipeline.loader import Loader
from data_pipeline.sampler import GlobalSampler
from data_pipeline.shards import open_corpus
from tests.helpers import sparse_corpus

SHARD, SEQ_LEN = 100_000_000, 1024


def test_the_first_batch_of_two_billion_tokens_is_the_right_one(tmp_path):
    corpus = open_corpus(sparse_corpus(tmp_path / "large"))
    assert corpus.train.n_tokens == 20 * SHARD
    per_shard = (SHARD - 1) // SEQ_LEN
    sampler = GlobalSampler([corpus.train.windows(SEQ_LEN)], 1, corpus.fingerprint)
    assert sampler.n_windows == 20 * per_shard

    def first_batch() -> np.ndarray:
        (batch,) = Loader(corpus.train, sampler, SEQ_LEN, corpus.vocab_size, 0, 1, "cpu").micro_batches(0, 8, 1)
        return batch.numpy()

    assert np.array_equal(first_batch(), np.zeros((8, SEQ_LEN + 1)))
    # The first window, the last, and those of the first batch get tokens of their own where the format says that they are.
    windows = [*sampler.indices(0, 8).tolist(), 0, 20 * per_shard - 1]
    expected = np.random.default_rng(0).integers(1, 50_257, (len(windows), SEQ_LEN + 1))
    for window, tokens in zip(windows, expected, strict=True):
        shard, place = divmod(window, per_shard)
        with open(corpus.path / f"train-{shard:05d}.bin", "r+b") as file:
            file.seek(2 * SEQ_LEN * place)
            file.write(tokens.astype("<u2").tobytes())
    assert np.array_equal(first_batch(), expected[:8])
    assert np.array_equal(corpus.train.read(np.array(windows), SEQ_LEN), expected)
    assert len({window // per_shard for window in windows[:8]}) > 3, "the order should not stay within a shard"
