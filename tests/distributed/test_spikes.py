"""`--spike_rule`: a stretch of garbage in the data is found, and its updates are skipped or its batches left out."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest

from launch.formats.checkpoint_files import complete_checkpoints, read_state, state_text
from launch.formats.tensor_files import load_tensors
from launch.training.spikes import DEVIATIONS, LIMIT, Window
from tests.helpers import losses, refusal, resumed_after

MODEL = "--n_layer 2 --n_head 2 --d_model 32 --seq_len 32 --micro_batch_size 2 --global_batch_size 4 --eval_every 0"
TRAINING = "--steps 90 --save_every 35 --lr 1e-2 --min_lr 1e-2 --warmup_steps 10"
FLAGS = [*MODEL.split(), *TRAINING.split()]
#: The steps whose batches are garbage: two in succession.
GARBAGE = (75, 76)
SAMPLES = (74 * 4, 76 * 4)


@pytest.fixture
def train(two_ranks, corpus, tmp_path) -> Callable[..., Any]:
    def train(name: str, *more: str, job: str = "pretrain_with_garbage", config: str = "zero1_fp32", **options: Any) -> Any:
        flags = ["--deepspeed_config", f"ds_configs/{config}.json", "--data", str(corpus), "--runs_dir", str(tmp_path), "--run_name", name]
        where = {"first": SAMPLES[0], "last": SAMPLES[1], **options}
        return two_ranks.run(f"tests.distributed.spike_jobs:{job}", flags=[*FLAGS, *flags, *more], **where)[0]

    return train


def spikes(lines: list[dict[str, Any]]) -> list[int]:
    return [line["step"] for line in lines if line.get("spike")]


LONG = ("zero2_fp16", "zero3_bf16", "zero_offload")


@pytest.mark.parametrize("config", ["zero1_fp32", *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_the_updates_of_garbage_are_skipped_at_every_stage(config, train):
    """The steps after it are bit for bit the earlier ones of a run without these batches; the learning rate is constant here."""
    without = train("without", "--spike_rule", "log", config=config, left_out=SAMPLES)
    logged = train("log", "--spike_rule", "log", config=config)
    skipped = train("skip", "--spike_rule", "skip", config=config)
    assert spikes(without) == [] and spikes(skipped) == list(GARBAGE) and spikes(logged)[0] == GARBAGE[0]
    before, after = GARBAGE[0] - 1, GARBAGE[1]
    assert losses(skipped)[:before] == losses(logged)[:before] == losses(without)[:before]
    assert skipped[before]["loss"] == logged[before]["loss"]  # the forward pass before the update
    assert losses(skipped)[after:] == losses(without)[before : before - after] != losses(logged)[after:]
    assert [line["lr"] for line in skipped] == [line["lr"] for line in without]
    assert [line["tokens"] for line in skipped] == [line["tokens"] for line in without]


@pytest.mark.long
def test_the_norm_of_a_skipped_step_is_that_of_its_gradients(train):
    lines = train("skip", "--spike_rule", "skip", "--set", "gradient_clipping=0", config="zero0_fp32")
    logged = train("log", "--spike_rule", "log", "--set", "gradient_clipping=0", config="zero0_fp32")
    assert spikes(lines) == list(GARBAGE)
    assert lines[GARBAGE[0] - 1]["grad_norm"] == logged[GARBAGE[0] - 1]["grad_norm"] != lines[GARBAGE[0] - 2]["grad_norm"]


@pytest.mark.parametrize("config", [pytest.param("zero1_fp32", marks=pytest.mark.gate), pytest.param("zero3_fp32", marks=pytest.mark.long)])
def test_a_rewound_run_is_bit_for_bit_the_run_without_these_batches(config, train, tmp_path):
    rewound = train("rewind", "--spike_rule", "rewind", config=config)
    without = train("without", config=config, left_out=(70 * 4, SAMPLES[1]))
    assert [line["step"] for line in rewound] == list(range(1, 91)) and spikes(rewound) == []
    assert losses(rewound) == losses(without)
    assert [line["grad_norm"] for line in rewound] == [line["grad_norm"] for line in without]
    log = (tmp_path / "rewind" / "log.txt").read_text()
    assert log.count("rewound to step 70") == 2


@pytest.mark.long
def test_both_rules_end_near_the_run_without_garbage(train):
    """Eight batches of garbage near the end of a run cost more than 0.1 of validation loss."""
    batch, steps = 16, 300
    first, last = ((steps - before) * batch for before in (23, 15))
    sizes = f"--n_layer 2 --n_head 2 --d_model 64 --seq_len 64 --micro_batch_size 8 --global_batch_size {batch}"
    length = f"--steps {steps} --save_every 200 --eval_every {steps} --eval_batches 16 --lr 5e-3 --min_lr 1e-3 --warmup_steps 30"

    def final_loss(name: str, rule: str, last: int = last) -> float:
        return train(name, *sizes.split(), *length.split(), "--spike_rule", rule, first=first, last=last)[-1]["val_loss"]

    clean = final_loss("clean", "off", last=first)
    ends = {rule: final_loss(rule, rule) - clean for rule in ("off", "skip", "rewind")}
    assert ends["off"] > 0.1, ends
    assert abs(ends["skip"]) < 0.02 and abs(ends["rewind"]) < 0.02, ends


@pytest.mark.parametrize("rule", [pytest.param(rule, marks=pytest.mark.gate) for rule in ("skip", "rewind")])
def test_a_resumed_run_with_the_rule_is_bit_for_bit(rule, train, tmp_path):
    """From a few steps before the garbage, also without the metrics: the checkpoint has the window of the steps before it."""
    whole = train("r", "--spike_rule", rule)
    shutil.rmtree(complete_checkpoints(tmp_path / "r" / "checkpoints")[-1])
    (tmp_path / "r" / "metrics.jsonl").unlink()
    resumed = train("r", "--spike_rule", rule, "--resume")
    assert resumed_after(tmp_path / "r") == 70
    assert losses(resumed) == losses(whole)[70:] and spikes(resumed) == spikes(whole)


@pytest.mark.gate
def test_a_checkpoint_of_an_earlier_version_begins_a_new_window(train, tmp_path):
    train("r", "--spike_rule", "skip")
    shutil.rmtree(complete_checkpoints(tmp_path / "r" / "checkpoints")[-1])
    checkpoint = complete_checkpoints(tmp_path / "r" / "checkpoints")[-1]
    state = read_state(checkpoint)
    del state["spike_window"]
    (checkpoint / "state.json").write_text(state_text(state, state["run_id"], state["ranks"], state["files"]))
    assert spikes(train("r", "--spike_rule", "skip", "--resume")) == []
    assert "the checkpoint has no losses of earlier steps" in (tmp_path / "r" / "log.txt").read_text()


@pytest.mark.gate
@pytest.mark.usefixtures("measured_text")
def test_a_run_that_rewinds_too_often_ends_with_the_checkpoint_that_its_name_says(train, tmp_path):
    """Not with the weights of the checkpoint that it was about to rewind to."""
    reason = train("r", "--spike_rule", "rewind", "--steps", "90", "--save_every", "70", job="ended_with_garbage", first=75 * 4, last=10**9)
    newest = complete_checkpoints(tmp_path / "r" / "checkpoints")[-1]
    engine = load_tensors(newest / "engine" / "mp_rank_00_model_states.pt")
    assert f"{LIMIT} rewinds" in reason and newest.name in reason
    assert engine["global_steps"] == read_state(newest)["step"] == 71


@pytest.mark.usefixtures("measured_text")
@pytest.mark.gate
def test_a_spike_that_has_no_good_checkpoint_before_it_is_skipped(train, tmp_path):
    folder, short = tmp_path / "r" / "checkpoints", ["--steps", "80", "--save_every", "70"]
    garbage = {"first": 75 * 4, "last": 76 * 4}
    lines = train("r", "--spike_rule", "rewind", *short, job="pretrain_and_lose_checkpoints", folder=str(folder), **garbage)
    assert losses(lines) == losses(train("skip", "--spike_rule", "skip", *short, **garbage)) and spikes(lines) == [76]
    assert "there is no checkpoint to rewind to" in (tmp_path / "r" / "log.txt").read_text()


@pytest.mark.gate
@pytest.mark.usefixtures("measured_text")
def test_a_rewind_also_sets_aside_the_checkpoints_that_the_resume_passed_over(train, tmp_path):
    folder, flags = tmp_path / "r" / "checkpoints", ["--spike_rule", "rewind", "--save_every", "70"]
    train("r", *flags, "--steps", "80")
    (folder / "step-00000080" / "state.json").unlink()
    garbage = {"first": 75 * 4, "last": 76 * 4}
    lines = train("r", *flags, "--steps", "80", "--resume", **garbage)
    assert resumed_after(tmp_path / "r") == 70 and lines[-1]["step"] == 80
    assert "rewound to step 70" in (tmp_path / "r" / "log.txt").read_text()
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000070", "step-00000080", "step-00000080.unusable"]


def test_the_window_starts_anew_after_many_spikes_in_succession():
    window = Window()
    for number in range(70):
        loss = 3 + number % 2 * 0.1
        assert window.deviations(loss) < DEVIATIONS
        window.add(loss, spike=False)
    found = window.deviations(9.0)
    assert found > DEVIATIONS
    for _ in range(LIMIT - 1):
        assert not window.add(9.0, spike=True)
        assert window.deviations(9.0) == found, "a spike is not in the window"
    assert window.add(9.0, spike=True)
    assert window.deviations(9.0) == 0


def test_the_window_has_the_last_128_steps_and_finds_nothing_in_fewer_than_64():
    """By hand: the standard deviation of n values, half of them 3 and half 3.1, is 0.05 sqrt(n / (n - 1))."""
    window = Window()
    for number in range(1000):
        assert (window.deviations(9.0) > 0) == (number >= 64)
        window.add(3 + number % 2 * 0.1 if number >= 500 else -50.0 - number, spike=False)
    assert window.deviations(3.35) == pytest.approx(0.3 / (0.05 * (128 / 127) ** 0.5))


@pytest.mark.parametrize("rule", ["skip", "rewind"])
def test_an_optimizer_that_counts_its_updates_is_refused(rule):
    assert "--spike_rule" in refusal("--recipe", "recipes/one_bit_adam", "--spike_rule", rule)
