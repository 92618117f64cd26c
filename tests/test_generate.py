"""`launch/generate.py` prints the text of the model while it is generated, and refuses mistakes in one line."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.shards import open_corpus
from data_pipeline.tokenizer import Tokenizer, train_tokenizer
from launch import generate
from launch.trained_model import text as samples_text
from launch.trained_model.load import TrainedModel, open_trained
from launch.trained_model.text import text_parts
from tests.commands import run_script
from tests.helpers import refusal_of, run_here
from tests.pages import commands

ROOT = Path(__file__).resolve().parents[1]
TINY = ["--n_layer", "2", "--n_head", "2", "--d_model", "32", "--seq_len", "32", "--steps", "4", "--lr", "0.01"]


@pytest.fixture(scope="module")
def run(one_rank, corpus, tmp_path_factory) -> Path:
    """A run of four steps."""
    folder = tmp_path_factory.mktemp("runs")
    flags = ["--deepspeed_config", "ds_configs/zero1_fp32.json", "--data", str(corpus), "--runs_dir", str(folder), "--run_name", "small"]
    one_rank.train([*flags, *TINY, "--eval_every", "0", "--save_every", "2"])
    return folder / "small"


def command(*arguments: object) -> tuple[int, str, str]:
    """The command, in this process: its exit code, what it wrote to the standard output, and to the standard error."""
    done = run_here(generate.main, *arguments)
    return done.returncode, done.stdout, done.stderr


def test_the_text_is_that_of_the_model_and_a_fresh_process_writes_it(run):
    """Greedy, against a loop over whole passes, beyond the context of 32 tokens."""
    trained = open_trained(run)
    model = trained.load_model()
    prompt = trained.tokenizer.encode("def get(").tolist()
    ids = list(prompt)
    import torch

    for _ in range(50):
        ids.append(int(model(torch.tensor([ids[-32:]]))[0, -1].argmax()))
    expected = "def get(" + trained.tokenizer.decode(ids[len(prompt) :])
    flags = [run, "--prompt", "def get(", "--temperature", "0", "--max_new_tokens", "50", "--ignore_eos"]
    code, out, err = command(*flags)
    assert (code, out) == (0, expected + "\n")
    assert "tokens/s" in err
    done = run_script("launch/generate.py", *flags, "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, expected + "\n", "")


def test_samples_are_written_one_after_the_other_and_as_json(run):
    flags = [run, "--prompt", "import ", "--samples", "3", "--seed", "5", "--max_new_tokens", "20", "--top_p", "0.9"]
    _, out, _ = command(*flags)
    _, lines, _ = command(*flags, "--json")
    samples = [json.loads(line) for line in lines.splitlines()]
    assert out == "".join(f"--- sample {n + 1} of 3, seed {5 + n}\nimport {one['text']}\n" for n, one in enumerate(samples))
    assert len({one["text"] for one in samples}) == 3
    _, alone, _ = command(*flags[:3], "--seed", "6", "--max_new_tokens", "20", "--top_p", "0.9", "--json")
    assert json.loads(alone)["ids"] == samples[1]["ids"]


def test_text_ends_at_its_end(run, monkeypatch):
    from model.sampling import Sampling

    end = open_trained(run).eot_id
    order = iter([40, 41, end, 42, 43])
    monkeypatch.setattr(Sampling, "pick", lambda *_: next(order))
    code, out, _ = command(run, "--prompt", "a", "--json")
    found = json.loads(out)
    assert (code, found["ids"], found["ended_by"]) == (0, [40, 41], "end of text")
    order = iter([40, end, 42])
    found = json.loads(command(run, "--prompt", "a", "--json", "--ignore_eos", "--max_new_tokens", "3")[1])
    assert (found["ids"], found["ended_by"]) == ([40, end, 42], "length")


def test_the_end_of_text_begins_a_document(run, monkeypatch):
    prompts = []
    real = samples_text.stream
    monkeypatch.setattr(samples_text, "stream", lambda cache, ids, *rest: prompts.append(ids) or real(cache, ids, *rest))
    end = open_trained(run).eot_id
    for flags in ([], ["--prompt", ""], ["--prompt", "a"], ["--prompt", "a", "--document_start"]):
        assert command(run, *flags, "--max_new_tokens", "1")[0] == 0
    assert prompts[0] == prompts[1] == [end]
    assert prompts[3] == [end, *prompts[2]] and end not in prompts[2]


def test_a_prompt_longer_than_the_context_and_from_standard_input(run, monkeypatch):
    text = "the quick brown fox jumps über die Brücke " * 20
    code, out, err = command(run, "--prompt", text, "--max_new_tokens", "5", "--temperature", "0")
    assert code == 0 and out.startswith(text)
    assert "the model reads the last 32" in err.splitlines()[0]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert command(run, "--prompt", "-", "--max_new_tokens", "5", "--temperature", "0")[1] == out


def test_an_earlier_checkpoint_is_another_model(run):
    flags = ["--prompt", "def ", "--max_new_tokens", "20", "--json", "--ignore_eos"]
    first, last = (json.loads(command(run, *flags, *more)[1])["ids"] for more in (["--checkpoint", "step-00000002"], []))
    assert first != last


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--temperature", "-1"], "--temperature: -1 is out of range"),
        (["--top_p", "0"], "--top_p: 0 is out of range"),
        (["--top_p", "1.5"], "--top_p: 1.5 is out of range"),
        (["--samples", "0"], "--samples: 0 is out of range"),
        (["--temprature", "1"], "did you mean '--temperature'?"),
        (["--dtype", "bf61"], "did you mean 'bf16'?"),
        (["--prompt", "caf\udce9"], "--prompt: is not UTF-8"),
        (["--checkpoint", "step-00000003"], "it has step-00000002, step-00000004"),
    ],
)
def test_mistakes_are_one_line(run, flags, words):
    assert words in refusal_of(generate.main, run, *flags)


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_logits_that_are_not_finite_are_one_line(temperature, run, monkeypatch):
    """Finite weights whose products are beyond the dtype."""
    load = TrainedModel.load_model

    def overflowing(trained):
        model = load(trained)
        model.ln_f.weight.fill_(3e38)
        model.ln_f.bias.fill_(3e38)
        return model

    monkeypatch.setattr(TrainedModel, "load_model", overflowing)
    code, _, err = command(run, "--prompt", "def ", "--temperature", temperature)
    (line,) = err.splitlines()
    assert code == 2 and "not finite in fp32" in line and "--checkpoint" in line


def test_a_prompt_that_is_not_text_is_refused(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    assert "is not UTF-8 (byte 0)" in refusal_of(generate.main, run, "--prompt", "-")


@pytest.mark.gate
def test_a_closed_standard_input_is_an_empty_prompt(tmp_path):
    command = f"exec {sys.executable} launch/generate.py {tmp_path}/missing --prompt - <&-"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {tmp_path}/missing: no such folder")


def test_a_folder_without_a_model_is_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    for source in ("empty", "missing"):
        assert f"{tmp_path / source}" in refusal_of(generate.main, tmp_path / source)


# --- text as it comes


@pytest.mark.parametrize("spec", ["bytes", "corpus"])
def test_text_as_it_comes_is_the_text(spec, corpus):
    """Whole characters at each moment; together, the text of all ids, broken ones included."""
    import numpy as np

    opened = open_corpus(corpus)
    tokenizer = Tokenizer.load(opened.path, opened.manifest["tokenizer"]) if spec == "corpus" else train_tokenizer("bytes", [])
    text = "naïve – 日本語 🦊🦊 \t\n end"
    before = tokenizer.encode("Büro ").tolist()
    for ids in (tokenizer.encode(text).tolist(), np.random.default_rng(1).integers(0, 256, 300).tolist()):
        assert "".join(text_parts(tokenizer, before, ids)) == tokenizer.decode([*before, *ids])[len("Büro ") :]
    seen = list(text_parts(tokenizer, [], tokenizer.encode(text).tolist()))
    assert "".join(seen) == text and not any("\ufffd" in part for part in seen)
    assert sum(map(bool, seen)) > 10  # and not all of it at the end


@pytest.mark.parametrize("script", ["generate", "score"])
def test_the_commands_of_the_page_run(script, run):
    """As they stand in the documentation, but on a small model."""
    from launch import score

    found = commands(f"python launch/{script}.py")
    assert found
    for line in found:
        words = shlex.split(line)[2:]
        own = open_trained(run).description["corpus"]["path"]
        words = [
            str(run) if word in ("exported/first", "runs/demo", "runs/first", "runs/other") else own if word.startswith("data/") else word
            for word in words
        ]
        assert run_here({"generate": generate.main, "score": score.main}[script], *words).returncode == 0, line
