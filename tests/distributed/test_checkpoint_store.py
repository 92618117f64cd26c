"""Runs with `--checkpoint_store`: a resume on a host that has nothing is bit for bit, and a store at fault changes nothing in training."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.formats.checkpoint_files import complete_checkpoints, read_state, verify
from launch.training.checkpoints.store import CheckpointStore
from tests.distributed.launched import TINY, LaunchedRun
from tests.helpers import ROOT, refused_start, resumed_after
from tests.object_store import Proxy, environment, s3_server
from tests.test_checkpoint_store import needs_s3

#: Where one object of the newest checkpoint is damaged.
OBJECT = "step-00000006/engine/mp_rank_00_model_states.pt"


@pytest.fixture(scope="module")
def flags(corpus) -> list[str]:
    return [*TINY, "--data", str(corpus), "--global_batch_size", "4", "--save_every", "2", "--eval_every", "0", "--keep", "9"]


@pytest.fixture(scope="module")
def train(two_ranks, flags) -> Callable[..., list[float]]:
    """Train on two ranks; the losses of all steps."""

    def train(runs: Path, store: Path | None, *more: str, stage: int = 1) -> list[float]:
        config = ["--deepspeed_config", f"ds_configs/zero{stage}_fp32.json", "--runs_dir", str(runs), "--run_name", "r"]
        place = ["--checkpoint_store", f"file://{store}"] if store else []
        lines = two_ranks.train([*flags, *config, *place, *more])
        return [line["loss"] for line in lines]

    return train


@pytest.fixture(scope="module")
def whole(train, tmp_path_factory) -> list[float]:
    """The losses of 9 steps without an interruption."""
    return train(tmp_path_factory.mktemp("whole"), None, "--steps", "9")


@pytest.fixture(scope="module")
def stored(train, tmp_path_factory) -> tuple[Path, Path]:
    """The folder of a run of 9 steps, and its store, as they were after step 6."""
    folder = tmp_path_factory.mktemp("stored")
    train(folder / "runs", folder / "store", "--steps", "9")
    for checkpoints in (folder / "runs/r/checkpoints", folder / "store/r"):
        for later in complete_checkpoints(checkpoints)[-2:]:
            shutil.rmtree(later)
    return folder / "runs" / "r", folder / "store"


def copies(stored: tuple[Path, Path], folder: Path) -> tuple[Path, Path]:
    return Path(shutil.copytree(stored[0], folder / "runs" / "r")), Path(shutil.copytree(stored[1], folder / "store"))


def log_of(run: Path, word: str) -> list[str]:
    return [line for line in (run / "log.txt").read_text().splitlines() if word in line]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def test_the_store_has_what_the_folder_has(stored):
    run, store = stored
    run_id = json.loads((run / "run.json").read_text())["run_id"]
    assert complete_checkpoints(store / "r")[-1].name == "step-00000006"
    for checkpoint in complete_checkpoints(store / "r"):
        verify(checkpoint, run_id)
    for name in ("run.json", "metrics.jsonl"):
        assert (store / "r" / name).read_bytes() == (run / name).read_bytes()


def test_a_resume_on_a_host_that_has_nothing_is_bit_for_bit(train, stored, whole, tmp_path):
    store = Path(shutil.copytree(stored[1], tmp_path / "store"))
    assert train(tmp_path / "runs", store, "--steps", "9", "--resume=must") == whole
    run = tmp_path / "runs" / "r"
    assert resumed_after(run) == 6 and not list((run / "checkpoints").glob(".tmp-*"))
    assert json.loads((run / "run.json").read_text())["run_id"] == json.loads((stored[0] / "run.json").read_text())["run_id"]
    assert read_state(store / "r" / "step-00000009")["step"] == 9


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: flip(file),
        lambda file: os.truncate(file, 1000),
        lambda file: file.unlink(),
        lambda file: (file.parents[1] / "state.json").unlink(),
    ],
    ids=["other content of the same size", "truncated", "missing", "half of an upload"],
)
def test_what_is_damaged_in_the_store_is_passed_over(damage, train, stored, whole, tmp_path):
    store = Path(shutil.copytree(stored[1], tmp_path / "store"))
    damage(store / "r" / OBJECT)
    assert train(tmp_path / "runs", store, "--steps", "9", "--resume") == whole
    run = tmp_path / "runs" / "r"
    assert resumed_after(run) == 4 and len(log_of(run, "passed over")) == 1
    assert "step-00000006" in log_of(run, "passed over")[0]
    verify(store / "r" / "step-00000006", json.loads((run / "run.json").read_text())["run_id"])  # uploaded again


def test_a_run_whose_every_upload_was_cut_off_starts_at_step_0(train, stored, whole, tmp_path):
    """On a host that has nothing, where no other start would find more."""
    store = Path(shutil.copytree(stored[1], tmp_path / "store"))
    for state in store.glob("r/*/state.json"):
        state.unlink()
    assert train(tmp_path / "runs", store, "--steps", "9", "--resume") == whole
    assert resumed_after(tmp_path / "runs" / "r") == 0
    verify(store / "r" / "step-00000009", json.loads((store / "r" / "run.json").read_text())["run_id"])


def test_the_newest_that_verifies_is_taken_from_both(train, stored, whole, tmp_path):
    def resume(name: str, change: Callable[[Path, Path], None]) -> Path:
        run, store = copies(stored, tmp_path / name)
        (run / "log.txt").unlink()
        change(run, store)
        assert train(run.parent, store, "--steps", "9", "--resume") == whole
        return run

    run = resume("both good", lambda run, store: None)
    assert resumed_after(run) == 6 and not log_of(run, "downloading")
    run = resume("folder damaged", lambda run, store: flip(run / "checkpoints" / OBJECT))
    assert resumed_after(run) == 6 and len(log_of(run, "downloading")) == 1 and len(log_of(run, "warning")) == 1
    assert (run / "checkpoints/step-00000006.unusable").is_dir()
    run = resume("folder older", lambda run, store: shutil.rmtree(run / "checkpoints/step-00000006"))
    assert resumed_after(run) == 6 and len(log_of(run, "downloading")) == 1
    run = resume("store damaged", lambda run, store: flip(store / "r" / OBJECT))
    assert resumed_after(run) == 6 and not log_of(run, "downloading")

    def damage_both(run: Path, store: Path) -> None:
        flip(run / "checkpoints" / OBJECT)
        flip(store / "r" / OBJECT)

    run = resume("both damaged", damage_both)
    assert resumed_after(run) == 4


def test_the_steps_of_another_host_are_not_missing_in_the_metrics(train, stored, whole, tmp_path):
    """This host trained until step 3, another one from its checkpoint to step 6."""
    run, store = copies(stored, tmp_path)
    for later in complete_checkpoints(run / "checkpoints")[1:]:
        shutil.rmtree(later)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:3]))
    assert train(run.parent, store, "--steps", "9", "--resume") == whole and resumed_after(run) == 6
    assert (store / "r" / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()


def test_a_store_that_cannot_be_listed_is_one_line_or_a_refusal(train, flags, stored, whole, tmp_path):
    run, store = copies(stored, tmp_path)
    shutil.rmtree(store)
    store.write_text("a file")
    assert train(run.parent, store, "--steps", "9", "--resume") == whole
    assert len(log_of(run, "resuming from the checkpoints in")) == 1 and len(log_of(run, "step-00000009 was not uploaded")) == 1
    for more in (["--resume"], []):
        flags_of = [*flags, "--deepspeed_config", "ds_configs/zero1_fp32.json", "--checkpoint_store", f"file://{store}", *more]
        assert "--checkpoint_store" in refused_start(tmp_path / "new", *flags_of)


def test_a_checkpoint_whose_upload_failed_is_uploaded_by_the_resume(train, stored, whole, tmp_path):
    """Also by a resume of a run that has ended, which writes no other checkpoint."""
    run, store = copies(stored, tmp_path)
    shutil.rmtree(store / "r" / "step-00000006")
    assert train(run.parent, store, "--steps", "6", "--resume") == whole[:6]
    verify(store / "r" / "step-00000006", json.loads((run / "run.json").read_text())["run_id"])
    assert len(log_of(run, "step-00000006 was uploaded")) == 2
    assert train(run.parent, store, "--steps", "6", "--resume") == whole[:6]
    assert len(log_of(run, "step-00000006 was uploaded")) == 2  # it is there


def test_a_signal_that_cuts_off_the_last_upload_is_the_exit_code(one_rank, flags, tmp_path):
    """So that a script requeues the job; the resume uploads the checkpoint."""
    store, config = tmp_path / "store", ["--deepspeed_config", "ds_configs/zero1_fp32.json", "--runs_dir", str(tmp_path / "runs")]
    given = [*flags, *config, "--run_name", "r", "--checkpoint_store", f"file://{store}", "--save_every", "0", "--steps", "3", "--resume"]
    one_rank.run("tests.distributed.failure_jobs:pretrain_signalled_in_the_last_upload", flags=given)
    run = tmp_path / "runs" / "r"
    assert json.loads((run / "run.json").read_text())["finished"]["step"] == 3
    assert len(log_of(run, "given up")) == 1 and not complete_checkpoints(store / "r")
    one_rank.train(given)
    assert [path.name for path in complete_checkpoints(store / "r")] == ["step-00000003"]


@pytest.mark.gate
def test_a_download_that_fails_does_not_discard_steps(flags, stored, tmp_path):
    config = ["--deepspeed_config", "ds_configs/zero1_fp32.json", "--runs_dir", f"{tmp_path}/runs", "--run_name", "r"]
    given = [*flags, *config, "--checkpoint_store", f"file://{stored[1]}", "--steps", "9", "--resume"]
    # The limit of each file, smaller than the weights, stands for a network or a disk that fails during the download.
    command = ["bash", "-c", f"ulimit -f 100; exec {sys.executable} launch/pretrain.py {shlex.join(given)}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "step-00000006 could not be downloaded" in done.stderr and "--resume tries again" in done.stderr
    assert "Traceback" not in done.stderr
    assert not complete_checkpoints(tmp_path / "runs" / "r" / "checkpoints")


# --- real commands, a real S3 server ----------------------------------------------------------------------------------------------------


@needs_s3
@pytest.mark.long
@pytest.mark.parametrize("fault", ["killed during an upload", "frozen", "closed"])
def test_a_store_at_fault_changes_nothing_in_training(fault, flags, tmp_path, monkeypatch):
    """An upload is interrupted: the run is killed, or the server freezes or goes away. Then a host that has nothing resumes."""
    given = [*flags[len(TINY) :], "--checkpoint_store", "s3://bucket/x", "--save_every", "10", "--steps"]
    with s3_server("bucket") as port:
        proxy = Proxy(port)
        for name, value in environment(port).items():
            monkeypatch.setenv(name, value)
        store = CheckpointStore("s3://bucket/x", "r")
        run = LaunchedRun(tmp_path / "runs", "r", 1, 2, [*given, "5000"], **environment(proxy.port))
        run.wait_until(lambda: any(map(store.state, store.checkpoints())))  # the first ones may be replaced while they wait
        if fault == "killed during an upload":
            proxy.bytes_per_second = 50_000
            run.wait_until(lambda: store.state(store.checkpoints()[-1]) is None)  # its last object is not there
            run.kill()
            proxy.frozen.set()
        else:
            proxy.frozen.set() if fault == "frozen" else proxy.close()
            run.wait_for_step(run.last_step() + 50)  # training goes on
            run.rank(0).send_signal(signal.SIGTERM)
            start = time.monotonic()
            assert run.wait(90) == 143, run.output()
            assert time.monotonic() - start < 60
            assert [line for line in log_of(run.folder, "warning") if "given up" in line or "was not uploaded" in line]
        newest = next(name for name in reversed(store.checkpoints()) if store.state(name))
        incomplete = store.checkpoints()[-1] != newest
        assert incomplete or fault != "killed during an upload"
        shutil.rmtree(run.folder)
        again = LaunchedRun(tmp_path / "new", "r", 1, 2, [*given, str(int(newest[5:]) + 5), "--resume=must"], **environment(port))
        assert again.wait() == 0, again.output()
        assert resumed_after(again.folder) == int(newest[5:]) and len(log_of(again.folder, "passed over")) == incomplete
        assert not list((again.folder / "checkpoints").glob(".tmp-*"))
