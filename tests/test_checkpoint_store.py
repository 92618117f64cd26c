"""Copies of checkpoints in an object store, without ranks: nothing half-written is taken, no error of the store leaves its thread."""

from __future__ import annotations

import importlib.util
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.config.store_url import check_url
from launch.errors import UsageError
from launch.formats.checkpoint_files import DamagedCheckpoint, checkpoint_name, file_entry, state_text, verify
from launch.training.checkpoints import store as store_module
from launch.training.checkpoints.store import CheckpointStore, StoreError, Uploads, check_store
from tests.helpers import ROOT, refusal
from tests.object_store import Proxy, environment, s3_server

FILES = {"engine/mp_rank_00_model_states.pt": b"weights" * 5000, "engine/optim_states.pt": b"moments" * 9000}
needs_s3 = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("s3fs", "moto", "flask_cors")),
    reason='s3fs or moto is not installed (pip install -e ".[dev]" -c constraints.txt)',
)


def make_run(runs: Path, run_id: str = "id", steps: tuple[int, ...] = (2, 4, 6), losses: tuple[float, ...] = (3.0, 2.0, 2.5)) -> Path:
    """A run with small checkpoints."""
    run = runs / "r"
    for step, loss in zip(steps, losses, strict=True):
        checkpoint = run / "checkpoints" / checkpoint_name(step)
        for name, content in FILES.items():
            (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
            (checkpoint / name).write_bytes(content + bytes([step]))
        entries = {name: file_entry(checkpoint / name) for name in FILES}
        state = {"step": step, "tokens": step, "samples": step, "val_loss": loss}
        (checkpoint / "state.json").write_text(state_text(state, run_id, 1, entries))
    (run / "run.json").write_text(json.dumps({"run_id": run_id}))
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 7)))
    return run


def upload_all(store: CheckpointStore, run: Path, keep: int = 9, run_id: str = "id") -> list[str]:
    """Upload the checkpoints of `run` one after the other, and return the log."""
    log: list[str] = []
    uploads = Uploads(store, run, keep, run_id, log.append)
    uploads.start()
    for checkpoint in sorted((run / "checkpoints").iterdir()):
        uploads.submit(checkpoint)
        deadline = time.monotonic() + 20
        while uploads._waiting or uploads._current:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert uploads.finish(lambda: 0)
    assert not uploads._thread.is_alive()
    return log


@pytest.fixture(params=["file", pytest.param("s3", marks=needs_s3)])
def store(request, tmp_path, monkeypatch) -> Iterator[CheckpointStore]:
    if request.param == "file":
        yield CheckpointStore(f"file://{tmp_path}/store", "r")
        return
    with s3_server("bucket") as port:
        for name, value in environment(port).items():
            monkeypatch.setenv(name, value)
        yield CheckpointStore("s3://bucket/folder", "r")


def test_what_is_uploaded_is_downloaded_and_verified(store, tmp_path):
    run = make_run(tmp_path / "runs")
    log = upload_all(store, run)
    assert len(log) == 3 and not any("warning" in line for line in log)
    assert store.checkpoints() == [checkpoint_name(step) for step in (2, 4, 6)]
    new = tmp_path / "new" / "r"
    check_store(store, new, resume=True)  # a host that has nothing
    assert [path.name for path in new.iterdir()] == ["run.json"]
    got = store.download(new / "checkpoints" / checkpoint_name(6), "id")
    verify(got, "id")
    assert (got / "engine/optim_states.pt").read_bytes() == FILES["engine/optim_states.pt"] + b"\x06"


def test_a_damaged_run_json_in_the_store_is_not_taken_over(tmp_path):
    store, new = CheckpointStore(f"file://{tmp_path}/store", "r"), tmp_path / "new" / "r"
    store.write("run.json", b'{"run_id": "id", "sha')
    with pytest.raises(UsageError, match=f"{store.url}/run.json"):
        check_store(store, new, resume=True)
    assert not new.exists()


