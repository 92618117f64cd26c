"""docs/add-a-recipe.md and CONTRIBUTING.md are followed in a copy of the tree: files written, commands run, the recipe trained."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.comparison.interleaved import free_port
from launch.formats.metrics import read_metrics
from recipes.registry import recipe_names
from tests.helpers import copy_checkout
from tests.pages import PAGES as PAGES_BY_NAME

ROOT = Path(__file__).resolve().parents[1]
PAGES = "\n".join(PAGES_BY_NAME[name] for name in ("docs/add-a-recipe.md", "CONTRIBUTING.md"))
NAME = "z_loss"
#: File name -> contents: every block that stands under a file's name.
BLOCKS = dict(re.findall(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```$", PAGES, re.MULTILINE | re.DOTALL))
FILES = {name: text for name, text in BLOCKS.items() if NAME in name}
#: The lines of all blocks of commands.
COMMANDS = [line for block in re.findall(r"^```sh\n(.*?)^```$", PAGES, re.MULTILINE | re.DOTALL) for line in block.splitlines()]
SHORT = "--steps 8"
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
    for command in commands("python -m launch.comparison.recipe_pages"):
        run(command)
    return checkout


def test_the_page_has_every_file_of_a_recipe():
    assert list(FILES) == [f"ds_configs/{NAME}.json", *(f"recipes/{NAME}/{file}" for file in ("technique.py", "recipe.json", "README.md"))]


@pytest.mark.gate
def test_the_index_picks_the_recipe_up(indexed):
    assert f"{NAME}/README.md) |" in (indexed / "recipes" / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "README.md", *(page for name in recipe_names() for page in (ROOT / "recipes" / name).glob("*.md"))):
        assert (indexed / page.relative_to(ROOT)).read_bytes() == page.read_bytes(), "other pages and verdicts are as they were"


@pytest.mark.long
def test_every_test_of_the_recipe_passes_before_it_was_measured(indexed, run):
    assert "not measured yet" in (indexed / "recipes" / NAME / "README.md").read_text(encoding="utf-8")
    (command,) = commands("python -m pytest tests -k")
    said = run(f"{command} -rp").stdout
    for case in ("test_every_page_opens_with_what_it_buys_and_costs", "test_it_trains_on_two_ranks"):
        assert re.search(rf"PASSED \S+::{case}\[{NAME}\]", said)


@pytest.mark.long
def test_the_checks_of_the_page_pass_with_the_recipe_in(indexed, run):
    for command in commands("python -m pytest tests/test_"):
        assert " passed" in run(command).stdout


def test_its_code_is_formatted(run):
    run(f"ruff check recipes/{NAME} && ruff format --check recipes/{NAME}")


def test_it_can_be_explained(run, corpus):
    (command,) = (command for command in commands("python launch/pretrain.py") if "--explain" in command)
    page = run(f"{command} --data {corpus}").stdout
    assert f"Over the run ({NAME})" in page
    plain = run(f"{command.replace(NAME, 'bf16')} --data {corpus}").stdout
    head, plain_head = (float(re.search(r"loss head +([\d.]+) MiB", one)[1]) for one in (page, plain))
    assert head > 1.5 * plain_head, "the plan counts the logits that token_losses needs"


def test_a_key_that_is_left_out_has_its_default(run, corpus):
    page = run(
        f"python launch/pretrain.py --deepspeed_config ds_configs/zero1_bf16.json --set {NAME}.enabled=true --explain --data {corpus}"
    ).stdout
    assert re.search(rf"{NAME}\.coefficient +0\.0001 +the default of {NAME}", page)


def test_a_mistake_in_its_section_is_one_line(run, corpus):
    done = run(f"python launch/pretrain.py --recipe recipes/{NAME} --data {corpus} --set {NAME}.coefficient=0", code=2)
    assert f"{NAME}.coefficient is 0; write a number above 0" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.long
def test_the_recipe_trains_and_its_control_too(indexed, run, corpus):
    for command in commands("deepspeed"):
        run(f"{command} --data {corpus} {SHORT}")
    recipe, control = (read_metrics(indexed / "runs" / name / "metrics.jsonl") for name in ("z_1", "plain_1"))
    assert all((line.get("z_loss", 0) > 0) == (line["step"] > 0) for line in recipe)
    assert all("z_loss" not in line for line in control)
    assert recipe[1]["loss"] == control[1]["loss"], "the same weights and tokens, and what is logged is the cross-entropy"
    assert recipe[-1]["loss"] != control[-1]["loss"], "other gradients"
    assert recipe[0]["val_loss"] == control[0]["val_loss"], "the same weights and the plain loss"
    assert all(lines[-1]["val_loss"] < lines[0]["val_loss"] - 0.1 for lines in (recipe, control))
    described = json.loads((indexed / "runs" / "z_1" / "run.json").read_text(encoding="utf-8"))
    assert described["config_file"] == str(indexed / "ds_configs" / f"{NAME}.json")
    (command,) = commands("tail")
    assert run(command).stdout.count('"val_loss"') == 2


@pytest.mark.long
def test_recipe_and_control_are_compared(indexed, run, corpus):
    (command,) = commands("python launch/compare.py")
    said = run(f"{command} --data {corpus} {SHORT} --seeds 2 --out report").stdout
    assert (
        "exploratory: no claim is judged" in said
        and "control: zero1_bf16" in said
        and "z-loss ends" in said
        and " zero1_bf16 (AdamW, ZeRO 1, bf16, 2 ranks) (95%: " in said
    )
    assert (indexed / "report" / "report.html").exists()


@pytest.mark.long
def test_losses_before_and_after_are_compared_bit_for_bit(indexed, run, corpus):
    for command in commands("python launch/pretrain.py --deepspeed_config ds_configs/zero1_fp32.json"):
        run(f"{command} --data {corpus} --steps 3")
    (command,) = commands("diff")
    assert run(command).stdout == ""
    metrics = indexed / "runs" / "after" / "metrics.jsonl"
    metrics.write_text(re.sub(r'"loss": (\d)', r'"loss": 1\1', metrics.read_text(encoding="utf-8"), count=1), encoding="utf-8")
    assert run(command, code=1).stdout.count("<") == 1
