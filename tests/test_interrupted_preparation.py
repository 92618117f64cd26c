"""A preparation that is killed, interrupted or out of disk resumes to the same bytes, and never leaves an incomplete corpus."""

import gzip
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_pipeline.errors import DataError
from data_pipeline.shards import open_corpus
from tests.helpers import members

ROOT = Path(__file__).resolve().parents[1]
# The command itself, with chunks of 20 kB in place of 1 MB and a commit behind each: 1.5 MB are then as many steps as 75 MB.
# The first argument names a place in the last moments where it kills itself, or none.
DRIVER = """
import os, signal, sys, time
from data_pipeline import documents, prepare, writing
documents.CHUNK_BYTES, writing.SECONDS_BETWEEN_COMMITS = 20_000, 0.0

def dies(usual, before):
    def function(*arguments, **options):
        result = None if before else usual(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)
    return function

where = sys.argv[1]
if where.endswith("the manifest"):
    prepare.write_manifest = dies(prepare.write_manifest, where.startswith("before"))
if where.endswith("the rename"):
    usual, at_its_place = os.rename, dies(os.rename, where.startswith("before"))
    os.rename = lambda a, b: at_its_place(a, b)
if where.startswith("within"):
    writes = iter([os.replace, os.replace, dies(os.replace, True)])  # the first is before any chunk
    os.replace = lambda a, b: next(writes)(a, b)
sys.exit(prepare.main(sys.argv[2:]))
"""


def start(*arguments, where="nowhere", **options) -> subprocess.Popen:
    command = [sys.executable, "-c", DRIVER, where, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True, **options)


def run(*arguments, **options) -> subprocess.CompletedProcess:
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def kill(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate(timeout=30)
    wait_for(lambda: not members(process.pid))  # the workers follow


def chunks_done(out: Path) -> int:
    try:
        return json.loads((out.parent / f".{out.name}.partial" / ".progress.json").read_text())["chunks"]
    except FileNotFoundError:
        return 0


def wait_for(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


def wait_for_chunks(process: subprocess.Popen, out: Path, n: int) -> None:
    """Until the run has committed so many chunks, or is over."""
    wait_for(lambda: chunks_done(out) >= n or process.poll() is not None)


def contents(out: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in out.iterdir()}


def text(generator: random.Random, n: int) -> str:
    words = ["the", "model", "größer", "def", "return", "\n", "日本", "<|endoftext|>", "12", "tokens"]
    return " ".join(generator.choices(words, k=n)) + "\n"


def resumed(arguments: list, uninterrupted: Path, out: Path) -> None:
    """The same command with --resume ends with the same bytes."""
    done = run(*arguments, "--resume")
    assert done.returncode == 0, done.stderr
    assert contents(out) == contents(uninterrupted)
    assert os.listdir(out.parent) == [out.name]


@pytest.fixture(scope="module")
def command(tmp_path_factory) -> list[str]:
    """Two weighted sources of 0.7 MB each with duplicates, empty and bad records, and options that use everything there is."""
    folder = tmp_path_factory.mktemp("sources")
    generator = random.Random(0)
    (folder / "a").mkdir()
    for number in range(120):
        (folder / "a" / f"{number}.txt").write_text(text(generator, 900) if number % 7 else "twice")
    (folder / "a" / "latin.txt").write_bytes(b"gr\xf6\xdfer")
    with gzip.open(folder / "b.jsonl.gz", "wt") as stream:
        for number in range(600):
            stream.write(json.dumps({"text": text(generator, 200) if number % 5 else ""}) + "\n")
            stream.write("{broken\n" if number % 100 == 3 else "")
    sources = ["--source", f"{folder}/a@0.7", f"{folder}/b.jsonl.gz@0.3", "--dedup", "exact", "--on_error", "skip"]
    return [*sources, "--tokenizer", "bpe:400", "--shard_tokens", "30000", "--val_fraction", "0.1"]


@pytest.fixture(scope="module")
def uninterrupted(command, tmp_path_factory) -> Path:
    """What must come out. Read only."""
    out = tmp_path_factory.mktemp("data") / "corpus"
    done = run(*command, "--out", out)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((out / "manifest.json").read_text())
    assert len(manifest["splits"]["train"]["shards"]) > 5
    assert manifest["dropped"] == {"broken JSON line": 6, "duplicate": 17, "empty": 120, "not UTF-8": 1}
    assert chunks_done(out) == 0
    return out


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_at_random_again_and_again_it_ends_with_the_same_bytes(command, uninterrupted, tmp_path, workers):
    generator, expected, out = random.Random(workers), contents(uninterrupted), tmp_path / "out"
    arguments = [*command, "--out", out, "--resume", "--workers", workers]
    in_the_middle = 0
    for _ in range(8):
        before = chunks_done(out)
        process = start(*arguments)
        if generator.random() < 0.2:  # anywhere, the start and the training of the tokenizer included
            time.sleep(generator.uniform(0, 1.5))
        else:
            wait_for_chunks(process, out, before + generator.randint(1, 20))
        kill(process)
        assert chunks_done(out) >= before or out.exists()
        in_the_middle += chunks_done(out) > before
        if out.exists():
            assert contents(out) == expected
            shutil.rmtree(out)
    assert in_the_middle
    resumed(arguments, uninterrupted, out)


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("before the manifest", marks=pytest.mark.long),
        pytest.param("after the manifest", marks=pytest.mark.long),
        pytest.param("within the third write of its progress", marks=pytest.mark.gate),
        "before the rename",
        pytest.param("after the rename", marks=pytest.mark.long),
    ],
)
def test_killed_in_its_last_moments_it_loses_nothing(command, uninterrupted, tmp_path, where):
    arguments = [*command, "--out", tmp_path / "out"]
    done = run(*arguments, where=where)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "out").exists() == (where == "after the rename")
    done = run(*arguments, "--resume")
    assert done.returncode == 0, done.stderr
    assert ("nothing to do" if where == "after the rename" else "resuming after") in done.stdout
    assert "training" not in done.stdout
    assert contents(tmp_path / "out") == contents(uninterrupted)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.long), signal.SIGINT])
