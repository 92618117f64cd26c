"""Exported folders: the command, tokenizers as AutoTokenizer reads them, folders of others and broken ones, `--init_from`'s refusals."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from data_pipeline.shards import open_corpus
from data_pipeline.tokenizer import Tiktoken, Tokenizer
from launch import export, generate
from launch.errors import UsageError
from launch.formats.hf_folder import open_hf_folder
from launch.formats.metrics import read_metrics
from launch.formats.tensor_files import safetensors_tensors
from launch.trained_model.card import without_folders
from launch.trained_model.load import open_trained
from model.hf import hf_tensors
from tests.commands import run_script
from tests.helpers import ROOT, explain, explained, exported, refusal, refusal_of, reseal, run_here

SIZES = {"n_layer": 2, "n_head": 2, "d_model": 36, "seq_len": 32}
SHAPE = [word for key, value in SIZES.items() for word in (f"--{key}", str(value))]
JSON = ["--deepspeed_config", "ds_configs/zero1_fp32.json", *SHAPE]
CL100K = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
#: Weights in a folder and in a run.
C_FC, ENGINE = "transformer.h.1.mlp.c_fc.weight", "checkpoints/step-00000006/engine"


@pytest.fixture(scope="module")
def run(one_rank, corpus, tmp_path_factory) -> Path:
    """A run of six steps, with the checkpoints of steps 3 and 6."""
    runs = tmp_path_factory.mktemp("runs")
    flags = [*JSON, "--data", str(corpus), "--runs_dir", str(runs), "--run_name", "r"]
    flags += ["--steps", "6", "--save_every", "3", "--eval_every", "6", "--eval_batches", "2", "--global_batch_size", "4"]
    one_rank.train(flags)
    return runs / "r"


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory) -> Path:
    """That run, exported by the command."""
    out = tmp_path_factory.mktemp("exported") / "model"
    done = run_script("launch/export.py", run, "--out", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"{out}: 0.1 M parameters in float32, step 6 of {run}")
    return out


def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def fault(folder: Path, **options: Any) -> str:
    """The one line with which a folder is refused."""
    with pytest.raises(UsageError) as refused:
        open_trained(folder, **options).load_model()
    (line,) = refused.value.faults
    return line


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], **config: Any) -> Path:
    """Write what `change` makes of the weights of `folder`, and values of config.json."""
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    edit(folder / "config.json", **config)
    return folder


# --- the command ---------------------------------------------------------------------------------------------------------------------


def test_the_folder_has_what_others_read_and_the_card_the_runs_figures(folder, run):
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md")
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    config = open_hf_folder(folder).config
    assert shapes == {part.name: part.shape for parts in hf_tensors(config).values() for part in parts}
    assert config.vocab_size == 1024
    # Its default has token_type_ids: a GPT-2 adds the embedding of token 0 to its input, a Llama's `generate` refuses them.
    assert json.loads((folder / "tokenizer_config.json").read_text())["model_input_names"] == ["input_ids", "attention_mask"]
    card = (folder / "README.md").read_text()
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    losses = [line["loss"] for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
    assert f"| training loss | {sum(losses) / len(losses):.4f} (mean of {len(losses)} steps) |" in card
    assert f"| validation loss | {last['val_loss']:.4f} (perplexity " in card
    assert f"| tokens seen | {last['tokens']:,} of {last['tokens']:,} |" in card
    assert card.startswith("---\nlibrary_name: transformers\n") and "AdamW" in card and "None" not in card


def test_the_card_names_no_folder_of_the_machine_and_all_commits(run, tmp_path):
    sources = ["nanoGPT: /home/user/data/owt", "hf:/home/u/ds", "hf:json:/home/u/x.jsonl", "hf:json:https://h/a/b.json", "http://a"]
    assert without_folders(", ".join(sources)) == "nanoGPT: owt, hf:ds, hf:json:x.jsonl, hf:json:https://h/a/b.json, http://a"
    copy = copied(run, tmp_path)
    edit(copy / "run.json", commit="a" * 40, init_from="/home/u/gpt2", resumes=[{"command": [], "commit": "b" * 40}])
    exported(copy, tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    assert f"| commit | {'a' * 40}, {'b' * 40} |" in card and "| initial weights | gpt2 |" in card
    assert str(tmp_path) not in card and str(run.parent) not in card and "/home/u" not in card


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["RUN", "--out", "DIR/there"], "exists, and nothing is overwritten"),
        (["RUN", "--out", "DIR/new", "--dtype", "bf61"], "did you mean 'bf16'?"),
        (["RUN", "--out", "DIR/new", "--checkpoint", "step-00000005"], "it has step-00000003, step-00000006"),
        (["DIR/nowhere", "--out", "DIR/new"], "no such folder"),
        (["DIR/there", "--out", "DIR/new"], "config.json: cannot be read"),
        (["FOLDER", "--out", "DIR/new", "--data", "x"], "--data x: is for a run, and"),
        (["FOLDER", "--out", f"DIR/{'x' * 300}"], "File name too long"),
        (["LARGE", "--out", "DIR/new", "--dtype", "fp16"], "h.1.mlp.c_fc.weight holds values beyond the range of torch.float16"),
        (["UNREADABLE", "--out", "DIR/new"], "metrics.jsonl: Is a directory"),
    ],
)
def test_nothing_is_overwritten_and_nothing_is_left_of_a_failure(arguments, said, run, folder, tmp_path):
    places = {"RUN": str(run), "FOLDER": str(folder), "DIR": str(tmp_path / "dir"), "LARGE": str(tmp_path / "copy")}
    places["UNREADABLE"] = str(tmp_path / "copy")
    (tmp_path / "dir" / "there").mkdir(parents=True)
    if "LARGE" in arguments:
        change_weights(copied(folder, tmp_path), lambda weights: weights | {C_FC: weights[C_FC] + 70_000})
    if "UNREADABLE" in arguments:
        (copied(run, tmp_path) / "metrics.jsonl").unlink()
        (tmp_path / "copy" / "metrics.jsonl").mkdir()
    first, *others = (word.replace("DIR", places["DIR"]) for word in arguments)
    assert said in refusal_of(export.main, places.get(first, first), *others)
    assert [path.name for path in (tmp_path / "dir").iterdir()] == ["there"]


def test_what_transformers_does_not_do_is_said_once(run, tmp_path):
    copy = copied(run, tmp_path)
    edit(copy / "run.json", no_cross_document=True)
    exported(copy, tmp_path / "model")
    assert (tmp_path / "model" / "README.md").read_text().endswith("one document at a time\n")


def test_another_checkpoint_another_dtype(run, tmp_path):
    exported(run, tmp_path / "half", "--checkpoint", "3", "--dtype", "bf16")
    half, whole = open_trained(tmp_path / "half").load_model(), open_trained(run, checkpoint="step-00000003").load_model()
    assert half.wte.weight.dtype == torch.bfloat16
    for name, parameter in half.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name).bfloat16())
    again = open_trained(run).load_model()
    assert not torch.equal(again.wpe.weight, whole.wpe.weight)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.gate),
        *(pytest.param(number, marks=pytest.mark.long) for number in (signal.SIGTERM, signal.SIGKILL)),
    ],
)
def test_an_export_that_is_killed_leaves_what_the_next_one_removes(number, run, tmp_path):
    process = subprocess.Popen([sys.executable, "launch/export.py", str(run), "--out", str(tmp_path / "out")], cwd=ROOT)
    while process.poll() is None and not (tmp_path / ".out.partial").exists():
        time.sleep(0.01)
    process.send_signal(number)
    interrupted = number == signal.SIGINT
    assert process.wait(60) == (130 if interrupted else -number)
    assert {path.name for path in tmp_path.iterdir()} == (set() if interrupted else {".out.partial", ".out.lock"})
    (tmp_path / ".other.partial").mkdir()  # of another export, which may be still at work
    assert run_here(export.main, run, "--out", tmp_path / "out").returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".other.partial"}


def test_weights_are_cut_into_several_files_and_read_again(folder, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    from launch.trained_model import hf_export

    monkeypatch.setattr(hf_export, "SHARD_BYTES", 60_000)
    exported(folder, tmp_path / "out")
    tmp_path, whole = tmp_path / "out", open_trained(folder).load_model()
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    again = open_trained(tmp_path).load_model()
    assert all(torch.equal(parameter, again.get_parameter(name)) for name, parameter in whole.named_parameters())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(theirs.transformer.wpe.weight, whole.wpe.weight)
    next(tmp_path.glob("model-00002-*.safetensors")).unlink()
    assert "model-00002-" in (said := fault(tmp_path)) and "No such file" in said


@pytest.mark.gate
def test_a_full_disk_is_one_line_and_leaves_nothing(folder, tmp_path):
    # The limit of each file stands for a full disk.
    command = f"ulimit -f 200; exec {sys.executable} launch/export.py {folder} --out {tmp_path}/out --dtype fp32"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert f"--out {tmp_path}/out: cannot be written" in done.stderr
    assert not list(tmp_path.iterdir())


# --- what is broken ------------------------------------------------------------------------------------------------------------------


def test_an_unfinished_run_is_refused_unless_its_checkpoint_is_named(run, tmp_path):
    copy = copied(run, tmp_path)
    shutil.rmtree(copy / "checkpoints" / "step-00000006")
    assert "an unfinished run" in fault(copy)
    assert "--checkpoint step-00000003" in fault(copy)
    assert open_trained(copy, checkpoint="newest").state["step"] == 3
    shutil.rmtree(copy / "checkpoints" / "step-00000003")
    assert "has no complete checkpoint" in fault(copy)


def test_a_damaged_checkpoint_is_one_line(run, tmp_path):
    copy = copied(run, tmp_path)
    engine = copy / "checkpoints" / "step-00000006" / "engine"
    weights = engine / "mp_rank_00_model_states.pt"
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    assert str(weights) in fault(copy, checkpoint="6")
    with pytest.raises(UsageError) as refused:  # the checkpoint before it is good, and not the end of the run
        open_trained(copy)
    assert str(weights) in refused.value.faults[0] and "--checkpoint step-00000003" in refused.value.faults[1]
    weights.unlink()
    assert str(weights) in fault(copy, checkpoint="6")
    # Of the size that it had, and no checkpoint of DeepSpeed's.
    weights.write_bytes(b"\0" * len(content))
    assert str(weights) in fault(copy, checkpoint="6")
    reseal(engine.parent)
    assert "cannot be read" in fault(copy)
    edit(copy / "run.json", shape={"n_layer": 3})
    assert "do not describe a model" in fault(copy)


class Attack:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


def test_no_pickle_is_loaded(run, folder, tmp_path):
    copy, mark = copied(run, tmp_path), tmp_path / "attacked"
    file = copy / "checkpoints" / "step-00000006" / "engine" / "mp_rank_00_model_states.pt"
    torch.save({"module": {}, "attack": Attack(mark)}, file)
    reseal(file.parents[1])
    assert f"{file}: holds " in fault(copy)
    theirs = Path(shutil.copytree(folder, tmp_path / "theirs"))
    (theirs / "model.safetensors").write_bytes(pickle.dumps(Attack(mark)) + b"\0" * 10_000)
    assert "model.safetensors: is not a complete safetensors file" in fault(theirs)
    (theirs / "model.safetensors").unlink()
    assert "holds no model.safetensors" in fault(theirs)
    torch.save({"attack": Attack(mark)}, theirs / "pytorch_model.bin")
    assert "convert pytorch_model.bin" in fault(theirs)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "is a model of \"['MambaForCausalLM']\"; only GPT2LMHeadModel"),
        ({"model_type": ["gpt2"]}, "is a model of"),
        ({"architectures": ["GPT2ForSequenceClassification"]}, "GPT2ForSequenceClassification"),
        ({"activation_function": "relu"}, 'activation_function is "relu", must be "gelu_new"'),
        ({"tie_word_embeddings": False}, "lacks lm_head.weight"),
        ({"n_inner": 100}, "config.json says ["),
        ({"n_embd": "36"}, 'n_embd is "36", must be a whole number'),
        ({"document_end": "7"}, "config.json: document_end is '7': it must be a token, from 0 to 1023"),
        ({"n_layer": 1}, "is not a weight of a gpt2 of 1 layers"),
        ({"n_layer": 3}, "lacks h.2."),
        ({"n_layer": 10**9}, "config.json has n_layer 1,000,000,000, the files have 28 tensors"),
        ({"n_positions": 64}, "wpe.weight is [32, 36], config.json says [64, 36]"),
        ({"n_head": 5}, "n_embd must be a multiple of n_head"),
        ({"quantization_config": {"quant_method": "gptq"}}, 'quantization_config is {"quant_method": "gptq"}, must be null'),
    ],
    ids=str,
)
def test_another_architecture_or_shape_is_named(values, said, folder, tmp_path):
    copy = copied(folder, tmp_path)
    edit(copy / "config.json", **values)
    assert said in fault(copy)


HEAD, EMBEDDING, LAST_BIAS = "lm_head.weight", "transformer.wte.weight", "transformer.ln_f.bias"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda weights: {HEAD: weights[EMBEDDING].clone()}, ""),
        (lambda weights: {HEAD: weights[EMBEDDING] + 1}, "is not the token embedding"),
        (lambda weights: {"ln_f.bias": weights[LAST_BIAS] + 1}, "ln_f.bias of model.safetensors; remove one of them"),
        (lambda weights: {C_FC: weights[C_FC] * torch.nan}, "h.1.mlp.c_fc.weight contains NaN or Inf"),
        (lambda weights: {C_FC: weights[C_FC] * torch.inf}, "h.1.mlp.c_fc.weight contains NaN or Inf"),
        (lambda weights: {C_FC: weights[C_FC].int()}, "is of dtype I32, must be floating point"),
    ],
    ids=["a tied head again", "another head", "twice", "nan", "inf", "integers"],
)
def test_weights_that_are_no_model_are_refused(change, said, folder, tmp_path):
    copy = change_weights(copied(folder, tmp_path), lambda weights: weights | change(weights))
    if said:
        assert said in fault(copy)
    else:
        open_trained(copy).load_model()


def test_an_index_names_files_that_are_there_and_no_weight_twice(folder, tmp_path):
    copy = copied(folder, tmp_path)
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"transformer.wpe.weight": "x" * 5000}}))  # a name that no file can have
    assert fault(copy).endswith("copy or export it again")
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for file in files:
        save_file(weights, copy / file)
    index.write_text(json.dumps({"weight_map": {**dict.fromkeys(weights, files[0]), "transformer.wpe.weight": files[1]}}))
    assert f"repeats transformer.h.0.attn.c_attn.bias of {files[0]}; remove one" in fault(copy)


def test_a_damaged_file_of_weights_is_one_line(folder, tmp_path):
    copy = copied(folder, tmp_path)
    file, content = copy / "model.safetensors", (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length]
    doubled = header.replace(b'"transformer.ln_f.weight"', b'"transformer.ln_f.bias"').ljust(length)
    for broken in (
        content[:-1],
        content + b"\0",
        content[:100],
        b"",
        content[:8] + b"[]".ljust(length) + content[8 + length :],
        content[:8] + b"x" * length + content[8 + length :],
        content[:8] + header.replace(b"F32", b"F16") + content[8 + length :],
        content[:8] + doubled + content[8 + length :],
    ):
        file.write_bytes(broken)
        assert str(file) in fault(copy)
    (copy / "config.json").write_text("{")
    assert "is not JSON" in fault(copy)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"])
def test_a_pipe_in_a_folder_is_not_waited_for(name, folder, tmp_path):
    copy = copied(folder, tmp_path)
    if name.endswith("index.json"):
        (copy / "model.safetensors").unlink()
    (copy / name).unlink(missing_ok=True)
    os.mkfifo(copy / name)
    assert "not a regular file" in (open_trained(copy).no_tokenizer if name == "tokenizer.json" else fault(copy))


def test_the_header_of_a_file_of_weights_says_what_it_holds(tmp_path):
    save_file({"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.tensor(1)}, tmp_path / "x.safetensors")
    found = safetensors_tensors(tmp_path / "x.safetensors")
    assert [(one.name, one.shape, one.dtype) for one in found] == [("a", (2, 3), "BF16"), ("b", (), "I64")]


@pytest.mark.parametrize(
    ("file", "values", "said"),
    [
        ("run.json", {"total_tokens": "x"}, "run.json: 'total_tokens' is \"x\", must be a whole number"),
        ("run.json", {"eval_batches": -3}, "run.json: 'eval_batches' is -3, must be a whole number"),
        ("run.json", {"techniques": 3}, "run.json: 'techniques' is 3, must be an object"),
        ("run.json", {"shape": {"n_layer": 3, "n_head": 2, "d_model": 36, "seq_len": 32}}, "of the model in run.json; restore run.json"),
        ("run.json", {"shape": {"n_layer": 3}}, "do not describe a model"),
        ("run.json", {"corpus": {"path": "PATH", "vocab_size": 1023}}, "but its corpus has"),
        ("checkpoints/step-00000006/state.json", {"ranks": 0}, "state.json: "),
        ("checkpoints/step-00000006/state.json", {"tokens": "x"}, "state.json: "),
    ],
)
def test_a_run_that_was_edited_is_one_line(file, values, said, run, corpus, tmp_path):
    copy = copied(run, tmp_path)
    edit(copy / file, **json.loads(json.dumps(values).replace("PATH", str(corpus))))
    assert said in fault(copy, checkpoint="step-00000006")


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("mp_rank_00_model_states.pt", lambda state: state.pop("param_shapes"), "its files are not as DeepSpeed writes them"),
        ("mp_rank_00_model_states.pt", lambda state: state.update(param_shapes=[1]), "its files are not as DeepSpeed writes them"),
        ("*_optim_states.pt", lambda state: state.update(optimizer_state_dict={"a": 1}), "its files are not as DeepSpeed writes them"),
        (
            "*_optim_states.pt",
            lambda state: state["optimizer_state_dict"]["single_partition_of_fp32_groups"][1].data.fill_(torch.nan),
            "ln_1.weight contains NaN or Inf; take an earlier --checkpoint",
        ),
    ],
    ids=["no shapes", "no names", "no weights", "nan"],
)
def test_files_of_deepspeeds_with_other_content_are_one_line(name, change, said, run, tmp_path):
    copy = copied(run, tmp_path)
    (file,) = (copy / ENGINE).glob(name)
    states = torch.load(file, weights_only=False)
    change(states)
    torch.save(states, file)
    reseal(file.parents[1])
    assert said in fault(copy)


def test_the_end_of_a_text_is_known_without_the_corpus(run, tmp_path):
    """The corpus's id is recorded, and not taken for the last one of the vocabulary."""
    copy = copied(run, tmp_path)
    described = json.loads((copy / "run.json").read_text())
    assert described["corpus"]["eot_id"] == open_corpus(described["corpus"]["path"]).eot_id
    described["corpus"] |= {"path": str(tmp_path / "elsewhere"), "eot_id": 7}
    (copy / "run.json").write_text(json.dumps(described | {"no_cross_document": True}))
    trained = open_trained(copy)
    assert trained.eot_id == trained.config.document_end == 7
    for unknown in ({}, {"eot_id": None}, {"eot_id": 10**9}, {"eot_id": "7"}):
        rest = {key: value for key, value in described["corpus"].items() if key != "eot_id"}
        (copy / "run.json").write_text(json.dumps(described | {"no_cross_document": True, "corpus": rest | unknown}))
        assert "the id that ends text is unknown" in fault(copy)
        (copy / "run.json").write_text(json.dumps(described | {"corpus": rest | unknown}))
        assert open_trained(copy).eot_id is None


