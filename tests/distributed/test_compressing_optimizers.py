"""1-bit Adam, 1-bit LAMB and 0/1 Adam on several ranks, beside what the plain loop shows: norms, bytes, and weights that differ by rank."""

from __future__ import annotations

import pytest

from launch.config.explain import bytes_of
from launch.config.run_config import resolve
from model.accounting import parameter_count
from tests.distributed.parity import (
    BATCH,
    EXCHANGED,
    FREEZE,
    LR,
    SIZES,
    STEPS,
    ZERO_ONE,
    expected,
    largest_difference,
    losses_of,
    section,
    technique_flags,
)
from tests.helpers import losses, resumed_after, rewind
from tests.test_zero_one_adam import by_the_papers_rule

JOBS = "tests.distributed.failure_jobs"
WEIGHTS = "tests.distributed.zero_one_jobs:weights_over_the_run"
long = pytest.mark.long
NAMES = ["one_bit_adam", pytest.param("one_bit_lamb", marks=long), "zero_one_adam"]


@pytest.mark.parametrize("name", NAMES[:1] + [pytest.param(name, marks=long) for name in ("one_bit_lamb", "zero_one_adam")])
def test_all_ranks_clip_by_the_norm_of_the_mean_gradient(name, two_ranks, corpus, tmp_path):
    """Estimated with a standard deviation of 3%, also in steps alone; the ranks' own norms are larger by a third here."""
    run = technique_flags(name, corpus, tmp_path) + section("gradient_clipping", 0.1)
    found = two_ranks.run(f"{JOBS}:pretrain_with_digest", flags=run)
    lines, reference = found[0]["lines"], expected(corpus, name, ranks=2, clip=0.1)
    assert len({rank["digest"] for rank in found}) == 1, "the weights are the same on both ranks"
    norms = [(line["grad_norm"], step.norm) for line, step in zip(lines, reference, strict=True)]
    assert norms[0][0] == pytest.approx(norms[0][1], rel=1e-4)
    ratios = [found / norm for found, norm in norms[FREEZE:]]
    assert all(0.8 < ratio < 1.2 for ratio in ratios)
    assert sum(ratios) / len(ratios) == pytest.approx(1.0, abs=0.03)
    assert any(norm > 0.1 for _, norm in norms[FREEZE:])
    assert largest_difference(losses(lines), losses_of(reference)) <= 0.03
    unclipped = expected(corpus, name, ranks=2, clip=0.1, clips=False)
    assert largest_difference(losses_of(unclipped), losses_of(reference)) > 0.06, "what is clipped must show"


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("one_bit_adam", "fp32"),
        ("zero_one_adam", "bf16"),
        pytest.param("one_bit_lamb", "fp32", marks=long),
    ],
)
def test_a_gradient_that_is_not_finite_on_one_rank_ends_the_run_on_all(name, precision, two_ranks, corpus, tmp_path):
    """In a compressed step, and in one alone."""
    disturbed = {"factor": float("inf"), "steps": [20], "rank": 1, "gradient_only": True}
    run = technique_flags(name, corpus, tmp_path, precision=precision)
    for line in two_ranks.run(f"{JOBS}:pretrain_until_it_fails", flags=run, **disturbed):
        assert line.startswith("step 20: the gradients are not finite, but the loss is")
        assert f"--resume continues from {tmp_path / 'r' / 'checkpoints'}/step-00000019" in line


@pytest.mark.parametrize("name", NAMES[:1] + [pytest.param(name, marks=long) for name in ("one_bit_lamb", "zero_one_adam")])
def test_rows_that_cannot_have_gradients_gather_no_error(name, two_ranks, corpus, tmp_path):
    """Positions beyond the length of a curriculum that still grows in the second phase; none is thrown about."""
    lengths = {"min_difficulty": 8, "max_difficulty": 32, "schedule_type": "fixed_linear"}
    lengths["schedule_config"] = {"total_curriculum_step": 40, "difficulty_step": 8}
    run = technique_flags(name, corpus, tmp_path) + section("curriculum_learning", lengths)
    lines = two_ranks.run("tests.distributed.jobs:pretrain_with", technique="WatchedErrors", flags=run)[0]
    assert {line["seq_len"] for line in lines} == {8, 16, 24, 32} and lines[FREEZE + 1]["seq_len"] < 32
    for line in lines:
        assert line["dead_values"] == line["dead_errors"] == 0.0
        assert (line["errors"] > 0.0) == bool(line.get("compressed", line["step"] > 3))
    # A weight begins at N(0, 0.02), a norm's at 1, and 30 steps at 5e-4 are 0.015; LAMB's, of a share of 0.05 of what there is, are
    # 1.05^40, which is 7.
    assert lines[-1]["largest_weight"] < (7 if name == "one_bit_lamb" else 1.5)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.2


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("one_bit_adam", "bf16"),
        pytest.param("zero_one_adam", "fp32", marks=pytest.mark.gate),
        pytest.param("one_bit_lamb", "fp32", marks=long),
    ],
)
def test_a_step_sends_gradients_a_bit_for_each_parameter_or_nothing(name, precision, two_ranks, corpus, tmp_path):
    """Of a model of 1.1 M parameters, with the scales of its tensors. It is planned."""
    run = [*technique_flags(name, corpus, tmp_path, precision=precision), "--n_layer", "5", "--d_model", "128"]
    config = resolve(run, ranks=2)[0]
    lines = two_ranks.train(run)
    width, parameters = {"fp32": 4, "bf16": 2}[precision], parameter_count(config.model_config)
    assert parameters > 1_000_000
    for line in lines:
        if not line.get("compressed", not line.get("variance_updated", 1)):
            assert line["bytes_sent"] == pytest.approx(width * parameters, rel=1e-3)
        elif line.get("exchanged", 1):
            assert 1 < line["bytes_sent"] / (parameters / 8) < 32 / 30
        else:
            assert line["bytes_sent"] < 5000
    sent = sum(line["bytes_sent"] for line in lines) / STEPS
    assert sent == pytest.approx(bytes_of(config, config.model_config), rel=0.01)


