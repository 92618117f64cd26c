"""DeepSpeed's learning rate schedules: every step has its own rate, a resume goes on with it, and --explain says it beforehand."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from launch.formats.checkpoint_files import complete_checkpoints
from tests.distributed.launched import TINY
from tests.helpers import explained

PEAK, STEPS, WARMUP = 0.01, 10, 4


def log_warmup(step: int) -> float:
    return PEAK * min(1.0, math.log(step + 1) / math.log(WARMUP))


def linear_warmup(step: int) -> float:
    return PEAK * min(1.0, step / WARMUP)


def decay(step: int) -> float:
    return linear_warmup(step) if step < WARMUP else PEAK * (STEPS - step) / (STEPS - WARMUP)


def cosine(step: int) -> float:
    if step < WARMUP:
        return linear_warmup(step)
    return PEAK * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - WARMUP + 1) / (STEPS - WARMUP)))))


WARM = {"warmup_num_steps": WARMUP}
KINDS = {
    "WarmupLR-log": (WARM | {"warmup_max_lr": PEAK, "warmup_type": "log"}, log_warmup),
    "WarmupLR-linear": (WARM | {"warmup_max_lr": PEAK, "warmup_type": "linear"}, linear_warmup),
    "WarmupDecayLR": (WARM | {"warmup_max_lr": PEAK, "warmup_type": "linear", "total_num_steps": STEPS}, decay),
    "WarmupCosineLR": (WARM | {"warmup_type": "linear", "total_num_steps": STEPS, "cos_min_ratio": 0.1}, cosine),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_has_the_rate_of_its_schedule(kind, one_rank, corpus, tmp_path):
    params, expected = KINDS[kind]
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": PEAK}},
        "scheduler": {"type": kind.split("-")[0], "params": params},
        "zero_optimization": {"stage": 1},
    }
    (tmp_path / "c.json").write_text(json.dumps(config))
    flags = ["--deepspeed_config", str(tmp_path / "c.json"), *TINY, "--data", str(corpus), "--steps", str(STEPS), "--eval_every", "0"]
    flags += ["--save_every", "5", "--runs_dir", str(tmp_path), "--run_name", "r"]
    whole = one_rank.run("tests.distributed.jobs:pretrain", flags=flags)[0]
    rates = {line["step"]: line["lr"] for line in whole}
    assert rates == pytest.approx({step: expected(step) for step in range(1, STEPS + 1)}, rel=1e-12, abs=1e-15)
    rows = explained(*flags)["over_the_run"]
    assert [row["lr"] for row in rows] == [rates[row["step"]] for row in rows] and rows[-1]["step"] == STEPS
    shutil.rmtree(complete_checkpoints(Path(tmp_path / "r/checkpoints"))[-1])
    resumed = one_rank.run("tests.distributed.jobs:pretrain", flags=[*flags, "--resume"])[0]
    assert [(line["lr"], line["loss"]) for line in resumed] == [(line["lr"], line["loss"]) for line in whole]
