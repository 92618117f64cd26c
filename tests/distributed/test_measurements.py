"""What a step's line says is what happened: bytes on the wire, tokens, learning rate; evaluation is apart from training."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from data_pipeline.shards import open_corpus
from launch.config.flags import as_words
from launch.formats.metrics import recent_loss
from launch.training import meter as metering
from model.accounting import block_parameter_count, parameter_count
from model.presets import GPTConfig
from recipes.technique import StepWork
from tests.pages import PAGES

SHAPE = {"n_layer": 2, "n_head": 2, "d_model": 64, "seq_len": 32}
STEPS = 6


def flags(corpus, tmp_path, config: str, *more: str) -> list[str]:
    shape = as_words(SHAPE)
    run = f"--deepspeed_config ds_configs/{config}.json --data {corpus} --runs_dir {tmp_path} --steps {STEPS}"
    run += " --global_batch_size 8 --micro_batch_size 2 --save_every 0 --lr 1e-3 --warmup_steps 2"
    return [*run.split(), *shape, *more]


def parameters(corpus) -> int:
    return parameter_count(GPTConfig(**SHAPE, vocab_size=open_corpus(corpus).vocab_size))


def pretrain(pool, *arguments: str) -> list[dict]:
    return pool.train(flags(*arguments))


# Loss and the three stop flags, in fp64, all-reduced: 2 (N-1)/N x 32 bytes.
AGREEMENT = 32


@pytest.mark.parametrize(("precision", "bytes_per_gradient"), [pytest.param("fp32", 4, marks=pytest.mark.gate), ("bf16", 2)])
def test_stage_0_sends_its_gradients_once_a_step_whatever_the_accumulation(two_ranks, corpus, tmp_path, precision, bytes_per_gradient):
    lines = pretrain(two_ranks, corpus, tmp_path, f"zero0_{precision}", "--run_name", "r", "--eval_every", "0")
    expected = bytes_per_gradient * parameters(corpus) + AGREEMENT  # all_reduce of two ranks: 2 x 1/2 x size
    assert [line["bytes_sent"] for line in lines] == [expected] * STEPS
    section = PAGES["docs/checkpoints.md"].partition("## Metrics")[2].partition("\n## ")[0]
    assert set(lines[-1]) <= set(re.findall(r"`(\w+)`", section))


def test_stages_send_what_their_collectives_need(two_ranks, corpus, tmp_path):
    """In units of the weights' size, on two ranks: stages 1 and 2 all-reduce the gradients (`use_multi_rank_bucket_allreduce`) and
    gather the weights, 1 + 1/2; stage 3 reduce-scatters the gradients and gathers, once or twice, the weights that do not persist."""
    size = 4 * parameters(corpus)
    for stage, least, most in ((1, 1.5, 1.51), (2, 1.5, 1.51), (3, 0.5, 1.51)):
        lines = pretrain(
            two_ranks, corpus, tmp_path, f"zero{stage}_fp32", "--run_name", f"s{stage}", "--eval_every", "0", "--micro_batch_size", "4"
        )
        for line in lines[1:]:  # in its first step stage 3 learns the order of the modules and gathers more
            assert least * size <= line["bytes_sent"] <= most * size, (stage, line["bytes_sent"] / size)


def test_one_rank_sends_nothing(one_rank, corpus, tmp_path):
    assert {line["bytes_sent"] for line in pretrain(one_rank, corpus, tmp_path, "zero2_fp32", "--run_name", "r", "--eval_every", "0")} == {
        0
    }


@pytest.mark.gate
def test_an_evaluation_before_the_first_step_does_not_decide_what_stage_3_gathers_again(two_ranks, corpus, tmp_path):
    partitioned = ["--set", "zero_optimization.stage3_param_persistence_threshold=0"]
    never = pretrain(two_ranks, corpus, tmp_path, "zero3_bf16", "--run_name", "never", "--eval_every", "0", *partitioned)
    once = pretrain(two_ranks, corpus, tmp_path, "zero3_bf16", "--run_name", "once", "--eval_every", "1000", *partitioned)
    assert once[0]["step"] == 0 and [line["loss"] for line in once[1:]] == [line["loss"] for line in never]
    assert once[-1]["bytes_sent"] == never[-1]["bytes_sent"] < 0.7 * never[0]["bytes_sent"]


def test_evaluation_changes_neither_the_training_nor_its_bytes(two_ranks, corpus, tmp_path):
    often = pretrain(two_ranks, corpus, tmp_path, "zero3_fp32", "--run_name", "often", "--eval_every", "1", "--eval_batches", "2")
    never = pretrain(two_ranks, corpus, tmp_path, "zero3_fp32", "--run_name", "never", "--eval_every", "0")
    assert often[0]["step"] == 0
    assert often[0]["val_loss"] == pytest.approx(math.log(1024), abs=0.15)
    for key in ("loss", "grad_norm", "lr", "tokens"):
        assert [line[key] for line in often[1:]] == [line[key] for line in never], key
    # The first forward pass of stage 3, where it learns the order of its modules, is here that of the evaluation at step 0.
    assert [line["bytes_sent"] for line in often[2:]] == [line["bytes_sent"] for line in never[1:]]
    assert all("val_loss" in line for line in often)
    assert not any("val_loss" in line for line in never)


def test_the_validation_loss_is_the_same_for_one_and_two_ranks(one_rank, two_ranks, corpus, tmp_path):
    losses = []
    for pool in (one_rank, two_ranks):
        # 3 windows a rank and round do not divide the 24 windows of an evaluation evenly.
        lines = pretrain(pool, corpus, tmp_path, "zero0_fp32", "--run_name", f"r{pool.size}", "--eval_every", "3", "--eval_batches", "3")
        losses.append([line["val_loss"] for line in lines if "val_loss" in line])
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_the_whole_split_is_evaluated_after_the_last_step(one_rank, two_ranks, corpus, tmp_path):
    """Beside the curve, as on one rank; where the evaluation was missing, a resume adds it."""
    more = ["--eval_every", "3", "--eval_batches", "3", "--micro_batch_size", "4"]
    reference = one_rank.train(flags(corpus, tmp_path, "zero1_fp32", "--run_name", "all", "--eval_every", "6", "--eval_batches", "1000000"))

    def whole_loss(name: str) -> float:
        return json.loads((tmp_path / name / "run.json").read_text())["finished"]["whole_val_loss"]

    name = "r"
    plain = pretrain(two_ranks, corpus, tmp_path, "zero3_fp32", "--run_name", name, *more)
    resumed = pretrain(two_ranks, corpus, tmp_path, "zero3_fp32", "--run_name", name, *more, "--whole_eval", "--resume")
    assert resumed == plain
    assert whole_loss(name) == pytest.approx(reference[-1]["val_loss"], abs=1e-5)
    evaluated = whole_loss(name)
    pretrain(two_ranks, corpus, tmp_path, "zero3_fp32", "--run_name", name, *more, "--resume")  # without it: no step is made
    assert whole_loss(name) == evaluated
    lines = pretrain(two_ranks, corpus, tmp_path, "zero3_fp32", "--run_name", f"{name}-at-once", *more, "--whole_eval")
    assert [line.get("loss") for line in lines] == [line.get("loss") for line in plain]
    assert lines[-1].get("val_loss") == plain[-1].get("val_loss") and whole_loss(f"{name}-at-once") == whole_loss(name)
    log = (tmp_path / f"{name}-at-once" / "log.txt").read_text().splitlines()
    assert f"of the whole validation split {whole_loss(name):.4f}" in log[-1]
    assert any(f"{open_corpus(corpus).val.windows(32):,} sequences" in line for line in log[:-1])


def test_the_learning_rate_warms_up_and_ends_at_its_minimum(one_rank, corpus, tmp_path):
    lines = pretrain(one_rank, corpus, tmp_path, "zero1_fp32", "--run_name", "r", "--eval_every", "0", "--min_lr", "2e-4")
    rates = [line["lr"] for line in lines]
    cosine = [2e-4 + 8e-4 * 0.5 * (1 + math.cos(math.pi * step / 4)) for step in (1, 2, 3, 4)]
    assert rates == pytest.approx([5e-4, 1e-3, *cosine])
    assert [line["tokens"] for line in lines] == [8 * 32 * step for step in range(1, STEPS + 1)]


def test_every_step_has_the_documented_fields(one_rank, corpus, tmp_path):
    documented = {
        "step",
        "tokens",
        "seconds",
        "loss",
        "lr",
        "grad_norm",
        "loss_scale",
        "tokens_per_second",
        "peak_memory_bytes",
        "bytes_sent",
    }
    lines = pretrain(one_rank, corpus, tmp_path, "zero0_bf16", "--run_name", "r", "--eval_every", "0", "--set", "gradient_clipping=0")
    for line in lines:
        assert documented <= set(line)
        assert "mfu" not in line, "no peak is known for a CPU"
        assert line["grad_norm"] > 0, "the norm is logged without clipping too"
    folder = tmp_path / "r"
    assert {"run.json", "metrics.jsonl", "log.txt", "loss.png", "checkpoints"} <= {path.name for path in folder.iterdir()}
    assert any(path.name.startswith("events.out.tfevents") for path in folder.iterdir())


def test_the_log_shows_the_mean_loss_of_the_last_steps(one_rank, corpus, tmp_path):
    lines = pretrain(one_rank, corpus, tmp_path, "zero0_fp32", "--run_name", "r", "--steps", "60", "--eval_every", "60")
    losses = [line["loss"] for line in lines if "loss" in line]
    log = (tmp_path / "r" / "log.txt").read_text()
    shown = re.findall(r"step +(\d+)/60  loss ([\d.]+) \(mean of (\d+) steps?\)", log)
    assert ("60", f"{sum(losses[-50:]) / 50:.4f}", "50") in shown and shown[0] == ("1", f"{losses[0]:.4f}", "1")
    assert "sequences of documents that the run is not trained on" in log


def test_rates_and_flops_are_those_of_all_ranks(monkeypatch):
    """Three data ranks make a step in half a second, on devices of 1 GFLOP/s. A rank has 2 x 4 sequences of 2 rows of 16 tokens."""
    model = GPTConfig(**SHAPE, vocab_size=1000)
    engine: Any = SimpleNamespace(
        config=SimpleNamespace(precision="fp32", model_config=model),
        data_ranks=3,
        techniques=SimpleNamespace(matmul_dtype=""),
        step_metrics=dict,
    )
    ranks: Any = SimpleNamespace(device=torch.device("cpu"), world_size=3, bytes_sent=1000.0, gather=lambda value: [value] * 3)
    monkeypatch.setattr(metering, "peak_flops", lambda device, dtype: 1e9)
    clock = iter([7.0, 7.5] * 2)
    monkeypatch.setattr(metering, "time", SimpleNamespace(monotonic=time.monotonic, perf_counter=lambda: next(clock)))
    meter = metering.Meter(engine, ranks, 0.0, on_lost=lambda: None)

    def measured(kept_blocks: float | None) -> dict[str, Any]:
        meter.start_step()
        ranks.bytes_sent += 10
        return meter.end_step(StepWork(2, 4, 16, rows_per_sequence=2, equivalent_blocks=kept_blocks))

    tokens = 3 * 8 * 2 * 16
    block, head = 6 * block_parameter_count(model) + 12 * 64 * 16, 6 * (1000 * 64 + 2 * 64)
    whole, part = measured(None), measured(0.5)
    assert (whole["tokens_per_second"], whole["step_seconds"], whole["bytes_sent"]) == (2 * tokens, 0.5, 10)
    assert (whole["flops"], part["flops"]) == (tokens * (head + 2 * block), tokens * (head + 0.5 * block))
    assert [line["mfu"] for line in (whole, part)] == pytest.approx([line["flops"] / 0.5 / 3e9 for line in (whole, part)])
    assert part["skipped_flops"] == pytest.approx(1 - part["flops"] / whole["flops"]) and "skipped_flops" not in whole
    assert psutil.Process().memory_info().rss / 2 < whole["peak_memory_bytes"] < psutil.virtual_memory().total


def test_a_mean_loss_is_that_of_the_finite_ones():
    assert recent_loss([math.nan, 2.0, None, math.inf, 4, "5", 10**400]) == "3.0000 (mean of 2 steps)"
    assert recent_loss([math.nan]) == "not finite"


def test_the_peak_of_a_process_is_not_that_of_the_one_that_started_it():
    child = "from launch.training.meter import peak_of_process; print(peak_of_process())"
    parent = f"import subprocess, sys; held = b'1' * (2 << 30); subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    found = subprocess.run([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, check=True)
    assert 2**27 < int(found.stdout.split()[-1]) < 2**30
