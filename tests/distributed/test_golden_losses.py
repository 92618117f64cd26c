"""Golden loss curves: every ZeRO stage and every recipe that a CPU trains repeats the recorded numbers bit for bit.

    python -m tests.distributed.test_golden_losses --write    # record tests/golden_losses.json anew

Run it before and after a change that must not change the mathematics. The numbers hold for one version of torch and DeepSpeed and one kind
of processor; elsewhere the tests are skipped, and the curves have to be recorded there before the change.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any

import pytest

from data_pipeline.shards import open_corpus
from recipes.registry import read_recipe, recipe_names
from tests.conftest import ROOT, Pools, on_this_machine

FILE = ROOT / "tests" / "golden_losses.json"
RUN = "--n_layer 4 --n_head 2 --d_model 64 --seq_len 64 --steps 20 --global_batch_size 8 --lr 5e-4 --warmup_steps 5 --seed 1"
RUN += " --eval_every 10 --eval_batches 2 --save_every 0 --quiet"
#: Recorded of each line of the metrics; line 0 is the evaluation before step 1.
KEYS = ("loss", "grad_norm", "lr", "tokens", "val_loss")
#: The cells that `make test` runs.
QUICK = ("stage 0", "one_bit_adam", "random_ltd")
#: DeepSpeed does not partition tensors below this many elements at stage 3; by default, that is all of this model's.
PARTITIONED = "zero_optimization.stage3_param_persistence_threshold=1000"
OPTIMIZER, WEIGHTS = (f'zero_optimization.offload_{name}={{"device": "cpu"}}' for name in ("optimizer", "param"))
#: What shortens the schedules to the 20 steps.
SIZES = 'batch_size_warmup={"min_batch_size": 4, "increment": 2, "warmup_tokens": 4096}'
LENGTHS = 'curriculum_learning={"min_difficulty": 16, "schedule_config": {"total_curriculum_step": 15, "difficulty_step": 16}'
LENGTHS += ', "max_difficulty": 64, "schedule_type": "fixed_linear"'
DROPS = 'progressive_layer_drop={"theta": 0.3, "gamma": 1'
LTD = 'random_ltd={"random_ltd_schedule": {"min_value": 16, "schedule_config": {"require_steps": 15, "seq_per_step": 16}}}'
ZERO_ONE = ("var_freeze_step=8", "var_update_scaler=3", "local_step_scaler=3", "local_step_clipper=4")
CHECKPOINTED = "activation_checkpointing.number_checkpoints=2"
#: Recipe -> what is changed in its JSON.
CHANGES: dict[str, list[str]] = {
    "activation_checkpointing": [CHECKPOINTED],
    "batch_size_warmup": [SIZES],
    "curriculum_learning": [LENGTHS + "}"],
    "fp8": ["fp8.emulate=true"],
    "one_bit_adam": ["optimizer.params.freeze_step=8"],
    "one_bit_lamb": ["optimizer.params.freeze_step=8"],
    "progressive_layer_drop": [DROPS + "}"],
    "random_ltd": [LTD],
    "zero_one_adam": [f"optimizer.params.{change}" for change in ZERO_ONE],
    "zero_infinity": [PARTITIONED, "zero_optimization.offload_param.buffer_size=1000000"],
    **{recipe: [PARTITIONED] for recipe in ("zero_3", "zero_3_param_offload", "zeropp")},
}
#: Recipes recorded in the precision of their JSON: they are about it, or the cells of the stages are the same run in fp32.
AS_SHIPPED = ("bf16", "fp8", "zero_1", "zero_2", "zero_3", "zero_3_param_offload", "zero_infinity", "zero_offload", "zeropp")
#: Cell -> metrics that are recorded too, and must take several values within the curve.
SWITCHES: dict[str, list[str]] = {
    "batch_size_warmup": ["batch_size"],
    "curriculum_learning": ["seq_len"],
    "one_bit_adam": ["compressed"],
    "one_bit_lamb": ["compressed"],
    "progressive_layer_drop": ["kept_blocks"],
    "random_ltd": ["reserved_length"],
    "zero_one_adam": ["variance_updated", "exchanged"],
    "several techniques, stage 3": ["batch_size", "seq_len", "kept_blocks"],
}
#: Recipe -> what the machine must have, as an expression about DeepSpeed's `accelerator`, and in words.
NEEDS = {
    "fp8": ("__import__('importlib.util').util.find_spec('torchao')", "torchao"),
    "tf32": ("accelerator.device_name() == 'cuda'", "a GPU"),
    "zero_infinity": ("accelerator.create_op_builder('AsyncIOBuilder').is_compatible()", "libaio with its headers"),
}


def cells() -> dict[str, list[str]]:
    """Name of a cell -> its flags. Steps have two micro-batches on each rank, but for the cells that say one."""
    made: dict[str, list[str]] = {}

    def add(name: str, config: str, *changes: str, micro_batch_size: int = 2, flags: tuple[str, ...] = ()) -> None:
        source = "--recipe" if config.startswith("recipes/") else "--deepspeed_config"
        made[name] = [source, config, "--micro_batch_size", str(micro_batch_size), *flags]
        made[name] += [text for change in changes for text in ("--set", change)]

    for stage in range(4):
        config, partitioned = f"ds_configs/zero{stage}_fp32.json", [PARTITIONED] if stage == 3 else []
        for name, micro_batch_size in ((f"stage {stage}", 2), (f"stage {stage}, one micro-batch", 4)):
            add(name, config, *partitioned, micro_batch_size=micro_batch_size)
            if stage:
                add(f"{name}, optimizer offloaded", config, *partitioned, OPTIMIZER, micro_batch_size=micro_batch_size)
    add("stage 3, weights offloaded", config, PARTITIONED, WEIGHTS)
    add("stage 3, all offloaded", config, PARTITIONED, OPTIMIZER, WEIGHTS)
    add("stage 0, bf16", "ds_configs/zero0_bf16.json")
    add("dropout", "ds_configs/zero1_fp32.json", flags=("--dropout", "0.1"))
    add("no_cross_document", "ds_configs/zero1_fp32.json", flags=("--no_cross_document",))
    add("curriculum_learning, reshape", "ds_configs/zero2_fp32.json", LENGTHS + ', "mode": "reshape"}')
    add("several techniques, stage 3", config, PARTITIONED, SIZES, LENGTHS + "}", DROPS + "}", CHECKPOINTED)
    for name in recipe_names():
        shipped = json.loads((ROOT / read_recipe(ROOT / "recipes" / name).config).read_text())
        fp32 = ["bf16.enabled=false"] if "bf16" in shipped and name not in AS_SHIPPED else []
        add(name, f"recipes/{name}", *fp32, *CHANGES.get(name, []), micro_batch_size=1 if name == "gradient_accumulation" else 2)
    return made


CELLS = cells()
GOLDEN: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}


def make_corpus(folder: Path) -> Path:
    """The bytes of 300 short texts from `Random.random`, whose numbers are the same in every version of Python."""
    random, source = Random(1), folder / "text"
    words = ["".join(chr(97 + int(26 * random.random() ** 2)) for _ in range(1 + int(8 * random.random()))) for _ in range(300)]
    source.mkdir()
    for number in range(300):
        text = " ".join(words[int(300 * random.random() ** 3)] for _ in range(40 + int(80 * random.random())))
        (source / f"{number:03}.txt").write_text(text + "\n")
    command = [sys.executable, "data_pipeline/prepare.py", "--source", source, "--out", folder / "tokens", "--tokenizer", "bytes"]
    subprocess.run([*command, "--val_fraction", "0.1", "--quiet"], cwd=ROOT, check=True)
    return folder / "tokens"


def machine() -> dict[str, str]:
    """What the last bits of the numbers depend on."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = (re.search(rf"^(?:{key})\s*: (.*)$", cpuinfo, re.MULTILINE) for key in ("vendor_id|CPU implementer", "flags|Features"))
    vendor, flags = (match[1] if match else "unknown" for match in found)
    vector = sorted(set(re.findall(r"\b(?:s?sse|avx|fma|f16c|amx|asimd|sve|bf16)\w*", flags)))
    versions = {name: version(name) for name in ("torch", "deepspeed")}
    return {**versions, "threads": os.environ["OMP_NUM_THREADS"], "vendor": vendor, "flags": " ".join(vector)}


