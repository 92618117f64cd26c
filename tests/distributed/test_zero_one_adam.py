"""0/1 Adam trains what the paper's algorithm trains, at its steps, on any number of ranks, in every precision, and through a resume."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable

import pytest

from launch.config.explain import bytes_of
from launch.config.run_config import resolve
from tests.distributed.reference import PublishedZeroOneAdam, Step, reference_steps
from tests.distributed.test_engine_follows_plain_pytorch import BATCH, LR, SEED, STEPS, WARMUP, largest_difference, losses_of
from tests.distributed.test_engine_follows_plain_pytorch import flags as engine_flags
from tests.distributed.test_one_bit_optimizers import COMPRESSED, NOT_CLIPPED, SHAPE, TOLERANCE, losses, trained, trained_in_two_parts
from tests.helpers import resumed_after
from tests.test_zero_one_adam import by_the_papers_rule

#: Renewals until step 10 that lie 1 and 2 steps apart; exchanges of each step until 14, of every second until 18, then of every fourth.
SCHEDULE = {"var_freeze_step": 10, "var_update_scaler": 3, "local_step_scaler": 4, "local_step_clipper": 4}
RENEWED, EXCHANGED = by_the_papers_rule(*SCHEDULE.values(), steps=STEPS)
EVERY_STEP = range(1, STEPS + 1)


def flags(corpus, tmp_path, ranks: int, accumulation: int = 1, precision: str = "fp32", run_name: str = "r", **params) -> list[str]:
    run = engine_flags(corpus, tmp_path, SHAPE, "stage 0", ranks, accumulation, precision)
    optimizer = {"type": "ZeroOneAdam", "params": {"lr": "auto", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": "auto", **SCHEDULE}}
    optimizer["params"] |= params
    return [*run, "--run_name", run_name, "--set", f"optimizer={json.dumps(optimizer)}"]


@pytest.fixture(scope="module")
def expected(corpus) -> Callable[..., list[Step]]:
    """The reference by ranks, micro-batches of a step on each, and what it clips to; each is computed once."""

    @functools.cache
    def steps(ranks: int, accumulation: int = 1, clip: float = 1e9, renewed=frozenset(RENEWED), exchanged=frozenset(EXCHANGED), **options):
        adam = functools.partial(PublishedZeroOneAdam, ranks=ranks, renewed=renewed, exchanged=exchanged, **options)
        return reference_steps(corpus, SHAPE, STEPS, BATCH, LR, WARMUP, SEED, clip=clip, accumulation=ranks * accumulation, adam=adam)

    return steps


def test_it_acts_at_the_steps_of_the_papers_rule(two_ranks, corpus, tmp_path):
    """By the metrics, and by what is sent: whole gradients, a bit for each parameter, or the norm and flags alone."""
    assert sorted(RENEWED) == [1, 2, 3, 5, 7, 9]
    assert sorted(EXCHANGED) == [*range(1, 15), 16, 18, 22, 26, 30]
    run = [*flags(corpus, tmp_path, 2), "--n_layer", "5", "--d_model", "128"]
    lines = trained(two_ranks, run)
    assert {line["step"] for line in lines if line["variance_updated"]} == RENEWED
    assert {line["step"] for line in lines if line["exchanged"]} == EXCHANGED
    gradients = 4 * (1024 * 128 + 32 * 128 + 5 * (12 * 128**2 + 13 * 128) + 2 * 128)
    for line in lines:
        if line["variance_updated"]:
            assert line["bytes_sent"] == pytest.approx(gradients, rel=1e-3)
        else:
            assert line["bytes_sent"] < (gradients / 30 if line["exchanged"] else 5000)
            assert line["bytes_sent"] > (gradients / 32 if line["exchanged"] else 0)
    config = resolve(run, ranks=2)[0]
    assert sum(line["bytes_sent"] for line in lines) / STEPS == pytest.approx(bytes_of(config, config.model_config), rel=0.01)


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.long), 3])
def test_on_one_rank_it_is_adam_whose_variance_is_renewed_at_its_steps(accumulation, one_rank, corpus, expected, tmp_path):
    lines = trained(one_rank, flags(corpus, tmp_path, 1, accumulation))
    assert largest_difference(losses(lines), losses_of(expected(1, clip=1.0))) <= TOLERANCE
    renewed = expected(1, clip=1.0, renewed=frozenset(EVERY_STEP))
    assert largest_difference(losses(lines), losses_of(renewed)) > 1e-3, "the variance is not that of Adam"
    assert {line["exchanged"] for line in lines} == {line["bytes_sent"] for line in lines} == {0}
    assert {line["step"] for line in lines if line["variance_updated"]} == RENEWED


@pytest.mark.parametrize(
    ("ranks", "accumulation"), [pytest.param(2, 1, marks=pytest.mark.long), (2, 3), pytest.param(4, 1, marks=pytest.mark.long)]
)
def test_on_several_ranks_it_is_the_papers_algorithm(ranks, accumulation, pools, corpus, expected, tmp_path):
    lines = trained(pools.of(ranks), flags(corpus, tmp_path, ranks, accumulation) + NOT_CLIPPED)
    reference = expected(ranks, accumulation)
    assert largest_difference(losses(lines[:4]), losses_of(reference)[:4]) <= TOLERANCE
    assert largest_difference(losses(lines), losses_of(reference)) <= COMPRESSED
    exchanged = expected(ranks, accumulation, exchanged=frozenset(EVERY_STEP))
    assert largest_difference(losses_of(reference), losses_of(exchanged)) > 3 * COMPRESSED, "steps alone must show"
    assert largest_difference(losses_of(reference), losses_of(expected(1))) > 10 * COMPRESSED, "what is compressed must show"


def test_all_ranks_clip_by_the_norm_of_the_mean_gradient(two_ranks, corpus, expected, tmp_path):
    """Also in steps alone; estimated with a standard deviation of 2%."""
    lines = trained(two_ranks, [*flags(corpus, tmp_path, 2), "--set", "gradient_clipping=0.1"])
    reference = expected(2, clip=0.1)
    ratios = [line["grad_norm"] / step.norm for line, step in zip(lines, reference, strict=True)]
    assert all(0.8 < ratio < 1.2 for ratio in ratios)
    assert sum(ratios) / len(ratios) == pytest.approx(1.0, abs=0.03)
    assert any(step.norm > 0.1 for step in reference[15:])
    assert largest_difference(losses(lines), losses_of(reference)) <= 0.03
    assert largest_difference(losses_of(expected(2, clip=0.1, clips=False)), losses_of(reference)) > 0.06, "what is clipped must show"


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.long)])
def test_in_half_precision_it_follows_fp32(precision, two_ranks, corpus, expected, tmp_path):
    run = flags(corpus, tmp_path, 2, precision=precision)
    lines = trained(two_ranks, run, "tests.distributed.jobs:pretrain")
    assert largest_difference(losses(lines), losses_of(expected(2, clip=1.0))) <= 0.005
    assert largest_difference(losses(lines), losses_of(expected(1, clip=1.0, renewed=frozenset(EVERY_STEP)))) > 0.015


@pytest.mark.long
def test_an_overflow_on_one_rank_is_skipped_by_all(two_ranks, corpus, tmp_path):
    """In a renewal, an exchange and a step alone: what was due is done a step later."""
    overflows = (5, 12, 22)
    run, job = flags(corpus, tmp_path, 2, precision="fp16"), "tests.distributed.zero_one_jobs:weights_over_the_run"
    lines = exchanged_alike(two_ranks.run(job, flags=run, overflows=overflows))
    assert [line["step"] for line in lines if line["overflow"]] == list(overflows)
    assert [line["loss_scale"] for line in lines] == [2.0 ** (16 - sum(step < line["step"] for step in overflows)) for line in lines]
    for line in lines:
        update = line["step"] - sum(step < line["step"] for step in overflows)
        if not line["overflow"]:
            assert (line["variance_updated"], line["exchanged"]) == (update in RENEWED, update in EXCHANGED)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.2


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.long), "bf16"])
def test_a_gradient_that_is_not_finite_on_one_rank_ends_the_run_on_all(precision, two_ranks, corpus, tmp_path):
    """In a step alone."""
    job = {"factor": float("inf"), "steps": [20], "rank": 1, "gradient_only": True}
    run = flags(corpus, tmp_path, 2, precision=precision)
    for line in two_ranks.run("tests.distributed.failure_jobs:pretrain_until_it_fails", flags=run, **job):
        assert line.startswith("step 20: the gradients are not finite, but the loss is")
        assert f"--resume continues from {tmp_path / 'r' / 'checkpoints'}/step-00000019" in line


def test_without_bias_correction(one_rank, corpus, expected, tmp_path):
    lines = trained(one_rank, flags(corpus, tmp_path, 1, bias_correction=False))
    assert largest_difference(losses(lines), losses_of(expected(1, clip=1.0, corrects=False))) <= TOLERANCE
    assert largest_difference(losses(lines), losses_of(expected(1, clip=1.0))) > 0.03


RESUMES = [("bf16", 20)]
RESUMES += [
    pytest.param(*case, marks=pytest.mark.long)
    for case in (("fp32", 20), ("fp32", 8), ("fp32", 10), ("fp32", 15), ("fp32", 22), ("bf16", 16), ("fp16", 20))
]


@pytest.mark.parametrize(("precision", "interrupted"), RESUMES)
def test_a_resume_is_bit_identical(precision, interrupted, two_ranks, corpus, tmp_path):
    """Between renewals, after the last, between exchanges and after one."""
    often, job = ["--eval_every", "5"], "tests.distributed.jobs:pretrain"
    whole = trained(two_ranks, flags(corpus, tmp_path, 2, precision=precision) + often, job)
    run = flags(corpus, tmp_path, 2, precision=precision, run_name="resumed") + often
    lines = trained_in_two_parts(two_ranks, run, tmp_path, interrupted, job)
    for key in ("loss", "grad_norm", "variance_updated", "exchanged", "bytes_sent", "val_loss"):
        assert [line.get(key) for line in lines] == [line.get(key) for line in whole]


@pytest.mark.parametrize("precision", ["bf16", *(pytest.param(name, marks=pytest.mark.long) for name in ("fp32", "fp16"))])
def test_what_is_evaluated_and_saved_is_what_the_ranks_agree_on(precision, two_ranks, corpus, tmp_path):
    """Between two exchanges it stays but for weight decay, although the ranks' weights move and are not the same."""
    run = [*flags(corpus, tmp_path, 2, precision=precision, weight_decay=0.0), "--eval_every", "1", "--save_every", "25"]
    job = "tests.distributed.zero_one_jobs:weights_over_the_run"
    found = two_ranks.run(job, flags=[*run, "--keep", "9"], saved_after=25)
    for one, other in zip(*(rank["steps"] for rank in found), strict=True):
        assert one["agreed"] == other["agreed"]
        assert (one["own"] == other["own"]) == (one["step"] in EXCHANGED) == (one["own"] == one["agreed"])
    steps = {line["step"]: line for line in found[0]["steps"]}
    assert steps[25]["agreed"] == steps[22]["agreed"] != steps[26]["agreed"]
    losses = {line["step"]: line["val_loss"] for line in found[0]["lines"]}
    assert losses[25] == losses[22] != losses[26]
    assert found[0]["saved"] == steps[25]["agreed"]


