"""1-bit Adam and 1-bit LAMB train what the published algorithms train, on any number of ranks, in every precision, and through a resume."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from launch.config.explain import bytes_of
from launch.config.run_config import resolve
from tests.distributed.reference import PublishedOneBitAdam, PublishedOneBitLamb, Step, reference_steps
from tests.distributed.test_engine_follows_plain_pytorch import BATCH, LR, SEED, STEPS, WARMUP, largest_difference, losses_of
from tests.distributed.test_engine_follows_plain_pytorch import flags as engine_flags
from tests.helpers import losses, resumed_after

SHAPE = {"n_layer": 2, "n_head": 2, "d_model": 64, "seq_len": 32}
FREEZE = 10
#: On one rank nothing is compressed, and the losses differ by what the order of sums does.
TOLERANCE = 5e-6
#: On several, an element whose sum is 0 to fp32 may get the other sign, which moves it by twice its tensor's scale in that step.
COMPRESSED = 3e-4
PUBLISHED = {"OneBitAdam": PublishedOneBitAdam, "OneBitLamb": PublishedOneBitLamb}
#: LAMB's rate is a share of each tensor's norm.
LRS = {"OneBitAdam": LR, "OneBitLamb": 0.05}


def flags(
    kind: str, corpus, tmp_path, ranks: int, accumulation: int = 1, precision: str = "fp32", run_name: str = "r", **params
) -> list[str]:
    """One of them in the place of AdamW, with what else is changed of its parameters."""
    run = engine_flags(corpus, tmp_path, SHAPE, "stage 0", ranks, accumulation, precision)
    optimizer = {
        "type": kind,
        "params": {"lr": LRS[kind], "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": "auto", "freeze_step": FREEZE},
    }
    optimizer["params"] |= params
    return [*run, "--lr", str(LRS[kind]), "--run_name", run_name, "--set", f"optimizer={json.dumps(optimizer)}"]


def cases(
    names: str = "", every: Sequence[tuple] = ((),), adam: Sequence[tuple] | None = None, lamb: Sequence[tuple] = ()
) -> pytest.MarkDecorator:
    """(kind, *names) of both; what is not among those of `adam` (left out: all) and `lamb` is left to `make test_all`."""
    quick = {"OneBitAdam": every if adam is None else adam, "OneBitLamb": lamb}
    marked = [
        pytest.param(kind, *case, marks=[] if case in quick[kind] else pytest.mark.long) for kind, case in itertools.product(quick, every)
    ]
    return pytest.mark.parametrize(("kind", *names.split()), marked)


NOT_CLIPPED = ["--set", "gradient_clipping=0"]


@pytest.fixture(scope="module")
def expected(corpus) -> Callable[..., list[Step]]:
    """The reference by kind, ranks, micro-batches of a step on each, and what it clips to; each is computed once."""

    @functools.cache
    def steps(kind: str, ranks: int, accumulation: int = 1, clip: float = 1e9, freeze_step: int = FREEZE, **options) -> list[Step]:
        def settle(variance, steps, beta2):
            """A tenth of the mean is the least. No row of this corpus is padding, and every position has gradients in each step."""
            return variance.clamp(min=0.1 * float(variance.mean()))

        adam = functools.partial(PUBLISHED[kind], ranks=ranks, freeze_step=freeze_step, settle=settle, **options)
        return reference_steps(
            corpus, SHAPE, STEPS, BATCH, LRS[kind], WARMUP, SEED, clip=clip, accumulation=ranks * accumulation, adam=adam
        )

    return steps


def trained(pool, run: list[str], job: str = "tests.distributed.jobs:pretrain") -> list[dict]:
    return pool.run(job, flags=run)[0]


def trained_in_two_parts(pool, run: list[str], tmp_path: Path, interrupted: int, *job: str) -> list[dict]:
    """The run named "resumed", resumed from a checkpoint of that step."""
    again = [*run, "--save_every", str(interrupted), "--keep", "30"]
    trained(pool, again, *job)
    for checkpoint in (tmp_path / "resumed" / "checkpoints").iterdir():
        if checkpoint.name != f"step-{interrupted:08d}":
            shutil.rmtree(checkpoint) if checkpoint.is_dir() else checkpoint.unlink()
    lines = trained(pool, [*again, "--resume"], *job)
    assert resumed_after(tmp_path / "resumed") == interrupted
    return lines


@cases("accumulation", [(1,), (3,)], adam=[(3,)], lamb=[])
def test_on_one_rank_it_has_a_variance_that_stays(kind, accumulation, one_rank, corpus, expected, tmp_path):
    lines = trained(one_rank, flags(kind, corpus, tmp_path, 1, accumulation))
    reference = expected(kind, 1, clip=1.0)
    assert largest_difference(losses(lines), losses_of(reference)) <= TOLERANCE
    assert largest_difference(losses(lines), losses_of(expected(kind, 1, clip=1.0, freeze_step=STEPS))) > 1e-3, "the variance stays"
    assert {line["compressed"] for line in lines} == {line["bytes_sent"] for line in lines} == {0}


@cases("ranks accumulation", [(2, 1), (2, 3), (4, 1)], adam=[], lamb=[(2, 3)])
def test_on_several_ranks_it_is_the_published_algorithm(kind, ranks, accumulation, pools, corpus, expected, tmp_path):
    lines = trained(pools.of(ranks), flags(kind, corpus, tmp_path, ranks, accumulation) + NOT_CLIPPED)
    reference = expected(kind, ranks, accumulation)
    assert largest_difference(losses(lines[:FREEZE]), losses_of(reference)[:FREEZE]) <= TOLERANCE
    assert largest_difference(losses(lines), losses_of(reference)) <= COMPRESSED
    assert largest_difference(losses_of(reference), losses_of(expected(kind, 1))) > 10 * COMPRESSED, "what is compressed must show"


@cases()
def test_all_ranks_clip_by_the_norm_of_the_mean_gradient(kind, two_ranks, corpus, expected, tmp_path):
    """Estimated with a standard deviation of 3%; the ranks' own norms are larger by a third here."""
    run = [*flags(kind, corpus, tmp_path, 2), "--set", "gradient_clipping=0.1"]
    found = two_ranks.run("tests.distributed.failure_jobs:pretrain_with_digest", flags=run)
    lines, reference = found[0]["lines"], expected(kind, 2, clip=0.1)
    assert len({rank["digest"] for rank in found}) == 1, "the weights are the same on both ranks"
    norms = [(line["grad_norm"], step.norm) for line, step in zip(lines, reference, strict=True)]
    assert all(found == pytest.approx(norm, rel=1e-4) for found, norm in norms[:FREEZE])
    ratios = [found / norm for found, norm in norms[FREEZE:]]
    assert all(0.8 < ratio < 1.2 for ratio in ratios)
    assert sum(ratios) / len(ratios) == pytest.approx(1.0, abs=0.03)
    assert any(norm > 0.1 for _, norm in norms[FREEZE:])
    assert largest_difference(losses(lines), losses_of(reference)) <= 0.03
    assert largest_difference(losses_of(expected(kind, 2, clip=0.1, clips=False)), losses_of(reference)) > 0.06, "what is clipped must show"


