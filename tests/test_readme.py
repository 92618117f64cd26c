"""The commands of README.md, CONTRIBUTING.md and docs/ are run, or explained if they need GPUs, hosts or a large corpus."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from benchmarks.__main__ import benchmarks
from data_pipeline.shards import open_corpus
from data_pipeline.tokenizer import train_tokenizer
from launch.compare import _check_sources, _passed_on, build_parser
from launch.comparison.interleaved import free_port
from launch.comparison.sweep import own_arms
from launch.comparison.trials import pair_trials
from launch.config.flags import given
from launch.config.run_config import resolve
from launch.formats.metrics import read_metrics
from launch.trained_model.hf_export import write_tokenizer
from recipes.registry import read_recipe, read_testbed
from tests.commands import run_script
from tests.helpers import copy_checkout, explained
from tests.pages import PAGES, ROOT, commands
from tests.run_folders import description, lines, write_run

README = PAGES["README.md"]
TRAINING = commands("deepspeed")
#: Trained here in seconds: a small model on one CPU rank. tests/distributed/test_branches.py and test_resume_by_folder.py train those that
#: need another run, tests/distributed/test_profile.py those that need many steps.
SMALL = [line for line in TRAINING if not any(word in line for word in ("gpt", "data/texts", " runs/", "--profile"))]
COMPARING = commands("python launch/compare.py")
#: Beginning of a command -> the test that runs it.
RUN_BY = {
    "deepspeed launch/pretrain.py ": "test_training_commands_are_explained, test_training_commands_train",
    "deepspeed --": "test_training_commands_are_explained",
    "torchrun ": "test_training_commands_are_explained, tests/distributed/test_restarts.py, tests/distributed/test_two_hosts.py",
    "sbatch ": "test_training_commands_are_explained, tests/distributed/test_slurm.py",
    "python launch/plan.py ": "test_commands_that_start_nothing_run_as_they_stand",
    "python launch/pretrain.py ": "test_commands_that_start_nothing_run_as_they_stand",
    "python launch/compare.py ": "test_comparing_commands_compare, test_experiments_on_testbeds_have_their_runs, test_sweeps_are_resolved",
    "python launch/generate.py ": "tests/test_generate.py",
    "python launch/score.py ": "tests/test_generate.py",
    "python launch/export.py ": "tests/test_score.py",
    "lm_eval ": "tests/test_score.py",
    "python data_pipeline/prepare.py ": "test_the_data_command_runs",
    "python benchmarks/": "test_benchmarks_exist",
    "python -c ": "tests/distributed/test_signals.py",
    "make ": "test_make_targets_exist, test_make_pretrain_does_everything_from_the_corpus_to_the_picture",
}


def ranks_of(words: list[str]) -> int:
    """The ranks that a command starts: `pretrain.sbatch` eight per node, the documented hostfile 16."""

    def value(name: str, default: int) -> int:
        return int(words[words.index(name) + 1]) if name in words else default

    if words[0] == "sbatch":
        return 8 * value("--nodes", 1)
    if words[0] == "torchrun":
        return value("--nnodes", 1) * value("--nproc_per_node", 1)
    return value("--num_gpus", 16 if "--hostfile" in words else 1)


def test_every_command_is_run_by_a_test():
    assert len(commands()) > 20
    assert [line for line in commands() if not line.startswith(tuple(RUN_BY))] == []


@pytest.mark.parametrize("command", [*TRAINING, *commands("torchrun"), *commands("sbatch")])
def test_training_commands_are_explained(command, corpus, tmp_path):
    if "--init_from" in command:
        pytest.skip("a published GPT-2 is not here; tests/test_export.py starts from folders like it")
    words = shlex.split(command)
    script = "launch/slurm/pretrain.sbatch" if words[0] == "sbatch" else "launch/pretrain.py"
    flags = words[words.index(script) + 1 :]
    if " runs/" in command:  # that it continues
        (tmp_path / "runs/long/checkpoints/step-00000400").mkdir(parents=True)
        described = description(corpus, "--deepspeed_config", "ds_configs/zero1_bf16.json")
        for name in ("demo", "long"):
            write_run(tmp_path / "runs" / name, described, [])
        flags = [str(tmp_path / word) if word.startswith("runs/") else word for word in flags]
    assert explained(*flags, "--ranks", str(ranks_of(words)))


@pytest.mark.long
@pytest.mark.parametrize("command", SMALL)
def test_training_commands_train(command, corpus, tmp_path):
    """As they stand, but for three steps, on the tests' corpus, into a folder of the test."""
    words = shlex.split(command)
    launcher = [f"{Path(sys.executable).parent}/deepspeed", "--master_port", str(free_port()), "--log_level", "error"]
    flags = ["--data", str(corpus), "--runs_dir", str(tmp_path), "--steps", "3", "--eval_batches", "1"]
    done = subprocess.run([*launcher, *words[1:], *flags], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    name = words[words.index("--run_name") + 1]
    assert len(read_metrics(tmp_path / name / "metrics.jsonl")) == 4  # with the untrained validation loss at step 0


@pytest.mark.parametrize("command", [line for line in commands() if re.match(r"python launch/(plan|pretrain)\.py", line)])
def test_commands_that_start_nothing_run_as_they_stand(command):
    done = run_script(*shlex.split(command)[1:])
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) >= 5


