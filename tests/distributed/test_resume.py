"""A run that was killed goes on as if it had not been: the curve of the resumed run is bit for bit that of an uninterrupted one."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from launch.comparison.runs import read_run
from launch.errors import UsageError
from launch.formats.checkpoint_files import complete_checkpoints, read_state
from launch.formats.metrics import RUN_KEYS
from launch.training.checkpoints import checkpoint as checkpoint_module
from launch.training.checkpoints.checkpoint import Checkpoints, check_shared
from launch.training.run_folder import folder as run_folder
from launch.training.run_folder.folder import RunFolder
from launch.training.run_folder.picture import draw_loss
from launch.training.run_folder.run_json import commits_of
from model.presets import PRESETS
from tests.commands import run_script
from tests.distributed.launched import TINY, LaunchedRun
from tests.distributed.ranks import Ranks
from tests.helpers import resumed_after, rewind

STEPS = 40
OFFLOAD = ["--set", 'zero_optimization.offload_optimizer={"device": "cpu"}']


@pytest.fixture(scope="module")
def flags(corpus: Path) -> list[str]:
    return f"--data {corpus} --global_batch_size 4 --steps {STEPS} --save_every 3 --eval_every 9 --keep 2".split()


@pytest.fixture(scope="module")
def train(request: pytest.FixtureRequest) -> Callable[..., list[dict]]:
    """Runs `launch/pretrain.py` on a pool's ranks, for what needs no launcher; the lines of its metrics."""

    def run(runs: Path, name: str, flags: list[str], stage: int = 1, ranks: int = 2) -> list[dict]:
        pool = request.getfixturevalue({1: "one_rank", 2: "two_ranks"}[ranks])
        config = ["--deepspeed_config", f"ds_configs/zero{stage}_fp32.json", "--runs_dir", str(runs), "--run_name", name]
        return pool.train([*config, *TINY, *flags])

    return run


def losses(lines: list[dict]) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


@pytest.fixture
def finished(train, flags, tmp_path: Path) -> Path:
    """A finished run of six steps on two ranks, to be damaged."""
    train(tmp_path, "r", [*flags, "--steps", "6", "--eval_every", "0"])
    return tmp_path / "r"


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)])
def test_deepspeeds_own_script_reads_a_checkpoint(stage, train, flags, tmp_path):
    train(tmp_path, "r", [*flags, "--steps", "6", "--eval_every", "0"], stage=stage)
    words = [sys.executable, "-m", "deepspeed.utils.zero_to_fp32", str(tmp_path / "r/checkpoints/step-00000006"), str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "pytorch_model.bin").exists()


# --- kill -9 ----------------------------------------------------------------------------------------------------------------------


def at_a_random_moment(run: LaunchedRun, chance: random.Random) -> None:
    time.sleep(chance.uniform(0.5, 8.0))


def within_a_step(run: LaunchedRun, chance: random.Random) -> None:
    run.wait_for_step(min(STEPS - 5, run.last_step() + chance.randint(1, 8)))
    time.sleep(chance.uniform(0.0, 0.01))


def _while_there_is(prefix: str) -> Callable[[LaunchedRun, random.Random], None]:
    def wait(run: LaunchedRun, chance: random.Random) -> None:
        folder = run.folder / "checkpoints"
        run.wait_until(lambda: bool(complete_checkpoints(folder)))  # otherwise there is nothing to resume from
        for _ in range(chance.randint(1, 3)):
            run.wait_until(lambda: folder.exists() and any(folder.glob(f"{prefix}*")))
            time.sleep(chance.uniform(0.0, 0.01))

    return wait


MOMENTS = [within_a_step, _while_there_is(".tmp-"), at_a_random_moment]