@cases("precision", [("bf16",), ("fp16",)], adam=[("bf16",)])
def test_in_half_precision_it_follows_fp32(kind, precision, two_ranks, corpus, expected, tmp_path):
    run = flags(kind, corpus, tmp_path, 2, precision=precision)
    lines = trained(two_ranks, run, "tests.distributed.jobs:pretrain")
    assert largest_difference(losses(lines), losses_of(expected(kind, 2, clip=1.0))) <= 0.05
    assert largest_difference(losses(lines), losses_of(expected(kind, 1, clip=1.0, freeze_step=STEPS))) > 0.05


@cases()
def test_an_overflow_on_one_rank_is_skipped_by_all(kind, two_ranks, corpus, tmp_path):
    """In the warm-up, which lasts for a step more, and in the compressed phase."""
    overflows = (4, 15, 16)
    run = flags(kind, corpus, tmp_path, 2, precision="fp16")
    found = two_ranks.run("tests.distributed.failure_jobs:fp16_run", flags=run, overflows=overflows, rank=1, micro_step=0)
    lines = found[0]["lines"]
    assert [line["step"] for line in lines if line["overflow"]] == list(overflows)
    assert [line["loss_scale"] for line in lines] == [2.0 ** (16 - sum(step < line["step"] for step in overflows)) for line in lines]
    assert [line["compressed"] for line in lines] == [0] * (FREEZE + 1) + [1] * (STEPS - FREEZE - 1)
    assert len({rank["digest"] for rank in found}) == 1
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.2


