"""Offload to a drive: the losses of CPU offload, a resume that goes on bit for bit, and one line where libaio is missing.

That the losses are those of a plain PyTorch loop too is in test_engine_follows_plain_pytorch.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch.config.run_config import OFFLOADS, resolve
from launch.errors import UsageError
from launch.formats.metrics import read_metrics
from launch.training.engine import _deepspeed_config
from tests.helpers import losses, resumed_after

ROOT = Path(__file__).resolve().parents[2]
#: c_fc and c_proj are large enough for the drive (1 MiB of fp32), biases and norms are not.
SHAPE = ["--n_layer", "2", "--n_head", "2", "--d_model", "256", "--seq_len", "32", "--global_batch_size", "4", "--micro_batch_size", "1"]
#: What is on the drive, and where the rest is.
PLACES = [("nvme", None), ("nvme", "nvme"), ("cpu", "nvme"), (None, "nvme")]


def flags(corpus, runs: Path, config: str, name: str, optimizer: str | None, param: str | None, *more: str) -> list[str]:
    run = ["--deepspeed_config", f"ds_configs/{config}.json", *SHAPE, "--data", str(corpus), "--runs_dir", str(runs), "--run_name", name]
    run += ["--steps", "6", "--lr", "1e-3", "--eval_every", "0", "--save_every", "3", *more]
    # The buffers of weights are locked in memory, in full: five of a million elements are enough here, the default is a hundred millions.
    # By default, DeepSpeed moves up to a billion weights of a rank from the drive to host memory for good.
    of_weights = {"buffer_size": 1_000_000, **({"max_in_cpu": 0} if optimizer == "nvme" else {})}
    for key, device, sizes in (("offload_optimizer", optimizer, {}), ("offload_param", param, of_weights)):
        if device:
            run += ["--set", f"zero_optimization.{key}={json.dumps({'device': device, 'nvme_path': 'auto', **sizes})}"]
    return run


@pytest.mark.long  # builds async_io, which takes three minutes of two cores
@pytest.mark.parametrize(("places", "config"), [*((places, "zero3_fp32") for places in PLACES), (("nvme", "nvme"), "zero3_bf16")], ids=str)
def test_it_trains_and_resumes_as_with_cpu_offload(places, config, drive, two_ranks, corpus, tmp_path):
    on_cpu = two_ranks.train(flags(corpus, tmp_path, config, "cpu", *("cpu" if place else None for place in places)))
    run = flags(corpus, tmp_path, config, "drive", *places)
    on_drive = two_ranks.train(run)
    assert losses(on_drive) == losses(on_cpu)
    assert (tmp_path / "drive" / "nvme" / "zero_stage_3").is_dir()
    shutil.rmtree(tmp_path / "drive" / "checkpoints" / "step-00000006")
    shutil.rmtree(tmp_path / "drive" / "nvme")
    resumed = two_ranks.train([*run, "--resume"])
    assert losses(resumed) == losses(on_drive) and resumed_after(tmp_path / "drive") > 0


@pytest.mark.long
def test_deepspeed_loses_the_optimizer_on_a_drive_without_the_correction(drive, two_ranks, corpus, tmp_path):
    job = {"job": "tests.distributed.correction_jobs:resumed_from_a_drive", "corpus": str(corpus), "runs": str(tmp_path)}
    wrong, right = two_ranks.run(**job, without="load_optimizer_on_drive")[0], two_ranks.run(**job)[0]
    assert wrong["resumed"] != wrong["uninterrupted"], "this DeepSpeed no longer shows the fault: see whether the correction can go"
    assert right["resumed"] == right["uninterrupted"]
    assert right["probe_on_a_mended_engine"] is False


@pytest.mark.long
def test_a_run_leaves_nothing_on_the_drive(drive, corpus, tmp_path):
    command = [sys.executable, "launch/pretrain.py", *flags(corpus, tmp_path, "zero3_bf16", "r", "nvme", "nvme")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "r" / "nvme").exists()
    assert len(read_metrics(tmp_path / "r" / "metrics.jsonl")) == 6


def test_two_runs_with_the_same_drive_have_folders_of_their_own(corpus, tmp_path):
    """DeepSpeed names the files in it by rank only, and a start removes those that it finds."""

    def folders(runs: str, path: str) -> list[Path]:
        config = resolve(flags(corpus, tmp_path / runs, "zero3_bf16", "r", "nvme", "nvme"))[0]
        for key in OFFLOADS:
            config.ds_config["zero_optimization"][key]["nvme_path"] = path
        zero = _deepspeed_config(config)["zero_optimization"]
        assert [Path(zero[key]["nvme_path"]) for key in OFFLOADS] == list(config.swap_folders.values())
        return [Path(zero[key]["nvme_path"]) for key in OFFLOADS]

    one, other = (folders(runs, str(tmp_path)) for runs in ("one", "other"))
    assert one[0] == one[1] and one[0].parent == tmp_path and one[0] != other[0]
    auto = tmp_path / "one" / "r" / "nvme"
    assert folders("one", str(auto)) == [auto, auto]


@pytest.mark.gate
def test_without_libaio_one_line_names_the_package(corpus, tmp_path):
    """Where it is installed, a compiler that finds nothing stands for its absence."""
    command = [sys.executable, "launch/pretrain.py", *flags(corpus, tmp_path, "zero3_bf16", "r", "nvme", "nvme")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "CC": "/bin/false"})
    assert done.returncode == 2, done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "needs libaio" in error
    assert "apt install libaio-dev" in error
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("key", "values", "message"),
    [
        ("offload_optimizer", {"device": "nvme"}, 'device "nvme" needs "nvme_path"'),
        ("offload_optimizer", {"device": "nvme", "nvme_path": "auto", "buffer_count": 3}, "buffer_count is 3; write 4 or more"),
        (
            "offload_param",
            {"device": "nvme", "nvme_path": "auto", "buffer_size": 1000},
            "is 1000, but a rank's part of the largest weight has",
        ),
    ],
)
def test_what_deepspeed_would_stop_at_later_is_refused(key, values, message, corpus, tmp_path):
    with pytest.raises(UsageError, match=message):
        resolve(
            [*flags(corpus, tmp_path, "zero3_bf16", "r", None, None), "--set", f"zero_optimization.{key}={json.dumps(values)}"], ranks=2
        )
