"""`launch/plan.py` explains any size at once, and refuses mistakes in one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch import plan as plan_command
from launch.config.explain import explain
from launch.config.memory import bytes_sent_per_step, memory_per_rank, parameter_sizes
from launch.config.run_config import RunConfig, resolve
from model.accounting import parameter_count
from model.presets import PRESETS, GPTConfig
from recipes.registry import make_techniques
from recipes.technique import planned_steps
from tests.commands import run_script
from tests.helpers import run_here

ROOT = Path(__file__).resolve().parents[1]


def run_with(zero: dict[str, Any], ranks: int = 1) -> RunConfig:
    """A bf16 run of one sequence a rank with another section `zero_optimization`."""
    flags = ["--deepspeed_config", "ds_configs/zero0_bf16.json", "--explain", "--micro_batch_size", "1", "--global_batch_size", str(ranks)]
    run = resolve(flags, ranks=ranks)[0]
    return replace(run, ds_config=run.ds_config | {"zero_optimization": zero}, save_every=0)


def plan(*arguments: str) -> subprocess.CompletedProcess:
    return run_script("launch/plan.py", *arguments)


def test_a_plan_has_a_column_for_every_stage_and_says_what_fits():
    done = plan(
        "--preset", "gpt3-13b", "--vocab_size", "50257", "--ranks", "64", "--memory", "80GB", "--offload", "optimizer", "--device", "cuda"
    )
    assert (done.returncode, done.stderr) == (0, "")
    headings = re.split(r" {2,}", done.stdout.splitlines()[3].strip())
    assert headings == ["ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3", *(f"ZeRO {stage} + optimizer" for stage in (1, 2, 3))]
    for row in ("weights", "gradients", "master weights", "activations", "activations, checkpointed", "peak", "sent a step, mean"):
        assert f"\n  {row} " in done.stdout
    # 12.6 G parameters x 16 bytes of model states alone are 202 GB.
    fit = "In 80 GB (74.51 GiB) a rank fit: ZeRO 1 (85% full), ZeRO 2 (54% full), ZeRO 3 (25% full), "
    assert done.stdout.splitlines()[-1].startswith(fit)


def test_the_times_are_those_of_what_fits_with_checkpointing_too():
    done = plan("--preset", "gpt3-13b", "--vocab_size", "50257", "--gpus", "64", "--memory", "60GB", "--device", "h100")
    *_, times = done.stdout.split("Time of ")
    assert re.split(r" {2,}", times.splitlines()[2].strip()) == ["ZeRO 2", "ZeRO 3", "ZeRO 1 checkpointed"]
    days = [float(day) for day in re.search(r"\n  days +(.*)", times)[1].split()]
    assert days[0] == days[1] < days[2] < 1.4 * days[0]  # a third more arithmetic in the blocks
    assert times.endswith(" With --set activation_checkpointing.enabled=true also ZeRO 1 (93% full).\n")


@pytest.mark.gate
def test_a_full_disk_is_one_line():
    words = [sys.executable, "launch/plan.py", "--preset", "nano", "--device", "cpu"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "error: the output: No space left on device; free some space, and repeat the command\n")


def test_a_plan_as_json_has_a_column_for_every_stage():
    done = plan("--preset", "nano", "--json", "--memory", "1000GB")
    assert done.stderr == ""
    planned = json.loads(done.stdout)
    assert set(planned["columns"]) == {"ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3"} == set(planned["fit"])
    assert planned["fit_checkpointed"] == []
    large = ("--preset", "gpt3-13b", "--ranks", "64", "--device", "cuda", "--memory", "80GB")
    checkpointed = json.loads(plan(*large, "--json", "--set", "activation_checkpointing.enabled=true").stdout)
    assert "ZeRO 0" not in [*checkpointed["fit"], *checkpointed["fit_checkpointed"]], "it does not fit with what it has already"


def test_a_column_is_what_explain_says_of_the_same_run(corpus):
    """The batch, the buffers and the vocabulary of a plan are those that `launch/pretrain.py` would take."""
    flags = ["--preset", "micro", "--ranks", "4", "--data", str(corpus), "--global_batch_size", "32", "--micro_batch_size", "2"]
    planned = json.loads(plan(*flags, "--json", "--device", "cpu").stdout)
    explained = explain(resolve(["--deepspeed_config", "ds_configs/zero2_bf16.json", *flags])[0])
    column = planned["columns"]["ZeRO 2"]
    assert column.pop("sent") == explained["bytes_sent_per_step"]
    assert column == explained["memory_per_rank"]["cpu"]
    assert (planned["micro_batch_size"], planned["gradient_accumulation_steps"]) == (2, 4)
    assert planned["model"]["vocab_size"] == 1024
    assert json.loads(plan(*flags, "--json", "--vocab_size", "50257").stdout)["model"]["vocab_size"] == 50_257


def test_explain_has_the_mean_of_the_bytes_of_steps_that_differ(corpus):
    flags = ["--recipe", "recipes/batch_size_warmup", "--global_batch_size", "32", "--micro_batch_size", "2", "--ranks", "2"]
    flags += ["--steps", "50", "--lr", "1e-3", "--data", str(corpus), "--set", "zero_optimization.stage=2"]
    config = resolve(flags)[0]
    accumulations = [steps.work.accumulation for steps in planned_steps(config, make_techniques(config)) for _ in range(steps.repeats)]
    assert set(accumulations) == {2, 4, 6, 8}
    sent = [bytes_sent_per_step(config, config.model_config, accumulation) for accumulation in accumulations]
    assert explain(config)["bytes_sent_per_step"] == pytest.approx(sum(sent) / len(sent), abs=1)


def test_explain_names_what_the_plan_does_not_count(corpus):
    def notes(*settings):
        flags = ["--deepspeed_config", "ds_configs/zero2_bf16.json", "--data", str(corpus), *(f"--set={one}" for one in settings)]
        return [note for note in explain(resolve(flags)[0])["notes"] if "the plan ignores" in note]

    assert notes() == notes("communication_data_type=bf16") == notes("data_types.grad_accum_dtype=fp32") == []
    (first,) = notes("communication_data_type=fp32")
    assert "'communication_data_type'" in first


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--presett", "nano"], "unknown argument '--presett'; did you mean '--preset'?; see --help"),
        (["--preset", "gpt3-13"], "--preset gpt3-13: no such preset; did you mean 'gpt3-13b'?"),
        (["--precision", "bf15"], "--precision: invalid choice: 'bf15' (choose from 'fp32', 'bf16', 'fp16'); did you mean 'bf16'?"),
        (["--offload", "optimiser"], "did you mean 'optimizer'?"),
        (["--memory", "80"], "--memory: '80' is not an amount of memory; write 80GB or 24GiB"),
        (["--memory", "0.00GB"], "is not an amount of memory"),
        (["--d_model", "100", "--n_head", "3"], "d_model must be a multiple of n_head"),
        (["--ranks", "0"], "--ranks: 0 is out of range"),
        (["--longest_sequence"], "which is not given; give it, for example --memory 80GB"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, line):
    done = plan(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and line in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("preset", PRESETS)
def test_the_sizes_are_those_of_the_model(preset):
    model = GPTConfig(**vars(PRESETS[preset].shape), vocab_size=50_257)
    assert sum(sum(group) for group in parameter_sizes(model)) == parameter_count(model)


def test_the_flat_groups_have_the_models_own_order():
    """Which parameters share a partition depends on it."""
    from model.gpt import GPT, weight_decay_groups

    model = GPTConfig(n_layer=2, n_head=2, d_model=8, seq_len=4, vocab_size=100)
    sizes = [[p.numel() for p in group["params"]] for group in weight_decay_groups(GPT(model), 0.1)]
    assert parameter_sizes(model) == sizes


def test_stages_share_what_the_paper_says_they_share():
    """ZeRO (arXiv 1910.02054, figure 1): 16 bytes a parameter; 12 of them over R ranks, then 14, then 16. Mixed precision, Adam."""
    model, ranks = GPTConfig(**vars(PRESETS["gpt3-13b"].shape), vocab_size=50_257), 64
    N = parameter_count(model)
    states = [memory_per_rank(run_with({"stage": stage}, ranks), model, "cuda").model_states for stage in range(4)]
    assert states[0] == 16 * N
    # Gradients at stages 1 and 2 are those of all parameters that touch a partition, more than 2 N / R.
    assert states[1] == states[2] == pytest.approx(2 * N + 14 * N / ranks, rel=0.03)
    assert states[3] == pytest.approx(16 * N / ranks, rel=1e-3)


DRIVE = {"device": "nvme", "nvme_path": "/x"}
ON_DRIVE = {"offload_optimizer": DRIVE}


@pytest.mark.parametrize(
    ("stage", "section", "on_device", "on_host", "on_drive"),
    [
        # bf16 weights 2, fp32 weights 4, moments 8, gradients 2, and their copy in fp32 4.
        (0, {}, 20, 0, 0),
        # The weights and the gradients; on the host also the gradients in fp32, and the gradients in bf16.
        (3, {"offload_optimizer": {"device": "cpu"}}, 2, 4 + 8 + 4 + 2, 0),
        (3, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, 0, 4 + 8 + 4 + 2 + 2, 0),
        # On the drive fp32 weights, moments and gradients; of one sub-group, 4 buffers of fp32 are on the host, with the gradients.
        (3, {"offload_optimizer": {"device": "nvme", "nvme_path": "/x"}, "offload_param": {"device": "cpu"}}, 0, 4 * 4 + 2 + 2, 16),
        # Weights on the drive too, in small buffers. By default, a billion of them are moved back to the host.
        (3, {**ON_DRIVE, "offload_param": {**DRIVE, "buffer_size": 1, "max_in_cpu": 0}}, 0, 4 * 4 + 2, 16 + 2),
        (3, {**ON_DRIVE, "offload_param": {**DRIVE, "buffer_size": 1}}, 0, 4 * 4 + 2 + 2, 16 + 2),
    ],
    ids=["stage 0", "optimizer on the host", "all on the host", "optimizer on a drive", "all on a drive", "weights moved back"],
)
def test_an_update_needs_these_bytes_per_parameter(stage, section, on_device, on_host, on_drive):
    """Mixed precision and Adam, on one rank, with few activations."""
    model = GPTConfig(n_layer=2, n_head=2, d_model=64, seq_len=2, vocab_size=128)
    plan = memory_per_rank(run_with({"stage": stage, **section}), model, "cuda")
    N = parameter_count(model)
    moment = plan.moments["update"]
    assert sum(moment.values()) - moment["buffers"] == on_device * N
    assert (plan.parts["host"], plan.parts["drive"]) == (pytest.approx(on_host * N, rel=0.05), on_drive * N)
    assert plan.peak >= sum(moment.values())


def test_on_a_cpu_the_offloaded_states_have_a_row():
    model = GPTConfig(n_layer=2, n_head=2, d_model=64, seq_len=2, vocab_size=128)
    offload = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    gpu, cpu = (memory_per_rank(run_with(offload), model, device) for device in ("cuda", "cpu"))
    assert cpu.parts["host"] == gpu.parts["host"] > 0
    assert cpu.peak <= sum(cpu.parts.values())


def test_a_sub_group_size_of_0_is_a_sub_group_per_parameter():
    model = GPTConfig(n_layer=2, n_head=2, d_model=64, seq_len=2, vocab_size=128)
    one, all_together = (memory_per_rank(run_with({"stage": 3, "sub_group_size": size}), model, "cpu") for size in (0, 10**9))
    assert one.parts["update"] < all_together.parts["update"] / 2


LONG = ["--preset", "llama3-8b", "--ranks", "8", "--device", "cuda", "--memory", "80GB", "--set", "activation_checkpointing.enabled=true"]


def test_the_longest_sequence_fits_and_the_next_does_not():
    longest = {}
    for slices in (1, 8):
        flags = [*LONG, "--set", f"sequence_parallel_size={slices}"]
        found = json.loads(run_here(plan_command.main, *flags, "--longest_sequence", "--json").stdout)["longest_sequence"]
        assert found["ZeRO 0"] == 0, "16 bytes x 8 G parameters are more than 80 GB"
        unit, longest[slices] = 128 * slices, found["ZeRO 3"]
        assert longest[slices] % unit == 0
        for length, fits in ((longest[slices], True), (longest[slices] + unit, False)):
            flags = [*flags, "--micro_batch_size", "1", "--seq_len", str(length), "--json"]
            assert ("ZeRO 3" in json.loads(run_here(plan_command.main, *flags).stdout)["fit"]) == fits
    assert 7.9 < longest[8] / longest[1] < 8.1


def test_the_longest_sequences_are_a_page():
    page = run_here(plan_command.main, *LONG, "--set", "sequence_parallel_size=8", "--longest_sequence").stdout
    assert page.startswith("The longest sequence in 80 GB a rank, 1 at a time, 1 group of 8 ranks:\n  ZeRO 0: none; the shortest needs 160")
    assert re.search(r"^  ZeRO 3: \d{3},\d{3} tokens$", page, re.M)


@pytest.mark.long
def test_the_page_has_the_longest_sequences():
    page = (ROOT / "docs/long-sequences.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(.+)` \| (\d+) GB \| (.+) \| (.+) \| (.+) \| (.+) \| (.+) \|$", page, re.M)
    assert rows
    for preset, memory, mlp, *lengths in rows:
        for slices, length in zip((1, 2, 4, 8), lengths, strict=True):
            flags = ["--preset", preset, "--ranks", "8", *LONG[4:6], "--memory", f"{memory}GB", *LONG[-2:]]
            flags += ["--set", f"sequence_parallel_size={slices}", "--longest_sequence", "--json"]
            flags += ["--set", "sequence_tiling.enabled=true"] if mlp == "tiled" else []
            found = json.loads(run_here(plan_command.main, *flags).stdout)["longest_sequence"]["ZeRO 3"]
            assert (f"{found:,}" if found else "none") == length, (preset, memory, slices)
    one = ["--preset", "gpt3-1.3b", "--data", "no/corpus", "--ranks", "1", *LONG[4:], "--longest_sequence", "--json"]
    whole, tiled = (
        json.loads(run_here(plan_command.main, *one, *flags).stdout)["longest_sequence"]["ZeRO 1"]
        for flags in ([], ["--set", "sequence_tiling.enabled=true"])
    )
    assert f"`gpt3-1.3b` with GPT-2's vocabulary has {whole:,} tokens, tiled {tiled:,}." in " ".join(page.split())


def test_the_page_says_who_shares_the_rows():
    page = run_here(plan_command.main, *LONG[:6], "--set", "sequence_parallel_size=4").stdout
    assert page.count("8 ranks: 2 groups of data x 4 slices of a sequence of 8,192 tokens") == 1


def test_one_rank_sends_nothing():
    model = GPTConfig(**vars(PRESETS["nano"].shape), vocab_size=8192)
    assert [bytes_sent_per_step(run_with({"stage": stage}), model, 1) for stage in range(4)] == [0] * 4
