"""The DeepSpeed JSONs that ship: named by what they are, complete, alike but for what their name says, and they train."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from launch.config.run_config import resolve
from launch.config.token_schedule import TOKEN_SCHEDULES
from launch.formats.files import read_json
from recipes.registry import read_recipe, recipe_names
from tests.helpers import recipe_flags, skip_unless_the_device_can

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "ds_configs").iterdir())
GRID = [f"zero{stage}_{precision}" for stage in range(4) for precision in ("fp32", "bf16", "fp16")]
TINY = ["--n_layer", "2", "--n_head", "2", "--d_model", "64", "--seq_len", "32", "--seed", "3"]


#: Those that only CUDA can do, and on how many GPUs they act.
CUDA_ONLY = {"fp8": 1, "tf32": 1, "zeropp": 2}


def values(name: str) -> dict:
    return read_json(ROOT / "ds_configs" / f"{name}.json")[0]


def test_the_grid_of_stages_and_precisions_is_there():
    assert set(GRID) <= {file.stem for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_is_named_by_its_stage_and_precision_or_by_its_recipe(file, corpus):
    assert file.suffix == ".json"
    config, _ = resolve(["--deepspeed_config", str(file), *recipe_flags(file), "--data", str(corpus), "--ranks", "2"])
    named = re.fullmatch(r"zero([0-3])_(fp32|bf16|fp16)", file.stem)
    if named:
        assert (config.zero_stage, config.precision) == (int(named[1]), named[2])
    else:
        assert file.stem in recipe_names()
        assert read_recipe(ROOT / "recipes" / file.stem).config == f"ds_configs/{file.name}"


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_is_complete_and_resolves(file, ranks, corpus):
    spelled_out = read_json(file)[0]
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"):
        assert key in spelled_out
    assert {"lr", "betas", "eps", "weight_decay"} <= set(spelled_out["optimizer"]["params"])
    assert set(spelled_out["scheduler"]["params"]) == set(TOKEN_SCHEDULES[spelled_out["scheduler"]["type"]])
    assert "stage" in spelled_out["zero_optimization"]
    ranks = max(ranks, spelled_out.get("sequence_parallel_size", 1))
    config, _ = resolve(["--deepspeed_config", str(file), *recipe_flags(file), "--data", str(corpus)], ranks=ranks)
    assert config.micro_batch_size * config.gradient_accumulation_steps * config.data_ranks == config.global_batch_size
    assert "auto" not in json.dumps([config.ds_config, config.optimizer, config.scheduler])


def test_the_grid_differs_in_nothing_but_stage_and_precision():
    def distinct(*sections: str) -> int:
        return len({json.dumps([values(name).get(key) for key in sections], sort_keys=True) for name in GRID})

    others = {key for name in GRID for key in values(name)} - {"zero_optimization", "fp16", "bf16"}
    assert (distinct(*others), distinct("zero_optimization"), distinct("fp16", "bf16")) == (1, 4, 3)


def flags(name: str, corpus: Path, tmp_path: Path, *more: str) -> list[str]:
    file = f"ds_configs/{name}.json"
    run = ["--data", str(corpus), "--runs_dir", str(tmp_path), *f"--run_name {name} --eval_every 0 --save_every 0".split()]
    return ["--deepspeed_config", file, *recipe_flags(ROOT / file), *TINY, *run, "--steps", "8", "--global_batch_size", "8", *more]


#: These build an extension of DeepSpeed for minutes (CPU-Adam, async_io), or are of the grid, where others show the same.
LONG = {"zero_infinity", *GRID} - {"zero1_bf16", "zero3_fp32", "zero0_fp16", "zero2_fp16"}
TRAINED = [file.stem for file in FILES if file.stem not in CUDA_ONLY]
QUICK = ("zero1_bf16", "zero3_fp32", "zero0_fp16", "one_bit_adam", "curriculum_learning")
MARKS = {**dict.fromkeys((name for name in TRAINED if name not in QUICK), "gate"), **dict.fromkeys(LONG, "long")}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=getattr(pytest.mark, MARKS[name])) if name in MARKS else name for name in TRAINED]
)
def test_it_trains_on_two_ranks(name, corpus, tmp_path, two_ranks, request):
    text, changes = (ROOT / "ds_configs" / f"{name}.json").read_text(), []
    if "nvme" in text:
        request.getfixturevalue("drive")
        changes = ["--set", "zero_optimization.offload_param.buffer_size=1000000"]  # five of them are locked in memory
    if '"fp16"' in text:
        changes = ["--set", "fp16.initial_scale_power=8"]  # no step is skipped
    run = flags(name, corpus, tmp_path, *changes)
    losses = [line["loss"] for line in two_ranks.train(run)]
    assert len(losses) == resolve(run, ranks=2)[0].steps_to_make >= 8
    assert all(math.isfinite(loss) for loss in losses)
    assert abs(losses[0] - math.log(1024)) < 0.2, "the first loss is that of a model that knows nothing"
    assert losses[-1] < losses[0] - 0.1


def test_those_that_need_cuda_are_those_that_say_so():
    explained = {file.stem: resolve(["--deepspeed_config", str(file), *recipe_flags(file), "--explain"], ranks=2)[0] for file in FILES}
    assert {name for name, config in explained.items() if config.cuda_only} == set(CUDA_ONLY)


@pytest.mark.cuda
@pytest.mark.parametrize(("name", "ranks"), CUDA_ONLY.items())
def test_it_trains_on_cuda(name, ranks, corpus, tmp_path, pools):
    run = flags(name, corpus, tmp_path)
    skip_unless_the_device_can(resolve([*run, "--explain"], ranks=ranks)[0])
    lines = pools.of(ranks).train(run)
    assert abs(lines[0]["loss"] - math.log(1024)) < 0.2
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.1