@cases("precision", [("fp32",), ("bf16",)])
def test_a_gradient_that_is_not_finite_on_one_rank_ends_the_run_on_all(kind, precision, two_ranks, corpus, tmp_path):
    job = {"factor": float("inf"), "steps": [FREEZE + 5], "rank": 1, "gradient_only": True}
    run = flags(kind, corpus, tmp_path, 2, precision=precision)
    for line in two_ranks.run("tests.distributed.failure_jobs:pretrain_until_it_fails", flags=run, **job):
        assert line.startswith(f"step {FREEZE + 5}: the gradients are not finite, but the loss is")
        assert f"--resume continues from {tmp_path / 'r' / 'checkpoints'}/step-{FREEZE + 4:08d}" in line


@cases()
def test_without_bias_correction(kind, one_rank, corpus, expected, tmp_path):
    """As upstream's: the steps after a short warm-up are too large."""
    lines = trained(one_rank, flags(kind, corpus, tmp_path, 1, bias_correction=False))
    assert largest_difference(losses(lines), losses_of(expected(kind, 1, clip=1.0, corrects=False))) <= TOLERANCE
    assert largest_difference(losses(lines), losses_of(expected(kind, 1, clip=1.0))) > 0.03


RESUMES = [("fp32", FREEZE - 3), ("fp32", FREEZE), ("fp32", FREEZE + 7), ("bf16", FREEZE), ("bf16", FREEZE + 7)]


@cases("precision interrupted", RESUMES, adam=[], lamb=RESUMES[2:3])
def test_a_resume_is_bit_identical(kind, precision, interrupted, two_ranks, corpus, tmp_path):
    """In the warm-up, between the phases and in the second."""
    whole = trained(two_ranks, flags(kind, corpus, tmp_path, 2, precision=precision))
    lines = trained_in_two_parts(
        two_ranks, flags(kind, corpus, tmp_path, 2, precision=precision, run_name="resumed"), tmp_path, interrupted
    )
    for key in ("loss", "grad_norm", "compressed", "bytes_sent"):
        assert [line[key] for line in lines] == [line[key] for line in whole]


@cases(
    "ranks word",
    [(1, "nothing is compressed"), (4, "the errors of the compression start at zero")],
    adam=[(1, "nothing is compressed")],
)
def test_another_number_of_ranks_goes_on_without_the_errors(kind, ranks, word, two_ranks, pools, corpus, tmp_path):
    run, steps = flags(kind, corpus, tmp_path, 2), ["--save_every", "15", "--keep", "30", "--micro_batch_size", "3"]
    whole = trained(two_ranks, run + steps)
    shutil.rmtree(tmp_path / "r" / "checkpoints" / f"step-{STEPS:08d}")
    lines = trained(pools.of(ranks), [*run, *steps, "--resume"])
    assert resumed_after(tmp_path / "r") == 15
    log = (tmp_path / "r" / "log.txt").read_text(encoding="utf-8")
    assert f"note: {kind}: {word}: written by 2 rank(s), and this job has {ranks}" in log
    assert lines[15]["loss"] == pytest.approx(whole[15]["loss"], abs=1e-5), "the weights are those that were saved"
    assert 1e-5 < largest_difference(losses(lines), losses(whole)) < 0.1