def kill_and_resume(train, runs: Path, flags: list[str], stage: int, ranks: int, moments: list[Callable], chance: random.Random) -> None:
    name = f"killed-{stage}-{ranks}"
    for moment in moments:
        resume = ["--resume"] if (runs / name).exists() else []
        run = LaunchedRun(runs, name, stage, ranks, [*flags, *resume])
        try:
            moment(run, chance)
        except AssertionError:  # it was faster than its killer: nothing was interrupted
            assert run.process.poll() == 0, run.output()
        run.kill()
    metrics = runs / name / "metrics.jsonl"
    if metrics.exists():
        with open(metrics, "a") as stream:  # a kill in the middle of a line is too rare to wait for
            stream.write('{"step": 39, "tokens": 49')
    resumed = train(runs, name, [*flags, "--resume"], stage, ranks)
    whole = train(runs, f"whole-{stage}-{ranks}", flags, stage, ranks)
    assert losses(resumed) == losses(whole) and [step for step, _ in losses(whole)] == list(range(1, STEPS + 1))
    seconds = [line["seconds"] for line in resumed]
    assert seconds == sorted(seconds)
    assert not list((runs / name / "checkpoints").glob(".*"))


@pytest.mark.parametrize(
    ("stage", "ranks", "moments"),
    [(3, 2, MOMENTS[1:2]), *(pytest.param(*case, MOMENTS[:2], marks=pytest.mark.long) for case in ((3, 2), (1, 1)))],
    ids=["3-2", "3-2-twice", "1-1-twice"],
)
def test_a_killed_run_resumes_bit_for_bit(stage, ranks, moments, train, flags, tmp_path):
    kill_and_resume(train, tmp_path, flags, stage, ranks, moments, random.Random(stage))
    assert resumed_after(tmp_path / f"killed-{stage}-{ranks}") > 0


@pytest.mark.long
@pytest.mark.parametrize(("stage", "ranks"), [(1, 1), (1, 2), (3, 1), (3, 2)])
def test_a_run_killed_at_many_moments_resumes_bit_for_bit(stage, ranks, train, flags, tmp_path):
    chance = random.Random(10 * stage + ranks)
    kill_and_resume(train, tmp_path, flags, stage, ranks, chance.choices(MOMENTS, k=2), chance)


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        *(pytest.param(stage, [], marks=[] if stage == 3 else pytest.mark.long) for stage in (0, 1, 2, 3)),
        *(pytest.param(stage, ["--set", 'bf16={"enabled": true}'], marks=pytest.mark.long) for stage in (0, 1, 3)),
        (2, ["--dropout", "0.2"]),
        (1, OFFLOAD),
        pytest.param(2, OFFLOAD, marks=pytest.mark.long),
    ],
)
def test_a_rewound_run_with_accumulation_resumes_bit_for_bit(stage, more, train, flags, tmp_path):
    # 12 sequences / 2 ranks / micro-batch 2 = 3 micro-batches a step
    flags = [*flags, *more, "--global_batch_size", "12", "--micro_batch_size", "2", "--eval_every", "0", "--keep", "9"]
    whole = train(tmp_path, "r", [*flags, "--steps", "12"], stage)
    rewind(tmp_path / "r", 6)
    resumed = train(tmp_path, "r", [*flags, "--steps", "12", "--resume"], stage)
    assert losses(resumed) == losses(whole) and len(resumed) == 12
    assert "resuming after step 6" in (tmp_path / "r/log.txt").read_text()


def test_dropout_draws_other_masks_for_each_seed_step_micro_step_and_rank():
    """And the same ones again in a resumed run."""
    from launch.training.engine import TrainingEngine

    class Drawing(SimpleNamespace):
        training = True

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


@pytest.mark.parametrize(
    "config",
    [
        *("zero2_bf16", "zero_one_adam"),
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("zero0_bf16", "zero3_fp32", "zero0_fp32", "zero1_fp32", "zero_offload", "one_bit_adam", "lamb")
        ),
    ],
)
def test_a_checkpoint_is_that_of_its_step_although_training_went_on(config, two_ranks, flags, tmp_path):
    """Step 3 is saved, steps 4 and 5 are made, and only then are its files written."""
    job, held = "tests.distributed.jobs:pretrain", "tests.distributed.failure_jobs:pretrain_with_held_writes"
    run = ["--deepspeed_config", f"ds_configs/{config}.json", *TINY, *flags, "--steps", "8", "--eval_every", "0", "--keep", "9"]
    run += ["--runs_dir", str(tmp_path), "--run_name", "r"]
    whole = two_ranks.run(held, flags=run)[0]
    assert [read_state(path)["step"] for path in complete_checkpoints(tmp_path / "r/checkpoints")] == [3, 6, 8]
    rewind(tmp_path / "r", 3)
    assert losses(two_ranks.run(job, flags=[*run, "--resume"])[0]) == losses(whole)
    assert resumed_after(tmp_path / "r") == 3


