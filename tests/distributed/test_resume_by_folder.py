"""`--resume FOLDER` and `--branch_from CHECKPOINT` repeat the flags of a run: what `run.json` records of them, and the same losses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from launch.config.flags import NOT_REPEATED
from launch.config.run_config import RunConfig, resolve
from launch.formats.checkpoint_files import complete_checkpoints
from launch.training.run_folder.provenance import describe_run
from launch.training.run_folder.run_json import resume_description
from recipes.registry import read_recipes
from tests.commands import ROOT, run_script
from tests.distributed.launched import TINY
from tests.helpers import losses, refusal, resumed_after, rewind
from tests.run_folders import lines, write_run
from tests.test_shipped_configs import CUDA_ONLY

SIX_STEPS = ["--global_batch_size", "4", "--steps", "6", "--save_every", "3", "--keep", "9"]


def record(folder: Path, config: RunConfig) -> dict[str, Any]:
    """Write the `run.json` of a run that was started, or resumed, with `config`, as training does; returns its content."""
    described = json.loads(json.dumps(describe_run(config)))
    if (folder / "run.json").exists():
        described, _ = resume_description(folder, described)
        (folder / "run.json").write_text(json.dumps(described))
    else:
        write_run(folder, described, lines())
    return described


def edit(run: Path, /, **values: Any) -> None:
    """Change entries of a run.json; None removes one."""
    described = json.loads((run / "run.json").read_text()) | values
    (run / "run.json").write_text(json.dumps({key: value for key, value in described.items() if value is not None}))


@pytest.fixture
def start(corpus, tmp_path, monkeypatch):
    """The configuration of a start with these flags, in the folder `tmp_path / "work"`, which has a JSON `my.json`."""
    work = tmp_path / "work"
    work.mkdir()
    shutil.copy(ROOT / "ds_configs/zero1_fp32.json", work / "my.json")
    (work / "corpus").symlink_to(corpus)
    monkeypatch.chdir(work)
    return lambda *flags: resolve([*map(str, flags)])[0]


def test_the_command_continues_from_another_folder_bit_for_bit(corpus, tmp_path):
    shutil.copy(ROOT / "ds_configs/zero1_fp32.json", tmp_path / "my.json")
    shutil.copytree(corpus, tmp_path / "data" / "stdlib")  # the default of --data
    flags = ["--deepspeed_config", "my.json", *TINY, *SIX_STEPS, "--run_name", "r", "--set", "gradient_clipping=0.5", "--quiet"]
    done = run_script("launch/pretrain.py", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    whole = curve(tmp_path / "runs/r")
    (tmp_path / "other").mkdir()
    rewind(tmp_path / "runs/r", 3)
    done = run_script("launch/pretrain.py", "--resume", "../runs/r", cwd=tmp_path / "other")
    assert done.returncode == 0, done.stderr
    assert resumed_after(tmp_path / "runs/r") == 3 and curve(tmp_path / "runs/r") == whole and len(whole) == 7
    changed = [line.split(": ")[1] for line in done.stdout.splitlines() if line.startswith("changed since this run was last started")]
    assert changed == ["config_file", "data", "runs_dir", "corpus.path"]


def curve(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: one.get(key) for key in ("step", "loss", "val_loss", "lr", "grad_norm")} for one in found]


def test_the_latest_flags_win_and_what_was_derived_follows_the_length(start, tmp_path):
    run = tmp_path / "work/runs/a"
    flags = ["--deepspeed_config", "my.json", "--data", "corpus", "--eval_batches", "3", "--quiet", "--run_name", "a"]
    first = start(*flags, "--steps", "100", "--lr", "1e-3", "--set", "gradient_clipping=0.5", "--set", "wall_clock_breakdown=true")
    record(run, first)
    assert start("--resume", "runs/a") == first.__class__(**{**vars(first), "resume": True, "quiet": False})
    record(run, start("--resume", run, "--tokens", 200 * 1024, "--set", "gradient_clipping=0.7", "--lr", "2e-3"))
    second = start("--resume", "runs/a/")
    assert (second.steps, second.eval_every, second.save_every, second.warmup_steps) == (200, 20, 50, 80)
    assert (second.lr, second.eval_batches, second.ds_config["gradient_clipping"]) == (2e-3, 3, 0.7)
    assert second.ds_config["wall_clock_breakdown"] and second.given["overrides"].count("gradient_clipping=0.7") == 1
    assert second.origins["lr"] == "runs/a/run.json"
    third = start("--resume", "./runs/a", "--steps", "50", "--set", "zero_optimization.stage=2")
    assert (third.steps, third.eval_every, third.zero_stage, third.origins["steps"]) == (50, 5, 2, "--steps")
    assert not NOT_REPEATED & third.given.keys() and not {"tokens"} & third.given.keys()


def test_must_is_a_word_and_a_folder_of_that_name_is_a_path(start, tmp_path):
    record(tmp_path / "work/must", start("--deepspeed_config", "my.json", "--data", "corpus", "--runs_dir", ".", "--run_name", "must"))
    assert start("--resume", "./must").run_name == "must"
    assert "give one of --deepspeed_config FILE" in refusal("--resume", "must")
    for folder in (".", str(tmp_path / "work/must")):
        with pytest.MonkeyPatch.context() as patched:
            patched.chdir(tmp_path / "work/must")
            edit(tmp_path / "work/must", folder=str(tmp_path / "work"))
            assert start("--resume", folder).run_name == "must"


def test_a_run_of_an_earlier_version_is_continued_by_its_command(start, tmp_path):
    flags = ["--deepspeed_config", "my.json", "--data", "corpus", "--run_name", "a", "--steps", "100", "--histogram_every", "5"]
    record(tmp_path / "work/runs/a", start(*flags[:-2]))
    command = ["launch/pretrain.py", "--local_rank=0", *flags]
    edit(tmp_path / "work/runs/a", flags=None, folder=None, command=command)
    assert start("--resume", "runs/a").steps == 100
    resumed = {"command": [*command, "--resume", "--steps", "70"], "changes": []}
    edit(tmp_path / "work/runs/a", resumes=[resumed])
    assert start("--resume", "runs/a").steps == 70


def test_a_json_that_has_changed_counts_and_one_that_is_gone_is_one_line(start, tmp_path, monkeypatch):
    run = tmp_path / "work/runs/a"
    record(run, start("--deepspeed_config", "my.json", "--data", "corpus", "--run_name", "a", "--set", "gradient_clipping=0.5"))
    values = json.loads(Path("my.json").read_text())
    Path("my.json").write_text(json.dumps(values | {"wall_clock_breakdown": True}))
    changed = start("--resume", "runs/a")
    assert changed.ds_config["wall_clock_breakdown"]
    assert "engine.wall_clock_breakdown: null -> true" in resume_description(run, json.loads(json.dumps(describe_run(changed))))[1]
    Path("my.json").unlink()
    assert "my.json: no such file" in refusal("--resume", str(run))
    other = start("--resume", "runs/a", "--deepspeed_config", str(ROOT / "ds_configs/zero3_bf16.json"))
    assert (other.zero_stage, other.ds_config["gradient_clipping"]) == (3, 0.5)


def test_the_flags_that_a_recipe_suggested_hold_in_another_folder(start, tmp_path, monkeypatch):
    shutil.copytree(ROOT / "recipes/modern_gpt", tmp_path / "work/mine")
    run = tmp_path / "work/runs/a"
    first = record(run, start("--recipe", "mine", "--data", "corpus", "--run_name", "a"))
    assert first["flags"]["architecture"] == "qwen3" and first["recipe"] == "mine"
    monkeypatch.chdir(tmp_path)
    for flags in ((), ("--recipe", ROOT / "recipes/zero_2"), ("--deepspeed_config", ROOT / "ds_configs/zero3_bf16.json")):
        resumed = start("--resume", run, *flags)
        assert resumed.shape.qk_norm and resumed.recipe == (None if "--deepspeed_config" in flags else "zero_2" if flags else "mine")
    shutil.rmtree(tmp_path / "work/mine")
    assert "mine: has no recipe.json" in refusal("--resume", str(run))


def test_a_branch_takes_the_flags_of_the_run(start, tmp_path):
    run = tmp_path / "work/runs/long"
    stable = 'scheduler={"type":"WarmupStableDecayTokens"}'
    record(run, start("--deepspeed_config", "my.json", "--data", "corpus", "--run_name", "long", "--seed", "7", "--set", stable))
    described = json.loads((run / "run.json").read_text())
    edit(run, flags=described["flags"] | {"init_from": "gpt2_folder"})  # the checkpoint has newer weights
    checkpoint = run / "checkpoints/step-00000020"
    checkpoint.mkdir(parents=True)
    branch = start("--branch_from", "runs/long/checkpoints/step-00000020", "--steps", "30")
    assert (branch.seed, branch.steps, branch.scheduler["type"]) == (7, 30, "WarmupStableDecayTokens")
    assert (branch.runs_dir, branch.run_name) == (str(run.parent), "long-from-step-00000020")
    assert start("--branch_from", checkpoint, "--run_name", "b", "--runs_dir", "new").runs_dir == "new"
    assert "no such checkpoint; give runs/NAME/checkpoints/step-00000300" in refusal("--branch_from", str(run))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--resume", "no/run"], "--resume no/run: no such folder; give the folder of a run, such as runs/first"),
        (["--resume", "launch"], "launch/run.json: cannot be read (No such file or directory); give a run folder, such as runs/first"),
        (["--resume", "launch", "--run_name", "r"], "--resume launch names the run; leave out --run_name and --runs_dir"),
    ],
)
def test_what_is_no_run_is_refused(flags, said):
    assert refusal(*flags) == f"error: {said}"


#: Recipes that train on a CPU.
ON_CPU = [recipe.name for recipe in read_recipes() if Path(recipe.config).stem not in CUDA_ONLY]


@pytest.mark.long
@pytest.mark.parametrize("name", ON_CPU)
def test_every_recipe_continues_by_its_folder_as_with_all_flags(name, corpus, two_ranks, tmp_path, request):
    flags = ["--recipe", f"recipes/{name}", *TINY, "--data", str(corpus), "--runs_dir", str(tmp_path), "--run_name", "r"]
    flags += ["--global_batch_size", "8", "--steps", "8", "--save_every", "4", "--eval_every", "3"]
    if name == "zero_infinity":
        request.getfixturevalue("drive")
        flags += ["--set", "zero_optimization.offload_param.buffer_size=1000000"]
    two_ranks.train(flags)
    rewind(tmp_path / "r", 4)
    shutil.copytree(tmp_path / "r", tmp_path / "by_flags" / "r")
    by_flags = two_ranks.train([*flags, "--runs_dir", str(tmp_path / "by_flags"), "--resume"])
    by_folder = two_ranks.train(["--resume", str(tmp_path / "r")])
    assert losses(by_folder) == losses(by_flags) and len(losses(by_folder)) >= 8
    assert [line.get("val_loss") for line in by_folder] == [line.get("val_loss") for line in by_flags]
    assert resumed_after(tmp_path / "r") == resumed_after(tmp_path / "by_flags/r") == 4
    (resume,) = json.loads((tmp_path / "r/run.json").read_text())["resumes"]
    assert [change for change in resume["changes"] if not change.startswith("commit: ")] == []
    assert complete_checkpoints(tmp_path / "r/checkpoints")
