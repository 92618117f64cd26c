"""A technique may cut a step into another number of micro-batches than the JSON says; the mathematics stays."""

from __future__ import annotations

import pytest

STEPS = 6


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.long) for stage in (1, 2, 3))])
def test_a_planned_accumulation_trains_what_the_usual_one_trains(stage, two_ranks, corpus, tmp_path):
    flags = f"--deepspeed_config ds_configs/zero{stage}_fp32.json --data {corpus} --runs_dir {tmp_path} --steps {STEPS}".split()
    flags += ["--n_layer", "2", "--n_head", "2", "--d_model", "64", "--seq_len", "32", "--global_batch_size", "16"]
    flags += ["--micro_batch_size", "4", "--eval_every", "0", "--save_every", "0"]
    usual = two_ranks.train([*flags, "--run_name", "usual"])
    # The same 16 sequences a step: 2 micro-batches of 4 on each rank, but 8 of 1 in odd steps and 1 of 8 in every third.
    planned = two_ranks.run("tests.distributed.jobs:pretrain_with", technique="ChangingPlan", flags=[*flags, "--run_name", "planned"])[0]
    assert [line["tokens"] for line in planned] == [line["tokens"] for line in usual]
    assert [line["loss"] for line in planned] == pytest.approx([line["loss"] for line in usual], abs=1e-5)
    assert usual[-1]["loss"] < usual[0]["loss"] - 0.1
