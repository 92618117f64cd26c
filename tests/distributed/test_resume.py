"""A run that was killed goes on as if it had not been: the curve of the resumed run is bit for bit that of an uninterrupted one."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

from launch.comparison.runs import read_run
from launch.errors import UsageError
from launch.formats.checkpoint_files import complete_checkpoints, read_state
from launch.formats.metrics import RUN_KEYS
from launch.training.checkpoints import checkpoint as checkpoint_module
from launch.training.checkpoints.checkpoint import Checkpoints, check_shared
from launch.training.engine import TrainingEngine
from launch.training.run_folder import folder as run_folder
from launch.training.run_folder.folder import RunFolder
from launch.training.run_folder.picture import draw_loss
from launch.training.run_folder.run_json import commits_of
from model.presets import PRESETS
from tests.commands import run_script
from tests.distributed.launched import TINY, LaunchedRun
from tests.distributed.parity import section
from tests.distributed.ranks import Ranks
from tests.helpers import losses, resumed_after, rewind

STEPS = 40
JOBS = "tests.distributed.failure_jobs"
long = pytest.mark.long
OFFLOAD = section("zero_optimization.offload_optimizer", {"device": "cpu"})
Flags = Callable[..., list[str]]


@pytest.fixture(scope="module")
def of(corpus: Path) -> Flags:
    """The flags of a run in a folder, `more` last: a checkpoint every 3 of 6 steps."""

    def flags(folder: Path, *more: str, config: str = "zero1_fp32") -> list[str]:
        run = [
            "--deepspeed_config",
            f"ds_configs/{config}.json",
            *TINY,
            "--data",
            str(corpus),
            "--runs_dir",
            str(folder),
            "--run_name",
            "r",
        ]
        return [*run, *["--global_batch_size", "4", "--steps", "6", "--save_every", "3", "--eval_every", "0", "--keep", "9"], *more]

    return flags


@pytest.fixture
def run(of, tmp_path) -> Flags:
    """`of` the test's own folder."""
    return lambda *more, **config: of(tmp_path, *more, **config)


