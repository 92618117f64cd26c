"""What several tests need and none of them is about."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.config.explain import explain as explained_run
from launch.config.run_config import RunConfig, cuda_requirement, resolve
from launch.config.step_time import hardware_of
from launch.errors import run_command
from launch.formats.checkpoint_files import complete_checkpoints, file_entry, read_state, state_text
from model.gpt import GPT
from model.hf import hf_config, to_hf_state_dict
from model.presets import FIELDS, GPTConfig, ModelShape, shape_of
from model.sampling import NextLogits, Sampling, stream
from recipes.registry import read_recipe, recipe_names
from tests.commands import run_script

ROOT = Path(__file__).resolve().parents[1]


def config_of(architecture: str, sizes: dict[str, Any], **more: Any) -> GPTConfig:
    """The model of an architecture. sizes: of `ModelShape`, and fields that replace the architecture's. more: of `GPTConfig`."""
    given = {name: value for name, value in sizes.items() if name in FIELDS}
    plain = ModelShape(**{name: value for name, value in sizes.items() if name not in FIELDS})
    return GPTConfig(**asdict(shape_of(plain, architecture, given)), **more)


def in_transformers(model: GPT, **options: Any) -> Any:
    """The model of transformers that is `model`. options: of its `from_pretrained`."""
    import transformers

    own = hf_config(model.config)
    config = transformers.AutoConfig.for_model(**own)
    theirs = getattr(transformers, own["architectures"][0]).from_pretrained(
        None, config=config, state_dict=to_hf_state_dict(model.state_dict(), model.config), **options
    )
    return theirs.eval()


def recipe_flags(config: Path) -> list[str]:
    """What the recipe of a DeepSpeed JSON that is named like it suggests, without which it may be refused."""
    return read_recipe(ROOT / "recipes" / config.stem).flags if config.stem in recipe_names() else []


def run_here(main: Callable[[], int], *words: object) -> subprocess.CompletedProcess[str]:
    """What a command with the arguments `words` ends with and prints, without a process of its own, from the checkout's root."""
    output, errors, arguments, here = io.StringIO(), io.StringIO(), sys.argv, os.getcwd()
    sys.argv = ["command", *map(str, words)]
    os.chdir(ROOT)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as end:
            run_command(main)
    finally:
        sys.argv = arguments
        os.chdir(here)
    return subprocess.CompletedProcess(words, int(end.value.code or 0), output.getvalue(), errors.getvalue())


def refusal_of(main: Callable[[], int], *words: object) -> str:
    """The one line on which a command ends, exit code 2."""
    done = run_here(main, *words)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def explain(*flags: str) -> subprocess.CompletedProcess[str]:
    """What `launch/pretrain.py --explain json` with `flags` ends with and prints, without a process of its own."""

    def command() -> int:
        config, parsed = resolve(["--explain", "json", *flags])
        print(json.dumps(explained_run(config, hardware_of(parsed, config))))
        return 0

    return run_here(command)


def explained(*flags: str) -> dict[str, Any]:
    """What `--explain json` says of a run that can be."""
    done = explain(*flags)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refusal(*flags: str) -> str:
    """The one line on which `launch/pretrain.py` with `flags` ends, exit code 2."""
    done = explain(*flags)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    return line


def exported(source: Path, out: Path, *more: str) -> Path:
    """What `launch/export.py SOURCE --out OUT` writes, without a process of its own."""
    from launch import export

    done = run_here(export.main, source, "--out", out, "--quiet", *more)
    assert done.returncode == 0, done.stderr
    return out


def skip_unless_the_device_can(config: RunConfig) -> None:
    """Skip the test, with the reason, where this machine lacks a package or its GPU the capability that the run needs."""
    if config.lacks:
        pytest.skip(config.lacks[0])
    for path, capability in config.cuda_only.items():
        if torch.cuda.get_device_capability() < capability:
            pytest.skip(cuda_requirement(path, capability))


def refused_start(runs: Path, *flags: str | Path) -> str:
    """The one error of a real `launch/pretrain.py` with `flags`, exit code 2, before `runs`, its folder of runs, is made."""
    done = run_script("launch/pretrain.py", *flags, "--runs_dir", runs)
    assert done.returncode == 2
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error:"))
    assert not runs.exists()
    return line