@cache
def lacks(name: str) -> str | None:
    """What the cell needs and this machine does not have."""
    expression, words = NEEDS.get(name, ("True", ""))
    return None if expression == "True" or on_this_machine(expression) else words


def curve(pools: Pools, name: str, corpus: Path, runs: Path) -> dict[str, str]:
    """Key -> its value in each line of the metrics; `repr` of a float is exact."""
    job = "tests.distributed.zeropp_jobs:zeropp_run" if name == "zeropp" else "tests.distributed.jobs:pretrain"
    where = ["--data", str(corpus), "--runs_dir", str(runs), "--run_name", re.sub(r"\W+", "_", name)]
    lines = pools.of(2).run(job, flags=[*CELLS[name], *RUN.split(), *where])[0]
    return {key: " ".join(repr(line.get(key)) for line in lines) for key in (*KEYS, *SWITCHES.get(name, []))}


@pytest.fixture(scope="module")
def golden_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = machine()
    if others := [f"{key} is {here[key]}, was {was}" for key, was in GOLDEN["machine"].items() if here[key] != was]:
        pytest.skip(f"recorded elsewhere: {'; '.join(others)}")
    corpus = make_corpus(tmp_path_factory.mktemp("golden"))
    assert open_corpus(corpus).fingerprint == GOLDEN["corpus"], "prepare.py makes other tokens of the same text"
    return corpus


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in CELLS])
def test_the_curve_is_the_recorded_one(name, golden_corpus, pools, tmp_path):
    if name not in GOLDEN["cells"] or lacks(name):
        pytest.skip(f"needs {lacks(name)}" if lacks(name) else "not recorded")
    recorded, now = GOLDEN["cells"][name], curve(pools, name, golden_corpus, tmp_path)
    differences = []
    for key in recorded:
        for step, (was, found) in enumerate(zip_longest(recorded[key].split(), now.get(key, "").split(), fillvalue="None")):
            if was != found:
                by = "" if "None" in (was, found) else f", by {float(found) - float(was):.3g}"
                differences.append((step, f"{name}: {key} of step {step} is {found}, was {was}{by}"))
    if differences:
        pytest.fail(f"{min(differences)[1]}; {len(differences)} values differ", pytrace=False)


@pytest.mark.parametrize("name", SWITCHES)
def test_every_schedule_acts_within_the_curve(name):
    for key in SWITCHES[name]:
        assert len(set(GOLDEN["cells"][name][key].split()) - {"None"}) >= 2


def write() -> None:
    """Record every cell that this machine can train."""
    made: dict[str, Any] = {"machine": machine(), "corpus": "", "cells": {}}
    pools = Pools("cpu")
    with tempfile.TemporaryDirectory() as folder:
        corpus = make_corpus(Path(folder))
        made["corpus"] = open_corpus(corpus).fingerprint
        for name in CELLS:
            if lacks(name):
                print(f"{name}: left out, needs {lacks(name)}")
            else:
                made["cells"][name] = curve(pools, name, corpus, Path(folder) / "runs")
    pools.close()
    FILE.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m tests.distributed.test_golden_losses --write")
    write()
