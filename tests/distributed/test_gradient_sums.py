"""Summing the gradients of micro-batches in bf16 costs what recipes/bf16/README.md says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launch.config.flags import DEFAULT_DATA

ROOT = Path(__file__).resolve().parents[2]
COUNTS = [4, 16, 64, 256, 1024]


@pytest.mark.long
def test_sums_in_bf16_have_the_published_errors(one_rank, tmp_path):
    if not (ROOT / DEFAULT_DATA).is_dir():
        pytest.skip("needs the corpus of `make data`")
    flags = ["--deepspeed_config", "ds_configs/zero1_bf16.json", "--data", str(ROOT / DEFAULT_DATA), "--steps", "100"]
    flags += ["--eval_every", "0", "--save_every", "0", "--runs_dir", str(tmp_path), "--run_name", "r"]
    job = "tests.distributed.gradient_sums_jobs:errors_of_sums"
    (found,) = one_rank.run(job, flags=flags, counts=COUNTS, most_groups=8)
    page = (ROOT / "recipes" / "bf16" / "README.md").read_text(encoding="utf-8")
    for count in COUNTS:
        print(count, found[count])
        relative, of_noise = re.search(rf"^\| {count:,} \| ([\d.]+)% \| ([\d.]+) \|", page, re.M).groups()
        assert found[count]["relative"] == pytest.approx(float(relative) / 100, rel=0.3)
        assert found[count]["of_noise"] == pytest.approx(float(of_noise), rel=0.3)
