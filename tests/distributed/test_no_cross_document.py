"""`--no_cross_document` on real ranks: a plain loop that takes the documents of each window one by one trains the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data_pipeline.loader import Loader
from data_pipeline.shards import open_corpus
from launch.config.flags import as_words
from model.gpt import GPT
from model.presets import GPTConfig
from tests.commands import run_script
from tests.distributed.reference import document_by_document, reference_steps
from tests.distributed.test_engine_follows_plain_pytorch import FORMS, largest_difference, losses_of
from tests.helpers import ROOT, losses

SHAPE = {"n_layer": 2, "n_head": 2, "d_model": 64, "seq_len": 64}
STEPS, BATCH, LR, WARMUP, SEED = 8, 12, 2e-3, 2, 5
TOLERANCE = 1e-5
WITHIN = "--no_cross_document"


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of documents of 4 to 60 bytes, which are its tokens: several in every window."""
    out = tmp_path_factory.mktemp("short")
    source = out / "text"
    source.mkdir()
    for number in range(900):
        # The first word decides the others, so that what stood before the document says nothing of it.
        words = ["one", "three", "five", "sevens"][number % 4 : number % 4 + 1] * (1 + number * 7 % 9)
        (source / f"{number}.txt").write_text(f"{number}{' '.join(words)}.", encoding="utf-8")
    command = [sys.executable, "data_pipeline/prepare.py", "--source", source, "--out", out / "tokens", "--tokenizer", "bytes"]
    subprocess.run([*command, "--val_fraction", "0.15", "--quiet"], cwd=ROOT, check=True)
    return out / "tokens"


def flags(corpus: Path, runs: Path, name: str, config: str, *more: str) -> list[str]:
    values = {
        "deepspeed_config": f"ds_configs/{config}.json",
        **SHAPE,
        "data": corpus,
        "runs_dir": runs,
        "run_name": name,
        "steps": STEPS,
        "global_batch_size": BATCH,
        "micro_batch_size": 2,  # 3 micro-batches a step on two ranks
        "lr": LR,
        "warmup_steps": WARMUP,
        "seed": SEED,
        "eval_every": 3,
        "eval_batches": 1,
        "save_every": 0,
    }
    return as_words(values) + list(more)


@pytest.fixture(scope="module")
def reference(short_documents) -> list[float]:
    steps = reference_steps(short_documents, SHAPE, STEPS, BATCH, LR, WARMUP, SEED, loss_of=document_by_document)
    crossing = reference_steps(short_documents, SHAPE, STEPS, BATCH, LR, WARMUP, SEED)
    assert largest_difference(losses_of(steps), losses_of(crossing)) > 1e-2, "documents that tell nothing of each other show nothing"
    return losses_of(steps)


@pytest.mark.parametrize(
    "form",
    [pytest.param(form, marks=[] if form == "stage 3" else pytest.mark.long) for form in FORMS],
)
def test_losses_are_those_of_the_documents_one_by_one(form, request, few_ranks, short_documents, reference, tmp_path):
    """With accumulation, and evaluations between the steps, whose loss is that of the documents one by one too."""
    if "drive" in form:
        request.getfixturevalue("drive")
    stage, changes = FORMS[form]
    sections = [part for key, value in changes.items() for part in ("--set", f"zero_optimization.{key}={json.dumps(value)}")]
    lines = few_ranks.train(flags(short_documents, tmp_path, "r", f"zero{stage}_fp32", WITHIN, *sections))
    assert largest_difference(losses(lines), reference) <= TOLERANCE
    assert reference[-1] < reference[0] - 1.0
    corpus = open_corpus(short_documents)
    loader = Loader(corpus.val, None, SHAPE["seq_len"], corpus.vocab_size, 0, 1, torch.device("cpu"))
    ((windows, _),) = loader.validation_batches(BATCH, BATCH)
    with torch.no_grad():
        untrained = GPT(GPTConfig(**SHAPE, vocab_size=corpus.vocab_size, init_seed=SEED))
        expected = document_by_document(untrained, windows, corpus.eot_id)
    assert lines[0]["val_loss"] == pytest.approx(float(expected), abs=TOLERANCE)


def test_the_flag_changes_the_losses_and_is_in_run_json(two_ranks, short_documents, reference, tmp_path):
    lines = two_ranks.train(flags(short_documents, tmp_path, "r", "zero1_fp32"))
    assert largest_difference(losses(lines), reference) > 1e-2
    assert json.loads((tmp_path / "r/run.json").read_text())["no_cross_document"] is False


@pytest.mark.long
@pytest.mark.parametrize("config", ["zero1_fp32", "zero3_bf16"])
def test_activation_checkpointing_changes_no_number(config, two_ranks, short_documents, tmp_path):
    """With dropout, bit for bit; a block that is computed again finds the mask of its own micro-batch."""

    def train(name: str, *more: str) -> list[tuple]:
        run = flags(short_documents, tmp_path, name, config, WITHIN, "--dropout", "0.1", *more)
        return [(line.get("loss"), line.get("grad_norm"), line.get("val_loss")) for line in two_ranks.train(run)]

    plain = train("plain")
    assert train("each", "--set", "activation_checkpointing.enabled=true") == plain
    assert train("one", "--set", "activation_checkpointing.number_checkpoints=1") == plain


def test_a_resume_with_the_other_value_is_refused_in_one_line(one_rank, short_documents, tmp_path):
    def resume(name: str, *more: str) -> subprocess.CompletedProcess:
        return run_script("launch/pretrain.py", *flags(short_documents, tmp_path, name, "zero1_fp32", "--resume", *more))

    for name, own, other in (("without", [], [WITHIN]), ("within", [WITHIN], [])):
        one_rank.train(flags(short_documents, tmp_path, name, "zero1_fp32", *own, "--steps", "3"))
        before = (tmp_path / name / "run.json").read_bytes()
        done = resume(name, *other)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        has, says = ("no ", "") if other else ("", "no ")
        assert f"{name}: this run has {has}--no_cross_document, and the command {says}--no_cross_document; give the run's own" in line
        assert (tmp_path / name / "run.json").read_bytes() == before
