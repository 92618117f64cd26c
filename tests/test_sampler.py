"""The global sample order: a permutation in every epoch, a pure function of its position, the same everywhere."""

import numpy as np
import pytest

from data_pipeline.sampler import BLOCK, GlobalSampler, shuffled_positions


@pytest.mark.parametrize("n", [*range(1, 18), 1000, 4096, 65536, 65537])
def test_every_window_once_an_epoch(n):
    sampler = GlobalSampler([n], 7, "f")
    for epoch in (0, 1, 5):
        assert np.array_equal(np.sort(sampler.indices(epoch * n, n)), np.arange(n))


@pytest.mark.parametrize(
    ("n", "seed", "start", "expected"),
    [
        (12345, 1337, 0, [6151, 4337, 6866, 8791, 11780, 3682, 891, 4540]),
        (12345, 1337, 12340, [5149, 10179, 7927, 9543, 10745, 11556, 8225, 7370]),
        (1000000007, 0, 1000000000000000, [537659677, 949008043, 683516117, 877506086, 903960039, 859648294, 557218414, 43888738]),
    ],
)
def test_order_never_changes(n, seed, start, expected):
    assert GlobalSampler([n], seed, "fingerprint").indices(start, 8).tolist() == expected


def test_any_position_alone_is_the_same_as_in_sequence():
    n = 1500
    order = GlobalSampler([n], 3, "f").indices(0, 12_000)
    generator = np.random.default_rng(0)
    sampler = GlobalSampler([n], 3, "f")
    for start, count in zip(generator.integers(0, 11_000, 200).tolist(), generator.integers(0, 1000, 200).tolist(), strict=True):
        assert np.array_equal(sampler.indices(start, count), order[start : start + count])
    assert np.array_equal(sampler.indices(BLOCK - 1, 2), order[BLOCK - 1 : BLOCK + 1])
    assert np.array_equal(sampler.indices(0, 12_000), order)  # over epochs and blocks


def test_far_positions_are_reached_at_once():
    sampler = GlobalSampler([10**12 + 39], 0, "f")
    found = sampler.indices(5 * 10**17, 1000)
    assert found.min() >= 0
    assert found.max() < 10**12 + 39
    assert len(set(found.tolist())) == 1000


def test_small_permutations_are_all_reached_and_about_equally():
    seen = {}
    for epoch in range(2400):
        order = tuple(shuffled_positions(4, "key", 4 * epoch, 4).tolist())
        seen[order] = seen.get(order, 0) + 1
    assert len(seen) == 24
    assert max(seen.values()) < 3 * min(seen.values())


def test_epochs_seeds_and_corpora_have_random_orders_of_their_own():
    n = 10_000
    base = GlobalSampler([n], 0, "f").indices(0, 2 * n)
    for other in (base[n:], np.arange(n), GlobalSampler([n], 1, "f").indices(0, n), GlobalSampler([n], 0, "g").indices(0, n)):
        # Two unrelated permutations agree in one place on average; more than 10 has probability 1e-8. Five standard deviations.
        assert np.count_nonzero(base[:n] == other) <= 10 and abs(np.corrcoef(base[:n], other)[0, 1]) < 5 / np.sqrt(n)
