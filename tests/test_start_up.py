"""What a start does not import: what only some runs, or nobody, needs costs every start its seconds and every rank its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: For pictures, for the Hub's models, for texts, and for compiled kernels.
UNNEEDED = ("matplotlib", "transformers", "datasets", "pandas", "pyarrow", "torch._inductor.compile_fx")
#: `launch/pretrain.py`, which says at the end of its first step what of that has been imported.
COMMAND = f"""
import sys
from launch import pretrain
from launch.training.meter import Meter

end_step = Meter.end_step

def say(*arguments):
    print("imported:", *(name for name in {UNNEEDED} if name in sys.modules))
    return end_step(*arguments)

Meter.end_step = say
pretrain.main()
"""


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.gate), pytest.param(3, marks=pytest.mark.long)])
def test_a_start_imports_only_what_its_first_step_needs(stage, corpus, tmp_path):
    run = ["--deepspeed_config", f"ds_configs/zero{stage}_bf16.json", "--n_layer", "1", "--n_head", "1", "--d_model", "8", "--seq_len", "8"]
    run += ["--steps", "1", "--eval_every", "0", "--data", str(corpus), "--runs_dir", str(tmp_path), "--quiet"]
    command = [sys.executable, "-c", COMMAND, *run]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "imported:\n" in done.stdout
