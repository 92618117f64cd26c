"""`launch/score.py`: the loss is that of the training log and of transformers, bits per byte are of the text, and the error is one."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.shards import open_corpus
from launch import score
from launch.formats.metrics import read_metrics
from launch.trained_model.load import open_trained
from launch.trained_model.scoring import estimate, window_losses
from tests.helpers import exported as exported_to
from tests.helpers import refusal_of, run_here

ROOT = Path(__file__).resolve().parents[1]
#: Where the commands of this environment are.
PATH = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
TINY = ["--n_layer", "2", "--n_head", "2", "--d_model", "32", "--seq_len", "32", "--steps", "4", "--lr", "0.01"]
#: What reads all windows of the tests' validation text, and what reads a part of them.
EVALUATIONS = {"zero1_fp32": "1000000", "zero3_bf16": "2"}


@pytest.fixture(scope="module")
def runs(one_rank, corpus, tmp_path_factory) -> Path:
    """Runs of four steps, with a validation loss at their end."""
    folder = tmp_path_factory.mktemp("runs")
    for name, batches in EVALUATIONS.items():
        flags = ["--deepspeed_config", f"ds_configs/{name}.json", "--data", str(corpus), "--runs_dir", str(folder), "--run_name", name]
        more = ["--eval_batches", batches, "--eval_every", "4"] + (["--no_cross_document"] if "bf16" in name else [])
        one_rank.train([*flags, *TINY, *more])
    return folder


@pytest.fixture(scope="module")
def exported(runs) -> Path:
    """The fp32 run as a Hugging Face folder."""
    return exported_to(runs / "zero1_fp32", runs / "exported")


def scored(*arguments: object) -> dict:
    done = run_here(score.main, *arguments, "--json", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_score_log_and_transformers_agree(runs, exported, corpus):
    """Bits per byte of all validation windows, within 1e-4; transformers from the exported folder alone."""
    import torch
    from transformers import AutoModelForCausalLM

    split = json.loads((corpus / "manifest.json").read_text())["splits"]["val"]
    to_bits = split["tokens"] / split["bytes"] / math.log(2)
    found = scored(runs / "zero1_fp32")
    logged = read_metrics(runs / "zero1_fp32" / "metrics.jsonl")[-1]["val_loss"]
    tokens = np.fromfile(corpus / split["shards"][0]["file"], dtype="<u2").astype(np.int64)
    windows = np.stack([tokens[start : start + 33] for start in range(0, len(tokens) - 32, 32)])
    model, losses = AutoModelForCausalLM.from_pretrained(exported), []
    with torch.no_grad():
        for batch in torch.from_numpy(windows).split(64):
            logits = model(batch[:, :-1]).logits
            losses.append(torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none").mean(1))
    losses = torch.cat(losses).double()
    assert found["windows"] == len(losses) == open_corpus(corpus).val.windows(32)
    for other in (logged, float(losses.mean())):
        assert abs(found["bits_per_byte"] - other * to_bits) < 1e-5
        assert abs(found["loss"] - other) < 1e-5
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["loss_stderr"] >= float(losses.std() / math.sqrt(len(losses))) - 1e-6
    of_folder = scored(exported, "--data", corpus)
    assert abs(of_folder["loss"] - found["loss"]) < 1e-6
    assert f"bits per byte   {found['bits_per_byte']:.4f} +- " in run_here(score.main, runs / "zero1_fp32").stdout


def test_a_run_in_bf16_is_scored_as_training_did(runs):
    """On as many windows as its evaluations read, in its precision, with its documents apart."""
    found = scored(runs / "zero3_bf16", "--windows", "16", "--dtype", "bf16")
    logged = read_metrics(runs / "zero3_bf16" / "metrics.jsonl")[-1]["val_loss"]
    assert abs(found["loss"] - logged) < 1e-4


def test_some_windows_are_spread_evenly(runs):
    some, all_of_them = (scored(runs / "zero1_fp32", *more) for more in (["--windows", "60", "--batch_size", "7"], []))
    assert some["windows"] == 60
    assert abs(some["loss"] - all_of_them["loss"]) < 4 * some["loss_stderr"]


def test_two_models_are_compared_on_the_same_windows(runs, exported, corpus):
    """The fp32 run with the bf16 run, whose losses are computed here as those of each alone."""
    one, other = runs / "zero1_fp32", runs / "zero3_bf16"
    opened = open_corpus(corpus)
    losses, theirs = (window_losses(open_trained(run).load_model(), opened, opened.val, 60) for run in (one, other))
    found = scored(one, "--against", other, "--windows", "60")
    against = found["against"]
    assert (against["model"], against["step"], found["windows"]) == (str(other), 4, 60)
    assert against["difference"] == pytest.approx((losses - theirs).mean(), abs=1e-6)
    assert against["loss"] == pytest.approx(theirs.mean(), abs=1e-6) and found["loss"] == pytest.approx(losses.mean(), abs=1e-6)
    assert against["difference_stderr"] < found["loss_stderr"], "the windows' own spread cancels"
    low, high = against["difference_interval"]
    assert low < against["difference"] < high
    ratio = found["bits_per_byte"] / found["loss"]
    assert against["difference_bits_per_byte"] == pytest.approx(against["difference"] * ratio)
    back = scored(other, "--against", one, "--windows", "60")["against"]
    assert back["difference"] == pytest.approx(-against["difference"], abs=1e-9)
    out = run_here(score.main, one, "--against", other, "--windows", "60").stdout
    assert f"difference      {against['difference']:+.4f} +- " in out


def test_a_model_against_itself_is_exactly_equal(runs, exported):
    for other in (runs / "zero1_fp32", exported):
        against = scored(runs / "zero1_fp32", "--against", other, "--windows", "60")["against"]
        assert (against["difference"], against["difference_stderr"], against["difference_interval"]) == (0, 0, [0, 0])


def test_a_model_with_another_context_or_tokenizer_is_not_compared(runs, exported, others, one_rank, corpus, tmp_path):
    flags = ["--deepspeed_config", "ds_configs/zero1_fp32.json", "--runs_dir", str(tmp_path), *TINY, "--steps", "1", "--eval_every", "0"]
    for name, data, length in (("short", corpus, "16"), ("bytes", others / "same", "32")):
        run = ["--run_name", name, "--data", str(data), "--seq_len", length]
        one_rank.train([*flags, *run])
    for name, words in (
        ("short", "its context is 16 tokens"),
        ("bytes", "has 1,024 ids, but the model has 300"),
        ("none", "no such folder"),
    ):
        line = refusal_of(score.main, runs / "zero1_fp32", "--against", tmp_path / name)
        assert name in line and words in line


def test_an_unfinished_run_is_compared_when_it_is_exported(runs, tmp_path):
    run = Path(shutil.copytree(runs / "zero1_fp32", tmp_path / "r"))
    described = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(described | {"total_tokens": 10 * described["total_tokens"]}))
    said = refusal_of(score.main, runs / "zero1_fp32", "--against", run)
    assert f"{run}: an unfinished run" in said and "use --checkpoint step-00000004 (for --against, export it)" in said
    exported_to(run, tmp_path / "exported", "--checkpoint", "step-00000004")
    scored(runs / "zero1_fp32", "--against", tmp_path / "exported", "--windows", "4")


def test_the_interval_of_a_difference_by_hand():
    """Of four windows: mean 2, deviation sqrt(20/3), standard error sqrt(5/3), and Student's 3.18245 for 3 degrees of freedom.

    Of four batches of four windows, whose means are 1 to 4: the deviation of the means is sqrt(5/3), with 3 degrees of freedom too.
    """
    found = estimate(np.array([1.0, -1.0, 5.0, 3.0]))
    assert (found.loss, found.error) == (2.0, pytest.approx(math.sqrt(5 / 3)))
    assert estimate(np.array([3.0])).error is None
    assert found.interval == pytest.approx((2 - 3.18245 * math.sqrt(5 / 3), 2 + 3.18245 * math.sqrt(5 / 3)), rel=1e-5)
    found = estimate(np.repeat([1.0, 2.0, 3.0, 4.0], 4))
    assert (found.loss, found.error) == (2.5, pytest.approx(math.sqrt(5 / 3) / 2))
    assert found.interval == pytest.approx((2.5 - 3.18245 * found.error, 2.5 + 3.18245 * found.error), rel=1e-5)


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> Path:
    """Corpora of another tokenizer: with fewer ids, and with as many."""
    folder = tmp_path_factory.mktemp("others")
    source = folder / "text"
    source.mkdir()
    for number in range(60):
        (source / f"{number}.txt").write_text(f"Number {number} and its square {number**2}, half of it {number / 2}.\n" * 30)
    for name, spec in (("bytes", "bytes"), ("same", "bpe:300")):
        words = [sys.executable, "data_pipeline/prepare.py", "--source", source, "--out", folder / name, "--tokenizer", spec]
        subprocess.run([*words, "--val_fraction", "0.3", "--quiet"], cwd=ROOT, check=True)
    return folder


@pytest.mark.parametrize("name", ["bytes", "same"])
def test_a_corpus_of_another_tokenizer_is_refused(runs, exported, others, name):
    for source in (runs / "zero1_fp32", exported):
        assert "was made with another tokenizer than the model's: " in refusal_of(score.main, source, "--data", others / name)


def test_another_corpus_of_the_same_tokenizer_is_scored(runs, exported, corpus, tmp_path):
    source = tmp_path / "text"
    source.mkdir()
    for number in range(60):
        (source / f"{number}.txt").write_text(f"def f{number}(x):\n    return x * {number}\n" * 20)
    words = [sys.executable, "data_pipeline/prepare.py", "--source", source, "--out", tmp_path / "out", "--val_fraction", "0.3", "--quiet"]
    subprocess.run([*words, "--tokenizer", corpus / "tokenizer.json"], cwd=ROOT, check=True)
    found = [scored(one, "--data", tmp_path / "out") for one in (runs / "zero1_fp32", exported)]
    assert abs(found[0]["loss"] - found[1]["loss"]) < 1e-6 and found[0]["notes"] == []


def test_bytes_that_the_corpus_does_not_count_are_unknown(runs, corpus, tmp_path):
    """As in nanoGPT's corpora."""
    folder = Path(shutil.copytree(corpus, tmp_path / "corpus"))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["splits"]["val"]["bytes"] = 0
    (folder / "manifest.json").write_text(json.dumps(manifest))
    done = run_here(score.main, runs / "zero1_fp32", "--data", folder, "--windows", "4")
    assert "bits per byte   -  (the bytes of the text are unknown)" in done.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--data", "missing"], "missing: no such corpus"),
        (["--split", "test"], "--split: invalid choice: 'test'"),
        (["--dtype", "fp8"], "--dtype: invalid choice: 'fp8'"),
        (["--windows", "0"], "--windows: 0 is out of range"),
        (["--tasks_dir", "x"], "--tasks_dir"),  # whose YAML files could run code
    ],
)
def test_mistakes_are_one_line(runs, flags, words):
    assert words in refusal_of(score.main, runs / "zero1_fp32", *flags)