def test_a_checkpoint_waits_for_the_previous_one_and_logs_it(one_rank, flags, tmp_path):
    run = ["--deepspeed_config", "ds_configs/zero1_fp32.json", *TINY, *flags, "--runs_dir", str(tmp_path), "--run_name", "r"]
    more = ["--steps", "5", "--save_every", "1", "--eval_every", "0"]
    one_rank.run("tests.distributed.failure_jobs:pretrain_with_slow_writes", flags=[*run, *more], seconds=0.5)
    assert [read_state(path)["step"] for path in complete_checkpoints(tmp_path / "r/checkpoints")] == [4, 5]
    assert (tmp_path / "r/log.txt").read_text().count("s for the previous checkpoint") > 1


@pytest.mark.parametrize(("how", "left"), [("signal", [5, 6]), ("error", [5])])
def test_a_run_that_ends_in_the_middle_of_a_write_ends_the_write_first(how, left, two_ranks, flags, tmp_path):
    run = ["--deepspeed_config", "ds_configs/zero1_fp32.json", *TINY, *flags, "--runs_dir", str(tmp_path), "--run_name", "r"]
    more = ["--steps", "9", "--save_every", "5", "--eval_every", "0"]
    reasons = two_ranks.run("tests.distributed.failure_jobs:end_in_the_middle_of_a_write", flags=[*run, *more], how=how)
    assert reasons == 2 * ["stopped" if how == "signal" else "a fault of ours"]
    assert [read_state(path)["step"] for path in complete_checkpoints(tmp_path / "r/checkpoints")] == left


def test_a_rank_that_is_killed_in_its_write_is_missed_by_the_one_that_waits_for_its_files(flags, device, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.distributed.ranks.JOB_SECONDS", 40.0)
    run = ["--deepspeed_config", "ds_configs/zero1_fp32.json", *TINY, *flags, "--runs_dir", str(tmp_path), "--run_name", "r"]
    job = "tests.distributed.failure_jobs:lose_rank_1_in_a_write"
    with Ranks(2, device) as ranks, pytest.raises(AssertionError) as failures:
        ranks.run(job, flags=[*run, "--save_every", "1", "--eval_every", "0"])
    assert str(failures.value) == "rank 1: the rank died"  # and rank 0 has answered
    assert not complete_checkpoints(tmp_path / "r/checkpoints")


def test_without_room_for_a_copy_training_waits_for_its_checkpoints(one_rank, flags, tmp_path):
    run = ["--deepspeed_config", "ds_configs/zero1_fp32.json", *TINY, *flags, "--runs_dir", str(tmp_path), "--run_name", "r"]
    one_rank.run("tests.distributed.failure_jobs:pretrain_without_room", flags=[*run, "--steps", "7", "--eval_every", "0", "--keep", "9"])
    assert [read_state(path)["step"] for path in complete_checkpoints(tmp_path / "r/checkpoints")] == [3, 6, 7]
    assert "training will wait while checkpoints are written" in (tmp_path / "r/log.txt").read_text()


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


def test_a_finished_run_goes_on_to_more_steps(train, flags, finished):
    lines = train(finished.parent, "r", [*flags, "--steps", "8", "--eval_every", "0", "--resume"])
    assert [line["step"] for line in lines] == list(range(1, 9))
    log = (finished / "log.txt").read_text()
    assert "resuming after step 6" in log and "changed since this run was last started: steps: 6 -> 8" in log


def test_ranks_may_change_at_stage_0(train, flags, tmp_path):
    flags = [*flags, "--eval_every", "0", "--steps", "12", "--lr", "5e-4", "--keep", "9"]
    whole = train(tmp_path, "r", flags, stage=0)
    rewind(tmp_path / "r", 6)
    lines = train(tmp_path, "r", [*flags, "--resume"], stage=0, ranks=1)
    # One rank sums the gradients of the same samples in another order.
    assert [loss for _, loss in losses(lines)] == pytest.approx([loss for _, loss in losses(whole)], abs=5e-6)


@pytest.mark.parametrize(
    "config",
    [
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("zero0_bf16", "zero1_bf16", "zero3_bf16", "lamb", "one_bit_lamb", "zero_one_adam")
        ),
        "zero2_fp32",
    ],
)
def test_changed_settings_of_the_optimizer_act_after_a_resume(config, two_ranks, corpus, tmp_path):
    """torch takes them from the checkpoint with the state, and the log would say of all of them that they have changed."""
    shape = ["--n_layer", "1", "--n_head", "1", "--d_model", "32", "--seq_len", "16", "--eval_every", "0", "--data", str(corpus)]
    run = ["--deepspeed_config", f"ds_configs/{config}.json", *shape, "--runs_dir", str(tmp_path), "--run_name", "r"]
    two_ranks.train([*run, "--steps", "3"])
    changed = {"betas": [0.5, 0.75], "eps": 1e-6, "weight_decay": 0.25}
    run += [text for key, value in changed.items() for text in ("--set", f"optimizer.params.{key}={json.dumps(value)}")]
    run += ["--set", "gradient_clipping=0.125"]
    groups, clipping = two_ranks.run("tests.distributed.failure_jobs:settings_after", flags=[*run, "--steps", "5", "--resume"])[0]
    assert clipping == 0.125
    assert all((tuple(group["betas"]), group["eps"]) == ((0.5, 0.75), 1e-6) for group in groups)
    assert [group["weight_decay"] for group in groups] == [0.25, 0.0]