@cases()
def test_a_variance_that_is_frozen_stays_so(kind, two_ranks, corpus, tmp_path):
    """Another freeze_step comes too late for it, and is told so; another beta2 acts on nothing but the second variance of LAMB."""
    steps = ["--save_every", "15", "--keep", "30"]
    whole = trained(two_ranks, flags(kind, corpus, tmp_path, 2) + steps)
    shutil.rmtree(tmp_path / "r" / "checkpoints" / f"step-{STEPS:08d}")
    late = {"freeze_step": 20, "betas": [0.9, 0.5 if kind == "OneBitAdam" else 0.95]}
    lines = trained(two_ranks, [*flags(kind, corpus, tmp_path, 2, **late), *steps, "--resume"])
    assert losses(lines) == losses(whole) and resumed_after(tmp_path / "r") == 15
    log = (tmp_path / "r" / "log.txt").read_text(encoding="utf-8")
    assert f"note: {kind}: the variance was frozen after step {FREEZE}; freeze_step, 20, does not change" in log


@cases(lamb=[()])
def test_rows_that_cannot_have_gradients_gather_no_error(kind, two_ranks, corpus, tmp_path):
    """Positions beyond the length of a curriculum that still grows when the variance is frozen; its last ones are not thrown about."""
    section = {"min_difficulty": 8, "max_difficulty": 32, "schedule_type": "fixed_linear"}
    section["schedule_config"] = {"total_curriculum_step": 40, "difficulty_step": 8}
    run = [*flags(kind, corpus, tmp_path, 2, freeze_step=5), "--set", f"curriculum_learning={json.dumps(section)}"]
    lines = two_ranks.run("tests.distributed.jobs:pretrain_with", technique="WatchedErrors", flags=run)[0]
    lengths = [line["seq_len"] for line in lines]
    assert {8, 16, 24, 32} == set(lengths) and lengths[5] == 8, "it grows in the compressed phase"
    for line in lines:
        assert line["dead_values"] == line["dead_errors"] == 0.0
        assert (line["errors"] > 0.0) == bool(line["compressed"])
    # A weight begins at N(0, 0.02), a norm's at 1, and 30 steps at 5e-4 are 0.015; LAMB's, of a share of 0.05 of what there is, are
    # 1.05^40, which is 7. Nothing is thrown about.
    assert lines[-1]["largest_weight"] < {"OneBitAdam": 1.5, "OneBitLamb": 7}[kind]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.2


@cases("precision", [("fp32",), ("bf16",)], lamb=[("fp32",)])
def test_a_step_sends_a_bit_for_each_parameter(kind, precision, two_ranks, corpus, tmp_path):
    """Of a model of 1.1 M parameters, at most 1/30 of its fp32 gradients and 1/15 of those in bf16, all else included. It is planned."""
    run = [*flags(kind, corpus, tmp_path, 2, precision=precision, freeze_step=2), "--n_layer", "5", "--d_model", "128", "--steps", "4"]
    lines = trained(two_ranks, run)
    sent = [line["bytes_sent"] for line in lines]
    parameters = 1024 * 128 + 32 * 128 + 5 * (12 * 128**2 + 13 * 128) + 2 * 128
    assert parameters > 1_000_000
    gradients = {"fp32": 4, "bf16": 2}[precision] * parameters
    assert sent[1] == pytest.approx(gradients, rel=1e-3)
    assert sent[2] == sent[3] <= gradients / {"fp32": 30, "bf16": 15}[precision]
    config = resolve(run, ranks=2)[0]
    assert sum(sent) / len(sent) == pytest.approx(bytes_of(config, config.model_config), rel=0.01)