DAMAGES = (
    "truncated",
    "other content of the same size",
    "missing",
    "no state.json",
    "half a state.json",
    "file of another step",
    "of another run",
)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_object_is_found(store, damage, tmp_path):
    run = make_run(tmp_path / "runs")
    upload_all(store, run)
    name, file = checkpoint_name(6), "engine/optim_states.pt"
    content = store.read(f"{name}/{file}")
    with store._connected() as (files, root):
        put = {
            "truncated": lambda: files.pipe_file(f"{root}/{name}/{file}", content[:-1]),
            "other content of the same size": lambda: files.pipe_file(f"{root}/{name}/{file}", content[:-1] + b"x"),
            "missing": lambda: files.rm_file(f"{root}/{name}/{file}"),
            "no state.json": lambda: files.rm_file(f"{root}/{name}/state.json"),
            "half a state.json": lambda: files.pipe_file(f"{root}/{name}/state.json", store.read(f"{name}/state.json")[:99]),
            "file of another step": lambda: files.pipe_file(f"{root}/{name}/{file}", store.read(f"{checkpoint_name(4)}/{file}")),
            "of another run": lambda: None,
        }
        put[damage]()
    new = tmp_path / "new"
    with pytest.raises(DamagedCheckpoint) as found:
        store.download(new / name, "other" if damage == "of another run" else "id")
    assert len(found.value.faults) == 1 and name in str(found.value) and store.url in str(found.value)
    store.download(new / checkpoint_name(4), "id")
    assert not (new / name).exists() and not (new / checkpoint_name(4)).exists()  # only under temporary names


def test_the_newest_and_the_best_are_kept_and_what_others_put_there(store, tmp_path):
    run = make_run(tmp_path / "runs", steps=(2, 4, 6, 8), losses=(3.0, 2.0, 2.5, 2.6))
    others = ["notes.txt", f"{checkpoint_name(1)}/state.json", "step-best/x"]
    store.write("run.json", b"{}")
    with store._connected() as (files, root):
        for name in others:
            if store.url.startswith("file"):
                files.makedirs(str(Path(root, name).parent), exist_ok=True)
            files.pipe_file(f"{root}/{name}", b'{"run_id": "other", "files": {}}')
        if store.url.startswith("file"):
            files.makedirs(f"{root}/{checkpoint_name(5)}/engine", exist_ok=True)
        files.pipe_file(f"{root}/{checkpoint_name(5)}/engine/optim_states.pt", b"half of an upload")
    assert not [line for line in upload_all(store, run, keep=1) if "warning" in line]
    with store._connected() as (files, root):
        files.invalidate_cache()
        found = {path.split(root.lstrip("/") + "/")[1] for path in files.find(root)}
    of_run = {f"{checkpoint_name(step)}/{name}" for step in (4, 8) for name in (*FILES, "state.json")}
    assert found == {"run.json", "metrics.jsonl", *others, *of_run}


@pytest.mark.parametrize("content", [b'{"step": ', b"[1]", b"[]", b"null"])
def test_an_older_checkpoint_with_a_damaged_state_is_removed(content, tmp_path):
    store = CheckpointStore(f"file://{tmp_path}/store", "r")
    upload_all(store, make_run(tmp_path / "first", steps=(2,), losses=(3.0,)))
    store.write(f"{checkpoint_name(2)}/state.json", content)
    log = upload_all(store, make_run(tmp_path / "second", steps=(4,), losses=(2.0,)))
    assert store.checkpoints() == [checkpoint_name(4)] and not [line for line in log if "not uploaded" in line]


@pytest.mark.parametrize("name", ["demo*", "demo[lr=1]"])
def test_a_name_that_is_a_pattern_removes_only_its_own_run(name):
    """fsspec reads the paths of `rm` as patterns, except in `file://`."""
    own, other = (CheckpointStore(f"memory://{name}/runs", run) for run in (name, "demo2"))
    for store in (own, other):
        for file in ("state.json", "engine/optim_states.pt"):
            store.write(f"{checkpoint_name(2)}/{file}", b"{}")
    own.remove(checkpoint_name(2))
    with own._connected() as (files, root):
        assert files.find(root) == []
    assert other.state(checkpoint_name(2)) == {}


