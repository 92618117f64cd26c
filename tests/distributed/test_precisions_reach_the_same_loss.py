"""The precisions end where fp32 ends: `nano`, 120 steps on the standard library."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers import ROOT

WITHIN = 0.02
pytestmark = pytest.mark.long


def test_bf16_and_fp16_end_within_002_of_fp32(two_ranks, tmp_path):
    corpus = tmp_path / "stdlib"
    words = [sys.executable, "data_pipeline/prepare.py", "--source", "stdlib", "--tokenizer", "bpe:8192", "--out", str(corpus), "--quiet"]
    subprocess.run(words, cwd=ROOT, check=True)

    def final(precision: str) -> float:
        run = ["--deepspeed_config", f"ds_configs/zero1_{precision}.json", "--preset", "nano", "--data", str(corpus)]
        run += ["--steps", "120", "--lr", "1e-3", "--warmup_steps", "50", "--eval_every", "120", "--save_every", "0"]
        run += ["--runs_dir", str(tmp_path), "--run_name", precision]
        return two_ranks.train(run)[-1]["val_loss"]

    fp32, bf16, fp16 = (final(precision) for precision in ("fp32", "bf16", "fp16"))
    print(f"fp32 {fp32:.4f}, bf16 {bf16 - fp32:+.4f}, fp16 {fp16 - fp32:+.4f}")
    assert fp32 < 6.0, "a model that has not learnt agrees with anything"
    assert abs(bf16 - fp32) <= WITHIN
    assert abs(fp16 - fp32) <= WITHIN
