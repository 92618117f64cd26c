"""What flags, DeepSpeed JSON and preset resolve to."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from launch.config.deepspeed_schema import deepspeed_schema
from launch.config.run_config import RunConfig, resolve
from launch.errors import UsageError
from launch.formats.files import read_json
from model.presets import PRESETS
from recipes.registry import technique_classes

pytestmark = pytest.mark.usefixtures("fixed_nano")

ROOT = Path(__file__).resolve().parents[1]
BASE = json.loads((ROOT / "ds_configs" / "zero1_bf16.json").read_text())
AUTO_WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}


@pytest.fixture
def resolved(tmp_path, corpus):
    """A function that resolves the shipped ZeRO-1 JSON with `changes` (dotted key -> value, None takes it out) and flags."""

    def run(*flags: str, ranks: int = 1, **changes: Any) -> RunConfig:
        values = copy.deepcopy(BASE)
        for key, value in changes.items():
            *sections, name = key.split(".")
            section = values
            for part in sections:
                section = section.setdefault(part, {})
            section[name] = value
            if value is None:
                del section[name]
        file = tmp_path / "engine.json"
        file.write_text(json.dumps(values, indent=2))
        return resolve(["--deepspeed_config", str(file), "--data", str(corpus), *flags], ranks=ranks)[0]

    return run


def test_auto_is_the_presets(resolved):
    config = resolved()
    assert (config.lr, config.steps, config.warmup_steps) == (3e-3, 300, 30)
    assert (config.global_batch_size, config.micro_batch_size, config.gradient_accumulation_steps) == (16, 16, 1)
    assert config.total_tokens == 300 * 16 * 128
    assert (config.zero_stage, config.precision) == (1, "bf16")
    assert config.optimizer == {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}
    assert config.scheduler["params"] == {"min_lr": pytest.approx(3e-4), "warmup_steps": 30, "total_tokens": config.total_tokens}
    assert resolved("--preset", "micro").lr == 1.5e-3


def test_a_run_is_evaluated_ten_times_and_saved_four_times_or_every_thousand_steps(resolved):
    runs = [resolved("--steps", steps) for steps in ("3", "300", "4000", "40000")]
    assert [run.eval_every for run in runs] == [1, 30, 400, 4000]
    assert [run.save_every for run in runs] == [1, 75, 1000, 1000]
    assert resolved("--steps", "40000", "--save_every", "3000").save_every == 3000


def test_a_run_of_many_epochs_has_a_note(resolved):
    config = resolved()
    (note,) = (note for note in resolved("--steps", "100000").notes if "trains on" in note)
    assert f"trains on each of its tokens {100_000 * 16 * 128 / config.corpus.train.n_tokens:,.0f} times" in note
    steps = 5 * config.corpus.train.n_tokens // (16 * 128)
    assert not any("trains on" in note for note in resolved("--steps", str(steps)).notes)


def test_ranks_with_another_corpus_or_configuration_are_refused(resolved):
    """A host on which the corpus, the command or the JSON differs; where the files lie may differ."""
    from launch.training.engine import _check_hosts  # imports torch and DeepSpeed

    def check(config: RunConfig, other: RunConfig | None = None) -> Any:
        own: list[Any] = []
        _check_hosts(other or config, cast("Any", SimpleNamespace(gather=lambda gathered: [own.append(gathered) or gathered])))
        theirs = own[0] if other else own[0] | {"corpus_fingerprint": "another"}
        _check_hosts(config, cast("Any", SimpleNamespace(gather=lambda gathered: [gathered, theirs])))

    config = resolved()
    check(config, resolved("--quiet"))
    drives = [{"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": path}} for path in ("/a", "/b")]
    check(*(resolved(zero_optimization=drive) for drive in drives))
    with pytest.raises(UsageError, match=r'rank 1 has corpus_fingerprint = "another", and rank 0 has "[0-9a-f]+"; .* files and corpus'):
        check(config)
    with pytest.raises(UsageError, match="rank 1 has seed = 7, and rank 0 has 1"):
        check(config, resolved("--seed", "7"))
    with pytest.raises(UsageError, match=r"rank 1 has engine.zero_optimization.stage = 2, and rank 0 has 1"):
        check(config, resolved(**{"zero_optimization.stage": 2}))


def test_a_flag_wins_over_the_preset(resolved):
    flags = ["--lr", "1e-4", "--min_lr", "0", "--steps", "50", "--warmup_steps", "0", "--global_batch_size", "8", "--d_model", "64"]
    config = resolved(*flags)
    assert (config.lr, config.steps, config.warmup_steps, config.global_batch_size) == (1e-4, 50, 0, 8)
    assert config.scheduler["params"]["min_lr"] == 0
    assert (config.shape.d_model, config.shape.n_layer) == (64, 4)


def test_a_preset_replaces_the_suggested_flags_of_a_recipe(corpus):
    """They are for a small model. The architecture of a recipe stays."""

    def run(recipe: str, *flags: str) -> RunConfig:
        return resolve(["--recipe", f"recipes/{recipe}", "--data", str(corpus), *flags], ranks=1)[0]

    suggested, sized = run("batch_size_warmup"), run("batch_size_warmup", "--preset", "gpt2", "--steps", "50")
    assert (suggested.lr, suggested.global_batch_size, suggested.steps) == (2e-3, 32, 125)
    assert (sized.lr, sized.global_batch_size, sized.steps) == (PRESETS["gpt2"].lr, PRESETS["gpt2"].global_batch_size, 50)
    assert run("fused_kernels", "--preset=nano").steps == PRESETS["nano"].steps
    assert run("modern_gpt", "--preset", "gpt2").architecture == "qwen3"


def test_a_concrete_value_stands(resolved):
    concrete = {"optimizer.params.lr": 1e-3, "scheduler.params.warmup_steps": 7, "train_batch_size": 8, "scheduler.params.min_lr": 1e-5}
    config = resolved(**concrete)
    assert (config.lr, config.warmup_steps, config.global_batch_size, config.scheduler["params"]["min_lr"]) == (1e-3, 7, 8, 1e-5)
    assert resolved("--lr", "0.001", **concrete).lr == 1e-3  # the flag says the same


@pytest.mark.parametrize(
    ("ranks", "given", "expected"),
    [
        # global, micro, accumulation as given (None: "auto") -> as resolved. The preset has 16 and at most 16.
        (1, (None, None, None), (16, 16, 1)),
        (2, (None, None, None), (16, 8, 1)),
        (2, (64, None, None), (64, 16, 2)),
        (2, (36, None, None), (36, 9, 2)),  # the largest micro-batch up to 16 that divides 18
        (1, (None, 4, None), (16, 4, 4)),
        (2, (None, None, 4), (16, 2, 4)),
        (2, (None, 3, 5), (30, 3, 5)),
        (4, (24, 2, None), (24, 2, 3)),
        (2, (24, None, 3), (24, 4, 3)),
        (4, (24, 2, 3), (24, 2, 3)),
    ],
)
def test_batch_arithmetic(ranks, given, expected, resolved):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = resolved(ranks=ranks, **{name: "auto" if value is None else value for name, value in zip(names, given, strict=True)})
    assert (config.global_batch_size, config.micro_batch_size, config.gradient_accumulation_steps) == expected
    assert tuple(config.ds_config[name] for name in names) == expected
    left_out = resolved(ranks=ranks, **dict(zip(names, given, strict=True)))
    assert (left_out.global_batch_size, left_out.micro_batch_size, left_out.gradient_accumulation_steps) == expected


@pytest.mark.parametrize(("tokens", "steps"), [(1, 1), (2047, 1), (2048, 1), (2049, 2), (20480, 10)])
def test_tokens_are_rounded_up_to_whole_steps(tokens, steps, resolved):
    config = resolved("--tokens", str(tokens))  # 16 x 128 = 2,048 tokens per step
    assert (config.steps, config.total_tokens) == (steps, steps * 2048)
    assert config.scheduler["params"]["total_tokens"] == steps * 2048
    in_the_json = resolved(**{"scheduler.params.total_tokens": tokens})
    assert (in_the_json.steps, in_the_json.total_tokens) == (steps, steps * 2048)
    assert in_the_json.origins["scheduler.params.total_tokens"].endswith(f": {tokens:,}, in whole steps") == bool(tokens % 2048)


def test_warm_up_of_a_short_run_is_at_most_40_percent_of_it(resolved):
    configs = [resolved("--steps", str(steps)) for steps in (1, 20, 74, 75, 3000)]  # the preset's is 30
    assert [config.warmup_steps for config in configs] == [1, 8, 29, 30, 30]
    assert [config.origins["scheduler.params.warmup_steps"] for config in configs[2:4]] == ["40% of the run", "preset nano"]


def test_deepspeeds_own_schedules_are_filled_as_transformers_fills_them(resolved):
    config = resolved("--steps", "40", "--lr", "0.01", scheduler={"type": "WarmupLR", "params": AUTO_WARMUP})
    assert config.scheduler == {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 16}}
    decay = {"type": "WarmupDecayLR", "params": AUTO_WARMUP | {"total_num_steps": "auto"}}
    assert resolved("--steps", "40", scheduler=decay).scheduler["params"]["total_num_steps"] == 40
    started = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "last_batch_iteration": -1}}
    assert resolved(scheduler=started).scheduler["params"]["last_batch_iteration"] == -1
    left_out = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 5}}
    assert resolved("--steps", "40", scheduler=left_out).scheduler["params"] == {"warmup_num_steps": 5, "total_num_steps": 40}
    assert resolved("--warmup_steps", "0", scheduler=decay).scheduler["params"]["warmup_num_steps"] == 1  # DeepSpeed refuses 0
    short = {"type": "WarmupDecayLR", "params": {"total_num_steps": 500}}
    for steps, flags in ((600, ("--warmup_steps", "600")), (1000, ())):  # DeepSpeed's default
        with pytest.raises(UsageError, match=f"warmup_num_steps.* is {steps}, and the schedule ends at step 500"):
            resolved("--tokens", "2e7", *flags, scheduler=short)


def test_a_set_value_is_a_number_only_as_a_whole(resolved):
    assert resolved("--set", "wandb.project=2024-run").ds_config["wandb"]["project"] == "2024-run"
    shape = ["--set", "scheduler.type=WarmupStableDecayTokens", "--set", "scheduler.params.decay_shape=1-sqrt"]
    assert resolved(*shape).scheduler["params"]["decay_shape"] == "1-sqrt"
    assert resolved("--set", "optimizer.params.eps=1e-6").optimizer["params"]["eps"] == 1e-6


def test_hugging_face_style_auto_inside_zero(resolved):
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    config = resolved("--d_model", "128", **{"zero_optimization.stage": 3} | {f"zero_optimization.{key}": "auto" for key in sizes})
    zero = config.ds_config["zero_optimization"]
    assert [zero[key] for key in sizes] == [128 * 128, 14745, 1280]  # hidden^2, 0.9 hidden^2, 10 hidden


@pytest.mark.parametrize(
    ("fp16", "bf16", "precision"),
    [("auto", "auto", "bf16"), ("auto", True, "bf16"), (True, "auto", "fp16"), ("auto", False, "fp32"), (False, "auto", "bf16")],
)
def test_auto_precision_is_bf16_unless_fp16_is_asked_for(fp16, bf16, precision, resolved, processor):
    processor("avx512_bf16")
    config = resolved(**{"fp16.enabled": fp16, "bf16.enabled": bf16})
    assert config.precision == precision
    assert [type(config.ds_config[key]["enabled"]) for key in ("fp16", "bf16")] == [bool, bool]


#: As transformers documents it: every value that the trainer knows is "auto", and the file serves fp16 and bf16.
HUGGING_FACE = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": AUTO_WARMUP},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        **dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"),
        **dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance"), 1e9),
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    **dict.fromkeys(("gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu"), "auto"),
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
SGD = BASE | {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, "zero_allow_untested_optimizer": True}
COSINE = BASE | {"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2}}}


@pytest.mark.parametrize(
    "values",
    [HUGGING_FACE, *(pytest.param(one, marks=pytest.mark.long) for one in (SGD, COSINE))],
    ids=["hugging_face", "sgd", "cosine"],
)
def test_what_is_resolved_trains(values, corpus, tmp_path, two_ranks):
    file = tmp_path / "engine.json"
    file.write_text(json.dumps(values))
    shape = ["--n_layer", "2", "--n_head", "2", "--d_model", "64", "--seq_len", "32", "--steps", "8", "--global_batch_size", "8"]
    run = ["--data", str(corpus), "--runs_dir", str(tmp_path), "--eval_every", "0", "--save_every", "0"]
    lines = two_ranks.train(["--deepspeed_config", str(file), *shape, *run])
    assert len(lines) == 8
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.03


@pytest.mark.parametrize(
    ("kind", "params", "weight"),
    [
        ("AdamW", {}, 10 - 0.1 * 0.5 * 10 - 0.1),
        ("Adam", {"amsgrad": True}, 10 - 0.1 * 0.5 * 10 - 0.1),  # DeepSpeed's, which decouples weight decay
        ("Adam", {"adam_w_mode": False}, 10 - 0.1),  # weight decay is a part of the gradient, which the first step divides by its size
    ],
)
def test_the_adam_that_is_built_is_that_of_the_json(kind, params, weight, resolved):
    """A first step at a rate of 0.1 and a weight decay of 0.5."""
    from launch.training.engine import _adam

    config = resolved(**{"optimizer.type": kind, "optimizer.params.lr": 0.1}, **{f"optimizer.params.{key}": params[key] for key in params})
    parameter = torch.nn.Parameter(torch.tensor([10.0]))
    adam = _adam(config, [{"params": [parameter], "weight_decay": 0.5}])
    assert adam is not None
    parameter.grad = torch.tensor([3.0])
    adam.step()
    assert float(parameter.detach()) == pytest.approx(weight)
    assert ("max_exp_avg_sq" in adam.state[parameter]) == params.get("amsgrad", False)


def test_set_changes_one_value(resolved):
    config = resolved(
        *("--set", "zero_optimization.stage=2", "--set", "gradient_clipping=0.5", "--set", "bf16.enabled=false"),
        *("--set", "optimizer.type=Adam", "--set", "optimizer.params.betas=[0.8, 0.9]", "--set", "steps_per_print=5"),
        *("--set", "gradient_clipping=0.25"),
    )
    assert (config.zero_stage, config.precision) == (2, "fp32")
    assert config.ds_config["gradient_clipping"] == 0.25  # the last one counts
    assert (config.optimizer["type"], config.optimizer["params"]["betas"]) == ("Adam", [0.8, 0.9])
    assert config.ds_config["steps_per_print"] == 5
    assert resolved("--set", "optimizer.params.lr=0.5").lr == 0.5


def test_a_decay_does_not_begin_within_the_warmup(resolved):
    run = ("--steps", "10", "--warmup_steps", "8", "--set", "scheduler.type=WarmupStableDecayTokens")
    resolved(*run, "--set", "scheduler.params.decay_fraction=0.2")
    for fraction, begin in ((0.249, "7.51"), (0.3, "7")):
        with pytest.raises(UsageError, match=f"would begin at step {begin}, within the warm-up of 8 steps"):
            resolved(*run, "--set", f"scheduler.params.decay_fraction={fraction}")


def test_documented_forms_that_people_have_keep_working(resolved):
    config = resolved(**{"optimizer.type": "adamw", "zero_optimization.reduce_bucket_size": 5e8, "steps_per_print": 2000})
    assert config.optimizer["type"] == "AdamW"
    assert config.ds_config["zero_optimization"]["reduce_bucket_size"] == 500_000_000
    assert type(config.ds_config["zero_optimization"]["reduce_bucket_size"]) is int
    off = resolved(amp={"enabled": False}, elasticity={"enabled": False}, sparse_gradients=False, autotuning={"enabled": False})
    assert not {"amp", "elasticity", "sparse_gradients"} & set(off.ds_config)  # DeepSpeed refuses them even when they are off
    assert resolved(gradient_clipping="auto").ds_config["gradient_clipping"] == 1.0
    assert resolved(gradient_clipping=None).ds_config["gradient_clipping"] == 1.0
    assert resolved(gradient_clipping=0).ds_config["gradient_clipping"] == 0


def test_the_launcher_says_how_many_ranks_there_are(monkeypatch, corpus):
    flags = ["--deepspeed_config", str(ROOT / "ds_configs/zero1_bf16.json"), "--data", str(corpus)]
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert resolve(flags)[0].ranks == 4
    with pytest.raises(UsageError, match="--ranks 2: the launcher started 4 ranks; start 2, or leave the flag out"):
        resolve([*flags, "--ranks", "2"])
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(UsageError, match="WORLD_SIZE is 'many'"):
        resolve(flags)
    monkeypatch.delenv("WORLD_SIZE")
    assert resolve([*flags, "--ranks", "2"])[0].ranks == 2
    assert resolve(flags)[0].ranks == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "two")
    with pytest.raises(UsageError, match="LOCAL_WORLD_SIZE is 'two'"):
        resolve([*flags, "--set", "zero_optimization.stage=3", "--set", "zero_optimization.zero_hpz_partition_size=auto"])


def test_a_reader_that_goes_away_leaves_no_traceback(corpus):
    script = f"'{sys.executable}' launch/pretrain.py --deepspeed_config ds_configs/zero1_bf16.json --data '{corpus}' --explain | true"
    done = subprocess.run(["bash", "-c", script + "; exit ${PIPESTATUS[0]}"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (141, "")


def test_positions_of_keys_are_known(tmp_path):
    file = tmp_path / "x.json"
    file.write_text('{\n "a": {"b": [1, {"c": "\\n{"}]},\n\n "d": 1.5e3, "e": {}\n}\n')
    value, lines = read_json(file)
    assert value == json.loads(file.read_text())
    assert lines == {("a",): 2, ("a", "b"): 2, ("a", "b", 1, "c"): 2, ("d",): 4, ("e",): 4}


def test_every_key_that_deepspeed_reads_has_a_rule():
    """A key that a new version of DeepSpeed reads by hand must be added to `READ_BY_HAND`."""
    from deepspeed.runtime.config import DeepSpeedConfig

    looked_for: set[str] = set()

    class Recorder(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            looked_for.add(key)
            return super().get(key, default)

        def __contains__(self, key: object) -> bool:
            looked_for.add(str(key))
            return super().__contains__(key)

        def keys(self) -> Any:
            return self

        def __copy__(self) -> Recorder:
            return self

    DeepSpeedConfig(Recorder(train_batch_size=1))
    schema = deepspeed_schema()
    old, of_recipes = {"bfloat16"}, {cls.declaration.section for cls in technique_classes()}
    of_initialize = {"data_parallel_size", "mesh_param"}
    assert looked_for - set(schema.removed) - old - of_recipes | of_initialize == set(schema.keys)


def test_the_peak_of_a_schedule_of_deepspeed_is_the_runs(resolved):
    """DeepSpeed's schedules overwrite the optimizer's rate at the first step, so theirs is the one to record and to explain."""
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 5}}
    config = resolved(scheduler=schedule, **{"optimizer.params.lr": 0.001})
    assert (config.lr, config.optimizer["params"]["lr"]) == (0.01, 0.01)
    (note,) = config.notes
    assert "'optimizer.params.lr' is 0.001 and is not used: WarmupLR sets the rate, up to its 'warmup_max_lr' of 0.01" in note
    assert resolved(scheduler=schedule).notes == ()  # "auto" follows the schedule
    assert resolved(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}}, **{"optimizer.params.lr": 0.5}).lr == 0.5