def test_ended_at_once_it_leaves_nothing_to_keep_and_the_next_run_cleans_up(tmp_path, number):
    arguments = ("--source", "stdlib", "--out", tmp_path / "out", "--tokenizer", "bpe:400", "--workers", 2)
    process = start(*arguments)
    wait_for((tmp_path / ".out.partial").exists)
    if number == signal.SIGKILL:
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, workers included
    _, err = process.communicate(timeout=30)
    wait_for(lambda: not members(process.pid))
    if number == signal.SIGINT:
        assert (process.returncode, err) == (130, f"interrupted: nothing was written to {tmp_path}/out\n")
    assert sorted(os.listdir(tmp_path)) == ([".out.lock", ".out.partial"] if number == signal.SIGKILL else [])
    with pytest.raises(DataError, match="no such corpus"):
        open_corpus(tmp_path / "out")
    done = run(*arguments, "--max_docs", 50)
    assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path) == ["out"]


def test_two_runs_for_one_folder_do_not_meet(tmp_path):
    arguments = ("--source", "stdlib", "--out", tmp_path / "out", "--max_docs", 50)
    first = start(*arguments)
    wait_for((tmp_path / ".out.partial").exists)
    os.kill(first.pid, signal.SIGSTOP)
    refused(run(*arguments), "another process is preparing it")
    os.kill(first.pid, signal.SIGCONT)
    _, err = first.communicate(timeout=60)
    assert first.returncode == 0, err
    open_corpus(tmp_path / "out").verify()


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 2])
def test_ctrl_c_ends_in_one_line_and_goes_on_by_resume(command, uninterrupted, tmp_path, workers):
    arguments = [*command, "--out", tmp_path / "out", "--workers", workers]
    process = start(*arguments)
    wait_for_chunks(process, tmp_path / "out", 20)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, workers included
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.startswith(f"interrupted: nothing was written to {tmp_path / 'out'}") and "--resume" in err
    assert err.count("\n") == 1
    wait_for(lambda: not members(process.pid))  # the workers follow
    resumed(arguments, uninterrupted, tmp_path / "out")


def test_a_full_disk_is_one_line_and_goes_on_by_resume(command, uninterrupted, tmp_path):
    arguments = [*command, "--out", tmp_path / "out"]
    # A shard is 60 kB; the limit is of each file, which is as near to a full disk as one gets without one of one's own.
    done = run(*arguments, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (45_000, 45_000)))
    assert done.returncode == 1
    assert done.stderr.startswith("failed: ")
    assert "File too large" in done.stderr
    assert "--resume" in done.stderr
    assert done.stderr.count("\n") == 1
    resumed(arguments, uninterrupted, tmp_path / "out")