@pytest.mark.parametrize("name", ["lr::1e-3", "a?b", "a#b", "~"])
def test_a_name_is_no_part_of_the_url(name, tmp_path):
    """fsspec reads a :: in a URL as the end of one URL."""
    store, other = (CheckpointStore(f"file://{tmp_path}", run) for run in (name, f"{name}2"))
    store.write("run.json", b"{}")
    assert (tmp_path / name / "run.json").exists() and other.read("run.json") is None
    assert store.url == f"file://{tmp_path}/{name}"


class HeldStore(CheckpointStore):
    """Holds each upload until `go` is set; fails it if `fails`."""

    def __init__(self, folder: Path, fails: bool = False):
        super().__init__(f"file://{folder}", "r")
        self.go, self.fails, self.began = threading.Event(), fails, []

    def upload(self, checkpoint):
        self.began.append(checkpoint.name)
        assert self.go.wait(20)
        if self.fails:
            raise StoreError("the disk of the server is full\nand more")
        super().upload(checkpoint)


def test_a_newer_checkpoint_replaces_a_waiting_one(tmp_path):
    run, store, log = make_run(tmp_path / "runs"), HeldStore(tmp_path / "store"), []
    uploads = Uploads(store, run, 9, "id", log.append)
    uploads.start()
    first, second, third = sorted((run / "checkpoints").iterdir())
    uploads.submit(first)
    deadline = time.monotonic() + 20
    while not store.began:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert uploads.uses(first)  # it is not pruned meanwhile
    for checkpoint in (second, third):
        start = time.monotonic()
        uploads.submit(checkpoint)
        assert time.monotonic() - start < 0.5
    store.go.set()
    assert uploads.finish(lambda: 0)
    assert store.began == [first.name, third.name] == store.checkpoints()
    assert sum(second.name in line for line in log) == 1


def test_an_upload_that_fails_is_one_line_and_the_next_one_is_made(tmp_path):
    run, store = make_run(tmp_path / "runs", steps=(2,), losses=(1.0,)), HeldStore(tmp_path / "store", fails=True)
    store.go.set()
    (line,) = upload_all(store, run)
    assert "step-00000002 was not uploaded" in line and "\n" not in line
    store.fails = False
    (line,) = upload_all(store, run)
    assert store.checkpoints() == ["step-00000002"] and "warning" not in line


def test_of_two_runs_with_one_name_the_second_uploads_nothing(store, tmp_path):
    """Both were started while the store had neither."""
    upload_all(store, make_run(tmp_path / "first"))
    log = upload_all(store, make_run(tmp_path / "second", run_id="other", steps=(4, 8, 9)), keep=1, run_id="other")
    assert store.checkpoints() == [checkpoint_name(step) for step in (2, 4, 6)]
    assert json.loads(store.read("run.json")) == {"run_id": "id"}
    for name in store.checkpoints():
        verify(store.download(tmp_path / "new" / name, "id"), "id")
    why = f"{store.url}: is another run's: run_id is id, not other; give another --run_name, or another --checkpoint_store"
    names = ("run.json", *(checkpoint_name(step) for step in (4, 8, 9)))
    assert log == [f"warning: {name} was not uploaded, training continues: {why}" for name in names]


def test_a_failed_upload_leaves_no_half_of_a_checkpoint(store, tmp_path):
    """On a full disk it would take the place of the next one."""
    run = make_run(tmp_path / "runs")
    (run / "checkpoints" / checkpoint_name(6) / "engine/optim_states.pt").unlink()  # the second of its files
    log = upload_all(store, run)
    assert len([line for line in log if f"{checkpoint_name(6)} was not uploaded" in line]) == 1
    with store._connected() as (files, root):
        files.invalidate_cache()
        assert not [path for path in files.find(root) if checkpoint_name(6) in path]


