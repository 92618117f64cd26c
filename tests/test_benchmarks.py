"""The benchmarks are discovered, say what their records mean, and the table of benchmarks/README.md is the one of results.json."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import report, stages, utilization
from recipes.fused_kernels.technique import FusedKernels
from tests.helpers import explained

ROOT = Path(__file__).resolve().parents[1]


def test_the_readme_has_the_newest_figures():
    assert benchmarks.README.read_text(encoding="utf-8") == benchmarks.readme(), "python -m benchmarks --readme"


def test_every_record_is_read_by_its_benchmark():
    for record in report.records():
        assert benchmarks.rows_of(record), record["benchmark"]


def test_benchmarks_are_imported_without_torch():
    code = "import sys; from benchmarks.__main__ import benchmarks; print(len(benchmarks())); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10


def test_one_that_cannot_run_does_not_stop_the_next(tmp_path, monkeypatch, capfd):
    programs = {
        "a": "print('error: no GPU', file=sys.stderr); sys.exit(2)",
        "b": "from benchmarks.report import append; append('b', {'ratio': 0.5}, 'cpu')",
    }
    modules = {}
    for name, program in programs.items():
        (tmp_path / "benchmarks").mkdir(exist_ok=True)
        (tmp_path / "benchmarks" / f"{name}.py").write_text(f"import sys; sys.path[0] = {str(ROOT)!r}\n{program}\n")
        modules[name] = type(sys)(name)
    modules["b"].rows = lambda record: [report.Row("one / other", str(record["ratio"]), (0.4, 0.6), "below 1")]
    monkeypatch.setattr(benchmarks, "benchmarks", lambda: modules)
    monkeypatch.setattr(benchmarks, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--quick"])
    kept = report.RESULTS.read_text(encoding="utf-8")
    assert benchmarks.main() == 0
    output, errors = capfd.readouterr()
    assert "error: no GPU" in errors
    assert "| `b` | one / other | 0.5 | 0.400 to 0.600 | below 1 |" in output
    assert "a: could not run here, exit code 2" in output
    assert report.RESULTS.read_text(encoding="utf-8") == kept


def test_an_unknown_name_is_told_the_nearest(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "trainr"])
    with pytest.raises(SystemExit, match="2"):
        benchmarks.main()
    assert "no such benchmark; did you mean 'trainer'?" in capsys.readouterr().err


def test_ratios_are_taken_pair_by_pair():
    # The machine became ten times slower in the middle: the ratio did not.
    assert report.ratio([2.0, 2.0, 20.0, 20.0], [1.0, 1.0, 10.0, 10.0]) == (2.0, [2.0, 2.0])


def test_shares_of_kernels_add_up_where_they_do_not_interact():
    saved = {key: number + 1.0 for number, key in enumerate(utilization.KERNELS)}
    none = 100.0
    seconds = {"none": none, "all": none - sum(saved.values())}
    seconds |= {f"without {key}": seconds["all"] + one for key, one in saved.items()}
    seconds |= {f"only {key}": none - one for key, one in saved.items()}
    assert seconds.keys() == utilization.variants().keys()
    shares = utilization.shares_of(seconds)
    assert sum(shares["lost_without"].values()) == pytest.approx(1)
    assert shares["lost_without"] == pytest.approx(shares["gained_alone"])
    assert shares["gain"] == pytest.approx(100 / 64)


def test_every_variant_of_the_kernels_is_a_run():
    assert tuple(FusedKernels.keys) == utilization.KERNELS
    for name, changes in utilization.variants().items():
        found = explained("--deepspeed_config", "ds_configs/fused_kernels.json", *(text for one in changes for text in ("--set", one)))
        assert bool(found["techniques"]) == (name != "none"), name


def test_records_of_stages_are_read():
    one = {"ratio": 1.1, "ratio_quartiles": [1.0, 1.2]}
    record = json.loads(json.dumps({"preset": "nano", "precisions": {"bf16": {str(stage): one for stage in stages.STAGES}}}))
    assert [row.figure for row in stages.rows(record)] == ["1.100"] * 3
