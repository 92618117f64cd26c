"""A mixture keeps its weights at every prefix of the run, each group in its own order, on any number of ranks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline import prepare
from data_pipeline.errors import DataError
from data_pipeline.loader import Loader
from data_pipeline.sampler import BLOCK, DENOMINATOR, GlobalSampler, mixture_pattern, parts_of, shuffled_positions
from data_pipeline.shards import Corpus, open_corpus
from launch.config.run_config import resolve

FIXED = settings(max_examples=40, deadline=None, derandomize=True, database=None)


def normed(weights: list[float]) -> list[float]:
    """As `prepare` writes them into the manifest."""
    total = sum(weights)
    return [weight / total for weight in weights]


UGLY = [
    [1 / 3, 2 / 3], [0.99999, 0.00001], [1 / 3, 1 / 3, 1 / 3], [0.1] * 8, [1 / 7, 6 / 7], [0.5, 0.25, 0.125, 0.0625, 0.0625], [1e-9, 1.0],
    [1.0] + [1e-6] * 7, [0.9993] + [0.0001] * 7, [5e-324, 1.0], [0.70001, 0.29999], [0.3, 0.3, 0.4], [2 / 3, 1 / 6, 1 / 6], [1e300, 1e300],
    [0.14285, 0.57143, 0.28572], [127, 1, 1, 1, 1, 1, 1, 1],
]  # fmt: skip
WEIGHTS = st.sampled_from(UGLY) | st.lists(st.floats(1e-4, 1) | st.integers(1, 20).map(float), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("weights", "parts"),
    [
        ([1.0], [1]),
        ([0.7, 0.3], [7, 3]),
        ([1 / 3, 2 / 3], [1, 2]),
        ([0.1] * 10, [1] * 10),
        ([1 / 7, 2 / 7, 4 / 7], [1, 2, 4]),
        ([4999 / 9999, 5000 / 9999], [4999, 5000]),
        ([0.5001, 0.4999], [5001, 4999]),
        ([0.50001, 0.49999], [1, 1]),
        ([1 / 101, 1 / 103, 1 - 1 / 101 - 1 / 103], [99, 97, 9804]),  # no common denominator up to 10,000
        ([1e-9, 1.0], [1, 9999]),
    ],
)
def test_weights_that_are_fractions_of_a_small_denominator_stay_exact(weights, parts):
    assert parts_of(weights) == parts


@FIXED
@given(weights=WEIGHTS.map(normed), sizes=st.lists(st.integers(1, 400), min_size=8, max_size=8), seed=st.integers(0, 2**32))
def test_at_every_prefix_each_group_is_within_one_sample_of_its_weight(weights, sizes, seed):
    """Within one of the weight in parts of 1/10,000; so of the weight as given within one and n/10,000, of n samples."""
    parts, groups = parts_of(weights), sizes[: len(weights)]
    sampler = GlobalSampler(groups, seed, "f", weights)
    n = 2 * sum(parts)
    group_of = np.repeat(np.arange(len(groups)), groups)
    order = sampler.indices(0, n)
    drawn = group_of[order]
    length = np.arange(1, n + 1)
    for group, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        count = np.cumsum(drawn == group)
        slack = max(1, 2 * len(parts) - 2)  # Tijdeman's bound, below the one that is promised
        assert np.all(np.abs(count * sum(parts) - length * part) * slack <= (slack - 1) * sum(parts))
        if min(weights) >= 1 / DENOMINATOR:
            assert np.all(np.abs(count - length * weight) <= 1 + length / DENOMINATOR + 1e-9 * length)
        # The group's own order is that of the group alone, epoch behind epoch.
        offset = sum(groups[:group])
        mine = order[drawn == group] - offset
        key = f"f:{seed}" if len(groups) == 1 else f"f:{seed}:{group}"
        assert np.array_equal(mine, shuffled_positions(groups[group], key, 0, len(mine)))
        for first in range(0, len(mine) - groups[group] + 1, groups[group]):
            assert len(set(mine[first : first + groups[group]].tolist())) == groups[group]


@FIXED
@given(weights=WEIGHTS.map(normed), places=st.lists(st.tuples(st.integers(0, 25_000), st.integers(1, 300)), max_size=20))
def test_any_place_of_a_mixture_alone_is_the_same_as_in_sequence(weights, places):
    groups = [17 * (number + 1) for number in range(len(weights))]
    order = GlobalSampler(groups, 5, "f", weights).indices(0, 25_300)
    sampler = GlobalSampler(groups, 5, "f", weights)
    for start, count in [*places, (BLOCK - 1, 2)]:
        assert np.array_equal(sampler.indices(start, count), order[start : start + count])


def test_far_places_of_a_mixture_are_reached_at_once():
    groups, weights = [10**9 + 7, 10**7, 3], [0.7, 0.2999, 0.0001]
    found = GlobalSampler(groups, 0, "f", weights).indices(10**17, 10_000)
    drawn = np.searchsorted(np.cumsum(groups), found, side="right")
    assert np.bincount(drawn).tolist() == [7000, 2999, 1]


def test_a_pattern_by_hand():
    """7 of 10 from group 0, whose count among the first n is 0.7 n to the nearest whole number (at n = 5, 3.5, to the one above)."""
    pattern, before = mixture_pattern([7, 3])
    assert pattern.tolist() == [0, 1, 0, 0, 0, 1, 0, 0, 1, 0]
    assert before.tolist() == [0, 0, 1, 2, 3, 1, 4, 5, 2, 6]
    assert mixture_pattern([1])[0].tolist() == [0]
    assert mixture_pattern([1, 1, 1])[0].tolist() == [0, 1, 2]


# A corpus of two sources that their bytes tell apart


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Corpus:
    """70% of documents of a's, 30% of documents of b's, though there are more of these."""
    folder = tmp_path_factory.mktemp("mixture")
    generator = np.random.default_rng(0)
    for letter, count in (("a", 120), ("b", 300)):
        (folder / letter).mkdir()
        for number in range(count):
            (folder / letter / f"{number}.txt").write_text(letter * int(generator.integers(20, 400)))
    sources = ["--source", f"{folder / 'a'}@0.7", f"{folder / 'b'}@0.3"]
    options = ["--tokenizer", "bytes", "--shard_tokens", "9000", "--val_fraction", "0.1", "--quiet"]
    assert prepare.main([*sources, "--out", str(folder / "corpus"), *options]) == 0
    corpus = open_corpus(folder / "corpus")
    corpus.verify()
    return corpus


def letters(batch: torch.Tensor) -> list[str]:
    """Which source each row is from, told by its bytes alone."""
    found = []
    for row in batch.tolist():
        (letter,) = set(row) - {256}
        found.append(chr(letter))
    return found


def loaders(corpus: Corpus, world_size: int, monkeypatch) -> list[Loader]:
    """The training loaders as a run makes them."""
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    flags = ["--deepspeed_config", "ds_configs/zero1_bf16.json", "--preset", "nano", "--seq_len", "64", "--global_batch_size", "24"]
    config, _ = resolve([*flags, "--data", str(corpus.path)])
    return [config.training_loader(SimpleNamespace(rank=rank, world_size=world_size, device="cpu")) for rank in range(world_size)]


def test_a_run_draws_from_each_source_by_its_weight_at_every_prefix(mixture, monkeypatch):
    assert mixture.mixture == [0.7, 0.3]
    (loader,) = loaders(mixture, 1, monkeypatch)
    n = 4 * loader.n_windows
    drawn = [letter for first in range(0, n, 12) for batch in loader.micro_batches(first, 4, 3) for letter in letters(batch)]
    assert len(drawn) >= n
    counts = np.cumsum(np.array(drawn) == "a")
    length = np.arange(1, len(drawn) + 1)
    assert np.all(np.abs(10 * counts - 7 * length) <= 10)
    # Every window of each source once, then again in another order.
    a, b = mixture.train.group_windows(64, 2)
    assert a + b == loader.n_windows
    assert a < b
    order = loader.sampler.indices(0, n)
    for found, size in ((order[order < a], a), (order[order >= a], b)):
        assert len(set(found[:size].tolist())) == size
        assert found[:size].tolist() != found[size : 2 * size].tolist()


def test_a_mixtures_global_batches_are_the_same_for_every_number_of_ranks(mixture, monkeypatch):
    def batches(world_size: int, micro: int, accumulation: int) -> torch.Tensor:
        ranks = loaders(mixture, world_size, monkeypatch)
        steps = []
        for first in range(0, 24 * 12, 24):
            of_ranks = [list(loader.micro_batches(first, micro, accumulation)) for loader in ranks]
            steps += [of_ranks[rank][step] for step in range(accumulation) for rank in range(world_size)]
        return torch.cat(steps)

    expected = batches(1, 24, 1)
    for world_size, micro, accumulation in ((1, 8, 3), (2, 4, 3), (2, 12, 1), (3, 4, 2)):
        assert torch.equal(batches(world_size, micro, accumulation), expected), (world_size, micro)


def test_a_source_that_is_repeated_often_has_a_note(mixture):
    """Of the first source alone: the run has less than ten epochs of the whole corpus, and of the second source."""
    flags = ["--deepspeed_config", "ds_configs/zero1_bf16.json", "--preset", "nano", "--seq_len", "64", "--data", str(mixture.path)]
    tokens = [
        sum(shard["tokens"] for shard in mixture.manifest["splits"]["train"]["shards"] if shard["group"] == group) for group in (0, 1)
    ]
    config, _ = resolve([*flags, "--global_batch_size", "16", "--steps", str(6 * sum(tokens) // (16 * 64))])
    assert config.total_tokens < 10 * sum(tokens) and 0.3 * config.total_tokens < 10 * tokens[1]
    (note,) = (note for note in config.notes if "trains on" in note)
    assert f"trains on the tokens of source a {0.7 * config.total_tokens / tokens[0]:,.0f} times" in note


def test_a_source_too_small_for_the_sequence_is_refused_by_name(tmp_path, monkeypatch):
    for letter, count in (("a", 4000), ("b", 40)):
        (tmp_path / letter).mkdir()
        for number in range(40):
            (tmp_path / letter / f"{number}.txt").write_text(f"{letter}{number}" * (count // 40))
    sources = ["--source", f"{tmp_path / 'a'}@0.7", f"{tmp_path / 'b'}@0.3"]
    out = tmp_path / "corpus"
    assert prepare.main([*sources, "--out", str(out), "--tokenizer", "bytes", "--val_fraction", "0.2", "--quiet"]) == 0
    with pytest.raises(DataError, match=r"no train shard of source number 2 holds one window of seq_len 512 \+ 1 tokens"):
        resolve(["--deepspeed_config", "ds_configs/zero1_bf16.json", "--preset", "nano", "--seq_len", "512", "--data", str(out)])


def test_weights_belong_to_the_corpus_and_its_order(mixture, tmp_path):
    """The same text with other weights is another corpus: no run resumes over it."""
    folder = mixture.path.parent
    sources = ["--source", f"{folder / 'a'}@0.6", f"{folder / 'b'}@0.4"]
    options = ["--tokenizer", "bytes", "--shard_tokens", "9000", "--val_fraction", "0.1", "--quiet"]
    assert prepare.main([*sources, "--out", str(tmp_path / "corpus"), *options]) == 0
    other = open_corpus(tmp_path / "corpus")
    assert other.manifest["splits"] == mixture.manifest["splits"]
    assert other.fingerprint != mixture.fingerprint