@pytest.mark.parametrize("signalled", [0.0, 1.0, None], ids=["stopped before", "stopped meanwhile", "not stopped"])
def test_the_end_of_a_run_does_not_wait_long_for_a_store_that_hangs(signalled, tmp_path, monkeypatch):
    """signalled: seconds after which the signal comes."""
    monkeypatch.setattr(store_module, "LAST_UPLOAD_SECONDS" if signalled is None else "STOPPED_SECONDS", 0.5)
    run, store, log = make_run(tmp_path / "runs"), HeldStore(tmp_path / "store"), []
    uploads = Uploads(store, run, 9, "id", log.append)
    uploads.start()
    uploads.submit(run / "checkpoints" / checkpoint_name(6))
    start = time.monotonic()
    assert not uploads.finish(lambda: 0 if signalled is None or time.monotonic() - start < signalled else 15)
    assert (signalled or 0.0) + 0.5 <= time.monotonic() - start < 5
    (line,) = log
    assert checkpoint_name(6) in line and "given up" in line
    store.go.set()


# --- the start ------------------------------------------------------------------------------------------------------------------------


def test_a_new_run_is_refused_where_the_store_has_it_and_a_resume_where_it_has_another(tmp_path):
    store, run = CheckpointStore(f"file://{tmp_path}/store", "r"), make_run(tmp_path / "runs")
    upload_all(store, run)
    with pytest.raises(UsageError, match="exists"):
        check_store(store, tmp_path / "new" / "r", resume=False)
    other = make_run(tmp_path / "other", run_id="another")
    with pytest.raises(UsageError, match="another run"):
        check_store(store, other, resume=True)
    assert not (tmp_path / "new").exists()


@needs_s3
def test_a_store_that_cannot_be_used_is_one_line(tmp_path, monkeypatch):
    import s3fs

    def refused(run: Path, resume: bool = False, url: str = "s3://bucket/x") -> str:
        s3fs.S3FileSystem.clear_instance_cache()
        with pytest.raises(UsageError) as found:
            check_store(CheckpointStore(url, "r"), run, resume)
        (line,) = found.value.faults
        assert url in line and "secret" not in line
        return line

    with s3_server("bucket") as port:
        for name, value in environment(port).items():
            monkeypatch.setenv(name, value)
        new = tmp_path / "r"
        refused(new, url="s3://no-such-bucket/x")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        assert "redentials" in refused(new)
        for name, value in environment(port).items():
            monkeypatch.setenv(name, value)
        proxy = Proxy(port)
        proxy.frozen.set()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setattr(store_module, "ANSWER_SECONDS", 1.0)
        assert "not answered" in refused(new)
        refused(new, resume=True)  # and no checkpoint on this host either
        s3fs.S3FileSystem.clear_instance_cache()
        check_store(CheckpointStore("s3://bucket/x", "r"), make_run(tmp_path / "here"), resume=True)
        proxy.close()
    assert not new.exists() and os.listdir(tmp_path) == ["here"]


#: A relative path, the home folder, two URLs, `--runs_dir`.
NOWHERE = ["file://mnt/store", "file://~/store", "file:///x::y", f"file://{ROOT}/runs/"]


@pytest.mark.parametrize("url", ["bucket/folder", "s3://", "s3//bucket", "file:", "", "s4://bucket/x", "S3 ://bucket", *NOWHERE])
def test_a_url_that_is_none_is_refused(url):
    assert "--checkpoint_store" in refusal("--deepspeed_config", "ds_configs/zero1_fp32.json", "--checkpoint_store", url)


@pytest.mark.parametrize("password", ["hunter2", "hunter2/with+slash"])
def test_a_password_is_neither_taken_nor_printed(password):
    line = refusal("--deepspeed_config", "ds_configs/zero1_fp32.json", "--checkpoint_store", f"s3://me:{password}@bucket/x")
    assert "hunter2" not in line and "password" in line


def test_a_missing_package_is_named(monkeypatch):
    def missing(scheme: str) -> None:
        raise ImportError("Install s3fs to access S3")

    assert check_url("file:///x", "runs") is None
    monkeypatch.setattr("fsspec.get_filesystem_class", missing)
    line = check_url("s3://bucket/x", "runs")
    assert line is not None and "s3fs" in line and ".[s3]" in line