@pytest.mark.long
def test_comparing_commands_compare(corpus, tmp_path):
    """On runs with the names that the page gives them, and with a recipe, trained for seconds only."""
    by_recipe, by_runs = (shlex.split(line)[1:] for line in COMPARING if "--sweep" not in line and ("--preset" in line or "runs/" in line))
    for words in (shlex.split(line) for line in SMALL if "--resume" not in line):
        name = words[words.index("--run_name") + 1]
        flags = words[words.index("launch/pretrain.py") + 1 : words.index("--run_name")]
        if (tmp_path / "runs" / name).exists():
            continue  # two pages name it
        write_run(tmp_path / "runs" / name, description(corpus, *flags, "--preset", "nano"), lines())
    tiny = ["--n_layer", "1", "--n_head", "1", "--d_model", "16", "--seq_len", "16", "--steps", "25", "--seeds", "1", "--eval_batches", "1"]
    by_recipe += ["--data", str(corpus), "--runs_dir", str(tmp_path / "trials"), *tiny]
    by_runs = [str(tmp_path / word) if word.startswith("runs/") else word for word in by_runs]
    for number, words in enumerate((by_recipe, by_runs)):
        done = run_script(*words, "--out", tmp_path / str(number), columns=120, timeout=400)
        assert done.returncode == 0, done.stdout
        if number == 0:  # a line of each run below the bar while it trains, and one that stays when it has ended
            shown = re.findall(r"\r(\w+-\w+-seed1): step \d+/25, loss [\d.]+, (?:validation [\d.]+, )?\d\d:\d\d left", done.stdout)
            assert len({*shown}) == 2 and "run 2 of 2: " in done.stdout
        assert {path.name for path in (tmp_path / str(number)).iterdir()} == {"report.html", "report.json", "loss.png"}


@pytest.mark.parametrize("command", [line for line in COMPARING if "--sweep" in line])
def test_sweeps_are_resolved(command, corpus):
    """They take hours, so their first trials are only resolved; tests/distributed/test_sweeps.py trains such ones."""
    words = [*shlex.split(command)[2:], "--data", str(corpus)]
    flags, given_names = build_parser().parse(words), given(build_parser(), words)
    _check_sources(flags, given_names)
    arms, pairs = own_arms(flags, _passed_on(flags, given_names))
    assert len(arms) == 1 + len(flags.recipe) and len(pairs) == len(flags.recipe)
    assert [next(points for points in arm.rounds() if points)[0]["lr"] for arm in arms] == [float(flags.sweep[0][3:].split(",")[0])] * len(
        arms
    )


@pytest.mark.parametrize("command", [line for line in COMPARING if not re.search("--preset|--sweep|runs/", line)])
def test_experiments_on_testbeds_have_their_runs(command, corpus):
    """These take hours, so their runs are only resolved: recipe and control on each testbed, or the sweep's testbed."""
    flags = build_parser().parse(shlex.split(command)[2:])
    for recipe in map(read_recipe, flags.recipe):
        for name in flags.testbed or recipe.experiments:
            found = pair_trials(recipe, ["--data", str(corpus)], [1], recipe.ranks, read_testbed(name))
            assert found.control[0].config.total_tokens == found.own[0].config.total_tokens
    assert flags.recipe or (flags.testbed and all(read_testbed(name).sweep for name in flags.testbed))


