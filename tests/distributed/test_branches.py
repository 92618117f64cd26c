"""`--branch_from`: a decay that is branched from a long run is, bit for bit, the run that decayed there from its start."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.config.run_config import RunConfig, resolve
from launch.errors import UsageError
from launch.formats.checkpoint_files import STATE_FILE, DamagedCheckpoint, state_text
from launch.training.checkpoints.branch import start_branch
from launch.training.run_folder.folder import open_run_folder
from launch.training.run_folder.provenance import describe_run
from recipes.registry import make_techniques
from recipes.technique import planned_steps
from tests.distributed.launched import TINY
from tests.run_folders import write_run

SCHEDULE = 'scheduler={"type":"WarmupStableDecayTokens","params":{"decay_fraction":0.4}}'
#: The values of "auto" in a run of 100 steps.
TOKENS = "batch_size_warmup.warmup_tokens=102400"
LTD = "random_ltd.random_ltd_schedule.schedule_config.require_steps=70"
ADAM_LR = "optimizer.params.adam_lr=0.0005"
CURRICULUM = "curriculum_learning.schedule_config.total_curriculum_step=40"


Flags = Callable[..., list[str]]


@pytest.fixture(scope="module")
def flags(corpus) -> Flags:
    def flags(runs: Path, name: str, *more: str) -> list[str]:
        run = [
            "--deepspeed_config",
            "ds_configs/zero1_fp32.json",
            *TINY,
            "--data",
            str(corpus),
            "--runs_dir",
            str(runs),
            "--run_name",
            name,
        ]
        run += ["--lr", "5e-3", "--warmup_steps", "3", "--keep", "9", "--save_every", "6", "--eval_every", "5", "--steps", "20"]
        return [*run, "--set", SCHEDULE, *more]

    return flags


@pytest.fixture(scope="module")
def long(two_ranks, flags, tmp_path_factory) -> Path:
    """A run of 30 steps, to be branched and not changed."""
    runs = tmp_path_factory.mktemp("runs")
    two_ranks.train(flags(runs, "long", "--steps", "30"))
    return runs / "long"


@pytest.fixture
def branch(flags, tmp_path) -> Callable[..., RunConfig]:
    """The configuration of the run "branch" of 20 steps from a checkpoint."""
    return lambda source, *more: resolve(flags(tmp_path, "branch", "--branch_from", str(source), *more), ranks=2)[0]


def of_steps(lines: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    keys = ("step", "tokens", "loss", "lr", "grad_norm", "val_loss")
    return [tuple(line.get(key) for key in keys) for line in lines]


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("links", [pytest.param(True, marks=pytest.mark.long), False])
def test_the_files_of_the_checkpoint_are_linked_or_copied(links, long, branch, tmp_path, monkeypatch):
    """Also where the checkpoints lie behind a link."""

    def refuse(*names: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    shutil.copytree(long, tmp_path / "long")
    (tmp_path / "long/checkpoints").rename(tmp_path / "elsewhere")
    (tmp_path / "long/checkpoints").symlink_to(tmp_path / "elsewhere")
    checkpoint = tmp_path / "long/checkpoints/step-00000012"
    config = branch(checkpoint)
    start_branch(config, tmp_path / "branch", describe_run(config))
    copied = tmp_path / "branch/checkpoints/step-00000012"
    names = sorted(digests(checkpoint).keys() - {STATE_FILE})
    assert len(names) > 3 and [digests(copied)[name] for name in names] == [digests(checkpoint)[name] for name in names]
    assert {(copied / name).samefile(checkpoint / name) for name in names} == {links}


def test_a_branched_decay_is_the_run_that_decayed_there(long, flags, two_ranks, tmp_path):
    before = digests(long)
    direct = two_ranks.train(flags(tmp_path, "direct"))
    branched = two_ranks.train(flags(tmp_path, "branch", "--branch_from", str(long / "checkpoints/step-00000012")))
    assert of_steps(branched) == of_steps(direct) and len(direct) == 21
    assert digests(long) == before
    runs = [json.loads((folder / "run.json").read_text()) for folder in (long, tmp_path / "branch")]
    assert runs[0]["run_id"] != runs[1]["run_id"] and runs[1]["branch_from"].endswith("long/checkpoints/step-00000012")
    again = two_ranks.train(flags(tmp_path, "branch", "--resume"))  # from its own last checkpoint
    assert of_steps(again) == of_steps(direct)


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("step-00000012", ["--steps", "18"], "the decay of this run begins"),
        ("step-00000024", ["--steps", "60"], "before its decay"),
        ("step-00000012", ["--lr", "4e-3"], "--lr"),
        ("step-00000012", ["--warmup_steps", "4"], "step 1 .*--warmup_steps"),  # both have the peak at step 12
        ("step-00000012", ["--seed", "2"], "--seed 1, .* of --branch_from$"),
        ("step-00000013", [], "no such checkpoint"),
    ],
)
def test_a_branch_that_would_be_another_run_is_refused(name, more, why, long, branch, tmp_path):
    before = digests(long)
    with pytest.raises(UsageError, match=why):
        open_run_folder(branch(long / "checkpoints" / name, *more), tmp_path / "branch")
    assert not list(tmp_path.iterdir()) and digests(long) == before


def test_the_next_start_removes_what_a_killed_one_has_copied(long, branch, flags, tmp_path):
    config = branch(long / "checkpoints/step-00000012")
    description = describe_run(config)
    if not (child := os.fork()):
        os.link = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
        start_branch(config, tmp_path / "branch", description)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert any(path.name.startswith(".branch.") for path in tmp_path.iterdir())
    (tmp_path / ".corpus.partial").mkdir()
    (tmp_path / ".corpus.lock").touch()
    folder = open_run_folder(resolve(flags(tmp_path, "other"), ranks=2)[0], tmp_path / "other")  # any start
    folder.abandon()
    folder.close()
    assert {path.name for path in tmp_path.iterdir()} == {".corpus.partial", ".corpus.lock"}
    start_branch(config, tmp_path / "branch", description)
    assert (tmp_path / "branch").is_dir()


def test_a_branch_from_a_damaged_checkpoint_is_refused(long, branch, tmp_path):
    shutil.copytree(long, tmp_path / "damaged")
    checkpoint = tmp_path / "damaged/checkpoints/step-00000012"
    file = max(checkpoint.rglob("*.pt"), key=lambda file: file.stat().st_size)
    with open(file, "r+b") as stream:  # its size stays
        stream.seek(-1000, os.SEEK_END)
        (byte,) = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))
    with pytest.raises(DamagedCheckpoint, match=f"^{re.escape(str(file))}: "):
        open_run_folder(branch(checkpoint), tmp_path / "branch")
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_a_resumed_branch_without_a_checkpoint_does_not_start_at_step_0(long, flags, two_ranks, tmp_path):
    (tmp_path / "branch/checkpoints").mkdir(parents=True)  # of a start that was killed
    with pytest.raises(Exception, match="no complete checkpoint"):
        two_ranks.train(flags(tmp_path, "branch", "--resume", "--branch_from", str(long / "checkpoints/step-00000006")))
    assert not (tmp_path / "branch/metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("settings", "changed", "why"),
    [
        (["muon"], ["optimizer.params.adam_lr=0.0005"], "optimizer.params.adam_lr = null.* leave it out"),
        (["muon"], ["optimizer.params.weight_decay=0"], "optimizer.params.weight_decay = 0.1"),
        (["muon"], ["optimizer.params.ns_steps=6"], "optimizer.params.ns_steps = null, and this run has 6; leave it out"),
        (["muon"], ["optimizer.params.ns_steps=6", "--unrecorded ns_steps"], "optimizer.params.ns_steps = null, and this run has 6"),
        (["muon"], ["optimizer.params.ns_steps=5", "--unrecorded ns_steps"], ""),
        (["muon"], ["--unrecorded adam_lr"], ""),
        (["muon"], ["optimizer.params.adam_lr=0.002", "--unrecorded adam_lr"], ""),  # the preset's lr
        (["muon"], ["gradient_clipping=0.5"], "gradient_clipping = 1.0, and this run has 0.5"),
        ([], ["random_ltd.enabled=true"], "techniques.random_ltd = null"),
        (["progressive_layer_drop"], ["progressive_layer_drop.theta=0.7"], "progressive_layer_drop.theta = 0.5"),
        (["progressive_layer_drop"], [], 'step 2 .* had theta = .* "auto" follows'),
        (["batch_size_warmup"], [], 'had tokens = .* "auto" follows'),
        (["random_ltd"], [], 'had .* "auto" follows'),
        (["curriculum_learning"], [], 'had tokens = .* "auto" follows'),
        (["muon"], ["zero_optimization.stage=1"], ""),
        (["progressive_layer_drop"], ["progressive_layer_drop.gamma=1.0"], ""),  # the value of the long run's "auto"
        (["batch_size_warmup"], [TOKENS], ""),
        (["fused_kernels"], ["fused_kernels.enabled=false"], ""),
        (["sequence_tiling"], ["sequence_tiling.tile=64"], ""),
        (["progressive_layer_drop"], ["progressive_layer_drop.gamma=1.0", "--ranks 2"], ""),
        (["batch_size_warmup"], [TOKENS, "--ranks 4"], ""),  # "auto" is 8 of 32 sequences at first, also with 4 ranks
        (["batch_size_warmup"], [TOKENS, "--ranks 16"], "had tokens = .* the ranks of a run"),
        (["batch_size_warmup"], [TOKENS, "batch_size_warmup.min_batch_size=1", "--long_ranks 2"], "step 1 .* had tokens"),
        (["muon"], ['--recorded {"spike_rule":"skip"}'], 'spike_rule = "skip", and this run has "off"'),
        (["muon"], ['--recorded {"spike_rule":"rewind"}'], 'spike_rule = "rewind"'),
        (["muon"], ['--recorded {"spike_rule":"log"}'], ""),
        (["muon"], ['--recorded {"spike_rule":null}'], ""),  # of an earlier version
        (["muon"], ['--recorded {"engine":null}'], "'engine' is null, must be an object"),
        # Equal rates do not suffice where a second rate is a multiple of them.
        (["muon"], ["optimizer.params.lr=0.004"], "step 1 .* had lr"),
        (["muon", ADAM_LR], [ADAM_LR, "optimizer.params.lr=0.004"], "optimizer.params.lr = 0.002, and this run has 0.004; give its value"),
        (["muon", ADAM_LR], [ADAM_LR, "--resumed optimizer.params.lr: 0.1 -> 0.2"], "a resume of the run that wrote it changed"),
        (["muon", ADAM_LR], [ADAM_LR], ""),
        (["muon"], ["--lost 7"], "lack tokens of step 7"),
        (["muon"], ["--evaluated 20"], ""),
        (["muon"], ["--evaluated 20", '--last {"lr":0.5}'], "step 20 .* had lr = 0.5"),
        (["muon"], ["--left_out 8"], "left out 8 samples"),
        (["muon"], ["--resumed optimizer.params.weight_decay: 0.1 -> 0.2"], "a resume of the run that wrote it changed"),
        (["muon"], ["--resumed optimizer.params.lr: 0.1 -> 0.2"], ""),
        (["batch_size_warmup"], [TOKENS, '--resumed techniques.batch_size_warmup.warmup_tokens: "auto" -> 102400'], ""),
        # What the metrics do not show is compared as it is written.
        (["random_ltd"], [LTD, "random_ltd.random_ltd_layer_id=[0,3]"], 'random_ltd_layer_id = "auto", and this run has .0, 3.'),
        (["random_ltd", "random_ltd.random_ltd_layer_id=[0,3]"], [LTD, "random_ltd.random_ltd_layer_id=auto"], "layer_id = .0, 3., and"),
        (["random_ltd"], [LTD], ""),
        (["curriculum_learning"], [CURRICULUM, 'curriculum_learning.mode="truncate"'], "curriculum_learning.mode = null"),
        (["curriculum_learning"], [CURRICULUM], ""),
    ],
)
def test_a_branch_with_other_settings_is_refused(settings, changed, why, corpus, tmp_path):
    options = dict(one.removeprefix("--").split(" ", 1) for one in changed if one.startswith("--"))
    changed = [one for one in changed if not one.startswith("--")]

    def config(steps: int, *sets: str, ranks: int = 1) -> Any:
        recipe = ["--recipe", f"recipes/{settings[0]}"] if settings else ["--deepspeed_config", "ds_configs/zero1_bf16.json"]
        batch = ["--global_batch_size", "32"] if settings[:1] == ["batch_size_warmup"] else []
        flags = [*recipe, "--data", str(corpus), "--preset", "nano", *batch, "--steps", str(steps), "--warmup_steps", "3"]
        flags += [word for one in (SCHEDULE, *sets) for word in ("--set", one)]
        return resolve([*flags, "--runs_dir", str(tmp_path)], ranks=ranks)[0]

    long = config(100, *settings[1:], ranks=int(options.get("long_ranks", 1)))
    checkpoint = tmp_path / "long/checkpoints/step-00000020"
    steps = [one for one in planned_steps(long, make_techniques(long)) if one.number <= 20]
    lines = [
        {"step": one.number, "tokens": one.consumed, "seconds": 1.0, "lr": long.token_schedule.rate(one.consumed), **one.reported}
        for one in steps
    ]
    lines[-1] |= json.loads(options.get("last", "{}"))
    lines = [one for one in lines if one["step"] != int(options.get("lost", 0))]
    lines += [
        {"step": int(step), "tokens": steps[-1].consumed, "seconds": 1.0, "val_loss": 5.0} for step in [options.get("evaluated")] if step
    ]
    described = describe_run(long) | {"resumes": [{"changes": [options["resumed"]]}] if "resumed" in options else []}
    described["optimizer"]["params"].pop(options.get("unrecorded"), None)
    described |= json.loads(options.get("recorded", "{}"))
    write_run(tmp_path / "long", described, lines)
    checkpoint.mkdir(parents=True)
    samples = sum(one.work.sequences * long.ranks for one in steps) + int(options.get("left_out", 0))
    state = {"step": 20, "tokens": steps[-1].consumed, "samples": samples, "val_loss": None}
    (checkpoint / STATE_FILE).write_text(state_text(state, described["run_id"], 1, {}))
    short = replace(config(50, *changed, ranks=int(options.get("ranks", 1))), branch_from=str(checkpoint))
    if why:
        with pytest.raises(UsageError, match=why):
            start_branch(short, tmp_path / "short", describe_run(short))
    else:
        start_branch(short, tmp_path / "short", describe_run(short))
        assert (tmp_path / "short/run.json").is_file()