def test_momentum_and_schedule_may_change_at_a_resume(one_rank, corpus, tmp_path):
    shape = ["--n_layer", "1", "--n_head", "1", "--d_model", "32", "--seq_len", "16", "--eval_every", "0", "--data", str(corpus)]
    run = ["--deepspeed_config", "ds_configs/zero0_fp32.json", *shape, "--runs_dir", str(tmp_path), "--run_name", "r", "--set"]
    sgd = 'optimizer={"type": "SGD", "params": {"lr": 0.01, "momentum": %s}}'
    one_rank.train([*run, sgd % 0.9, "--steps", "3"])
    resumed = [*run, sgd % 0.5, "--set", "scheduler.type=WarmupLR", "--set", "scheduler.params={}", "--steps", "5", "--resume"]
    groups, _ = one_rank.run("tests.distributed.failure_jobs:settings_after", flags=resumed)[0]
    assert [group["momentum"] for group in groups] == [0.5] * len(groups)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--steps", "9"], "goes from 3.00e-04 (step 6) to "),
        (["--lr", "4e-3", "--steps", "7"], "goes from 3.00e-04 (step 6) to 4.00e-04"),
        (["--set", 'scheduler={"type":"WarmupLR"}', "--steps", "7"], "goes from 3.00e-04 (step 6) to 3.00e-03"),
        (["--steps", "6"], ""),
    ],
)
def test_a_resume_that_changes_the_learning_rate_says_both_rates(more, said, one_rank, corpus, tmp_path):
    """At the end of the run it says nothing, because no step is left."""
    shape = ["--n_layer", "1", "--n_head", "1", "--d_model", "32", "--seq_len", "16", "--eval_every", "0", "--data", str(corpus)]
    run = ["--deepspeed_config", "ds_configs/zero1_fp32.json", *shape, "--runs_dir", str(tmp_path), "--run_name", "r"]
    schedule = ["--warmup_steps", "2"]
    one_rank.train([*run, *schedule, "--lr", "3e-3", "--steps", "6"])
    lines = one_rank.train([*run, *schedule, "--lr", "3e-3", "--resume", *more])
    found = [line for line in (tmp_path / "r/log.txt").read_text().splitlines() if "warning: the learning rate" in line]
    assert len(found) == bool(said) and all(said in line and f"to {lines[6]['lr']:.2e}, " in line for line in found)