@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.long)])
def test_another_number_of_ranks_goes_on_from_what_was_agreed(ranks, two_ranks, pools, corpus, tmp_path):
    """A checkpoint between two exchanges: what the ranks went alone is lost with their errors."""
    run, steps = flags(corpus, tmp_path, 2), ["--save_every", "20", "--keep", "30", "--micro_batch_size", "3"]
    whole = trained(two_ranks, run + steps)
    shutil.rmtree(tmp_path / "r" / "checkpoints" / f"step-{STEPS:08d}")
    lines = trained(pools.of(ranks), [*run, *steps, "--resume"])
    assert resumed_after(tmp_path / "r") == 20
    log = (tmp_path / "r" / "log.txt").read_text(encoding="utf-8")
    word = (
        "nothing is compressed, and local steps since the last exchange, if there were any, are lost"
        if ranks == 1
        else "the errors of the compression, and local steps since the last exchange if there were any, are lost"
    )
    assert f"note: ZeroOneAdam: {word}: written by 2 rank(s), and this job has {ranks}" in log
    assert 1e-5 < largest_difference(losses(lines), losses(whole)) < 0.1


def test_rows_that_cannot_have_gradients_gather_no_error(two_ranks, corpus, tmp_path):
    """Positions beyond the length of a curriculum that grows between renewals and after the last; none is thrown about."""
    section = {"min_difficulty": 8, "max_difficulty": 32, "schedule_type": "fixed_linear"}
    section["schedule_config"] = {"total_curriculum_step": 40, "difficulty_step": 8}
    run = [*flags(corpus, tmp_path, 2), "--set", f"curriculum_learning={json.dumps(section)}"]
    lines = two_ranks.run("tests.distributed.jobs:pretrain_with", technique="WatchedErrors", flags=run)[0]
    assert {line["seq_len"] for line in lines} == {8, 16, 24, 32}
    for line in lines:
        assert line["dead_values"] == line["dead_errors"] == 0.0
        assert (line["errors"] > 0.0) == (line["step"] > 3)
    # A weight begins at N(0, 0.02), a norm's at 1, and 30 steps at 5e-4 are 0.015.
    assert lines[-1]["largest_weight"] < 1.5
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.2


