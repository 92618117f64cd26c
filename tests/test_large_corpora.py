"""A corpus of two billion tokens is opened and read without reading it: no more than what a batch needs. It may have many shards."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from data_pipeline.loader import Loader
from data_pipeline.sampler import GlobalSampler
from data_pipeline.shards import open_corpus
from tests.helpers import ROOT, sparse_corpus

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


@pytest.mark.parametrize(("hard", "said"), [(300, "2300\n"), (100, "cannot be read (Too many open files)")])
def test_more_shards_than_the_soft_limit_of_open_files_are_read(tmp_path, hard, said):
    corpus = sparse_corpus(tmp_path / "many", shards=230, shard_tokens=11)
    code = f"""
import resource
from data_pipeline.shards import open_corpus
resource.setrlimit(resource.RLIMIT_NOFILE, (100, {hard}))
try:
    print(open_corpus({str(corpus)!r}).train.windows(1))
except ValueError as reason:
    print(reason)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert said in done.stdout and not done.stderr, done
