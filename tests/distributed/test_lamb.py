"""LAMB trains what algorithm 2 of its paper trains, on any number of ranks, in every precision, and through a resume."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable

import pytest

from tests.distributed.reference import PublishedLamb, Step, reference_steps, run_all_but
from tests.distributed.test_engine_follows_plain_pytorch import BATCH, SEED, SMALL, STEPS, WARMUP, largest_difference, losses_of
from tests.distributed.test_engine_follows_plain_pytorch import flags as engine_flags
from tests.distributed.test_one_bit_optimizers import TOLERANCE, losses, trained
from tests.helpers import resumed_after

LR = 0.05


def flags(corpus, tmp_path, ranks: int, accumulation: int = 1, precision: str = "fp32", run_name: str = "r", **params) -> list[str]:
    run = engine_flags(corpus, tmp_path, SMALL, "stage 0", ranks, accumulation, precision)
    optimizer = {"type": "Lamb", "params": {"lr": LR, "betas": [0.9, 0.95], **params}}
    return [*run, "--lr", str(LR), "--run_name", run_name, "--set", f"optimizer={json.dumps(optimizer)}"]


@pytest.fixture(scope="module")
def expected(corpus) -> Callable[..., list[Step]]:
    """The reference by its options; each is computed once."""

    @functools.cache
    def steps(drops: bool = False, skips: tuple[int, ...] = (), **options) -> list[Step]:
        runner = {"runner_of": lambda step, micro_step: run_all_but(1)} if drops else {}
        lamb = functools.partial(PublishedLamb, **options)
        return reference_steps(corpus, SMALL, STEPS, BATCH, LR, WARMUP, SEED, skips=skips, adam=lamb, **runner)

    return steps


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 3), (2, 1), pytest.param(2, 3, marks=pytest.mark.long)])
def test_losses_are_those_of_the_published_algorithm(ranks, accumulation, pools, corpus, expected, tmp_path):
    lines = trained(pools.of(ranks), flags(corpus, tmp_path, ranks, accumulation))
    assert largest_difference(losses(lines), losses_of(expected())) <= TOLERANCE
    assert any(line["grad_norm"] > 1.0 for line in lines), "what is clipped must show"
    assert lines[-1]["loss"] < lines[0]["loss"] - 1.0
    assert 0.01 <= min(line["trust_ratio"] for line in lines) <= max(line["trust_ratio"] for line in lines) <= 10.0


@pytest.mark.parametrize(
    ("params", "options"),
    [
        ({"max_coeff": 0.3, "min_coeff": 0.1}, {"limits": (0.1, 0.3)}),
        pytest.param({"bias_correction": False}, {"corrects": False}, marks=pytest.mark.long),
    ],
)
def test_its_parameters_act(params, options, one_rank, corpus, expected, tmp_path):
    lines = trained(one_rank, flags(corpus, tmp_path, 1, **params))
    assert largest_difference(losses(lines), losses_of(expected(**options))) <= TOLERANCE
    assert largest_difference(losses(lines), losses_of(expected())) > 1000 * TOLERANCE


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.long)])
def test_in_half_precision_it_follows_fp32(precision, two_ranks, corpus, expected, tmp_path):
    """The norms are those of the fp32 master weights."""
    lines = trained(two_ranks, flags(corpus, tmp_path, 2, precision=precision), "tests.distributed.jobs:pretrain")
    assert largest_difference(losses(lines), losses_of(expected())) <= 0.05
    assert largest_difference(losses(lines), losses_of(expected(limits=(0.1, 0.3)))) > 0.05


@pytest.mark.long
def test_an_overflow_on_one_rank_is_skipped_by_all(two_ranks, corpus, expected, tmp_path):
    run = flags(corpus, tmp_path, 2, precision="fp16")
    found = two_ranks.run("tests.distributed.failure_jobs:fp16_run", flags=run, overflows=(4, 15), rank=1, micro_step=0)
    assert len({rank["digest"] for rank in found}) == 1
    # The loss itself is infinite in these steps.
    seen = [(line["loss"], step.loss) for line, step in zip(found[0]["lines"], expected(skips=(4, 15)), strict=True) if line["loss"]]
    assert len(seen) == STEPS - 2
    assert all(loss == pytest.approx(other, abs=0.05) for loss, other in seen)


@pytest.mark.parametrize(
    ("precision", "ranks"), [("fp32", 2), *(pytest.param(*case, marks=pytest.mark.long) for case in (("bf16", 2), ("fp32", 1)))]
)
def test_a_resume_is_the_uninterrupted_run(precision, ranks, two_ranks, pools, corpus, tmp_path):
    """Bit for bit; on another number of ranks within what the order of sums does."""
    whole = trained(two_ranks, flags(corpus, tmp_path, 2, precision=precision))
    again = [*flags(corpus, tmp_path, 2, precision=precision, run_name="resumed"), "--save_every", "15", "--keep", "30"]
    trained(two_ranks, again)
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / f"step-{STEPS:08d}")
    lines = trained(pools.of(ranks), [*again, "--micro_batch_size", "6", "--resume"])
    assert resumed_after(tmp_path / "resumed") == 15
    if ranks == 2:
        assert losses(lines) == losses(whole)
    else:
        assert largest_difference(losses(lines), losses(whole)) <= TOLERANCE
