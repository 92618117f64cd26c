"""`"bf16": {"enabled": "auto"}` is what the device has arithmetic for; the run says what and why."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from launch.config import hardware
from launch.config.explain import as_text, explain
from launch.config.run_config import RunConfig, resolve
from launch.errors import UsageError
from launch.training.engine import check_device
from launch.training.run_folder import provenance

ROOT = Path(__file__).resolve().parents[1]
AUTO = ("--set", "bf16.enabled=auto")
NO_BF16 = "this processor has no bf16 arithmetic"


@pytest.fixture
def run(corpus):
    """A function that resolves a run of a shipped JSON with flags."""

    def resolved(*flags: str, config: str = "zero1_bf16") -> RunConfig:
        return resolve(["--deepspeed_config", f"{ROOT}/ds_configs/{config}.json", "--data", str(corpus), *flags])[0]

    return resolved


@pytest.fixture
def gpus(monkeypatch):
    """A function that gives this process GPUs of these compute capabilities."""

    def become(*capabilities: tuple[int, int]) -> None:
        found = [
            SimpleNamespace(name=f"G{number}", major=major, minor=minor, total_memory=(number + 1) * 10**12)
            for number, (major, minor) in enumerate(capabilities)
        ]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(found))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
        monkeypatch.setattr(torch.cuda, "get_device_properties", found.__getitem__)
        monkeypatch.delenv("DS_ACCELERATOR", raising=False)

    return become


@pytest.mark.parametrize(
    ("flags", "name", "precision", "why"),
    [
        (["avx512f", "avx512_bf16"], "flags", "bf16", "this processor has avx512_bf16"),
        (["avx512_bf16", "amx_bf16"], "flags", "bf16", "this processor has amx_bf16"),
        (["asimd", "bf16", "sve"], "Features", "bf16", "this processor has bf16"),
        (["avx2", "avx512f"], "flags", "fp32", NO_BF16),
    ],
)
def test_auto_is_bf16_where_the_processor_has_its_arithmetic(flags, name, precision, why, run, processor):
    processor(*flags, name=name)
    config = run(*AUTO)
    found = json.dumps(precision == "bf16")
    assert (config.precision, config.ds_config["bf16"]["enabled"]) == (precision, precision == "bf16")
    assert config.origins["bf16.enabled"] == f"auto: {why}"
    assert config.notes == (f'--set bf16.enabled: "auto" is {found}: {why}',)
    assert config.notes[0] in as_text(explain(config))


@pytest.mark.parametrize(
    ("capabilities", "precision", "why"),
    [
        ([(8, 0)], "bf16", "this machine has a GPU of compute capability 8.0"),
        ([(9, 0), (7, 5)], "fp32", "this machine has a GPU of compute capability 7.5, bf16 arithmetic needs 8.0"),
    ],
)
def test_auto_is_bf16_from_ampere_on(capabilities, precision, why, run, gpus):
    gpus(*capabilities)
    config = run(*AUTO)
    assert (config.precision, config.origins["bf16.enabled"]) == (precision, f"auto: {why}")


def test_the_processor_is_asked_where_deepspeed_would_use_it(run, gpus, processor, monkeypatch, tmp_path):
    """By DS_ACCELERATOR, and without a GPU that torch can use."""
    processor("avx2")
    gpus((9, 0))
    assert run(*AUTO).precision == "bf16"
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert run(*AUTO).precision == "fp32"
    monkeypatch.setenv("DS_ACCELERATOR", "xpu")
    assert "no 'xpu' device was found" in run(*AUTO).notes[0] and run(*AUTO).precision == "bf16"
    gpus()
    assert run(*AUTO).precision == "fp32"
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "none")
    assert run(*AUTO).precision == "fp32"


@pytest.mark.parametrize(("chosen", "visible", "refused"), [(False, None, True), (True, None, False), (False, "", False)])
def test_a_run_on_the_cpu_of_a_host_with_gpus_must_be_wanted(chosen, visible, refused, gpus, monkeypatch, tmp_path):
    gpus()
    monkeypatch.setattr(hardware, "DEVICE_IS_CHOSEN", chosen)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert hardware.unused_gpus() == "", "no driver"
    (tmp_path / "version").touch()
    monkeypatch.setattr(hardware, "NVIDIA_DRIVER", tmp_path / "version")
    assert ("finds none" in hardware.unused_gpus()) == refused


@pytest.mark.parametrize(
    ("environment", "refused"),
    [
        ({"RANK": "9", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, None),
        ({"RANK": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}, "this host has 8 ranks"),  # srun --gpus-per-task=1
        ({"RANK": "3", "LOCAL_RANK": "3"}, "this host has 4 ranks"),
        ({}, None),
    ],
)
def test_more_ranks_than_gpus_are_one_line(environment, refused, run, gpus, monkeypatch):
    gpus((9, 0))
    monkeypatch.setattr(get_accelerator(), "device_name", lambda index=None: "cuda")
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = run()
    if refused is None:
        return check_device(config)
    with pytest.raises(UsageError) as mistake:
        check_device(config)
    (fault,) = mistake.value.faults
    assert fault.startswith(refused) and "this process sees 1 GPU(s)" in fault and "--gpus-per-node" in fault


# --- real ranks ------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(corpus, tmp_path):
    """The flags of a run of two steps, and the folder in which it gets a processor."""
    shape = ["--n_layer", "1", "--n_head", "1", "--d_model", "32", "--seq_len", "16", "--steps", "2", "--eval_every", "0"]
    run = ["--data", str(corpus), "--runs_dir", str(tmp_path), "--run_name", "r"]
    return {"folder": str(tmp_path), "flags": ["--deepspeed_config", f"{ROOT}/ds_configs/zero1_bf16.json", *shape, *run]}


def test_hosts_that_come_out_differently_are_told(two_ranks, tiny):
    """Each rank as if on a host of its own: the first has AVX512-BF16, the second has not."""
    tiny["flags"] += AUTO
    answers: list[Any] = two_ranks.run("tests.distributed.jobs:pretrain_on", processors=["avx512_bf16", "avx2"], **tiny)
    assert answers[0] == answers[1]
    assert "rank 1 has engine.bf16.enabled = false, and rank 0 has true" in answers[0]


@pytest.mark.parametrize(("flag", "emulated"), [("avx2", True), ("avx512_bf16", False)])
def test_bf16_that_is_emulated_is_said_to_be(flag, emulated, one_rank, tiny, tmp_path):
    (lines,) = one_rank.run("tests.distributed.jobs:pretrain_on", processors=[flag], **tiny)
    assert len(lines) == 2
    log = (tmp_path / "r" / "log.txt").read_text()
    said = f"note: bf16 is emulated, {NO_BF16}: the fp32 JSON of the same stage (ds_configs/zero1_fp32.json) is probably faster"
    assert (said in log) == emulated
    cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} core(s)"
    assert f"{os.environ['OMP_NUM_THREADS']} thread(s) a rank, which may use {cores} of this host" in log


def test_gpus_are_named_and_their_memory_known(gpus, monkeypatch):
    gpus((9, 0), (8, 0))
    assert [gpu.total_memory for gpu in hardware.gpus()] == [10**12, 2 * 10**12]
    assert provenance.machine()["gpus"] == ["G0", "G1"]
    with monkeypatch.context() as patched:
        patched.setenv("DS_ACCELERATOR", "cpu")
        assert "gpus" not in provenance.machine(), "a run on the CPU uses none"
    gpus()
    assert "gpus" not in provenance.machine() and hardware.gpus() == []
