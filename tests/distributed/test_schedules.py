"""Learning rate schedules: every step has its own rate, a resume goes on with it, and --explain says it beforehand."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path

import pytest

from launch.formats.checkpoint_files import complete_checkpoints
from tests.distributed.launched import TINY
from tests.helpers import explained, resumed_after

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


def line_to_zero(step: int) -> float:
    return PEAK * step / 4 if step <= 4 else PEAK * (10 - step) / 6


def stable_then_root(step: int) -> float:
    """The last 3 of 10 steps decay from the peak to 0.001."""
    table = {1: 0.0025, 2: 0.005, 3: 0.0075, 8: 0.001 + 0.009 * (1 - (1 / 3) ** 0.5), 9: 0.001 + 0.009 * (1 - (2 / 3) ** 0.5), 10: 0.001}
    return table.get(step, 0.01)


def stable_then_line(step: int) -> float:
    return {1: 0.005, 9: 0.005, 10: 0.0}.get(step, 0.01)


WARM = {"warmup_num_steps": WARMUP}
KINDS = {
    "WarmupLR-log": (WARM | {"warmup_max_lr": PEAK, "warmup_type": "log"}, log_warmup),
    "WarmupLR-linear": (WARM | {"warmup_max_lr": PEAK, "warmup_type": "linear"}, linear_warmup),
    "WarmupDecayLR": (WARM | {"warmup_max_lr": PEAK, "warmup_type": "linear", "total_num_steps": STEPS}, decay),
    "WarmupLinearTokens": ({"warmup_steps": 4}, line_to_zero),
    "WarmupStableDecayTokens-root": ({"warmup_steps": 4, "decay_fraction": 0.3, "min_lr": 0.001}, stable_then_root),
    "WarmupStableDecayTokens-line": ({"warmup_steps": 2, "decay_shape": "linear"}, stable_then_line),
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
    whole = one_rank.train(flags)
    rates = {line["step"]: line["lr"] for line in whole}
    assert rates == pytest.approx({step: expected(step) for step in range(1, STEPS + 1)}, rel=1e-12, abs=1e-15)
    rows = explained(*flags)["over_the_run"]
    assert [row["lr"] for row in rows] == [rates[row["step"]] for row in rows] and rows[-1]["step"] == STEPS
    shutil.rmtree(complete_checkpoints(Path(tmp_path / "r/checkpoints"))[-1])
    resumed = one_rank.train([*flags, "--resume"])
    assert [(line["lr"], line["loss"]) for line in resumed] == [(line["lr"], line["loss"]) for line in whole]
    assert resumed_after(tmp_path / "r") > 0


TABLES = {
    "WarmupCosineTokens": lambda done: 0.1 + 0.9 * math.cos(math.pi * done / 2) ** 2,
    "WarmupLinearTokens": lambda done: 1 - done,
    "WarmupStableDecayTokens": lambda done: 1.0 if done * 8 <= 6 else 1 - (done * 4 - 3) ** 0.5,  # 8 steps follow the warm-up of 2
}


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [("batch_size_warmup", "WarmupStableDecayTokens"), ("curriculum_learning", "WarmupCosineTokens")]
    + [pytest.param("batch_size_warmup", kind, marks=pytest.mark.long) for kind in ("WarmupCosineTokens", "WarmupLinearTokens")],
)
def test_the_rate_follows_the_tokens_of_steps_of_unequal_size(recipe, kind, one_rank, corpus, tmp_path):
    flags = ["--recipe", f"recipes/{recipe}", *TINY, "--data", str(corpus), "--steps", str(STEPS), "--warmup_steps", "2", "--lr", str(PEAK)]
    flags += ["--set", f"scheduler.type={kind}", "--eval_every", "0", "--save_every", "6", "--runs_dir", str(tmp_path), "--run_name", "r"]
    whole = one_rank.train(flags)
    total = json.loads((tmp_path / "r/run.json").read_text())["total_tokens"]  # the last step may go beyond it
    sizes = {after["tokens"] - before["tokens"] for before, after in itertools.pairwise(whole)}
    assert len(sizes) > 1
    warmup = total * 2 / STEPS

    def expected(tokens: int) -> float:
        return PEAK * (tokens / warmup if tokens < warmup else TABLES[kind](min(1, (tokens - warmup) / (total - warmup))))

    assert [line["lr"] for line in whole] == pytest.approx([expected(line["tokens"]) for line in whole], rel=1e-9, abs=1e-12)
    shutil.rmtree(complete_checkpoints(Path(tmp_path / "r/checkpoints"))[-1])
    resumed = one_rank.train([*flags, "--resume"])
    assert [(line["lr"], line["loss"]) for line in resumed] == [(line["lr"], line["loss"]) for line in whole]
    assert resumed_after(tmp_path / "r") > 0