def test_a_resume_with_the_same_schedule_is_silent_about_the_rate(one_rank, corpus, tmp_path):
    """Also one to another length before the decay of `WarmupStableDecayTokens`."""
    shape = ["--n_layer", "1", "--n_head", "1", "--d_model", "32", "--seq_len", "16", "--eval_every", "0", "--data", str(corpus)]
    run = [
        "--deepspeed_config",
        "ds_configs/zero1_fp32.json",
        *shape,
        "--runs_dir",
        str(tmp_path),
        "--save_every",
        "4",
        "--warmup_steps",
        "2",
    ]
    for name, steps in (("WarmupCosineTokens", "8"), ("WarmupStableDecayTokens", "20"), ("WarmupDecayLR", "8")):
        again = [*run, "--run_name", name, "--set", f'scheduler={{"type":"{name}"}}', "--steps"]
        one_rank.train([*again, "8"])
        rewind(tmp_path / name, 4)
        one_rank.train([*again, steps, "--resume"])
        assert resumed_after(tmp_path / name) == 4 and "learning rate goes" not in (tmp_path / name / "log.txt").read_text()


def test_a_run_that_is_stopped_in_its_last_step_is_evaluated_once(one_rank, corpus, tmp_path):
    shape = ["--n_layer", "1", "--n_head", "1", "--d_model", "32", "--seq_len", "16", "--data", str(corpus)]
    run = [*shape, "--deepspeed_config", "ds_configs/zero1_fp32.json", "--runs_dir", str(tmp_path), "--run_name", "r", "--resume"]
    run += ["--steps", "6", "--eval_every", "3"]
    one_rank.run("tests.distributed.failure_jobs:pretrain_stopped_in", step=6, flags=run)
    for _ in range(2):
        lines = one_rank.train(run)
        assert [line["step"] for line in lines if line.get("val_loss")] == [0, 3, 6]
    read = read_run(tmp_path / "r")
    assert read.finished and not read.remarks and read.measures["final_val_loss"] == lines[-1]["val_loss"]


@pytest.mark.parametrize(("seen", "said"), [([True, True], ""), ([True, False], "rank 1 does not see this folder"), ([False, False], "")])
def test_a_run_folder_that_not_all_hosts_share_is_refused(seen, said, tmp_path, monkeypatch):
    """Before the first step. A job whose rank 0 has no folder needs none."""
    monkeypatch.setattr(checkpoint_module, "SEEN_SECONDS", 0.1)
    collectives = SimpleNamespace(gather=lambda own: seen)
    with pytest.raises(UsageError, match=f"{said}; all hosts must share --runs_dir") if said else contextlib.nullcontext():
        check_shared(tmp_path, collectives)


def test_a_host_with_an_earlier_copy_of_the_run_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_module, "SEEN_SECONDS", 0.1)
    (tmp_path / ".lock").write_text("process 7 on node1\n1\n")

    def gather(own: str | bool) -> list[str | bool]:
        """The answers of rank 0, and of this rank."""
        return ["process 7 on node0\n2\n" if isinstance(own, str) else True, own]

    with pytest.raises(UsageError, match="rank 1 does not see this folder"):
        check_shared(tmp_path, SimpleNamespace(gather=gather))


def test_a_checkpoint_whose_files_are_on_another_host_is_not_complete(tmp_path):
    (tmp_path / ".tmp-step-00000003/engine").mkdir(parents=True)
    entries = {"engine/of_another_rank.pt": {"bytes": 1, "xxh128": "0"}}
    checkpoints = Checkpoints.__new__(Checkpoints)
    with pytest.raises(OSError, match=r"of_another_rank.pt is not in this folder.* all hosts must share --runs_dir"):
        checkpoints._complete(tmp_path / ".tmp-step-00000003", tmp_path / "step-00000003", {"step": 3}, entries)
    assert not (tmp_path / "step-00000003").exists()


