"""Every number of `metrics.jsonl` is in wandb, in the CSV files and in TensorBoard, over ends of every kind and resumes."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from launch.config.run_config import resolve
from launch.errors import UsageError
from launch.training.run_folder.monitors import Monitors, check_monitors
from tests.distributed.launched import LaunchedRun

Columns = dict[str, list[tuple[int, float]]]
ON = ["--set", "csv_monitor.enabled=true", "--set", "tensorboard.enabled=true"]
WANDB = ["--set", "wandb.enabled=true", "--set", "wandb.project=demo"]
needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")


def flags(corpus: Path, *more: str) -> list[str]:
    return [*f"--data {corpus} --global_batch_size 32 --steps 30 --save_every 4 --eval_every 5".split(), *ON, *WANDB, *more]


def start(runs: Path, given: list[str]) -> LaunchedRun:
    return LaunchedRun(runs, "r", stage=1, ranks=1, flags=given, WANDB_MODE="offline")


def of_lines(lines: list[dict]) -> Columns:
    """(step, value) of every number of `metrics.jsonl`, by name."""
    columns: Columns = {}
    for line in lines:
        for name, value in line.items():
            if name != "step" and value is not None:
                columns.setdefault(name, []).append((line["step"], value))
    return columns


def of_csv(folder: Path) -> Columns:
    columns: Columns = {}
    for file in folder.glob("*.csv"):
        with open(file, newline="") as stream:
            (step, name), *rows = csv.reader(stream)
        assert (step, name) == ("step", file.stem)
        columns[name] = [(int(step), float(value)) for step, value in rows]
    return columns


def of_tensorboard(folder: Path) -> Columns:
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {name: [(event.step, event.value) for event in read.Scalars(name)] for name in read.Tags()["scalars"]}


def records(file: Path) -> Iterator[bytes]:
    """The records of a `.wandb` file: LevelDB's log format after 7 bytes."""
    content, place, record = file.read_bytes(), 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        size, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        if kind == 0:
            break
        record += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def of_wandb(folder: Path) -> tuple[set[str], Columns, bool]:
    """The ids of the runs; all rows in the order in which they were written, a later one for a step in place of an earlier; whether
    the last file has its end."""
    from wandb.proto.wandb_internal_pb2 import Record

    ids, rows, ended = set(), {}, False
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):  # the folders are named by their time
        ended = False
        for text in records(file):
            record = Record.FromString(text)
            ended = ended or record.HasField("exit")
            if record.HasField("run"):
                ids.add(record.run.run_id)
            if record.HasField("history"):
                row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                rows[row["step"]] = {name: value for name, value in row.items() if not name.startswith("_")}
    return ids, of_lines([rows[step] for step in sorted(rows)]), ended


def check(run: LaunchedRun) -> None:
    """All monitors hold what `metrics.jsonl` holds."""
    expected = of_lines(run.metrics())
    assert "loss" in expected
    assert of_csv(run.folder / "csv_monitor") == expected
    for folder in (run.folder, run.folder / "tensorboard"):
        found = of_tensorboard(folder)
        assert set(found) == set(expected)
        for name, rows in expected.items():
            assert found[name] == [(step, pytest.approx(value, rel=1e-6)) for step, value in rows]  # TensorBoard has fp32
    ids, rows, finished = of_wandb(run.folder)
    assert ids == {json.loads((run.folder / "run.json").read_text())["run_id"]}
    assert rows == expected
    assert finished


@needs_wandb
@pytest.mark.gate
def test_a_signal_and_a_resume_leave_one_run_with_every_row(corpus, tmp_path):
    run = start(tmp_path, flags(corpus)).wait_for_step(6)
    os.killpg(run.process.pid, signal.SIGTERM)
    assert run.wait() == 143, run.output()
    check(run)
    run = start(tmp_path, flags(corpus, "--resume"))
    assert run.wait() == 0, run.output()
    assert run.last_step() == 30
    check(run)


@needs_wandb
@pytest.mark.long
def test_a_kill_and_a_resume_leave_one_run_with_every_row(corpus, tmp_path):
    run = start(tmp_path, flags(corpus)).wait_for_step(10)
    run.kill()
    before = of_lines(run.metrics())["loss"]
    deadline = time.monotonic() + 60.0  # wandb's process ends 15 s after the run
    while len(of_wandb(run.folder)[1].get("loss", [])) < len(before) - 1:  # the kill may have come before the last row was sent
        assert time.monotonic() < deadline
        time.sleep(0.5)
    run = start(tmp_path, flags(corpus, "--resume"))
    assert run.wait() == 0, run.output()
    assert run.last_step() == 30
    assert (run.folder / "metrics.jsonl.cut").exists()
    check(run)


@needs_wandb
@pytest.mark.gate
def test_a_failed_run_has_its_last_row(corpus, tmp_path):
    given = flags(corpus, "--deepspeed_config", "ds_configs/lamb.json", "--set", "optimizer.params.eps=1e-320")  # NaN weights in step 1
    run = start(tmp_path, given)
    assert run.wait() == 1, run.output()
    assert "error" in run.output() and run.metrics()
    check(run)


class FakeWandb:
    """wandb whose process has ended."""

    def __init__(self):
        self.settings: dict[str, float] = {}

    def Settings(self, **settings: float) -> None:
        self.settings = settings

    def init(self, **_: object) -> FakeWandb:
        return self

    def define_metric(self, *_: object, **__: object) -> None: ...

    def log(self, row: object) -> None:
        raise ConnectionResetError("Connection lost")

    def finish(self) -> None: ...


def test_a_run_continues_if_wandb_fails_and_waits_for_it_for_a_limited_time(monkeypatch, tmp_path, capsys):
    """By default wandb waits until its server answers, and a job that is stopped would be killed meanwhile."""
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("launch.training.run_folder.monitors._start_wandb_service", lambda: None)
    monitors = Monitors({"wandb": {"enabled": True}}, tmp_path, "id", [{"step": 1}], [])
    assert 0 < fake.settings["finish_timeout"] <= 60
    for step in (2, 3):
        monitors.write({"step": step, "loss": 5.0})
    assert capsys.readouterr().err.count("wandb: ConnectionResetError: Connection lost; the run continues without it") == 1
    monitors.close()


def test_a_run_continues_if_comet_does_not_start(monkeypatch, tmp_path, capsys):
    def start(config: object) -> None:
        raise ValueError("no API key")

    monkeypatch.setattr("deepspeed.monitor.comet.CometMonitor", start)
    monitors = Monitors({"comet": {"enabled": True}}, tmp_path, "id", [], [])
    assert "warning: comet: ValueError: no API key; the run continues without it" in capsys.readouterr().err
    monitors.write({"step": 1, "loss": 5.0})
    monitors.close()


def test_a_new_run_does_not_replace_the_csv_files_of_another(corpus, tmp_path):
    (tmp_path / "logs" / "first").mkdir(parents=True)
    (tmp_path / "logs" / "first" / "loss.csv").write_text("step,loss\n")
    values = json.loads(Path("ds_configs/zero1_fp32.json").read_text())
    values["csv_monitor"] = {"enabled": True, "output_path": str(tmp_path / "logs"), "job_name": "first"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config, _ = resolve(["--deepspeed_config", str(tmp_path / "config.json"), "--data", str(corpus)])
    with pytest.raises(UsageError, match=r"logs/first: holds CSV files, and r is a new run; give another csv_monitor\.job_name"):
        check_monitors(config.ds_config, tmp_path / "r")
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "run.json").touch()
    check_monitors(config.ds_config, tmp_path / "r")