def exchanged_alike(found: list[dict]) -> list[dict]:
    """The lines of the metrics of a run of `weights_over_the_run`, after each exchange of which both ranks have the same weights."""
    for line, *ranks in zip(found[0]["lines"], *(rank["steps"] for rank in found), strict=True):
        assert len({rank["agreed"] for rank in ranks}) == 1
        if line["lr"]:  # else nobody has moved
            assert {rank["own"] == rank["agreed"] for rank in ranks} == {bool(line["exchanged"])}
    return found[0]["lines"]


def test_a_step_at_a_rate_of_zero_is_alone(two_ranks, corpus, tmp_path):
    """After the end of a schedule that decays to 0, only what was left from before is exchanged, once."""
    params = {"warmup_max_lr": LR, "warmup_num_steps": 5, "warmup_type": "linear", "total_num_steps": STEPS - 5}
    run = [*flags(corpus, tmp_path, 2), "--set", f"scheduler={json.dumps({'type': 'WarmupDecayLR', 'params': params})}"]
    place = run.index("--warmup_steps")
    del run[place : place + 2]
    place = run.index("--steps")  # with which the end of the schedule must agree
    run[place : place + 2] = ["--tokens", str(STEPS * BATCH * SHAPE["seq_len"])]
    lines = exchanged_alike(two_ranks.run("tests.distributed.zero_one_jobs:weights_over_the_run", flags=run))
    still = [line for line in lines if line["lr"] == 0]
    assert [line["step"] for line in still] == list(range(STEPS - 5, STEPS + 1))
    assert sum(line["exchanged"] for line in still) <= 1
    assert not still[-1]["exchanged"] and still[-1]["bytes_sent"] < 5000
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.2