@pytest.mark.parametrize("command", commands("python data_pipeline/prepare.py"))
def test_the_data_command_runs(command, tmp_path):
    """On texts of the test; bytes instead of GPT-2's tokens, which are a download, with a validation split of more than one document."""
    source = tmp_path / "texts"
    source.mkdir()
    texts = [f"The square of {number} is {number**2}, its cube {number**3}.\n" * 20 for number in range(200)]  # enough for both splits
    for number, text in enumerate(texts):
        (source / f"{number}.txt").write_text(text, encoding="utf-8")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"content": text}) + "\n" for text in texts), encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "texts.parquet")
    (tmp_path / "gpt2_folder").mkdir()  # of Hugging Face, like a GPT-2 that was downloaded
    write_tokenizer(train_tokenizer("bytes", []), tmp_path / "gpt2_folder", 32)
    here = {
        "gpt2_folder": str(tmp_path / "gpt2_folder"),
        "~/texts": str(source),
        "/texts/*.parquet": f"{tmp_path}/*.parquet",
        "/texts/*.jsonl": f"{tmp_path}/*.jsonl",
        "code=/src@0.7": f"code={source}@0.7",
        "text=/notes@0.3": f"text={tmp_path}/texts.parquet@0.3",
        "gpt2": "bytes",
        "0.0005": "0.05",
    }
    here |= dict.fromkeys(("data/texts", "data/texts_gpt2", "data/corpus", "data/own", "data/mixed"), str(tmp_path / "out"))
    words = [sys.executable, *(here.get(word, word) for word in shlex.split(command)[1:])]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "manifest.json").exists()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the working tree in which the Makefile finds the environment that these tests run in, already set up."""
    if not (ROOT / ".venv" / ".installed").exists():
        pytest.skip("the tests do not run in the Makefile's environment")
    copy = copy_checkout(tmp_path_factory.mktemp("readme") / "checkout")
    (copy / ".venv").symlink_to(ROOT / ".venv")
    return copy


@pytest.mark.parametrize(
    "command", [pytest.param(line, marks=pytest.mark.long if "ARGS" in line else pytest.mark.gate) for line in commands("make pretrain")]
)
def test_make_pretrain_does_everything_from_the_corpus_to_the_picture(command, checkout):
    """As it stands, but for the set-up and for fewer steps; `-o` keeps make from installing again into the shared .venv."""
    arguments = shlex.split(command)[1:]
    asked = next((word.removeprefix("ARGS=") for word in arguments if word.startswith("ARGS=")), "")
    before = len(list(checkout.glob("runs/first*")))
    make = ["make", "-o", ".venv/.installed", "pretrain", f"ARGS={asked} --steps 4 --eval_batches 1"]
    done = subprocess.run(make, cwd=checkout, capture_output=True, text=True, timeout=300, env=os.environ | {"DS_ACCELERATOR": "cpu"})
    assert done.returncode == 0, done.stderr
    folder = checkout / "runs" / (f"first-{before + 1}" if before else "first")
    assert {"run.json", "metrics.jsonl", "loss.png", "log.txt"} <= {path.name for path in folder.iterdir()}
    assert f"the curve is runs/{folder.name}/loss.png" in done.stdout


@pytest.fixture(scope="module")
def data_made(checkout) -> subprocess.CompletedProcess[str]:
    """What `make data` in the copy ends with, without the corpus that another test may have made."""
    shutil.rmtree(checkout / "data/stdlib", ignore_errors=True)
    return subprocess.run(["make", "-o", ".venv/.installed", "data"], cwd=checkout, capture_output=True, text=True)


def test_the_standard_library_is_a_corpus_on_every_machine(data_made, checkout):
    assert data_made.returncode == 0, data_made.stderr
    corpus = open_corpus(checkout / "data/stdlib")
    corpus.verify()
    assert (corpus.vocab_size, corpus.eot_id, corpus.dtype) == (8192, 8191, np.dtype("<u2"))
    assert 2_500_000 < corpus.train.n_tokens < 4_500_000
    assert 0.01 < corpus.val.n_tokens / corpus.train.n_tokens < 0.1
    for word in ("bytes/token", "train", "val", f"{corpus.train.n_tokens:,}"):
        assert word in data_made.stdout
    assert "%" not in data_made.stderr  # no bar without a terminal


@pytest.mark.usefixtures("data_made")
@pytest.mark.parametrize(("page", "script"), [("docs/configuration.md", "launch/pretrain.py"), ("docs/memory.md", "launch/plan.py")])
def test_an_excerpt_is_what_the_command_prints(page, script, checkout):
    """Each line of the excerpt, wherever it stands, with the corpus that it names."""
    before, _, after = PAGES[page].partition("An excerpt, with the corpus of")
    command = re.findall(rf"^    python ({script} .*)$", before, re.MULTILINE)[-1]
    words = [sys.executable, *shlex.split(command)]
    printed = subprocess.run(words, cwd=checkout, capture_output=True, text=True, check=True).stdout
    found = [" ".join(line.split()) for line in printed.splitlines()]
    excerpt = re.search(r"\n\n((?: {4}.*\n|\n)+)", after)
    assert excerpt
    shown = [" ".join(line.split()) for line in excerpt[1].splitlines() if line.strip()]
    assert len(shown) > 5
    assert [line for line in shown if line not in found] == []


def test_the_refusals_that_it_shows_are_real(corpus):
    shown = re.findall(r"^    error: my\.json: line \d+: ('[\w.]+'.*)$", PAGES["docs/configuration.md"], re.MULTILINE)
    keys = {
        "zero_optimization.overlap_com": "true",
        "lr": "0.1",
        "amp": '{"enabled": true}',
        "zero_optimization.offload_param": '{"device": "cpu"}',
    }
    assert [line.split("'")[1] for line in shown] == list(keys)
    for line, (key, value) in zip(shown, keys.items(), strict=True):
        with pytest.raises(ValueError) as mistake:
            resolve(["--deepspeed_config", "ds_configs/zero2_bf16.json", "--data", str(corpus), "--set", f"{key}={value}"])
        assert str(mistake.value) == line.replace(f"'{key}'", f"--set {key}", 1)


def test_the_loop_is_quoted_from_the_script():
    (quoted,) = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    script = iter(line.strip() for line in (ROOT / "launch" / "pretrain.py").read_text(encoding="utf-8").splitlines())
    for line in (line.strip() for line in quoted.splitlines()):
        assert line == "..." or line in script, f"not in launch/pretrain.py, or not in this order: {line}"  # `in` consumes the iterator


def test_the_functions_that_architecture_names_exist():
    page = PAGES["docs/architecture.md"]
    named = [(name, file) for name, file in re.findall(r"`(\w+)`\s(?:in|of)\s`([\w/]+\.py)`", page)]
    for file, names in re.findall(r"^\| \d+ \| `([\w/]+\.py)` \| ([^|]+) \|", page, re.MULTILINE):
        named += [(name, file) for name in re.findall(r"`(\w+)`", names)]
    assert len(named) > 15
    for name, file in named:
        assert re.search(rf"\b(def|class) {name}\b", (ROOT / file).read_text(encoding="utf-8")), f"{name} in {file}"


def test_the_readme_is_short():
    assert len(re.sub(r"<!-- recipes.*?<!-- end -->", "", README, flags=re.DOTALL).split()) <= 1100


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z_]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {command.split()[1] for command in commands("make")}
    assert named | {name for text in PAGES.values() for name in re.findall(r"`make (\w+)`", text)} <= targets


def test_benchmarks_exist():
    for command in commands("python benchmarks/"):
        assert (ROOT / command.split()[1]).exists(), command
    named = [re.findall(pattern, "".join(PAGES.values())) for pattern in (r"`python -m benchmarks (\w+)", r"`python (benchmarks/\w+\.py)")]
    assert all(named)
    assert set(named[0]) <= set(benchmarks())
    assert [file for file in named[1] if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_file_and_link_it_names_exists(page):
    text = PAGES[page]
    example = page == "docs/add-a-recipe.md"  # whose own files tests/test_contributing.py writes
    for name in re.findall(
        r"`((?:launch|tests|recipes|model|data_pipeline|benchmarks|ds_configs|docs)/[\w/-]+\.(?:py|md|png|json))`", text
    ):
        assert (ROOT / name).exists() or (example and re.search("z_loss|NAME", name)), name
    prose = re.sub(r"^```\w*\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for link, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", prose):
        target = (ROOT / page).parent / link if link else ROOT / page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings], f"{link}#{anchor}"
