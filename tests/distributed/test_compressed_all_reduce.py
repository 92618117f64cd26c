"""The compressed mean over the ranks is the published algorithm's, for tensors of any sizes, and costs one bit an element."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.one_bit_jobs import values_of
from tests.distributed.reference import PublishedAllReduce

ROUNDS = 20
#: A scalar, primes, what fills bytes and blocks exactly and what does not; no sum of them is divisible by anything. Few enough that no
#: element is 0 but for fp32's rounding in any round, whose sign fp64 would give otherwise: one in some millions is.
SIZES = [1, 20_011, 7, 64, 4096, 3, 997, 1]


def published(sizes: list[int], ranks: int, live: list[list[int]] | None = None) -> tuple[PublishedAllReduce, list[list[torch.Tensor]]]:
    reduction, results = PublishedAllReduce(sizes, ranks), []
    for step in range(ROUNDS):
        values = [[value.double() for value in values_of(rank, step, sizes)] for rank in range(ranks)]
        results.append(reduction(values, live[step] if live else None))
    return reduction, results


def worker_errors(found: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """The tensors in a flat buffer, each at a multiple of 8."""
    start, tensors = 0, []
    for size in sizes:
        tensors.append(found[start : start + size])
        start += -(-size // 8) * 8
    assert not found[start:].any()
    return tensors


@pytest.mark.parametrize(
    ("ranks", "block"),
    [
        pytest.param(2, 65_536, marks=pytest.mark.long),
        pytest.param(4, 65_536, marks=pytest.mark.long),
        pytest.param(2, 4096, marks=pytest.mark.long),
        pytest.param(4, 32, marks=pytest.mark.long),
        (4, 512),
    ],
)
def test_twenty_rounds_are_those_of_the_published_algorithm(ranks, block, pools):
    """Whatever part of a tensor is worked on at a time."""
    found = pools.of(ranks).run("tests.distributed.one_bit_jobs:reduce_rounds", sizes=SIZES, rounds=ROUNDS, block=block)
    reduction, expected = published(SIZES, ranks)
    for rank in found:
        for results, tensors in zip(rank["results"], expected, strict=True):
            for result, tensor in zip(results, tensors, strict=True):
                # The same sign everywhere; the same scale, which is the magnitude.
                assert torch.equal(result > 0, tensor > 0)
                torch.testing.assert_close(result.double(), tensor, rtol=2e-6, atol=0)
        assert all(torch.equal(one, other) for one, other in zip(rank["results"][-1], found[0]["results"][-1], strict=True))
    for rank, errors in zip(found, reduction.worker_errors, strict=True):
        for error, other in zip(worker_errors(rank["worker"], SIZES), errors, strict=True):
            torch.testing.assert_close(error.double(), other, rtol=0, atol=1e-6)
    server = torch.cat([rank["server"] for rank in found])
    for error, other in zip(worker_errors(server, SIZES), reduction.server_errors, strict=True):
        torch.testing.assert_close(error.double(), other, rtol=0, atol=1e-6)


def test_the_errors_are_made_good(two_ranks):
    """What is left out of the same values in one round is sent in a later one: the mean of many rounds is the mean of the values."""
    sizes, rounds = [1000], 200
    found = two_ranks.run("tests.distributed.one_bit_jobs:reduce_rounds", sizes=sizes, rounds=rounds, constant=True)[0]
    mean = sum(values_of(rank, 0, sizes)[0].double() for rank in range(2)) / 2
    sent = sum(results[0].double() for results in found["results"]) / rounds
    assert float((sent - mean).norm() / mean.norm()) < 0.05
    assert float((found["results"][-1][0] - mean).norm() / mean.norm()) > 0.5, "a single round is far from it"


def test_a_rank_may_own_nothing(pools):
    """Three numbers are less than the chunks of four ranks."""
    found = pools.of(4).run("tests.distributed.one_bit_jobs:reduce_rounds", sizes=[2, 1], rounds=ROUNDS)
    _, expected = published([2, 1], 4)
    for rank in found:
        for results, tensors in zip(rank["results"], expected, strict=True):
            for result, tensor in zip(results, tensors, strict=True):
                torch.testing.assert_close(result.double(), tensor, rtol=2e-6, atol=0)


@pytest.mark.parametrize("live", [[[40 + 13 * step, 64] for step in range(ROUNDS)], [[300 - 13 * step, 64] for step in range(ROUNDS)]])
def test_elements_that_take_no_part_stay_zero_and_count_for_no_scale(live, two_ranks):
    """Also where they become more from round to round, or less."""
    sizes = [300, 64]
    found = two_ranks.run("tests.distributed.one_bit_jobs:reduce_rounds", sizes=sizes, rounds=ROUNDS, live=live)
    _, expected = published(sizes, 2, live)
    for rank in found:
        for results, tensors, (first, _) in zip(rank["results"], expected, live, strict=True):
            assert not results[0][first:].any()
            assert bool(results[0][:first].all()), "those that take part have a sign"
            for result, tensor in zip(results, tensors, strict=True):
                torch.testing.assert_close(result.double(), tensor, rtol=2e-6, atol=0)
        assert not rank["worker"][live[-1][0] : 300].any()
        assert bool(rank["worker"][: live[-1][0]].all())


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_element_costs_a_bit(ranks, pools):
    sizes = [1_000_003, 17, 1]
    found = pools.of(ranks).run("tests.distributed.one_bit_jobs:reduce_rounds", sizes=sizes, rounds=1)
    share = (ranks - 1) / ranks
    whole = 2 * share * 4 * sum(sizes)  # an all-reduce in fp32
    for rank in found:
        assert rank["bytes"] == pytest.approx(whole / 32, rel=1e-3)


def test_one_rank_sends_nothing_and_loses_nothing(one_rank):
    sizes = [5, 3]
    found = one_rank.run("tests.distributed.one_bit_jobs:reduce_rounds", sizes=sizes, rounds=3)[0]
    for step, results in enumerate(found["results"]):
        assert all(torch.equal(result, value) for result, value in zip(results, values_of(0, step, sizes), strict=True))
    assert found["bytes"] == 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_norm_of_the_mean_gradient_is_estimated_within_percents(ranks, pools):
    """Low rank, as gradients of matrices are: rows that are alike are the hard case of a sketch."""
    shapes = [[512, 256], [4096, 64], [1, 300], [1, 1]]
    found = pools.of(ranks).run("tests.distributed.one_bit_jobs:norms_of_mean", shapes=shapes, draws=30)
    assert all(rank == found[0] for rank in found), "the same on all ranks"
    ratios = torch.tensor([estimate / norm for estimate, norm in found[0]])
    assert abs(float(ratios.mean()) - 1) < 0.015
    assert float(ratios.std()) < 0.03


@pytest.mark.parametrize("width", [32, 48, 64, 96, 128, 256])
def test_the_norm_of_a_models_first_gradient_is_estimated_within_percents(width, one_rank):
    """Biases and columns of matrices hold much of it: in numbers that stay the same for all rows and tensors they were off by 7% to 20%."""
    ratios = torch.tensor(one_rank.run("tests.distributed.one_bit_jobs:norms_of_first_gradients", width=width, seeds=40)[0])
    assert abs(float(ratios[0]) - 1) < 0.06, "with a run's own signs"
    assert float((ratios - 1).square().mean().sqrt()) < 0.03