@pytest.mark.gate
def test_a_killed_worker_is_one_line_and_goes_on_by_resume(command, uninterrupted, tmp_path):
    arguments = [*command, "--out", tmp_path / "out", "--workers", "2"]
    process = start(*arguments)
    wait_for_chunks(process, tmp_path / "out", 5)
    os.kill(next(pid for pid, line in members(process.pid).items() if "spawn_main" in line), signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert err.startswith("failed: a worker process died")
    assert "--resume" in err
    assert err.count("\n") == 1
    resumed(arguments, uninterrupted, tmp_path / "out")


def refused(done: subprocess.CompletedProcess, said: str) -> None:
    assert done.returncode == 2, done.stdout
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


@pytest.mark.gate
def test_only_the_same_command_with_resume_goes_on(command, uninterrupted, tmp_path):
    shutil.copytree(Path(command[1].rpartition("@")[0]).parent, tmp_path / "sources", copy_function=shutil.copy2)
    command = [part.replace(str(Path(command[1]).parent), str(tmp_path / "sources")) for part in command]
    arguments = [*command, "--out", tmp_path / "out"]
    process = start(*arguments)
    wait_for_chunks(process, tmp_path / "out", 20)
    kill(process)
    kept = sorted(os.listdir(tmp_path / ".out.partial"))
    refused(run(*arguments), "an interrupted run left its work in")
    for changed, said in (
        (["--val_fraction", "0.2"], "val_fraction was 0.1, now 0.2"),
        (["--tokenizer", "bytes"], "tokenizer was bpe:400, now bytes"),
        (["--max_docs", "5"], "max_docs was None, now 5"),
        (["--dedup", "none"], "dedup was exact, now none"),
        (["--source", f"{tmp_path}/sources/a@0.1"], "sources was"),
    ):
        refused(run(*arguments, "--resume", *changed), said)
    file = tmp_path / "sources" / "a" / "8.txt"
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    text = file.read_text()
    file.write_text(text[::-1])  # as long as before
    refused(run(*arguments, "--resume"), "a source has changed")
    file.write_text(text)
    os.utime(file, ns=times)
    assert sorted(os.listdir(tmp_path / ".out.partial")) == kept
    assert run(*arguments, "--resume").returncode == 0
    theirs = contents(uninterrupted)
    assert {name: data for name, data in contents(tmp_path / "out").items() if name != "manifest.json"} == {
        name: data for name, data in theirs.items() if name != "manifest.json"
    }
    assert "nothing to do" in run(*arguments).stdout
    assert "nothing to do" in run(*arguments, "--resume").stdout


@pytest.mark.gate
def test_a_changed_file_behind_a_dataset_is_noticed(tmp_path):
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps({"text": text(random.Random(number), 400)}) + "\n" for number in range(300)))
    arguments = ["--source", f"hf:json:{file}", "--out", tmp_path / "out", "--tokenizer", "bytes"]
    assert run(*arguments, where="before the rename").returncode == -signal.SIGKILL
    file.write_text(file.read_text().replace("model", "MODEL"))
    refused(run(*arguments, "--resume"), "a source has changed")


def test_a_bad_record_far_behind_stops_and_goes_on_by_skipping_it(tmp_path):
    lines = [json.dumps({"text": text(random.Random(number), 400)}) + "\n" for number in range(300)]
    lines.insert(250, "{broken\n")
    (tmp_path / "records.jsonl").write_text("".join(lines))
    arguments = ["--source", tmp_path / "records.jsonl", "--tokenizer", "bytes"]
    done = run(*arguments, "--out", tmp_path / "out")
    refused(done, "records.jsonl:251: broken JSON line")
    done = run(*arguments, "--out", tmp_path / "out", "--resume", "--on_error", "skip")
    assert "resuming after" in done.stdout, done.stderr
    assert run(*arguments, "--out", tmp_path / "whole", "--on_error", "skip").returncode == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_options_of_which_nothing_comes_leave_nothing_behind(command, tmp_path):
    refused(run(*command, "--out", tmp_path / "out", "--val_fraction", "1e-9"), "no document for val")
    assert os.listdir(tmp_path) == []
