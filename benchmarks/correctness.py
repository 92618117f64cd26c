"""The tests that train on real ranks, with the ranks on a GPU: each stage, precision, kernel and recipe against its plain reference.

    python benchmarks/correctness.py                       # all cells, on one GPU
    python benchmarks/correctness.py --only parity

A cell is `pytest --device cuda` on some test files, long grids included. Each rank needs its own GPU: on one GPU the tests of several
ranks are skipped. A record counts what passed, failed and was skipped, with the message of each failure. Exit code 1 if a test failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import report
from benchmarks.report import ROOT, Row

ONLY_BY_NAME = "it needs a GPU"
#: Processes of a cell; each holds one rank on the GPU and loads its own CUDA context.
PROCESSES = 12
FILES = {
    "parity": ["tests/distributed/test_engine_follows_plain_pytorch.py", "tests/distributed/test_unfused_step.py"],
    "fused kernels": ["tests/test_fused_kernels.py", "tests/distributed/test_techniques_act.py"],
    "fp8, tf32, ZeRO++": ["tests/test_fp8.py", "tests/test_tf32.py", "tests/test_shipped_configs.py", "tests/distributed/test_zeropp.py"],
    "layers and tokens dropped": ["tests/distributed/test_techniques_resume.py"],
    "batches and lengths": ["tests/distributed/test_techniques_together.py"],
    "LAMB, Muon and 1-bit optimizers": [
        "tests/distributed/test_muon.py",
        "tests/distributed/test_compressing_optimizers.py",
    ],
    "activations and documents": ["tests/test_activation_checkpointing.py"],
    "resume and export": [
        "tests/distributed/test_schedules.py",
        "tests/distributed/test_resume.py",
        "tests/distributed/test_moves.py",
        "tests/distributed/test_export.py",
    ],
}


def cells(tiny: bool = False) -> dict[str, list[str]]:
    """The arguments of pytest by the cell's name; `tiny`: a test of three of them, on the CPU."""
    if tiny:
        some = ["--device", "cpu", "-m", "not long", "-k"]
        return {
            "parity": [*FILES["parity"], *some, "bias and correction"],
            "LAMB, Muon and 1-bit optimizers": ["tests/distributed/test_muon.py", *some, "bytes_on_the_wire"],
            "resume and export": ["tests/distributed/test_schedules.py", *some, "rate_of_its_schedule and WarmupLinearTokens"],
        }
    return {name: [*files, "--device", "cuda", "-n", str(PROCESSES)] for name, files in FILES.items()}


def test(name: str, arguments: list[str]) -> dict[str, Any]:
    """Run one cell's tests; its record."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        report_file = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments, f"--junitxml={report_file}"]
        code = subprocess.run(command, cwd=ROOT).returncode
        if code not in (0, 1):
            report.fail(command, code)
        cases = list(ElementTree.parse(report_file).iter("testcase"))
    failed, skipped = {}, {}
    for case in cases:
        test = f"{case.get('classname')}::{case.get('name')}"
        for problem in (*case.iter("failure"), *case.iter("error")):
            failed[test] = (problem.text or problem.get("message") or "")[-1500:]
        for reason in case.iter("skipped"):
            skipped[test] = reason.get("message") or ""
    reasons = {reason: sum(one == reason for one in skipped.values()) for reason in sorted(set(skipped.values()))}
    return {"cell": name, "passed": len(cases) - len(failed) - len(skipped), "failed": failed, "skipped": reasons}


def measure(arguments: argparse.Namespace) -> report.Measured:
    """Run the tests of the chosen cells; a record for each."""
    report.require_gpu(arguments)
    for name, options in report.chosen(cells(arguments.tiny), arguments.only).items():
        record = test(name, options)
        passed, failed = record["passed"], len(record["failed"])
        print(f"{name}: {sum(record['skipped'].values())} skipped")
        yield [Row(f"tests with ranks on the GPU: {name}", f"{passed} of {passed + failed} pass", bar="all")], record


def main() -> None:
    report.run(__file__, report.cells_parser(__doc__), measure)


if __name__ == "__main__":
    main()