@pytest.mark.long
def test_a_variance_may_be_renewed_again_after_a_resume_between_exchanges(two_ranks, corpus, tmp_path):
    """By a later var_freeze_step: the ranks, who were alone, exchange at the first renewal."""
    steps = ["--save_every", "20", "--keep", "30"]
    trained(two_ranks, flags(corpus, tmp_path, 2) + steps)
    shutil.rmtree(tmp_path / "r" / "checkpoints" / f"step-{STEPS:08d}")
    run = [*flags(corpus, tmp_path, 2, var_freeze_step=40), *steps, "--resume"]
    found = two_ranks.run("tests.distributed.zero_one_jobs:weights_over_the_run", flags=run)
    renewed, _ = by_the_papers_rule(40, *list(SCHEDULE.values())[1:], steps=STEPS)
    assert 21 in renewed, "in the first step"
    lines = found[0]["lines"]
    assert {line["step"] for line in lines[20:] if line["variance_updated"]} == {step for step in renewed if step > 20}
    for one, other in zip(*(rank["steps"] for rank in found), strict=True):
        assert one["own"] == other["own"] == one["agreed"]


@pytest.mark.long
def test_a_rate_that_rises_again_after_a_resume_throws_nothing_about(two_ranks, corpus, tmp_path):
    """A run that has ended at a rate of nearly zero goes on as one of twice its length, whose rate is half the peak."""
    run = [*flags(corpus, tmp_path, 2), "--min_lr", "0"]
    short = trained(two_ranks, run)
    run[run.index("--steps") + 1] = str(2 * STEPS)
    lines = trained(two_ranks, [*run, "--resume"])
    assert (short[-1]["lr"], lines[STEPS - 1]["lr"]) == (0, 0) and lines[STEPS]["lr"] > LR / 3
    assert max(line["loss"] for line in lines[STEPS:]) < short[-1]["loss"] + 0.2
