"""All benchmarks, one after another, and one table of what they found.

    python -m benchmarks                          # what `make bench` runs; about half an hour on two cores
    python -m benchmarks --quick                  # each one shortened, figures not kept: under five minutes, to see that all of them run
    python -m benchmarks training_step stages     # these
    python -m benchmarks --readme                 # runs nothing: the table of benchmarks/README.md, from benchmarks/results.json

The benchmarks are the modules of this folder that have a `main`; benchmarks/report.py says what else a module may have. One that cannot
run here says why, and the next ones follow. Exit code 1 if one failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks import report
from launch.errors import nearest

ROOT = Path(__file__).resolve().parents[1]
README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- by python -m benchmarks --readme -->\n", "<!-- end -->\n"


def benchmarks() -> dict[str, ModuleType]:
    """Every benchmark by name, in the order of the alphabet."""
    names = sorted(file.stem for file in Path(__file__).parent.glob("*.py") if not file.stem.startswith("_"))
    modules = {name: importlib.import_module(f"benchmarks.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "main")}


def rows_of(record: dict[str, Any]) -> list[report.Row]:
    """What a record says, as its benchmark reads it."""
    module = benchmarks().get(record["benchmark"])
    return module.rows(record) if hasattr(module, "rows") else [report.Row("", "in results.json")]


def table(records: list[dict[str, Any]]) -> str:
    """A line in Markdown for each comparison of `records`."""
    lines = ["| benchmark | what | median | quartiles | bar | where |", "|---|---|---|---|---|---|"]
    for record in records:
        device = f"{record['machine']['cores']} cores of an {record['machine']['processor']}"
        where = f"{device if record['device'] == 'cpu' else record['device']}, {(record['commit'] or 'no commit')[:7]}, {record['date']}"
        for sides, figure, quartiles, bar in rows_of(record):
            spread = f"{quartiles[0]:.3f} to {quartiles[1]:.3f}" if quartiles else ""
            lines.append(f"| `{record['benchmark']}` | {sides} | {figure} | {spread} | {bar} | {where} |")
    return "\n".join(lines) + "\n"


def newest(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each benchmark the newest record of each device that says the same things."""
    found = {(record["benchmark"], record["device"], *(row.sides for row in rows_of(record))): record for record in records}
    return [found[key] for key in sorted(found)]


def readme() -> str:
    """benchmarks/README.md as it should be: its own text, with the two tables made anew."""
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = ["| command | what it measures |", "|---|---|"]
    for name, module in benchmarks().items():
        command = f"python benchmarks/{name}.py"
        alone = f" Only where it is named: {module.ALONE}." if hasattr(module, "ALONE") else ""
        lines.append(f"| `{command}` | {(module.__doc__ or '').strip().splitlines()[0]}{alone} |")
    return f"{before}{BEGIN}" + "\n".join(lines) + f"\n\n{table(newest(report.records()))}{END}{after}"


def run(name: str, flags: tuple[str, ...], results: Path) -> tuple[int, list[dict[str, Any]]]:
    """Run one benchmark in a process of its own: its exit code, and what it appended to `results`."""

    def records() -> list[dict[str, Any]]:
        return json.loads(results.read_text(encoding="utf-8")) if results.exists() else []

    before = len(records())
    command = [sys.executable, f"benchmarks/{name}.py", *flags]
    code = subprocess.run(command, cwd=ROOT, env={**os.environ, "BENCHMARK_RESULTS": str(results)}).returncode
    return code, records()[before:]


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run (all that need nothing special)")
    parser.add_argument("--quick", action="store_true", help="shortened, and the figures are not kept")
    parser.add_argument("--readme", action="store_true", help="write the tables of benchmarks/README.md and stop")
    arguments = parser.parse_args()
    if arguments.readme:
        README.write_text(readme(), encoding="utf-8")
        return 0
    modules = benchmarks()
    for name in arguments.names:
        if name not in modules:
            parser.error(f"{name}: no such benchmark{nearest(name, modules)}; there are {', '.join(modules)}")
    names = arguments.names or [name for name, module in modules.items() if not hasattr(module, "ALONE")]
    records, codes = [], {}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        results = Path(folder) / "results.json" if arguments.quick else report.RESULTS
        for number, name in enumerate(names, 1):
            flags = tuple(getattr(modules[name], "QUICK", ())) if arguments.quick else ()
            print(f"\n[{number}/{len(names)}] python benchmarks/{name}.py {' '.join(flags)}", flush=True)
            began = time.monotonic()
            codes[name], found = run(name, flags, results)
            records += found
            print(f"[{number}/{len(names)}] {name}: {time.monotonic() - began:.0f} s", flush=True)
    print(f"\n{table(records)}")
    if not arguments.quick:
        README.write_text(readme(), encoding="utf-8")
    for name, code in codes.items():
        if code:
            print(f"{name}: {'could not run here' if code == 2 else 'failed'}, exit code {code}; its reason is above")
    return int(any(code not in (0, 2) for code in codes.values()))


if __name__ == "__main__":
    sys.exit(main())
