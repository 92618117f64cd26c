"""Run all benchmarks, one after another, and print one table of their figures.

    python -m benchmarks                             # what `make bench` runs: about half an hour on two cores
    python -m benchmarks --quick                     # each one shortened, figures not kept: under five minutes, to check that all run
    python -m benchmarks training_step step_time     # these
    python -m benchmarks --readme                    # run nothing; write the tables of benchmarks/README.md

The benchmarks are the scripts with a `main` in benchmarks/ and recipes/*/benchmark.py. A benchmark that cannot run on this machine prints
the reason, and the next one follows. Exit code 1 if one failed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks import report
from benchmarks.report import ROOT
from launch.errors import nearest, run_command

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- by python -m benchmarks --readme -->\n", "<!-- end -->\n"


def benchmarks() -> dict[str, ModuleType]:
    """Every benchmark by name, in alphabetical order."""
    files = [*Path(__file__).parent.glob("[!_]*.py"), *ROOT.glob("recipes/*/benchmark.py")]
    modules = {report.name_of(file): ".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files}
    found = {name: importlib.import_module(module) for name, module in sorted(modules.items())}
    return {name: module for name, module in found.items() if hasattr(module, "main")}


def script(module: ModuleType) -> str:
    """The path of a benchmark in the repository."""
    return f"{module.__name__.replace('.', '/')}.py"


def table(records: list[dict[str, Any]]) -> str:
    """A line in Markdown for each row of `records`."""
    lines = ["| benchmark | what | median | quartiles | bar | where |", "|---|---|---|---|---|---|"]
    for record in records:
        device = f"{record['machine']['cores']} cores of an {record['machine']['processor']}"
        commit = re.sub(r"^([0-9a-f]{7})[0-9a-f]*", r"\1", record["commit"] or "no commit")  # "+changes" may follow
        where = f"{device if record['device'] == 'cpu' else record['device']}, {commit}, {record['date']}"
        for row in record["rows"]:
            spread = "{:.3f} to {:.3f}".format(*row["quartiles"]) if row["quartiles"] else ""
            lines.append(f"| `{record['benchmark']}` | {row['what']} | {row['figure']} | {spread} | {row['bar']} | {where} |")
    return "\n".join(lines) + "\n"


def newest(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A record for each row, the newest of those with the same benchmark, device and row."""
    found = {(record["benchmark"], record["device"], row["what"]): record | {"rows": [row]} for record in records for row in record["rows"]}
    return [found[key] for key in sorted(found, key=lambda key: key[:2])]


def readme() -> str:
    """The text of benchmarks/README.md with its two tables made from the scripts and the records."""
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = ["| command | what it measures |", "|---|---|"]
    for module in benchmarks().values():
        named = f" Runs only if named: {module.ONLY_BY_NAME}." if hasattr(module, "ONLY_BY_NAME") else ""
        lines.append(f"| `python {script(module)}` | {(module.__doc__ or '').strip().splitlines()[0]}{named} |")
    return f"{before}{BEGIN}" + "\n".join(lines) + f"\n\n{table(newest(report.records()))}{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run (all that need nothing special)")
    parser.add_argument("--quick", action="store_true", help="shorten each benchmark and do not keep the figures")
    parser.add_argument("--readme", action="store_true", help="write the tables of benchmarks/README.md and stop")
    arguments = parser.parse_args()
    if arguments.readme:
        README.write_text(readme(), encoding="utf-8")
        return 0
    modules = benchmarks()
    for name in arguments.names:
        if name not in modules:
            parser.error(f"{name}: no such benchmark{nearest(name, modules)}; allowed are {', '.join(modules)}")
    names = arguments.names or [name for name, module in modules.items() if not hasattr(module, "ONLY_BY_NAME")]
    codes = {}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        results = Path(folder) / "results.json" if arguments.quick else report.RESULTS
        before = len(report.read_records(results))
        for number, name in enumerate(names, 1):
            command = [script(modules[name]), *(getattr(modules[name], "QUICK", ()) if arguments.quick else ())]
            print(f"\n[{number}/{len(names)}] python {' '.join(command)}", flush=True)
            began = time.monotonic()
            environment = {**os.environ, "BENCHMARK_RESULTS": str(results)}
            codes[name] = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment).returncode
            print(f"[{number}/{len(names)}] {name}: {time.monotonic() - began:.0f} s", flush=True)
        print(f"\n{table(report.read_records(results)[before:])}")
    if not arguments.quick:
        README.write_text(readme(), encoding="utf-8")
    for name, code in codes.items():
        if code:
            print(f"{name}: {'cannot run here' if code == 2 else 'failed'}, exit code {code}; the reason is above")
    return int(any(code not in (0, 2) for code in codes.values()))


if __name__ == "__main__":
    run_command(main)