def copy_checkout(folder: Path) -> Path:
    """A copy of the working tree in `folder`, without what git ignores."""
    ignored = ("data", "runs", "__pycache__", "*.egg-info", ".git", ".gpu", ".venv", ".*cache", ".hypothesis", "exported")
    return Path(shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*ignored)))


def sparse_corpus(folder: Path, shards: int = 20, shard_tokens: int = 100_000_000) -> Path:
    """A corpus of `shards` x `shard_tokens` tokens, all of them 0 and none of them on the disk; its shards' hashes are nobody's.

    uint16, so 2,000,000,000 tokens are 4 GB to whoever asks for the size.
    """
    folder.mkdir(parents=True)

    def shard(split: str, number: int, tokens: int) -> dict[str, Any]:
        name = f"{split}-{number:05d}"
        (folder / f"{name}.bin").touch()
        os.truncate(folder / f"{name}.bin", 2 * tokens)
        return {"file": f"{name}.bin", "tokens": tokens, "sha256": "0" * 64, "group": 0, "documents": 0}

    made = {"train": [shard("train", number, shard_tokens) for number in range(shards)], "val": [shard("val", 0, 100_000)]}
    manifest = {
        "format_version": 2,
        "dtype": "uint16",
        "vocab_size": 50_257,
        "eot_id": 50_256,
        "tokenizer": {"kind": "tiktoken", "name": "r50k_base", "files": {}},
        "sources": [],
        "options": {},
        "mixture": [1.0],
        "dropped": {},
        "splits": {
            split: {"tokens": sum(one["tokens"] for one in found), "documents": 0, "bytes": 0, "shards": found}
            for split, found in made.items()
        },
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def reseal(checkpoint: Path, **values: Any) -> None:
    """Write the `state.json` of a checkpoint anew, with `values`, for the files that it has now: what somebody could forge."""
    state = json.loads((checkpoint / "state.json").read_text()) | values
    files = (path for path in checkpoint.rglob("*") if path.is_file() and path.name != "state.json")
    entries = {str(path.relative_to(checkpoint)): file_entry(path) for path in files}
    where = {key: state[key] for key in ("step", "tokens", "samples", "val_loss")}
    (checkpoint / "state.json").write_text(state_text(where, state["run_id"], state["ranks"], entries))


def losses(lines: list[dict[str, Any]]) -> list[float]:
    """Training losses of the lines of a run's metrics; the line of step 0 has none."""
    return [line["loss"] for line in lines if "loss" in line]


def rewind(run: Path, step: int) -> None:
    """As if the run in folder `run` had been killed after `step`, with its last steps in the metrics and not in a checkpoint."""
    for checkpoint in complete_checkpoints(run / "checkpoints"):
        if read_state(checkpoint)["step"] > step:
            shutil.rmtree(checkpoint)


def resumed_after(run: Path) -> int:
    """The step after which the run in folder `run` was last resumed, as its log says; 0 where it began anew."""
    said = re.findall(r"resuming after step (\d+)|no complete checkpoint to resume from", (run / "log.txt").read_text(encoding="utf-8"))
    assert said, "the run was not resumed"
    return int(said[-1] or 0)


def members(session: int) -> dict[int, str]:
    """Command lines of the living processes of a session."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, sid = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(sid) == session and state != "Z":
                found[int(folder.name)] = (folder / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            pass
    return found


def recomputed(forward: Callable[[torch.Tensor], torch.Tensor], seq_len: int) -> NextLogits:
    """The next token's logits by a forward pass over the last `seq_len` tokens, int64 (1, T) -> (1, T, vocab_size), without a cache."""
    return lambda ids: forward(torch.tensor([ids[-seq_len:]], dtype=torch.int64))[0, -1]


def generate(
    forward: Callable[[torch.Tensor], torch.Tensor],
    prompt_ids: list[int],
    n_tokens: int,
    seq_len: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> list[int]:
    """`prompt_ids` followed by `n_tokens` sampled tokens, each from a forward pass without a cache."""
    sampling = Sampling(temperature, top_k)
    return [*prompt_ids, *stream(recomputed(forward, seq_len), prompt_ids, n_tokens, sampling, generator)]