def test_a_folder_does_not_say_what_it_is_scored_on(exported):
    assert "give --data DIR" in refusal_of(score.main, exported)


# --- lm-evaluation-harness on an exported model

#: Two tasks, as in LAMBADA and HellaSwag: log-likelihoods of texts, and the likelier of two continuations.
TASKS = {
    "own_rolling": """
task: own_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
""",
    "own_choice": """
task: own_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: ["pass", "yield"]
doc_to_target: 0
metric_list: [{metric: acc}]
""",
}


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("lm_eval", "accelerate"))),
    reason="lm-evaluation-harness is not installed (pip install lm_eval accelerate -c constraints.txt)",
)
@pytest.mark.long
def test_the_harness_evaluates_an_exported_model(runs, tmp_path):
    """By the two commands of docs/export.md, with tasks of the test's own: the figures are those of the model's own logits."""
    import torch

    lines = (ROOT / "docs" / "export.md").read_text(encoding="utf-8").splitlines()
    evaluate = next(number for number, line in enumerate(lines) if line.startswith("    lm_eval "))
    texts = ["def f():\n    return", "import", "x = 1\nfor x in range(10):\n    print(x)\n"]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "tasks").mkdir()
    for name, yaml in TASKS.items():
        (tmp_path / "tasks" / f"{name}.yaml").write_text(yaml.replace("FILE", str(tmp_path / "docs.jsonl")))
    places = {
        "exported/first": str(tmp_path / "model"),
        "runs/first": str(runs / "zero1_fp32"),
        "lambada_openai,hellaswag": ",".join(TASKS),
    }
    environment = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "PATH": PATH}
    more = ["--include_path", str(tmp_path / "tasks"), "--output_path", str(tmp_path / "out"), "--device", "cpu"]
    for line, flags in ((lines[evaluate - 1], []), (lines[evaluate], more)):
        for place, own in places.items():
            line = line.replace(place, own)
        done = subprocess.run([*shlex.split(line), *flags], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "out").rglob("results*.json")
    results = json.loads(file.read_text())["results"]

    trained = open_trained(runs / "zero1_fp32")
    model = trained.load_model()

    def logprob(context: list[int], text: str) -> float:
        """ln P of `text` after `context`; what is longer than the model's context is read in windows side by side."""
        ids = trained.tokenizer.encode(text).tolist()
        assert len(ids) + len(context) <= 33
        logits = model(torch.tensor([[*context, *ids][:-1]]))[0, -len(ids) :].log_softmax(-1)
        return float(logits.gather(1, torch.tensor(ids)[:, None]).sum())

    of_texts = sum(logprob([trained.eot_id], text) for text in texts)
    assert results["own_rolling"]["bits_per_byte,none"] == pytest.approx(-of_texts / sum(map(len, texts)) / math.log(2), rel=1e-5)
    encode = trained.tokenizer.encode
    right = [logprob(encode(text).tolist(), " pass") > logprob(encode(text).tolist(), " yield") for text in texts]
    assert results["own_choice"]["acc,none"] == pytest.approx(sum(right) / 3)
