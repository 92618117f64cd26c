"""`--explain` says what will happen, each value with where it came from; without a launcher, without a corpus."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from launch.config.explain import as_text, explain
from launch.config.run_config import resolve
from model.accounting import flops_per_token, parameter_count
from model.presets import PRESETS, GPTConfig
from recipes.progressive_layer_drop.technique import draws
from recipes.technique import Declaration, Technique, Techniques
from tests.helpers import recipe_flags

ROOT = Path(__file__).resolve().parents[1]
LARGE = ["--deepspeed_config", "ds_configs/zero3_bf16.json", "--preset", "gpt3-13b", "--ranks", "64"]


@pytest.fixture
def explained(corpus, tmp_path):
    """A function that explains a run of a small JSON with flags."""

    def run(*flags: str, **changes) -> dict:
        file = tmp_path / "engine.json"
        values = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.99]}}, "zero_optimization": {"stage": 2}}
        file.write_text(json.dumps(values | changes, indent=1))
        return explain(resolve(["--deepspeed_config", str(file), "--data", str(corpus), *flags])[0])

    return run


def came_from(page: dict) -> dict[str, str]:
    return {key: item["from"] for key, item in {**page["run"], **page["engine"]}.items()}


def test_each_value_says_where_it_came_from(explained, processor):
    processor("avx512_bf16")
    origins = came_from(
        explained("--lr", "0.002", "--n_layer", "3", "--set", "zero_optimization.overlap_comm=false", bf16={"enabled": "auto"})
    )
    assert origins["optimizer.params.lr"] == "--lr"
    assert origins["optimizer.params.betas"] == "line 6"
    assert origins["optimizer.params.eps"] == "GPT-3, appendix B"
    assert origins["zero_optimization.stage"] == "line 13"
    assert origins["zero_optimization.overlap_comm"] == "--set"
    assert origins["zero_optimization.sub_group_size"] == "DeepSpeed's default"
    assert origins["bf16.enabled"] == "auto: this processor has avx512_bf16"
    assert origins["train_batch_size"] == "preset nano"
    assert origins["scheduler.params.min_lr"] == "a tenth of the peak"
    assert origins["n_layer"] == "--n_layer"
    assert origins["d_model"] == "preset nano"
    assert origins["seed"] == "default"


def test_the_clipping_that_nobody_asked_for_is_named(explained):
    assert explained()["engine"]["gradient_clipping"] == {"value": 1.0, "from": "DeepSpeed's default"}
    assert explained(gradient_clipping=0.5)["engine"]["gradient_clipping"] == {"value": 0.5, "from": "line 15"}


def test_a_recipes_own_flags_are_told_from_the_users(corpus, monkeypatch, tmp_path):
    folder = tmp_path / "some_recipe"
    folder.mkdir()
    fields = json.loads((ROOT / "recipes" / "zero_2" / "recipe.json").read_text()) | {"flags": ["--steps", "50", "--lr", "0.001"]}
    (folder / "recipe.json").write_text(json.dumps(fields))
    page = explain(resolve(["--recipe", str(folder), "--lr", "0.003", "--data", str(corpus)])[0])
    assert page["run"]["steps"] == {"value": 50, "from": str(folder / "recipe.json")}
    assert page["engine"]["optimizer.params.lr"] == {"value": 0.003, "from": "--lr"}


@pytest.mark.parametrize(
    ("flags", "changes", "origin"),
    [
        (["--steps", "7"], {}, "--steps"),
        (["--tokens", "9000"], {}, "--tokens"),
        ([], {}, "preset nano"),
        ([], {"scheduler": {"type": "WarmupCosineTokens", "params": {"total_tokens": 2048, "warmup_steps": 0}}}, "line 18, 'total_tokens'"),
    ],
    ids=str,
)
def test_the_length_says_where_it_came_from(flags, changes, origin, explained):
    assert explained(*flags, **changes)["run"]["steps"]["from"] == origin


def test_every_key_of_the_json_and_every_default_of_its_sections_is_there(explained):
    page = explained()
    for key in ("zero_optimization.stage3_param_persistence_threshold", "zero_optimization.reduce_scatter", "wall_clock_breakdown"):
        assert page["engine"][key]["from"] == "DeepSpeed's default"
    assert not [key for key in page["engine"] if key.startswith(("aio", "flops_profiler"))], "nobody switched these sections on"


def test_the_arithmetic_is_that_of_the_model(corpus):
    config, _ = resolve([*LARGE, "--explain", "--data", str(corpus), "--seq_len", "128"])
    page = explain(config)
    model = GPTConfig(**vars(config.shape), vocab_size=config.vocab_size)
    assert page["model"]["parameters"] == parameter_count(model)
    assert page["flops"]["per_token"] == flops_per_token(model)
    assert page["batch"]["tokens_per_step"] == 1024 * 128
    assert page["flops"]["per_step"] == flops_per_token(model) * 1024 * 128
    assert page["flops"]["per_step_and_rank"] * 64 == page["flops"]["per_step"]


def test_a_run_is_explained_without_its_corpus(tmp_path):
    config, _ = resolve([*LARGE, "--explain", "--data", str(tmp_path / "none")])
    assert config.vocab_size == 50_257
    (missing,) = explain(config)["lacks"]
    assert "a vocabulary of 50,257 is assumed" in missing
    assert "Missing on this machine" in as_text(explain(config))


def test_what_is_accepted_with_a_word_is_in_the_page(explained):
    (note,) = explained(autotuning={"enabled": True})["notes"]
    assert "'autotuning' has no effect here" in note
    assert note in as_text(explained(autotuning={"enabled": True}))


class Ramp(Technique):
    """A schedule: from 0 to 1 over the run."""

    def __init__(self, section, run):
        self.steps, self.at = run.steps, 0.0

    def on_step(self, step, plan):
        self.at = step / self.steps
        return plan

    def metrics(self) -> dict[str, float]:
        return {"ramp": self.at}


def test_the_table_over_the_run_asks_the_techniques(explained, monkeypatch):
    monkeypatch.setattr("recipes.registry.make_techniques", lambda run: Techniques([Ramp({}, run)]))
    rows = explained("--steps", "100", "--lr", "0.01", "--warmup_steps", "10")["over_the_run"]
    assert [row["percent"] for row in rows] == [0, 25, 50, 75, 100]
    assert [row["step"] for row in rows] == [1, 25, 50, 75, 100]
    assert [row["ramp"] for row in rows] == [0.01, 0.25, 0.5, 0.75, 1.0]
    assert rows[0]["lr"] == pytest.approx(0.001)
    assert rows[-1]["lr"] == pytest.approx(0.001)
    assert rows[1]["lr"] > rows[2]["lr"] > rows[3]["lr"]


def test_a_technique_that_changes_the_tokens_of_a_step_must_declare_it(explained, monkeypatch):
    """The length of the run, its progress and the schedule would be wrong."""

    class Short(Ramp):
        def on_step(self, step, plan):
            return plan._replace(seq_len=plan.seq_len // 2)

    monkeypatch.setattr("recipes.registry.make_techniques", lambda run: Techniques([Short({}, run)]))
    with pytest.raises(AssertionError, match=r"Short\.on_step changes the tokens of step 1 .* changes_tokens=True"):
        explained("--steps", "100")
    declared = Declaration(section="short", changes_tokens=True)
    monkeypatch.setattr(Short, "declaration", declared)
    assert explained("--steps", "100")["length"]["steps"] == 200


def test_without_a_technique_the_run_has_the_steps_that_were_asked_for(explained):
    page = explained("--steps", "3")
    assert [row["step"] for row in page["over_the_run"]] == [1, 1, 2, 3, 3]
    assert page["length"]["steps"] == 3
    assert page["flops"]["run"] == 3 * page["flops"]["per_step"]


@pytest.mark.parametrize("mode", ["truncate", "reshape"])
def test_steps_and_flops_of_the_run_are_those_of_what_is_left_to_train_on(mode, corpus, explained):
    """By hand: 10 steps of 8 sequences are 10,240 tokens at length 128. Four steps at length 48, and all blocks but the last."""
    curriculum = {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [48, 128], "max_step": [4]}, "mode": mode}
    page = explained("--steps", "10", curriculum_learning=curriculum)
    # A row of each sequence, or two: 4 x 8 x 48 = 1,536 tokens, or 3,072. The rest are whole steps of 1,024.
    short, full = (1536, 9 * 1024) if mode == "truncate" else (3072, 7 * 1024)
    model = resolve(["--deepspeed_config", "ds_configs/zero1_bf16.json", "--data", str(corpus)])[0].model_config
    assert page["length"]["steps"] == 4 + full // 1024
    assert page["over_the_run"][-1]["tokens"] == short + full
    assert page["flops"]["run"] == short * flops_per_token(model, 48) + full * flops_per_token(model)


def test_blocks_that_are_dropped_cost_nothing(corpus, explained):
    page = explained("--steps", "10", progressive_layer_drop={"theta": 0, "gamma": 1000})
    model = resolve(["--deepspeed_config", "ds_configs/zero1_bf16.json", "--data", str(corpus)])[0].model_config
    # theta is 1 in the first step, and then 0: of nano's four blocks i is kept with 1 - i / 4.
    kept = [4, *(sum(number < 1 - layer / 4 for layer, number in enumerate(draws(1, step, 4))) for step in range(2, 11))]
    assert sum(kept) < 35
    assert page["flops"]["run"] == 1024 * sum(flops_per_token(model, kept_blocks=blocks) for blocks in kept)


def test_the_text_has_every_value_and_fits_the_terminal(explained):
    page = explained("--steps", "100")
    text = as_text(page, full=True)
    for key, item in {**page["run"], **page["engine"]}.items():
        (line,) = [line for line in text.splitlines() if line.split()[:1] == [key] and item["from"] in line]
        assert item["from"] in line
    assert max(map(len, text.splitlines())) <= 140
    short = as_text(page)
    assert "zero_optimization.stage " in short and "gradient_clipping " in short and "sub_group_size" not in short
    assert len(text.splitlines()) - len(short.splitlines()) > 20


@pytest.mark.gate
def test_it_prints_nothing_else_makes_nothing_and_is_quick(tmp_path):
    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    start = spent()
    subprocess.run([sys.executable, "-c", "import deepspeed"], cwd=ROOT, capture_output=True, check=True, env=environment)
    imported = spent()
    command = [sys.executable, "launch/pretrain.py", *LARGE, "--explain", "json", "--runs_dir", str(tmp_path / "runs")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment)
    assert spent() - imported < 2 * (imported - start), "little more than the import of DeepSpeed"
    assert done.stderr == "" and json.loads(done.stdout)["batch"]["ranks"] == 64
    assert not (tmp_path / "runs").exists()


OF_EACH_ARCHITECTURE = {preset.architecture: name for name, preset in PRESETS.items()}.values()


@pytest.mark.parametrize(
    ("preset", "files"),
    [
        *((name, "*") for name in OF_EACH_ARCHITECTURE),
        *((name, "zero3_bf16") for name in PRESETS if name not in OF_EACH_ARCHITECTURE),
        *(pytest.param(name, "*", marks=pytest.mark.long) for name in PRESETS if name not in OF_EACH_ARCHITECTURE),
    ],
)
def test_every_preset_and_shipped_json_is_explained(preset, files, tmp_path):
    for file in sorted((ROOT / "ds_configs").glob(f"{files}.json")):
        if file.stem == "sequence_parallel" and PRESETS[preset].shape.n_head % 2:
            continue  # two ranks cannot share 25 heads
        if file.stem == "fp8" and PRESETS[preset].architecture in ("mixtral", "qwen3_moe"):
            continue  # refused
        if file.stem == "zero_infinity" and preset == "mixtral-8x7b":
            continue  # a rank's part of the experts is larger than the JSON's buffers
        flags = ["--deepspeed_config", str(file), *recipe_flags(file), "--preset", preset, "--ranks", "8", "--explain"]
        flags += ["--data", str(tmp_path), "--steps", "2000"]
        assert as_text(explain(resolve(flags)[0])).startswith(str(file))


def test_a_run_without_techniques_says_so(explained):
    assert "Over the run (no technique)" in as_text(explained())