# --- --init_from ---------------------------------------------------------------------------------------------------------------------


def padded(folder: Path, tmp_path: Path, rows: int) -> Path:
    """A copy whose embedding has more rows than its tokenizer has ids, as those of Qwen3, or fewer if `rows` is negative."""

    def change(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        embedding = weights[EMBEDDING]
        return weights | {EMBEDDING: torch.cat([embedding, torch.full((rows, 36), 9.0)]) if rows > 0 else embedding[:rows].clone()}

    return change_weights(copied(folder, tmp_path), change, vocab_size=1024 + rows)


def test_a_start_from_a_padded_vocabulary_leaves_the_padding_out(one_rank, folder, corpus, tmp_path):
    copy = padded(folder, tmp_path, 200)
    flags = ["--deepspeed_config", "ds_configs/zero1_bf16.json", "--data", str(corpus), "--init_from", str(copy), *SHAPE]
    told = json.loads(explain(*flags).stdout)
    assert any("the last 200 of its 1,224 ids are not in its tokenizer" in note for note in told["notes"])
    run = [*flags, "--runs_dir", str(tmp_path), "--run_name", "r", "--global_batch_size", "4", "--eval_every", "0", "--steps", "1"]
    one_rank.train([*run, "--lr", "1e-30", "--min_lr", "0"])
    whole, found = open_trained(folder).load_model().state_dict(), open_trained(tmp_path / "r").load_model().state_dict()
    assert whole.keys() == found.keys()
    assert all(torch.equal(whole[name], found[name]) for name in whole)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink()
    assert "copy the model's tokenizer there" in starting(copy, corpus, *SHAPE)
    (copy / "tokenizer.json").write_text("{")
    assert "its vocab_size is 1,224, and that of the corpus 1,024" in starting(copy, corpus, *SHAPE)


def test_ids_that_only_the_model_or_only_the_tokenizer_has_are_left_out(folder, tmp_path):
    copy = padded(folder, tmp_path, 3000)
    done = run_here(generate.main, copy, "--prompt", "def ", "--top_k", "0", "--max_new_tokens", "20", "--ignore_eos", "--json")
    assert max(json.loads(done.stdout)["ids"]) < 1024
    copy = padded(folder, tmp_path / "short", -24)  # without the tokenizer's end of text, 1023
    assert "this model has no end-of-text token" in refusal_of(generate.main, copy)
    assert json.loads((exported(copy, tmp_path / "out") / "config.json").read_text())["eos_token_id"] is None


def test_a_host_without_the_folder_starts_from_a_checkpoint_or_not_at_all(one_rank, folder, corpus, tmp_path):
    """With a store, a resume does not need the folder, as the store may have a checkpoint."""
    copy = copied(folder, tmp_path)
    flags = [*JSON, "--data", str(corpus), "--run_name", "r", "--init_from", str(copy)]
    flags += ["--global_batch_size", "4", "--eval_every", "0", "--checkpoint_store", f"file://{tmp_path}/store"]
    one_rank.train([*flags, "--runs_dir", str(tmp_path / "a"), "--steps", "2"])
    shutil.rmtree(copy)
    one_rank.train([*flags, "--runs_dir", str(tmp_path / "b"), "--steps", "4", "--resume"])
    assert json.loads((tmp_path / "b" / "r" / "run.json").read_text())["init_from"] == str(copy)
    assert "no such folder" in refusal(*flags, "--runs_dir", str(tmp_path / "c"))
    done = run_script("launch/pretrain.py", *flags[:-1], f"file://{tmp_path}/empty", "--runs_dir", tmp_path / "c", "--resume")
    assert done.returncode == 2 and "a host lacks the folder" in done.stderr
    assert not (tmp_path / "c" / "r").exists()


def starting(folder: object, corpus: Path, *more: str) -> str:
    """The lines with which a start from `folder` is refused."""
    return refusal("--deepspeed_config", "ds_configs/zero1_fp32.json", "--data", str(corpus), "--init_from", str(folder), *more)


def test_a_start_from_a_folder_has_its_shape_and_tokenizer(folder, corpus, tmp_path):
    flags = ["--deepspeed_config", "ds_configs/zero1_fp32.json", "--data", str(corpus), "--init_from", str(folder)]
    assert explained(*flags, "--preset", "micro", *SHAPE[:2])["run"]["d_model"]["value"] == 36
    said = "its model has --d_model 36 --seq_len 32, and the command --d_model 64 --seq_len 16; leave the flags out"
    assert said in starting(folder, corpus, "--d_model", "64", "--seq_len", "16")
    copy = copied(folder, tmp_path)
    described = json.loads((copy / "tokenizer.json").read_text())
    described["model"]["merges"] = described["model"]["merges"][:50]
    (copy / "tokenizer.json").write_text(json.dumps(described))
    assert "its tokenizer gives other ids than that of" in starting(copy, corpus, *SHAPE)
    described = json.loads((folder / "tokenizer.json").read_text())
    ids = described["model"]["vocab"]
    ids["e"], ids["t"] = ids["t"], ids["e"]
    (copy / "tokenizer.json").write_text(json.dumps(described))
    assert "decode to another text" in starting(copy, corpus, *SHAPE)
    (copy / "tokenizer.json").write_text("{")
    told = explain("--deepspeed_config", "ds_configs/zero1_fp32.json", "--data", str(corpus), "--init_from", str(copy), *SHAPE)
    assert any("cannot tell whether" in note and "was made with its tokenizer: " in note for note in json.loads(told.stdout)["notes"])
    resolved = explain(*flags, *SHAPE)
    assert json.loads(resolved.stdout)["run"]["init_from"]["value"] == str(folder)


def test_a_start_from_what_is_no_model_is_one_line(folder, run, corpus, tmp_path):
    assert "no such folder" in starting(tmp_path / "nowhere", corpus, *SHAPE)
    assert "config.json: cannot be read" in starting(run, corpus, *SHAPE)
    assert "--init_from is empty" in starting("", corpus, *SHAPE)
    copy = copied(folder, tmp_path)
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    assert "convert pytorch_model.bin" in starting(copy, corpus, *SHAPE)


def test_a_resumed_run_keeps_where_it_began(one_rank, folder, corpus, tmp_path):
    flags = [*JSON, "--data", str(corpus), "--runs_dir", str(tmp_path), "--run_name", "r", "--global_batch_size", "4"]
    flags += ["--eval_batches", "2", "--eval_every", "2"]
    one_rank.train([*flags, "--steps", "2", "--init_from", str(folder)])
    one_rank.train([*flags, "--steps", "4", "--resume"])
    assert json.loads((tmp_path / "r" / "run.json").read_text())["init_from"] == str(folder)
    log = (tmp_path / "r" / "log.txt").read_text()
    assert f"step 0, the weights of {folder}: validation" in log and "init_from" not in log


# --- tokenizers ----------------------------------------------------------------------------------------------------------------------


def documents() -> list[str]:
    """A thousand documents: code, other scripts, blanks, numbers, and what looks like the end of a text."""
    rng = np.random.default_rng(3)
    lines = [line for path in sorted(Path(json.__file__).parent.glob("*.py")) for line in path.read_text().splitlines(keepends=True)]
    lines += [
        "naïve café — 世界 привет\n",
        "    \n\n\t x   \n",
        "1234567 89,000.5e10\r\n",
        "<|endoftext|> a<|endoftext|>b\n",
        "🙂🙂 e\u0301\n",
    ]
    lines += ["don't we'LL I'VE\n", "==========\n", " " * 300 + "x\n", "\x00\x01\x1c\x85\u2028\n", "aaaaaaaaaaaaaaaaaaaaaaaaa\n"]
    ends = ["", "   ", "\n  \n ", "\n\n\n", "  \t", " \r\n"]
    return ["".join(rng.choice(lines, rng.integers(0, 30))) + ends[rng.integers(len(ends))] for _ in range(1000)]


def of_tiktoken(pattern: str, special: dict[str, int] | None = None) -> Tokenizer:
    """A tokenizer as tiktoken's own are: ranks and a pattern, nothing else."""
    from data_pipeline.tokenizer import train_tokenizer

    trained = train_tokenizer("bpe:900", documents()[:300])
    ranks = trained._ranks  # type: ignore[attr-defined]
    special = special or {"<|endoftext|>": len(ranks)}
    return Tiktoken({"kind": "tiktoken"}, ranks, pattern, special, special["<|endoftext|>"])


def all_tokenizers(corpus: Path) -> dict[str, Tokenizer]:
    from data_pipeline.tokenizer import GPT2_PATTERN, Characters, train_tokenizer

    opened = open_corpus(corpus)
    known = "".join(sorted({character for text in documents() for character in text}))
    return {
        "bpe": Tokenizer.load(opened.path, opened.manifest["tokenizer"]),
        "bytes": train_tokenizer("bytes", []),
        "gpt2": of_tiktoken(GPT2_PATTERN),
        "cl100k": of_tiktoken(CL100K, {"<|endoftext|>": 901, "<|fim_prefix|>": 903, "<|endofprompt|>": 950}),
        "characters": Characters(known),
    }


@pytest.mark.parametrize(
    "name", ["bpe", "gpt2", "characters", *(pytest.param(name, marks=pytest.mark.long) for name in ("bytes", "cl100k"))]
)
def test_auto_tokenizer_gives_the_ids_of_the_corpus(name, corpus, tmp_path):
    from transformers import AutoTokenizer

    from launch.formats.folder_tokenizer import tokenizer_of_folder
    from launch.formats.hf_folder import HFFolder
    from launch.trained_model.hf_export import write_config, write_tokenizer
    from model.presets import GPTConfig

    tokenizer = all_tokenizers(corpus)[name]
    eot, config = getattr(tokenizer, "eot_id", None), GPTConfig(**SIZES, vocab_size=tokenizer.vocab_size)
    write_tokenizer(tokenizer, tmp_path, 32)
    write_config(tmp_path, config, eot, "float32")
    texts = documents()
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(texts, verbose=False)["input_ids"] == [ids.tolist() for ids in tokenizer.encode_many(texts)]
    assert theirs.eos_token_id == eot
    assert [theirs.decode(tokenizer.encode(text)) for text in texts] == [tokenizer.decode(tokenizer.encode(text)) for text in texts]
    again, why = tokenizer_of_folder(HFFolder(tmp_path, config, {}, {}))
    assert again is not None, why
    assert getattr(again, "eot_id", None) == eot
    assert all(np.array_equal(own, found) for own, found in zip(tokenizer.encode_many(texts), again.encode_many(texts), strict=True))


# --- GPT-2's own size ----------------------------------------------------------------------------------------------------------------

IN_AND_OUT = """
import sys
import time
sys.path.insert(0, {root!r})
import torch, transformers
from launch import export
from launch.training.meter import peak_of_process
torch.ones(10) @ torch.ones(10)
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew: else it is that of the process which started this one
before = peak_of_process()
sys.argv = ["export.py", {source!r}, "--out", {out!r}, "--quiet"]
export.main()
print(peak_of_process() - before)
"""


def published(folder: Path, sizes: dict[str, int], vocab_size: int) -> None:
    """A folder like GPT-2's published ones, with random weights: names without a prefix, and the causal masks."""
    from model.presets import GPTConfig

    config = GPTConfig(**sizes, vocab_size=vocab_size)
    shapes = {part.name.removeprefix("transformer."): part.shape for parts in hf_tensors(config).values() for part in parts}
    masks = {f"h.{index}.attn.bias": (1, 1, config.seq_len, config.seq_len) for index in range(config.n_layer)}
    said = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new", "n_ctx": config.seq_len}
    said |= {"n_positions": config.seq_len, "n_embd": config.d_model, "n_head": config.n_head, "n_layer": config.n_layer}
    said |= {"vocab_size": vocab_size, "bos_token_id": vocab_size - 1, "eos_token_id": vocab_size - 1, "layer_norm_epsilon": 1e-05}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(said))
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in {**shapes, **masks}.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def in_and_out(folder: Path, out: Path) -> int:
    """Exports `folder` to `out` in a process of its own; by how much its peak of memory grew, bytes."""
    code = IN_AND_OUT.format(root=str(ROOT), source=str(folder), out=str(out))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def check_in_and_out(tmp_path: Path, sizes: dict[str, int], vocab_size: int) -> tuple[int, int]:
    published(tmp_path / "in", sizes, vocab_size)
    grown = in_and_out(tmp_path / "in", tmp_path / "out")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    before = {f"transformer.{name}": tensor for name, tensor in before.items() if not name.endswith(".attn.bias")}
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    return grown, (tmp_path / "out" / "model.safetensors").stat().st_size


def test_a_published_folder_goes_in_and_out_unchanged(tmp_path):
    check_in_and_out(tmp_path, SIZES, 1000)


@pytest.mark.long
def test_a_gpt2_goes_in_and_out_in_its_own_memory(tmp_path):
    grown, size = check_in_and_out(tmp_path, {"n_layer": 12, "n_head": 12, "d_model": 768, "seq_len": 1024}, 50_257)
    assert size == pytest.approx(124_439_808 * 4, rel=1e-3)
    assert grown < 1.5 * size
