"""TF32: in fp32 alone, on a GPU that has it, and counted against its peak."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import torch

from launch.config.flags import as_words
from launch.config.run_config import resolve
from launch.errors import UsageError
from launch.training.engine import check_device
from launch.training.meter import Meter
from recipes.registry import make_techniques
from tests import helpers

RUN = ("--data", "no/corpus", "--recipe", "recipes/tf32")
explained, refusal = partial(helpers.explained, *RUN), partial(helpers.refusal, *RUN)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("bf16.enabled=true", "'tf32' is for fp32 runs, and this run is in bf16; leave it out, or switch bf16 off"),
        ("tf32.enable=true", "--set tf32.enable: unknown key; did you mean 'enabled'?"),
    ],
)
def test_a_bad_value_is_one_line(change, words):
    assert words in refusal("--set", change)


def test_it_is_explained_anywhere_and_trained_on_cuda(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert explained("--set", "tf32.enabled=false")["needs"] == []
    assert explained()["needs"][0].endswith("'tf32' needs CUDA and compute capability 8.0 or higher")
    line = helpers.refused_start(tmp_path / "runs", "--recipe", "recipes/tf32", "--data", corpus)
    assert "tf32.json: line 31: 'tf32' needs CUDA and compute capability 8.0 or higher, and this is a cpu; leave it out" in line


@pytest.mark.parametrize(
    ("name", "capability", "hip", "found"),
    [
        ("Tesla T4", (7, 5), None, "and this is Tesla T4 (7.5); leave it out"),
        ("AMD Instinct MI300X", (9, 4), "6.4", "and this is AMD Instinct MI300X, which is not NVIDIA's; leave it out"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), None, None),
        ("NVIDIA H200", (9, 0), None, None),
    ],
)
def test_another_gpu_is_refused_by_its_name(name, capability, hip, found, monkeypatch):
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "device_name", lambda index=None: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    config = resolve([*RUN, "--explain"])[0]
    if found is None:
        check_device(config)
        return
    with pytest.raises(UsageError) as mistake:
        check_device(config)
    (fault,) = mistake.value.faults
    assert fault.endswith(f"'tf32' needs CUDA and compute capability 8.0 or higher, {found}")


def test_it_is_the_switch_that_torch_documents():
    code = (
        "import torch; from recipes.tf32.technique import use_tf32; use_tf32(); cuda = torch.backends.cuda.matmul;"
        "print(torch.get_float32_matmul_precision(), cuda.allow_tf32, cuda.fp32_precision)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=helpers.ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["high", "True", "tf32"]


@pytest.mark.parametrize(("changes", "tera"), [((), 494.7), (("--set", "tf32.enabled=false"), 67)])
def test_mfu_is_of_the_peak_of_tf32(changes, tera, monkeypatch):
    class Stub:
        config = resolve([*RUN, "--explain", *changes])[0]
        techniques = make_techniques(config)
        device = torch.device("cuda")

        def gather(self, value: float) -> list[float]:
            return [value]

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    assert Meter(Stub(), Stub(), 0.0, Stub()).peak_flops == tera * 1e12


#: Matrices large enough that products are most of the step.
LARGE = {"n_layer": 4, "n_head": 8, "d_model": 1024, "seq_len": 512, "micro_batch_size": 8, "global_batch_size": 8}


@pytest.mark.cuda
def test_it_trains_what_fp32_trains(one_rank, corpus, tmp_path):
    values = {**LARGE, "steps": 20, "eval_every": 0, "save_every": 0, "data": corpus, "runs_dir": tmp_path}
    run = as_words(values)
    helpers.skip_unless_the_device_can(resolve(["--recipe", "recipes/tf32", *run])[0])
    tf32, fp32 = (
        one_rank.train([*kind, *run, "--run_name", name])
        for name, kind in (("tf32", ["--recipe", "recipes/tf32"]), ("fp32", ["--deepspeed_config", "ds_configs/zero1_fp32.json"]))
    )
    assert tf32[-1]["loss"] == pytest.approx(fp32[-1]["loss"], abs=0.01)
    assert tf32[-1]["loss"] != fp32[-1]["loss"]
