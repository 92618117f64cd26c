"""`--profile`: a trace of these steps and no others, on one rank or on all, and what is refused."""

from __future__ import annotations

import gzip
import json
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.config.run_config import resolve
from launch.errors import UsageError
from launch.training.engine import check_device
from launch.training.profiling import profilers
from tests.commands import run_script
from tests.distributed.launched import TINY
from tests.helpers import losses, refusal

JSON = ["--deepspeed_config", "ds_configs/zero1_fp32.json"]


@pytest.fixture
def flags(corpus, tmp_path) -> list[str]:
    run = ["--data", str(corpus), "--runs_dir", str(tmp_path), "--run_name", "r"]
    return [*JSON, *TINY, *run, "--global_batch_size", "4", "--steps", "5", "--eval_every", "1", "--save_every", "2"]


def trace(folder: Path, step: int, rank: int) -> list[dict[str, Any]]:
    """The events with a duration in a trace."""
    with gzip.open(folder / f"r/profile/from-step-{step}-rank-{rank}.json.gz") as stream:
        return [event for event in json.load(stream)["traceEvents"] if event.get("ph") == "X"]


def spans(events: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    found = [event for event in events if re.fullmatch(name, event["name"]) and event["cat"] == "user_annotation"]
    return [(event["ts"], event["ts"] + event["dur"]) for event in found]


def test_the_command_traces_the_steps_and_logs_the_largest_entries(flags, tmp_path):
    done = run_script("launch/pretrain.py", *flags, "--profile", "2:2")
    assert done.returncode == 0, done.stderr
    events = trace(tmp_path, 2, 0)
    (second,), (third,) = spans(events, "step 2"), spans(events, "step 3")
    assert len(spans(events, "step .*")) == 2
    phases = [spans(events, name) for name in ("forward pass", "backward pass", "update")]
    assert [len(found) for found in phases] == [8, 8, 8]  # four micro-batches a step
    assert all(any(step[0] <= begin and end <= step[1] for step in (second, third)) for found in phases for begin, end in found)
    operations = [event for event in events if event["cat"] == "cpu_op"]
    assert any(event["name"] == "aten::mm" for event in operations)
    assert all(second[0] <= event["ts"] <= third[1] for event in operations), "and the evaluation between them"
    log = done.stdout.splitlines()
    (at,) = (number for number, line in enumerate(log) if line.startswith("profile of steps 2 to 3: "))
    assert log[at + 1].split() == ["CPU", "time", "share", "calls"] and len(re.findall(r"ms +\d+\.\d% ", "".join(log[at:]))) == 10
    shares = [float(re.search(r"([\d.]+)%", line)[1]) for line in log[at + 2 : at + 12]]
    assert shares == sorted(shares, reverse=True) and 30 < sum(shares) <= 100.1 and "pass" not in "".join(log[at + 2 : at + 12])


@pytest.mark.gate
def test_every_rank_traces_and_the_numbers_are_those_without(flags, two_ranks, tmp_path):
    plain = two_ranks.train([*flags, "--run_name", "plain"])
    assert losses(two_ranks.train([*flags, "--profile", "4:9:all"])) == losses(plain)
    assert [len(spans(trace(tmp_path, 4, rank), "step [45]")) for rank in (0, 1)] == [2, 2]
    assert not (tmp_path / "plain/profile").exists()
    two_ranks.train(["--resume", str(tmp_path / "r"), "--steps", "7", "--profile", "7:1"])
    assert spans(trace(tmp_path, 7, 0), "step 7") and len(list((tmp_path / "r/profile").iterdir())) == 3


def test_what_cannot_be_profiled_is_refused(corpus, monkeypatch):
    run = [*JSON, "--data", str(corpus), "--steps", "8", "--profile"]
    assert "--profile: '10' must be START:COUNT or memory" in refusal(*run, "10")
    assert "--profile 9:1: the run ends at step 8; give an earlier step" in refusal(*run, "9:1")
    with pytest.raises(UsageError, match=r"^--profile 5:1: this start begins after step 5; give a later step$"):
        profilers(resolve([*run, "5:1"])[0], 5, SimpleNamespace(rank=0), print)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(UsageError, match=r"^--profile memory needs CUDA, and this is a cpu; leave it out$"):
        check_device(resolve([*run, "memory:all"])[0])


@pytest.mark.cuda
def test_the_memory_of_the_first_steps_is_recorded(flags, one_rank, tmp_path):
    one_rank.train([*flags, "--profile", "memory"])
    assert pickle.loads((tmp_path / "r/profile/memory-rank-0.pickle").read_bytes())["segments"]
