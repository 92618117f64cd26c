"""A run that cannot go on ends in one line that names step and rank, and leaves a checkpoint of good weights."""

from __future__ import annotations

import json
import math
import os
import shutil

import pytest

from launch.training.checkpoints.checkpoint import complete_checkpoints
from tests.distributed.launched import LaunchedRun
from tests.helpers import losses, resumed_after

JOBS = "tests.distributed.failure_jobs"
SHAPE = ["--n_layer", "2", "--n_head", "2", "--d_model", "64", "--seq_len", "32", "--global_batch_size", "8", "--micro_batch_size", "2"]
STEPS = 8


def flags(corpus, tmp_path, config: str, *more: str) -> list[str]:
    run = ["--deepspeed_config", f"ds_configs/{config}.json", *SHAPE, "--data", str(corpus), "--runs_dir", str(tmp_path)]
    return [*run, "--run_name", "r", "--steps", str(STEPS), "--lr", "1e-3", "--eval_every", "0", "--save_every", "0", *more]


@pytest.mark.parametrize(
    ("config", "factor"),
    [
        ("zero3_fp32", math.nan),
        *(pytest.param(name, math.nan, marks=pytest.mark.long) for name in ("zero0_fp32", "zero2_bf16", "zero_offload")),
        *(
            pytest.param(name, math.inf, marks=pytest.mark.long)
            for name in ("zero0_bf16", "zero1_fp32", "zero3_bf16", "zero_3_param_offload")
        ),
    ],
)
def test_a_loss_that_is_no_number_stops_the_run_before_its_update(config, factor, two_ranks, corpus, tmp_path):
    """In the second micro-batch of step 4, on rank 1; the checkpoint of step 3 goes on to the curve of an undisturbed run."""
    run = flags(corpus, tmp_path, config)
    disturbed = {"factor": factor, "steps": (4,), "rank": 1, "micro_step": 1}
    precision = "fp32" if config.endswith("fp32") else "bf16"
    for reason in two_ranks.run(f"{JOBS}:pretrain_until_it_fails", flags=run, **disturbed):
        assert reason.startswith(f"step 4: the loss is {factor:g} on rank 1 in {precision}; lower --lr")
        assert reason.endswith(f"--resume continues from {tmp_path}/r/checkpoints/step-00000003")
    folder = tmp_path / "r"
    assert [path.name for path in complete_checkpoints(folder / "checkpoints")] == ["step-00000003"]
    assert "error: step 4: the loss is" in (folder / "log.txt").read_text()
    assert (folder / "loss.png").exists()
    resumed = two_ranks.train([*run, "--resume"])
    undisturbed = two_ranks.train([*run, "--run_name", "undisturbed"])
    assert losses(resumed) == pytest.approx(losses(undisturbed), abs=0 if precision == "fp32" else 2e-3)
    assert len(resumed) == STEPS and resumed_after(folder) == 3


def test_a_run_that_fails_in_its_first_step_starts_again(two_ranks, corpus, tmp_path):
    run = flags(corpus, tmp_path, "zero1_bf16")
    reason = two_ranks.run(f"{JOBS}:pretrain_until_it_fails", flags=run, factor=math.nan, steps=(1,), rank=0)[0]
    assert reason.startswith("step 1: the loss is nan on rank 0 in bf16; look at the data, ")
    assert reason.endswith("; there is no checkpoint yet: --resume starts at step 0")
    assert complete_checkpoints(tmp_path / "r" / "checkpoints") == []
    assert len(two_ranks.train([*run, "--resume"])) == STEPS


@pytest.mark.parametrize("config", ["lamb", "zero3_bf16"])
def test_weights_that_an_update_made_no_numbers_are_not_saved(config, two_ranks, corpus, tmp_path):
    """An eps that is 0 to fp32 divides 0 by 0, in rows of embeddings that have no gradient."""
    run = [*flags(corpus, tmp_path, config), "--set", "optimizer.params.eps=1e-320"]
    for reason in two_ranks.run(f"{JOBS}:pretrain_until_it_fails", flags=run, factor=1, steps=(), rank=0):
        assert reason.startswith("step 2: the loss is nan on rank 0")
        assert reason.endswith("; the weights contain NaN or Inf and were not saved; there is no checkpoint yet: --resume starts at step 0")
    assert complete_checkpoints(tmp_path / "r" / "checkpoints") == []


@pytest.mark.parametrize(
    "config", ["zero0_fp32", *(pytest.param(name, marks=pytest.mark.long) for name in ("zero0_bf16", "zero2_fp32")), "zero3_bf16"]
)
def test_gradients_that_are_no_numbers_stop_the_run_too(config, two_ranks, corpus, tmp_path):
    disturbed = {"factor": math.nan, "steps": (2,), "rank": 0, "gradient_only": True}
    for reason in two_ranks.run(f"{JOBS}:pretrain_until_it_fails", flags=flags(corpus, tmp_path, config), **disturbed):
        assert reason.startswith("step 2: the gradients are not finite, but the loss is 6.")


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.long), 3])
def test_fp16_stops_at_the_minimum_loss_scale_with_a_checkpoint(stage, two_ranks, corpus, tmp_path):
    scale = ["--set", "fp16.initial_scale_power=4", "--set", "fp16.min_loss_scale=4", "--set", "fp16.hysteresis=1"]
    run = flags(corpus, tmp_path, f"zero{stage}_fp16", *scale)
    # 16 and 8 overflow and are halved; at 4 there is nothing left to halve.
    reasons = two_ranks.run(f"{JOBS}:pretrain_until_it_fails", flags=run, factor=math.inf, steps=(3, 4, 5), rank=1)
    for reason in reasons:
        assert reason.startswith(
            "step 5: the loss is inf on rank 1: an overflow in fp16 at the minimum loss scale of 4 (fp16.min_loss_scale)"
        )
        assert reason.endswith("step-00000004")
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss_scale"] for line in lines] == [16, 16, 16, 8]
    assert [line["overflow"] for line in lines] == [0, 0, 1, 1]
    assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 2]
    log = (tmp_path / "r" / "log.txt").read_text()
    assert "step 3: overflow in fp16 at loss scale 16, the update is skipped" in log


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        pytest.param(
            os.utime,
            1,
            "train-00000.bin: changed since the run has opened it (its size, time of modification or inode); restore the corpus; ",
            marks=pytest.mark.gate,
        ),
        pytest.param(
            lambda file: os.truncate(file, 100), 2, "train-00000.bin: truncated since it was opened; copy or", marks=pytest.mark.long
        ),
    ],
)
def test_a_corpus_that_changes_while_a_run_trains_on_it_stops_the_run(change, code, said, corpus, tmp_path):
    copied = shutil.copytree(corpus, tmp_path / "corpus")
    run = LaunchedRun(tmp_path / "runs", "r", 1, 2, f"--data {copied} --steps 100000 --save_every 50 --eval_every 0".split())
    run.wait_until(lambda: bool(complete_checkpoints(run.folder / "checkpoints")))
    change(copied / "train-00000.bin")
    assert run.wait() == code, run.output()
    (line,) = [line for line in run.output().splitlines() if line.startswith("error: ")]
    newest = complete_checkpoints(run.folder / "checkpoints")[-1].name
    assert said in line and "Traceback" not in run.output()
    if code == 1:
        assert line.endswith(f"; --resume continues from {newest}") and line in (run.folder / "log.txt").read_text()
