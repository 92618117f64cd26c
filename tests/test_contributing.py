"""CONTRIBUTING.md is done as it stands there, in a copy of the working tree: its files are written, its commands run, its recipe trains."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.formats.metrics import read_metrics
from tests.helpers import copy_checkout, free_port

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
#: File name -> contents: every block of the page that stands under a file's name.
FILES = dict(re.findall(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
#: The lines of all blocks of commands.
COMMANDS = [line for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) for line in block.splitlines()]
NAME = "dropout_schedule"
STEPS = 8  # dropout acts in a quarter of them
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def commands(start: str) -> list[str]:
    found = [command for command in COMMANDS if command.startswith(start)]
    assert found, f"the page has no command that begins with {start!r}"
    return found


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the working tree, without what git ignores, with the files of the page written into it."""
    copy = copy_checkout(tmp_path_factory.mktemp("contributing") / "checkout")
    for name, text in FILES.items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text(text, encoding="utf-8")
    return copy


@pytest.fixture(scope="module")
def run(checkout: Path) -> Run:
    """Run a command of the page in the copy, with this environment's programs."""

    def run_command(command: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = re.sub(r"^deepspeed ", f"deepspeed --master_port {free_port()} --log_level error ", command)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PATH": path}
        done = subprocess.run(["bash", "-c", command], cwd=checkout, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
        return done

    return run_command


@pytest.fixture(scope="module")
def indexed(checkout: Path, run: Run) -> Path:
    """The copy with its tables of recipes written anew."""
    for command in commands("python -m recipes.pages"):
        run(command)
    return checkout


def test_the_page_has_every_file_of_a_recipe():
    assert list(FILES) == [f"ds_configs/{NAME}.json", *(f"recipes/{NAME}/{file}" for file in ("technique.py", "recipe.json", "README.md"))]


def test_the_copys_modules_are_the_ones_that_run(checkout, run):
    """An editable installation points at the original checkout; the current folder comes before it."""
    code = "import launch, model, recipes, data_pipeline as d; print(*(m.__file__ for m in (launch, model, recipes, d)))"
    assert all(Path(file).is_relative_to(checkout) for file in run(f'python -c "{code}"').stdout.split())


def test_the_index_picks_the_recipe_up(indexed):
    for page in ("README.md", "recipes/README.md"):
        assert f"{NAME}/README.md) |" in (indexed / page).read_text(encoding="utf-8")
    before, after = ((place / "README.md").read_text(encoding="utf-8").splitlines() for place in (ROOT, indexed))
    assert [line for line in after if NAME not in line] == [line for line in before if NAME not in line], "the rest is as it was"


def test_every_test_of_the_recipe_passes_before_it_was_measured(indexed, run):
    for page in ("recipes/README.md", f"recipes/{NAME}/README.md"):
        lines = (indexed / page).read_text(encoding="utf-8").splitlines()
        assert any("not measured yet" in line.lower() for line in lines if NAME in page or NAME in line)
    (command,) = commands("python -m pytest tests -k")
    said = run(f"{command} -rp").stdout
    for case in ("test_every_recipe_was_compared_or_says_why_not", "test_it_trains_on_two_ranks"):
        assert re.search(rf"PASSED \S+::{case}\[{NAME}\]", said)


@pytest.mark.long
def test_the_checks_of_the_page_pass_with_the_recipe_in(indexed, run):
    for command in commands("python -m pytest tests/test_"):
        assert " passed" in run(command).stdout


def test_its_code_is_formatted(indexed, run):
    run(f"ruff check recipes/{NAME} && ruff format --check recipes/{NAME}")


def test_explain_says_what_it_will_do(indexed, run, corpus):
    (command,) = (command for command in commands("python launch/pretrain.py") if "--explain" in command)
    page = run(f"{command} --data {corpus}").stdout
    assert f"Over the run ({NAME})" in page
    rates = [line.split()[1:] for line in page.splitlines() if line.split()[:1] == ["dropout"]]
    assert rates == [["0.1", f"recipes/{NAME}/recipe.json"], ["0.1", "0.1", "0", "0", "0"]], "the run's own, and over the run"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--set dropout_schedule.off_after=1.5", "--set dropout_schedule.off_after: is 1.5, must be a whole number"),
        ("--set dropout_schedule.off=1", "--set dropout_schedule.off: unknown key; did you mean 'off_after'?"),
        ("--dropout 0", "line 34: 'dropout_schedule' needs a run with dropout, and this one's is 0; give --dropout, such as 0.1"),
    ],
)
def test_a_mistake_in_its_section_is_one_line(flags, message, indexed, run, corpus):
    done = run(f"python launch/pretrain.py --recipe recipes/{NAME} --data {corpus} {flags}", code=2)
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_recipe_trains_and_its_control_too(indexed, run, corpus):
    for command in commands("deepspeed"):
        run(f"{command} --data {corpus} --steps {STEPS}")
    early, throughout = (read_metrics(indexed / "runs" / name / "metrics.jsonl") for name in ("early_1", "throughout_1"))
    assert [line["dropout"] for line in early if line["step"]] == [0.1] * (STEPS // 4) + [0] * (STEPS - STEPS // 4)
    assert all("dropout" not in line for line in throughout)
    assert [line["tokens"] for line in early] == [line["tokens"] for line in throughout]
    alike = [one["loss"] == other["loss"] for one, other in zip(early, throughout, strict=True) if one["step"]]
    assert alike == [True] * (STEPS // 4) + [False] * (STEPS - STEPS // 4)
    assert early[0]["val_loss"] == throughout[0]["val_loss"], "the same weights, the same validation"
    assert all(lines[-1]["val_loss"] < lines[0]["val_loss"] - 0.1 for lines in (early, throughout))
    described = json.loads((indexed / "runs" / "early_1" / "run.json").read_text(encoding="utf-8"))
    assert described["config_file"] == str(indexed / "ds_configs" / f"{NAME}.json")
    (command,) = commands("tail")
    assert run(command).stdout.count('"val_loss"') == 2


@pytest.mark.long
def test_recipe_and_control_are_compared(indexed, run, corpus):
    (command,) = commands("python launch/compare.py")
    said = run(f"{command} --data {corpus} --steps {STEPS} --seeds 2 --out report").stdout
    assert "dropout_schedule: loss_within 0.05 " in said
    assert (indexed / "report" / "report.html").exists()


def test_losses_before_and_after_are_compared_bit_for_bit(indexed, run, corpus):
    for command in commands("python launch/pretrain.py --deepspeed_config"):
        run(f"{command} --data {corpus} --steps 3")
    (command,) = commands("diff")
    assert run(command).stdout == ""
    metrics = indexed / "runs" / "after" / "metrics.jsonl"
    metrics.write_text(re.sub(r'"loss": (\d)', r'"loss": 1\1', metrics.read_text(encoding="utf-8"), count=1), encoding="utf-8")
    assert run(command, code=1).stdout.count("<") == 1


def test_every_file_and_target_that_the_page_names_is_there(checkout):
    for name in re.findall(r"`((?:launch|tests|recipes|model|data_pipeline|ds_configs)/[\w/]+\.\w+)`", PAGE):
        if NAME not in name or name in FILES:
            assert (checkout / name).exists(), name
    targets = set(re.findall(r"^([a-z_]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make (\w+)`", PAGE)) <= targets