@pytest.mark.parametrize("name", ["one_bit_adam", pytest.param("one_bit_lamb", marks=long)])
def test_a_variance_that_is_frozen_stays_so(name, two_ranks, corpus, tmp_path):
    """Another freeze_step comes too late for it, and is told so; another beta2 acts on nothing but the second variance of LAMB."""
    run = [*technique_flags(name, corpus, tmp_path), "--save_every", "15", "--keep", "30"]
    whole = two_ranks.train(run)
    rewind(tmp_path / "r", 15)
    late = section("optimizer.params.freeze_step", 20) + section("optimizer.params.betas", [0.9, 0.5 if name == "one_bit_adam" else 0.95])
    lines = two_ranks.train([*run, *late, "--resume"])
    assert losses(lines) == losses(whole) and resumed_after(tmp_path / "r") == 15
    log = (tmp_path / "r" / "log.txt").read_text(encoding="utf-8")
    assert f"the variance was frozen after step {FREEZE}; freeze_step, 20, does not change" in log


# --- 0/1 Adam, whose ranks go alone -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.gate), pytest.param("fp32", marks=long)])
def test_what_is_evaluated_and_saved_is_what_the_ranks_agree_on(precision, two_ranks, corpus, tmp_path):
    """Between two exchanges it stays but for weight decay, although the ranks' weights move and are not the same."""
    run = technique_flags("zero_one_adam", corpus, tmp_path, precision=precision) + section("optimizer.params.weight_decay", 0.0)
    run += ["--eval_every", "1", "--save_every", "25", "--keep", "9"]
    found = two_ranks.run(WEIGHTS, flags=run, saved_after=25)
    for one, other in zip(*(rank["steps"] for rank in found), strict=True):
        assert one["agreed"] == other["agreed"]
        assert (one["own"] == other["own"]) == (one["step"] in EXCHANGED) == (one["own"] == one["agreed"])
    steps = {line["step"]: line for line in found[0]["steps"]}
    assert steps[25]["agreed"] == steps[22]["agreed"] != steps[26]["agreed"]
    evaluated = {line["step"]: line["val_loss"] for line in found[0]["lines"]}
    assert evaluated[25] == evaluated[22] != evaluated[26]
    assert found[0]["saved"] == steps[25]["agreed"]


@pytest.mark.gate
def test_a_step_at_a_rate_of_zero_is_alone(two_ranks, corpus, tmp_path):
    """After the end of a schedule that decays to 0, only what was left from before is exchanged, once."""
    params = {"warmup_max_lr": LR, "warmup_num_steps": 5, "warmup_type": "linear", "total_num_steps": STEPS - 5}
    run = technique_flags("zero_one_adam", corpus, tmp_path) + section("scheduler", {"type": "WarmupDecayLR", "params": params})
    place = run.index("--warmup_steps")
    del run[place : place + 2]
    place = run.index("--steps")  # with which the end of the schedule must agree
    run[place : place + 2] = ["--tokens", str(STEPS * BATCH * SIZES["seq_len"])]
    found = two_ranks.run(WEIGHTS, flags=run)
    lines = found[0]["lines"]
    for line, *ranks in zip(lines, *(rank["steps"] for rank in found), strict=True):
        assert len({rank["agreed"] for rank in ranks}) == 1
        if line["lr"]:  # else nobody has moved
            assert {rank["own"] == rank["agreed"] for rank in ranks} == {bool(line["exchanged"])}
    still = [line for line in lines if line["lr"] == 0]
    assert [line["step"] for line in still] == list(range(STEPS - 5, STEPS + 1))
    assert sum(line["exchanged"] for line in still) <= 1
    assert not still[-1]["exchanged"] and still[-1]["bytes_sent"] < 5000
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.2


@long
def test_a_variance_may_be_renewed_again_after_a_resume_between_exchanges(two_ranks, corpus, tmp_path):
    """By a later var_freeze_step: the ranks, who were alone, exchange at the first renewal."""
    run = [*technique_flags("zero_one_adam", corpus, tmp_path), "--save_every", "20", "--keep", "30"]
    two_ranks.train(run)
    rewind(tmp_path / "r", 20)
    found = two_ranks.run(WEIGHTS, flags=[*run, *section("optimizer.params.var_freeze_step", 40), "--resume"])
    renewed, _ = by_the_papers_rule(40, *list(ZERO_ONE.values())[1:], steps=STEPS)
    assert 21 in renewed, "in the first step"
    assert {line["step"] for line in found[0]["lines"][20:] if line["variance_updated"]} == {step for step in renewed if step > 20}
    for one, other in zip(*(rank["steps"] for rank in found), strict=True):
        assert one["own"] == other["own"] == one["agreed"]


@long
def test_a_rate_that_rises_again_after_a_resume_throws_nothing_about(two_ranks, corpus, tmp_path):
    """A run that has ended at a rate of nearly zero goes on as one of twice its length, whose rate is half the peak."""
    run = [*technique_flags("zero_one_adam", corpus, tmp_path), "--min_lr", "0"]
    short = two_ranks.train(run)
    lines = two_ranks.train([*run, "--steps", str(2 * STEPS), "--resume"])
    assert (short[-1]["lr"], lines[STEPS - 1]["lr"]) == (0, 0) and lines[STEPS]["lr"] > LR / 3
    assert max(line["loss"] for line in lines[STEPS:]) < short[-1]["loss"] + 0.2
