"""The benchmarks are discovered, a mistake is one line, and the pages are made from results.json."""

from __future__ import annotations

import configparser
import re
import sys
import time
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import report, utilization
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import rehearsal
from recipes.fused_kernels.technique import FusedKernels
from tests.commands import run_script
from tests.distributed.ranks import gpus
from tests.helpers import explained

ROOT = Path(__file__).resolve().parents[1]


def test_the_pages_have_the_newest_figures():
    assert all(report.Row(**row) for record in report.records() for row in record["rows"])
    for page, text in benchmarks.pages().items():
        assert page.read_text(encoding="utf-8") == text, "python -m benchmarks --pages"


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path):
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"zero_optimisation": {}}')
    for command, key in (
        (["benchmarks/training_step.py", "--deepspeed_config", "ds_configs/nope.json"], "ds_configs/nope.json"),
        (["benchmarks/start_up.py", "--deepspeed_config", str(wrong)], "zero_optimisation"),
        (["benchmarks/step_time.py", "--side", "a side"], "--side 'a side'"),
        (["benchmarks/utilization.py", "--only", "gpt3"], "--tiny" if not gpus() else "no such cell"),
    ):
        done = run_script(*command, "--no_record")
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert key in done.stderr


def test_one_that_cannot_run_does_not_stop_the_next(tmp_path, monkeypatch, capfd):
    programs = {
        "a": "print('error: no GPU', file=sys.stderr); sys.exit(2)",
        "b": "from benchmarks import report as r; r.append('b', [r.Row('one / other', '0.5', (0.4, 0.6), 'below 1')], {'device': 'cpu'})",
    }
    modules = {}
    for name, program in programs.items():
        (tmp_path / "benchmarks").mkdir(exist_ok=True)
        (tmp_path / "benchmarks" / f"{name}.py").write_text(f"import sys; sys.path[0] = {str(ROOT)!r}\n{program}\n")
        modules[name] = type(sys)(f"benchmarks.{name}")
    monkeypatch.setattr(benchmarks, "benchmarks", lambda: modules)
    monkeypatch.setattr(benchmarks, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--quick"])
    kept = report.RESULTS.read_text(encoding="utf-8")
    assert benchmarks.main() == 0
    output, errors = capfd.readouterr()
    assert "error: no GPU" in errors
    assert "| `b` | one / other | 0.5 | 0.400 to 0.600 | below 1 |" in output
    assert "a: cannot run here, exit code 2" in output
    assert report.RESULTS.read_text(encoding="utf-8") == kept


def test_an_unknown_name_is_told_the_nearest(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "step_tme"])
    with pytest.raises(SystemExit, match="2"):
        benchmarks.main()
    assert "no such benchmark; did you mean 'step_time'?" in capsys.readouterr().err


def test_ratios_are_taken_pair_by_pair():
    # The machine became ten times slower in the middle: the ratio did not.
    assert report.ratio([2.0, 2.0, 20.0, 20.0], [1.0, 1.0, 10.0, 10.0]) == (2.0, [2.0, 2.0])


def test_sides_are_interleaved_in_a_rotating_order():
    calls: list[str] = []
    sides = {name: lambda name=name: calls.append(name) for name in "ab"}
    seconds = report.interleave(sides, rounds=2, warm_up=1)
    assert calls == ["a", "b", "b", "a", "a", "b"] and {len(times) for times in seconds.values()} == {2}


@pytest.mark.long
def test_both_sides_of_the_training_step_train_the_same(corpus):
    done = run_script("benchmarks/training_step.py", "--preset", "nano", "--steps", "15", "--data", str(corpus), "--no_record")
    assert done.returncode == 0, done.stderr
    difference, rounding = map(float, re.findall(r"at most (\S+) \(up to (\S+) is rounding\)", done.stdout)[0])
    assert difference <= rounding


def test_utilization_leaves_out_each_kernel_in_turn():
    of_other_models, in_compiled_blocks = {"rms_norm", "swiglu", "rotary"}, {"attention", "layer_norm", "gelu"}
    assert set(utilization.KERNELS) == set(FusedKernels.declaration.keys) - of_other_models - in_compiled_blocks
    for name, flags in utilization.cells().items():
        sets = [text for change in flags if "fused_kernels" in change and "=" in change for text in ("--set", change)]
        config = flags[flags.index("--deepspeed_config") + 1]
        assert explained("--deepspeed_config", config, *sets)["techniques"], name


def requirements(file: str) -> set[str]:
    return {re.split("[=<>]", name)[0].replace("_", "-").lower() for name in rehearsal.names(file)}


def test_torchao_is_installed_for_fp8_only():
    """Where it is installed, transformers imports it to load any model, and it prints four lines about kernels that nobody asked for."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    asked = {"base": config["options"]["install_requires"], **config["options.extras_require"]}
    assert [name for name, packages in asked.items() if "torchao" in packages] == ["fp8"]


def test_a_gpu_machine_has_or_is_brought_what_the_project_requires():
    has, carried = requirements("image.txt"), requirements("carried.txt")
    assert not has & carried
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    asked = config["options"]["install_requires"] + config["options.extras_require"]["fp8"] + config["options.extras_require"]["liger"]
    assert {re.split("[=<>]", line)[0].lower() for line in asked.split()} <= has | carried


def test_every_part_has_cells_and_a_smaller_form():
    for part in gpu.PARTS:
        every, tiny = gpu.commands(part, tiny=False), gpu.commands(part, tiny=True)
        assert every and 0 < len(tiny) <= len(every)
        for command in (*every.values(), *tiny.values()):
            assert (ROOT / command[0]).is_file()


@pytest.mark.long
def test_a_part_that_is_out_of_time_goes_on_with_what_is_left(tmp_path, monkeypatch, capfd):
    """A cell that fails is measured again; one that is not over at the deadline is ended."""
    program = "import sys, json, os, time; sys.path[0] = sys.argv[1]; from benchmarks import report; n = sys.argv[2]; print('runs', n);"
    program += "report.append('utilization', [report.Row(n, '1')], {'device': 'cpu', "
    program += "'failed': {'t': 'x'} if n == 'b' and not os.path.exists('again') else {}});"
    program += "time.sleep(60 if n == 'c' and not os.path.exists('again') else 0)"
    cells = {name: ["-c", program, str(ROOT), name] for name in "abc"}
    monkeypatch.setattr(gpu, "commands", lambda part, tiny: cells)
    monkeypatch.setattr(gpu, "WORK", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert gpu.run_part("utilization", True, time.monotonic() + 15) == gpu.TIME_IS_OVER
    assert list(gpu.read(tmp_path / "tiny" / "utilization.json")) == ["a", "b"]
    (tmp_path / "again").touch()
    assert gpu.run_part("utilization", True, time.monotonic() + 60) == 0
    records = gpu.read(tmp_path / "tiny" / "utilization.json")
    assert not any(one["failed"] for (one,) in records.values()) and list(records) == ["a", "b", "c"]
    assert [line for line in capfd.readouterr().out.splitlines() if line.startswith("runs")] == [f"runs {name}" for name in "abcbc"]