@pytest.mark.parametrize("stage", [pytest.param(stage, marks=[] if stage == 1 else pytest.mark.long) for stage in (0, 1, 2, 3)])
def test_the_rule_of_the_loss_scale_is_the_resumed_runs(stage, two_ranks, corpus, tmp_path):
    """The scale itself is that of the checkpoint."""
    shape = ["--n_layer", "1", "--n_head", "1", "--d_model", "32", "--seq_len", "16", "--eval_every", "0", "--data", str(corpus)]
    run = ["--deepspeed_config", f"ds_configs/zero{stage}_fp16.json", *shape, "--runs_dir", str(tmp_path), "--run_name", "r"]
    rule = {"initial_scale_power": 6, "loss_scale_window": 2, "min_loss_scale": 32}
    run += [text for key, value in rule.items() for text in ("--set", f"fp16.{key}={value}")]
    job = "tests.distributed.failure_jobs:loss_scaler_after"
    before = two_ranks.run(job, flags=[*run, "--steps", "4"])[0]
    changed = ["--set", "fp16.loss_scale_window=500", "--set", "fp16.min_loss_scale=1"]
    after = two_ranks.run(job, flags=[*run, *changed, "--steps", "6", "--resume"])[0]
    assert (before["scale_window"], before["min_scale"]) == (2, 32) and before["cur_scale"] == 128
    assert (after["scale_window"], after["min_scale"], after["cur_scale"]) == (500, 1, 128)


def test_a_resume_that_is_another_run_is_refused_and_changes_nothing(flags, finished):
    before = {path: path.read_bytes() for path in sorted(finished.rglob("*")) if path.is_file()}
    others = ["--seed", "7", "--n_layer", "3", "--global_batch_size", "8"]
    run = LaunchedRun(finished.parent, "r", 3, 1, [*flags, "--resume", *others])
    assert run.wait() == 2
    (fault,) = (line for line in run.output().splitlines() if line.startswith("error: "))
    theirs, own = "--seed 1, --global_batch_size 4, --n_layer 2", "--seed 7, --global_batch_size 8, --n_layer 3"
    assert f"{finished}: this run has {theirs}, and the command {own}; give the run's own values, or another --run_name" in fault
    assert "Traceback" not in run.output()
    assert before == {path: path.read_bytes() for path in sorted(finished.rglob("*")) if path.is_file()}


# --- damaged checkpoints, full disks -----------------------------------------------------------------------------------------------


def test_a_checkpoint_without_its_state_is_passed_over(train, flags, finished):
    (finished / "checkpoints/step-00000006/state.json").unlink()
    train(finished.parent, "r", [*flags, "--steps", "6", "--eval_every", "0", "--resume"])
    log = (finished / "log.txt").read_text()
    assert "resuming after step 3" in log and "step-00000006/state.json: is missing" in log
    assert [read_state(path)["step"] for path in complete_checkpoints(finished / "checkpoints")] == [3, 6]


@pytest.mark.parametrize("steps", ["12", "9"], ids=["beside-training", "at-the-end"])
@pytest.mark.long
def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_leaves_the_older_ones(steps, flags, finished):
    # Every file of the checkpoint is larger than what this job may write to a file, as on a disk that is full.
    run = LaunchedRun(
        finished.parent, "r", 1, 2, [*flags, "--steps", steps, "--eval_every", "0", "--resume"], under=("prlimit", "--fsize=60000")
    )
    assert run.wait() == 1, run.output()
    faults = [line for line in run.output().splitlines() if line.startswith("error: ")]
    assert any("step-00000009: could not be written" in line and "--resume" in line for line in faults)
    assert "Traceback" not in run.output()
    assert [read_state(path)["step"] for path in complete_checkpoints(finished / "checkpoints")] == [3, 6]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_is_full_beside_training_ends_all_ranks_together(rank, train, two_ranks, flags, tmp_path):
    run = ["--deepspeed_config", "ds_configs/zero1_fp32.json", "--runs_dir", str(tmp_path), "--run_name", "r", *TINY, *flags]
    run += ["--eval_every", "0"]
    assert two_ranks.run("tests.distributed.failure_jobs:pretrain_until_a_write_fails", flags=run, rank=rank, step=6) == [1, 1]
    assert [read_state(path)["step"] for path in complete_checkpoints(tmp_path / "r/checkpoints")] == [3]
    assert 6 <= json.loads((tmp_path / "r/metrics.jsonl").read_text().splitlines()[-1])["step"] <= 9, "noted too late"
    train(tmp_path, "r", [*flags, "--steps", "9", "--eval_every", "0", "--resume"])
    assert not list((tmp_path / "r/checkpoints").glob(".*"))