@pytest.fixture(scope="module")
def trained(of, two_ranks, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    two_ranks.train(of(folder))
    return folder / "r"


@pytest.fixture
def finished(trained, tmp_path: Path) -> Path:
    """A finished run of six steps on two ranks, to be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "r"))


def saved(folder: Path) -> list[int]:
    """The steps of the complete checkpoints of a run in the folder."""
    return [read_state(path)["step"] for path in complete_checkpoints(folder / "r" / "checkpoints")]


def log_of(folder: Path) -> str:
    return (folder / "r" / "log.txt").read_text()


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=long)])
def test_deepspeeds_own_script_reads_a_checkpoint(stage, run, two_ranks, tmp_path):
    two_ranks.train(run("--steps", "3", config=f"zero{stage}_fp32"))
    convert_zero_checkpoint_to_fp32_state_dict(str(tmp_path / "r/checkpoints/step-00000003"), str(tmp_path / "out"))
    assert (tmp_path / "out" / "pytorch_model.bin").exists()


# --- kill -9 ----------------------------------------------------------------------------------------------------------------------


def within_a_step(run: LaunchedRun, chance: random.Random) -> None:
    run.wait_for_step(min(STEPS - 5, run.last_step() + chance.randint(1, 8)))
    time.sleep(chance.uniform(0.0, 0.01))


def while_a_checkpoint_is_written(run: LaunchedRun, chance: random.Random) -> None:
    folder = run.folder / "checkpoints"
    run.wait_until(lambda: bool(complete_checkpoints(folder)))  # otherwise there is nothing to resume from
    for _ in range(chance.randint(1, 3)):
        run.wait_until(lambda: any(folder.glob(".tmp-*")))
        time.sleep(chance.uniform(0.0, 0.01))


MOMENTS = [within_a_step, while_a_checkpoint_is_written]


@pytest.mark.parametrize(
    ("stage", "ranks", "moments"),
    [
        pytest.param(3, 2, MOMENTS[1:], marks=pytest.mark.gate),
        *(pytest.param(*case, MOMENTS, marks=long) for case in ((1, 1), (3, 2))),
    ],
)
def test_a_killed_run_resumes_bit_for_bit(stage, ranks, moments, run, of, pools, tmp_path):
    chance, more = random.Random(10 * stage + ranks), ["--steps", str(STEPS), "--eval_every", "9", "--keep", "2"]
    flags = run(*more, config=f"zero{stage}_fp32")
    for moment in moments:
        killed = LaunchedRun(tmp_path, "r", stage, ranks, [*flags, *(["--resume"] if (tmp_path / "r").exists() else [])])
        try:
            moment(killed, chance)
        except AssertionError:  # it was faster than its killer: nothing was interrupted
            assert killed.process.poll() == 0, killed.output()
        killed.kill()
    with open(tmp_path / "r" / "metrics.jsonl", "a") as stream:  # a kill in the middle of a line is too rare to wait for
        stream.write('{"step": 39, "tokens": 49')
    resumed = pools.of(ranks).train([*flags, "--resume"])
    whole = pools.of(ranks).train(of(tmp_path / "whole", *more, config=f"zero{stage}_fp32"))
    assert losses(resumed) == losses(whole) and [line["step"] for line in resumed if "loss" in line] == list(range(1, STEPS + 1))
    seconds = [line["seconds"] for line in resumed]
    assert seconds == sorted(seconds)
    assert not list((tmp_path / "r" / "checkpoints").glob(".*")) and resumed_after(tmp_path / "r") > 0


@pytest.mark.parametrize(
    ("config", "more"),
    [
        pytest.param("zero3_fp32", [], marks=pytest.mark.gate),
        pytest.param("zero2_fp32", ["--dropout", "0.2"], marks=pytest.mark.gate),
        ("zero1_fp32", OFFLOAD),
        *(pytest.param(name, [], marks=long) for name in ("zero0_fp32", "zero1_fp32", "zero0_bf16", "zero1_bf16", "zero3_bf16")),
        pytest.param("zero2_fp32", OFFLOAD, marks=long),
    ],
)
def test_a_rewound_run_with_accumulation_resumes_bit_for_bit(config, more, run, two_ranks, tmp_path):
    """12 sequences / 2 ranks / micro-batch 2 = 3 micro-batches a step."""
    flags = run(*more, *["--global_batch_size", "12", "--micro_batch_size", "2", "--steps", "12"], config=config)
    whole = two_ranks.train(flags)
    rewind(tmp_path / "r", 6)
    resumed = two_ranks.train([*flags, "--resume"])
    assert losses(resumed) == losses(whole) and len(resumed) == 12
    assert "resuming after step 6" in log_of(tmp_path)


def test_dropout_draws_other_masks_for_each_seed_step_micro_step_and_rank():
    """And the same ones again in a resumed run."""

    class Drawing(SimpleNamespace):
        module = SimpleNamespace(training=True)

        def __call__(self, *_: torch.Tensor) -> torch.Tensor:
            return torch.rand(4)

    def drawn(seed: int = 1, step: int = 0, micro_step: int = 0, rank: int = 0) -> tuple[float, ...]:
        config = SimpleNamespace(seed=seed, shape=SimpleNamespace(dropout=0.1))
        engine = TrainingEngine(Drawing(global_steps=step), config, [], SimpleNamespace(rank=rank), None, _micro_step=micro_step)
        return tuple(engine.loss(torch.zeros(1, 2)).tolist())

    with torch.random.fork_rng(devices=[]):
        first = drawn()
        assert len({first, drawn(seed=2), drawn(step=1), drawn(micro_step=1), drawn(rank=1)}) == 5
        assert drawn() == first


# --- beside training --------------------------------------------------------------------------------------------------------------

OTHERS = ("zero0_bf16", "zero3_fp32", "zero_offload", "one_bit_adam")


@pytest.mark.parametrize("config", ["zero2_bf16", "zero_one_adam", *(pytest.param(name, marks=long) for name in OTHERS)])
def test_a_checkpoint_is_that_of_its_step_although_training_went_on(config, run, two_ranks, tmp_path):
    """Step 3 is saved, steps 4 and 5 are made, and only then are its files written."""
    flags = run("--steps", "8", config=config)
    whole = two_ranks.run(f"{JOBS}:pretrain_with_held_writes", flags=flags)[0]
    assert saved(tmp_path) == [3, 6, 8]
    rewind(tmp_path / "r", 3)
    assert losses(two_ranks.train([*flags, "--resume"])) == losses(whole)
    assert resumed_after(tmp_path / "r") == 3


def test_a_checkpoint_waits_for_the_previous_one_and_logs_it(run, one_rank, tmp_path):
    one_rank.run(f"{JOBS}:pretrain_with_slow_writes", flags=run("--steps", "5", "--save_every", "1", "--keep", "2"), seconds=0.5)
    assert saved(tmp_path) == [4, 5]
    assert log_of(tmp_path).count("s for the previous checkpoint") > 1


@pytest.mark.parametrize(("how", "left"), [("signal", [5, 6]), ("error", [5])])
def test_a_run_that_ends_in_the_middle_of_a_write_ends_the_write_first(how, left, run, two_ranks, tmp_path):
    flags = run("--steps", "9", "--save_every", "5")
    reasons = two_ranks.run(f"{JOBS}:end_in_the_middle_of_a_write", flags=flags, how=how)
    assert reasons == 2 * ["stopped" if how == "signal" else "a fault of ours"]
    assert saved(tmp_path) == left


def test_a_rank_that_is_killed_in_its_write_is_missed_by_the_one_that_waits_for_its_files(run, device, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.distributed.ranks.JOB_SECONDS", 40.0)
    with Ranks(2, device) as ranks, pytest.raises(AssertionError) as failures:
        ranks.run(f"{JOBS}:lose_rank_1_in_a_write", flags=run("--save_every", "1"))
    assert str(failures.value) == "rank 1: the rank died"  # and rank 0 has answered
    assert not saved(tmp_path)


def test_without_room_for_a_copy_training_waits_for_its_checkpoints(run, one_rank, tmp_path):
    one_rank.run(f"{JOBS}:pretrain_without_room", flags=run("--steps", "7"))
    assert saved(tmp_path) == [3, 6, 7]
    assert "training will wait while checkpoints are written" in log_of(tmp_path)


def test_copies_may_take_what_the_tightest_limit_leaves(tmp_path):
    from launch.training.checkpoints.snapshot import _left_by_cgroups

    for place, limit in (("job", "5000"), ("job/step", "max"), ("job/step/task", "9000")):
        folder = tmp_path / place
        folder.mkdir()
        for name, text in (("memory.max", limit), ("memory.current", "1000"), ("memory.stat", "anon 7\ninactive_file 200\n")):
            (folder / name).write_text(text + "\n")
    assert list(_left_by_cgroups(tmp_path, "/job/step/task")) == [8200, 4200]
    assert list(_left_by_cgroups(tmp_path, "/../seen/from/a/container")) == []


# --- what may change, and what may not -------------------------------------------------------------------------------------------


def finish_of(run: Path) -> dict | None:
    return json.loads((run / "run.json").read_text())["finished"]


def test_a_finished_run_goes_on_to_more_steps(run, two_ranks, finished):
    assert (finish_of(finished)["step"], finish_of(finished)["tokens"]) == (6, 6 * 4 * 32)
    before = (finished / "run.json").read_bytes()
    again = RunFolder(finished, json.loads(before) | {"resume": True}, quiet=True)
    again.abandon()  # a resume that was refused after the folder was opened
    assert (finished / "run.json").read_bytes() == before
    again.begin(6)
    again.close()
    assert finish_of(finished) is None
    lines = two_ranks.train(run("--steps", "8", "--resume=must"))
    assert [line["step"] for line in lines] == list(range(1, 9)) and finish_of(finished)["step"] == 8
    log = log_of(finished.parent)
    assert "resuming after step 6" in log and "changed since this run was last started: steps: 6 -> 8" in log
    assert not list(finished.glob("*.cut")), "nothing lies beyond the checkpoint"


@pytest.mark.parametrize(
    ("config", "before", "changed"),
    [
        *(
            pytest.param(name, {}, {"betas": [0.5, 0.75], "eps": 1e-6, "weight_decay": 0.25}, marks=[] if name == "zero2_fp32" else long)
            for name in ("zero2_fp32", "zero0_bf16", "zero3_bf16", "lamb", "one_bit_lamb", "zero_one_adam")
        ),
        ("zero0_fp32", {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}, {"momentum": 0.5}),
    ],
)
def test_changed_settings_of_the_optimizer_act_after_a_resume(config, before, changed, run, two_ranks, tmp_path):
    """torch takes them from the checkpoint with the state, and the log would say of all of them that they have changed."""
    flags = run("--steps", "3", *(section("optimizer", before) if before else []), config=config)
    two_ranks.train(flags)
    flags += [word for key, value in changed.items() for word in section(f"optimizer.params.{key}", value)]
    flags += [*section("gradient_clipping", 0.125), "--steps", "5", "--resume"]
    groups, clipping = two_ranks.run(f"{JOBS}:settings_after", flags=flags)[0]
    assert clipping == 0.125
    for key, value in changed.items():
        expected = [0.25, 0.0] if key == "weight_decay" else [tuple(value) if key == "betas" else value] * len(groups)
        assert [tuple(group[key]) if key == "betas" else group[key] for group in groups] == expected


STABLE = section("scheduler", {"type": "WarmupStableDecayTokens"})


@pytest.mark.parametrize(
    ("first", "more", "said"),
    [
        ([], ["--steps", "9"], "goes from 3.00e-04 (step 6) to "),
        ([], ["--lr", "4e-3", "--steps", "7"], "goes from 3.00e-04 (step 6) to 4.00e-04"),
        ([], [*section("scheduler", {"type": "WarmupLR"}), "--steps", "7"], "goes from 3.00e-04 (step 6) to 3.00e-03"),
        ([*STABLE, "--steps", "9"], [*STABLE, "--steps", "20"], ""),  # before its decay, another length changes no rate
    ],
)
def test_a_resume_that_changes_the_learning_rate_says_both_rates(first, more, said, run, one_rank, tmp_path):
    flags = run("--warmup_steps", "2", "--lr", "3e-3")
    one_rank.train([*flags, *first])
    rewind(tmp_path / "r", 6)
    lines = one_rank.train([*flags, *more, "--resume"])
    found = [line for line in log_of(tmp_path).splitlines() if "warning: the learning rate" in line]
    assert len(found) == bool(said) and all(said in line and f"to {lines[6]['lr']:.2e}, " in line for line in found)


def test_a_run_that_is_stopped_in_its_last_step_is_evaluated_once(run, one_rank, tmp_path):
    flags = run("--eval_every", "3", "--resume")
    one_rank.run(f"{JOBS}:pretrain_stopped_in", step=6, flags=flags)
    for _ in range(2):
        lines = one_rank.train(flags)
        assert [line["step"] for line in lines if line.get("val_loss")] == [0, 3, 6]
    read = read_run(tmp_path / "r")
    assert read.finished and not read.remarks and read.measures["final_val_loss"] == lines[-1]["val_loss"]


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (lambda own: [True, True], ""),
        (lambda own: [True, False], "rank 1 does not see this folder"),
        (lambda own: [False, False], ""),  # a job whose rank 0 has no folder needs none
        # The answers of rank 0, and of a rank with an earlier copy.
        (lambda own: ["process 7 on node0\n2\n" if isinstance(own, str) else True, own], "rank 1 does not see this folder"),
    ],
)
def test_a_run_folder_that_not_all_hosts_share_is_refused(seen, said, tmp_path, monkeypatch):
    """Before the first step."""
    monkeypatch.setattr(checkpoint_module, "SEEN_SECONDS", 0.1)
    (tmp_path / ".lock").write_text("process 7 on node1\n1\n")
    with pytest.raises(UsageError, match=f"{said}; all hosts must share --runs_dir") if said else contextlib.nullcontext():
        check_shared(tmp_path, SimpleNamespace(gather=seen))


def test_a_checkpoint_whose_files_are_on_another_host_is_not_complete(tmp_path):
    (tmp_path / ".tmp-step-00000003/engine").mkdir(parents=True)
    entries = {"engine/of_another_rank.pt": {"bytes": 1, "xxh128": "0"}}
    checkpoints = Checkpoints.__new__(Checkpoints)
    with pytest.raises(OSError, match=r"of_another_rank.pt is not in this folder.* all hosts must share --runs_dir"):
        checkpoints._complete(tmp_path / ".tmp-step-00000003", tmp_path / "step-00000003", {"step": 3}, entries)
    assert not (tmp_path / "step-00000003").exists()


@pytest.mark.parametrize("stage", [1, *(pytest.param(stage, marks=long) for stage in (0, 3))])
def test_the_rule_of_the_loss_scale_is_the_resumed_runs(stage, run, two_ranks):
    """The scale itself is that of the checkpoint."""
    rule = {"initial_scale_power": 6, "loss_scale_window": 2, "min_loss_scale": 32}
    flags = run("--steps", "4", config=f"zero{stage}_fp16") + [word for key in rule for word in section(f"fp16.{key}", rule[key])]
    before = two_ranks.run(f"{JOBS}:loss_scaler_after", flags=flags)[0]
    flags += [*section("fp16.loss_scale_window", 500), *section("fp16.min_loss_scale", 1), "--steps", "6", "--resume"]
    after = two_ranks.run(f"{JOBS}:loss_scaler_after", flags=flags)[0]
    assert (before["scale_window"], before["min_scale"]) == (2, 32) and before["cur_scale"] == 128
    assert (after["scale_window"], after["min_scale"], after["cur_scale"]) == (500, 1, 128)


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_resume_that_is_another_run_is_refused_and_changes_nothing(run, finished):
    before = files_of(finished)
    others = ["--seed", "7", "--n_layer", "3", "--global_batch_size", "8", "--no_cross_document"]
    done = run_script("launch/pretrain.py", *run(*others, "--resume", config="zero3_fp32"))
    theirs = "no --no_cross_document, --global_batch_size 4, --seed 1, --n_layer 2"
    own = "--no_cross_document, --global_batch_size 8, --seed 7, --n_layer 3"
    said = f"{finished}: this run has {theirs}, and the command {own}; give the run's own values, or another --run_name"
    assert (done.returncode, done.stderr) == (2, f"error: {said}\n")
    assert files_of(finished) == before


# --- full disks --------------------------------------------------------------------------------------------------------------------


@long
@pytest.mark.parametrize(
    ("more", "bytes_per_file", "what"),
    [
        (["--steps", "12", "--resume"], 60_000, "step-00000009"),  # beside training
        (["--steps", "9", "--resume"], 60_000, "step-00000009"),  # at the end
        (["--steps", "1000", "--save_every", "0", "--run_name", "other"], 12_000, "other"),
    ],
)
def test_a_file_that_cannot_be_written_ends_the_run_and_leaves_older_checkpoints(more, bytes_per_file, what, run, finished):
    """Every file of a checkpoint is larger than what this job may write to a file, as on a disk that is full."""
    ended = LaunchedRun(finished.parent, "r", 1, 2, run(*more), under=("prlimit", f"--fsize={bytes_per_file}"))
    assert ended.wait() == 1, ended.output()
    faults = [line for line in ended.output().splitlines() if line.startswith("error: ")]
    then = "there is no checkpoint yet" if what == "other" else "--resume continues from step-00000006"
    assert any(f"{what}: could not be written" in line and then in line for line in faults) and saved(finished.parent) == [3, 6]
    assert "Traceback" not in ended.output()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_is_full_beside_training_ends_all_ranks_together(rank, run, two_ranks, tmp_path):
    flags = run("--steps", str(STEPS))
    assert two_ranks.run(f"{JOBS}:pretrain_until_a_write_fails", flags=flags, rank=rank, step=6) == [1, 1]
    assert saved(tmp_path) == [3]
    assert 6 <= json.loads((tmp_path / "r/metrics.jsonl").read_text().splitlines()[-1])["step"] <= 9, "noted too late"
    two_ranks.train([*flags, "--steps", "9", "--resume"])
    assert not list((tmp_path / "r/checkpoints").glob(".*"))


def test_the_newest_and_the_best_checkpoints_stay(run, two_ranks, tmp_path):
    # A learning rate that ruins the model after a while: the best is not among the newest.
    ruin = ["--lr", "3", "--min_lr", "3", "--warmup_steps", "12"]
    lines = two_ranks.train(run(*ruin, "--eval_every", "3", "--steps", "24", "--keep", "2"))
    best = min((line for line in lines if line["step"] and "val_loss" in line), key=lambda line: line["val_loss"])["step"]
    assert best < 21 and saved(tmp_path) == [best, 21, 24]


# --- what a run has written, damaged or removed -----------------------------------------------------------------------------------


def test_a_damaged_line_costs_a_resume_no_other_line(run, two_ranks, finished):
    """Only what the checkpoint does not have is cut, and a copy of it stays. A newer checkpoint without its state is passed over."""
    metrics = finished / "metrics.jsonl"
    texts = metrics.read_bytes().split(b"\n")[:6]
    texts[1] = texts[1].replace(b"step", b"st\xffep")
    texts[2] = json.dumps({key: value for key, value in json.loads(texts[2]).items() if key != "seconds"}).encode()
    metrics.write_bytes(b"\n".join([*texts, b'{"step": 7, "tok']))
    (finished / "checkpoints/step-00000006/state.json").unlink()
    lines = two_ranks.train(run("--resume"))
    assert [line["step"] for line in lines] == [1, 3, 4, 5, 6] and saved(finished.parent) == [3, 6]
    assert metrics.read_bytes().split(b"\n")[:3] == texts[:3]
    assert (finished / "metrics.jsonl.cut").read_bytes().split(b"\n") == [*texts[3:], b'{"step": 7, "tok', b""]
    log = log_of(finished.parent)
    assert "4 line(s) beyond step 3 were cut off" in log and "metrics.jsonl.cut" in log
    assert "resuming after step 3" in log and "step-00000006/state.json: is missing" in log


def test_only_what_lies_beyond_the_checkpoint_is_cut(tmp_path):
    folder = RunFolder(tmp_path / "r", description(resume=False))
    file, cut = folder.path / "metrics.jsonl", folder.path / "metrics.jsonl.cut"
    texts = [b'{"step": 0}', b"\x00\x00", b'{"step": 1, "seconds": 4}', b'{"step": 2, "seconds": 1e999}', b"{}", b'{"step": 3}', b"torn"]
    file.write_bytes(b"\n".join(texts))
    folder.begin(2)
    assert file.read_bytes().splitlines() == texts[:4] and cut.read_bytes().splitlines() == texts[4:]
    assert folder.seconds_before == 4
    folder.close()
    again = RunFolder(tmp_path / "r", description(resume=True))
    again.begin(2)  # with nothing beyond
    assert cut.read_bytes().splitlines() == texts[4:]
    again.begin(0)  # no checkpoint: a run that starts anew
    assert file.read_bytes() == b"" and cut.read_bytes().splitlines() == [*texts[4:], *texts[:4]]
    again.close()


@long
def test_a_run_whose_folder_is_removed_ends_in_one_line(run, tmp_path):
    ended = LaunchedRun(tmp_path, "r", 1, 1, run("--steps", "100000", "--save_every", "0")).wait_for_step(2)
    while ended.folder.exists():  # the run may make a file in it meanwhile
        shutil.rmtree(ended.folder, ignore_errors=True)
    assert ended.wait() == 1, ended.output()
    (fault,) = (line for line in ended.output().splitlines() if line.startswith("error: "))
    assert str(ended.folder) in fault and "there is no checkpoint yet" in fault
    assert "Traceback" not in ended.output() and not ended.folder.exists()


# --- the folder of a run ---------------------------------------------------------------------------------------------------------


def test_a_finished_run_is_not_resumed_with_a_setting_that_no_step_would_use(finished):
    before = (finished / "run.json").read_bytes()
    said = json.loads(before) | {"resume": True, "lr": 0.5}
    with pytest.raises(UsageError, match=r"has finished, so no step would be trained with lr: 0\.\d+ -> 0\.5; give another --run_name"):
        RunFolder(finished, said, quiet=True)
    assert (finished / "run.json").read_bytes() == before
    RunFolder(finished, said | {"total_tokens": said["total_tokens"] + 1}, quiet=True).close()


def test_a_run_is_not_resumed_to_a_step_that_it_has_passed(finished, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    before = {name: (finished / name).read_bytes() for name in ("run.json", "metrics.jsonl")}
    done = run_script("launch/pretrain.py", "--resume", finished, "--steps", "5")
    assert done.returncode == 2, done.stderr
    assert f"error: {finished}: this run is at step 6, and --steps 5 is less; give more steps" in done.stderr
    assert {name: (finished / name).read_bytes() for name in before} == before


def description(resume: bool) -> dict[str, Any]:
    empty = {key: kind() for key, (kind,) in RUN_KEYS.items()}
    model = {"shape": vars(PRESETS["nano"].shape), "corpus": {"vocab_size": 1024}}
    return {**empty, **model, "created": "now", "resume": resume, "ranks": 1, "optimizer": {"type": "AdamW"}}


def test_a_resume_with_another_corpus_is_refused(tmp_path):
    begin_run(tmp_path / "r", description(resume=False) | {"corpus": {"path": "data/a", "vocab_size": 1024}})
    other = {"path": "data/b", "vocab_size": 1024}
    with pytest.raises(UsageError, match=r"--data data/b is not the corpus of this run, data/a: its text .* is another; give the"):
        RunFolder(tmp_path / "r", description(resume=True) | {"corpus": other, "corpus_fingerprint": "b"})


def begin_run(path: Path, description: dict) -> None:
    folder = RunFolder(path, description, quiet=True)
    folder.begin(0)
    folder.close()


def test_a_second_job_on_a_run_folder_is_refused_while_the_first_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "WAIT_SECONDS", 1.0)
    first = RunFolder(tmp_path / "r", description(resume=False))
    first.begin(0)
    before = (tmp_path / "r/run.json").read_text(), (tmp_path / "r/.lock").read_text()
    for resume in (True, False):
        with pytest.raises(UsageError, match=f"process {os.getpid()} .* is still writing into this run"):
            RunFolder(tmp_path / "r", description(resume=resume))
    assert before == ((tmp_path / "r/run.json").read_text(), (tmp_path / "r/.lock").read_text())
    first.close()
    # Two jobs with one new name that were started at once: the later one does not take over what the first has written.
    with pytest.raises(UsageError, match="this run exists"):
        RunFolder(tmp_path / "r", description(resume=False))
    RunFolder(tmp_path / "r", description(resume=True)).close()


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(run_folder.fcntl, "flock", flock)
    with pytest.raises(UsageError, match=r"its file system does not lock files \(Function not implemented\); mount it with flock"):
        RunFolder(tmp_path / "r", description(resume=False))


def test_a_folder_that_is_no_run_is_not_resumed(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r/thesis.tex").write_text("x")
    with pytest.raises(UsageError, match=r"holds thesis\.tex but no run\.json"):
        run_folder.check_run_folder(str(tmp_path), "r", resume=True)


@pytest.mark.parametrize("name", [".lock", "log.txt", "metrics.jsonl", "metrics.jsonl.cut"])
def test_a_run_does_not_write_through_a_link(name, finished):
    outside, file = finished.parent / "outside", finished / name
    outside.write_text("mine")
    file.unlink(missing_ok=True)
    file.symlink_to(outside)
    said = f"{file}: is a link to {outside}, and a run writes its own files; remove the link"
    with pytest.raises(UsageError, match=re.escape(said)):
        run_folder.check_run_folder(str(finished.parent), "r", resume=True)


def test_a_start_that_a_signal_ended_while_it_built_the_engine_is_made_again(tmp_path):
    """`"nvme_path": "auto"` is in the folder before run.json is."""
    for name in ("checkpoints", "nvme"):
        (tmp_path / "r" / name).mkdir(parents=True)
    assert run_folder.check_run_folder(str(tmp_path), "r", resume=True) == tmp_path / "r"


def test_the_curve_of_a_run_with_any_name_is_drawn(tmp_path):
    draw_loss([{"step": 1, "tokens": 8, "loss": 9.0}], picture := tmp_path / "loss.png", "a$^$b", 9.0)  # no formula of TeX
    assert picture.exists()


def test_a_refused_start_leaves_what_it_did_not_make(tmp_path):
    description = {"resume": True, "created": "now", "command": []}
    refused = RunFolder(tmp_path / "new", description, quiet=True)
    refused.abandon()
    refused.close()
    assert not (tmp_path / "new").exists()
    (tmp_path / "old" / "checkpoints" / "step-00000003").mkdir(parents=True)
    refused = RunFolder(tmp_path / "old", description, quiet=True)
    refused.abandon()
    refused.close()
    assert (tmp_path / "old" / "checkpoints" / "step-00000003").exists()


def test_run_json_keeps_the_initial_weights_unless_the_run_starts_anew(tmp_path):
    """Also on a host without checkpoints: the store has them, and the folder is opened first."""
    begin_run(tmp_path / "r", description(resume=False) | {"init_from": "gpt2"})
    for step, init_from in ((3, "gpt2"), (0, None)):
        folder = RunFolder(tmp_path / "r", description(resume=True) | {"init_from": None}, quiet=True)
        folder.begin(step)
        folder.close()
        assert json.loads((tmp_path / "r" / "run.json").read_text())["init_from"] == init_from


def test_run_json_keeps_how_the_run_was_first_started(tmp_path):
    """And of each resume when, by which command, flags and commit, and with which runs it was interleaved."""
    first, later, latest = (
        {
            "created": f"day {day}",
            "command": ["pretrain.py", str(day)],
            "folder": f"/job/{day}",
            "flags": {"steps": day},
            "interleaved": None if day == 2 else f"group-{day}",
            "commit": str(day),
        }
        for day in (1, 2, 3)
    )
    begin_run(tmp_path / "r", description(resume=False) | first)
    for resume in (later, latest):
        begin_run(tmp_path / "r", description(resume=True) | resume)
    described = json.loads((tmp_path / "r" / "run.json").read_text())
    assert {key: described[key] for key in first} == first
    changes = [one.pop("changes") for one in described["resumes"]]
    assert changes == [['commit: "1" -> "2"'], ['commit: "2" -> "3"']]
    assert described["resumes"] == [later, latest] and commits_of(described) == ["1", "2", "3"]