def test_the_newest_and_the_best_checkpoints_stay(train, flags, tmp_path):
    # A learning rate that ruins the model after a while: the best is not among the newest.
    ruin = ["--lr", "3", "--min_lr", "3", "--warmup_steps", "12", "--eval_every", "3", "--steps", "24"]
    train(tmp_path, "r", [*flags, *ruin])
    states = [read_state(path) for path in complete_checkpoints(tmp_path / "r/checkpoints")]
    lines = [json.loads(line) for line in (tmp_path / "r/metrics.jsonl").read_text().splitlines()]
    best = min((line for line in lines if line["step"] and "val_loss" in line), key=lambda line: line["val_loss"])["step"]
    assert best < 21 and [state["step"] for state in states] == [best, 21, 24]


# --- what a run has written, damaged or removed -----------------------------------------------------------------------------------


def test_a_damaged_line_costs_a_resume_no_other_line(train, flags, finished):
    """Only what the checkpoint does not have is cut, and a copy of it stays."""
    metrics = finished / "metrics.jsonl"
    texts = metrics.read_bytes().split(b"\n")[:6]
    texts[1] = texts[1].replace(b"step", b"st\xffep")
    texts[2] = json.dumps({key: value for key, value in json.loads(texts[2]).items() if key != "seconds"}).encode()
    metrics.write_bytes(b"\n".join([*texts, b'{"step": 7, "tok']))
    rewind(finished, 3)
    lines = train(finished.parent, "r", [*flags, "--steps", "6", "--eval_every", "0", "--resume"])
    assert [line["step"] for line in lines] == [1, 3, 4, 5, 6]
    assert metrics.read_bytes().split(b"\n")[:3] == texts[:3]
    assert (finished / "metrics.jsonl.cut").read_bytes().split(b"\n") == [*texts[3:], b'{"step": 7, "tok', b""]
    log = (finished / "log.txt").read_text()
    assert "4 line(s) beyond step 3 were cut off" in log and "metrics.jsonl.cut" in log


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


def test_without_anything_beyond_the_checkpoint_nothing_is_kept_aside(train, flags, finished):
    train(finished.parent, "r", [*flags, "--steps", "7", "--eval_every", "0", "--resume"])
    assert not list(finished.glob("*.cut"))


@pytest.mark.long
def test_a_run_whose_folder_is_removed_ends_in_one_line(flags, tmp_path):
    run = LaunchedRun(tmp_path, "r", 1, 1, [*flags, "--steps", "100000", "--save_every", "0"]).wait_for_step(2)
    while run.folder.exists():  # the run may make a file in it meanwhile
        shutil.rmtree(run.folder, ignore_errors=True)
    assert run.wait() == 1, run.output()
    (fault,) = (line for line in run.output().splitlines() if line.startswith("error: "))
    assert str(run.folder) in fault and "there is no checkpoint yet" in fault
    assert "Traceback" not in run.output() and not run.folder.exists()


@pytest.mark.long
def test_a_disk_that_is_full_before_the_first_checkpoint_promises_none(flags, tmp_path):
    run = LaunchedRun(tmp_path, "r", 1, 1, [*flags, "--steps", "1000", "--save_every", "0"], under=("prlimit", "--fsize=12000"))
    assert run.wait() == 1, run.output()
    (fault,) = (line for line in run.output().splitlines() if line.startswith("error: "))
    assert "could not be written" in fault and "there is no checkpoint yet" in fault
    assert "Traceback" not in run.output()


# --- whether a run has reached its end -------------------------------------------------------------------------------------------


def finish_of(run: Path) -> dict | None:
    return json.loads((run / "run.json").read_text())["finished"]


def test_run_json_says_whether_the_run_has_reached_its_end(train, flags, finished):
    assert (finish_of(finished)["step"], finish_of(finished)["tokens"]) == (6, 6 * 4 * 32)
    before = (finished / "run.json").read_bytes()
    again = RunFolder(finished, json.loads(before) | {"resume": True}, quiet=True)
    again.abandon()  # a resume that was refused after the folder was opened
    assert (finished / "run.json").read_bytes() == before
    again.begin(6)
    again.close()
    assert finish_of(finished) is None
    train(finished.parent, "r", [*flags, "--steps", "8", "--eval_every", "0", "--resume=must"])
    assert finish_of(finished)["step"] == 8


def test_a_finished_run_is_not_resumed_with_a_setting_that_no_step_would_use(finished):
    before = (finished / "run.json").read_bytes()
    said = json.loads(before) | {"resume": True, "lr": 0.5}
    with pytest.raises(UsageError, match=r"has finished, so no step would be trained with lr: 0\.\d+ -> 0\.5; give another --run_name"):
        RunFolder(finished, said, quiet=True)
    assert (finished / "run.json").read_bytes() == before
    RunFolder(finished, said | {"total_tokens": said["total_tokens"] + 1}, quiet=True).close()


def test_a_name_of_which_there_is_no_run_is_said_in_the_first_line(train, flags, finished):
    train(finished.parent, "rr", [*flags, "--steps", "2", "--eval_every", "0", "--resume"])
    first = (finished.parent / "rr" / "log.txt").read_text().splitlines()[0]
    assert f"{finished.parent / 'rr'} is a new run; did you mean 'r'?" in first
    assert "new run" not in (finished / "log.txt").read_text()


# --- two jobs on one folder ------------------------------------------------------------------------------------------------------


def description(resume: bool) -> dict:
    empty = {key: kind() for key, (kind,) in RUN_KEYS.items()}
    model = {"shape": vars(PRESETS["nano"].shape), "corpus": {"vocab_size": 1024}}
    return {**empty, **model, "created": "now", "resume": resume, "ranks": 1, "optimizer": {"type": "AdamW"}}


@pytest.mark.parametrize(
    ("here", "said"),
    [
        ({"vocab_size": 2048}, "vocab_size 2048, not 1024, other sources"),
        ({"sources": ["a"]}, "the same sources, prepared differently"),
    ],
)
def test_a_resume_with_another_corpus_says_what_differs(here, said, tmp_path):
    corpus = {"path": "data/a", "vocab_size": 1024, "sources": ["a"]}
    begin_run(tmp_path / "r", description(resume=False) | {"corpus": corpus})
    other = {"path": "data/b", "vocab_size": 1024, "sources": ["b"]} | here
    with pytest.raises(UsageError, match=f"--data data/b is not the corpus of this run, data/a: it has {said}; give the run's own"):
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


@pytest.mark.parametrize("name", [".lock", "log.txt", "loss.png", "metrics.jsonl", "metrics.jsonl.cut", "csv_monitor/loss.csv"])
def test_a_resume_does_not_write_through_a_link(name, finished, flags):
    outside, file = finished.parent / "outside", finished / name
    outside.write_text("mine")
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    file.symlink_to(outside)
    before = (finished / "run.json").read_bytes()
    monitor = ["--set", 'csv_monitor={"enabled": true}']
    run = ["--deepspeed_config", "ds_configs/zero1_fp32.json", "--runs_dir", finished.parent, "--run_name", "r", *TINY, *flags, *monitor]
    done = run_script("launch/pretrain.py", *run, "--steps", "7", "--resume")
    assert (done.returncode, done.stderr) == (
        2,
        f"error: {file}: is a link to {outside}, and a run writes its own files; remove the link\n",
    )
    assert outside.read_text() == "mine" and (finished / "run.json").read_bytes() == before


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
    """And of each resume when, by which command and commit, and with which runs it was interleaved."""
    first, later, latest = (
        {
            "created": f"day {day}",
            "command": ["pretrain.py", str(day)],
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
