"""Everything that is measured on a GPU, in parts of a few minutes, also on a machine without a network.

    python3 -m benchmarks.gpu                       # all parts, one after another; what is measured already is not measured again
    python3 -m benchmarks.gpu utilization           # one part; with --minutes N it ends after N minutes, and goes on when called again
    python -m benchmarks.gpu pack                   # before: the repository and the wheels that the GPU machine lacks, into .gpu
    python -m benchmarks.gpu rehearse               # before: all parts at small sizes on a CPU, with the GPU machine's packages alone

benchmarks/gpu/README.md says how to bring it to a machine and back. A part is a list of cells; each cell runs in a process of its own and
its record is in benchmarks/gpu/PART.json as soon as it ends. Exit codes: 0 every part is complete, 1 a cell failed, 3 the time is over.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import FOLDER, PARTS, ROOT, SITE, WORK, commands

TIME_IS_OVER = 3


def main() -> int:
    parser = argparse.ArgumentParser("benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (all of them), or alone: pack, rehearse")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end each part after this time, complete or not (no limit)")
    parser.add_argument("--tiny", action="store_true", help="small sizes on a CPU; records go to .gpu/tiny instead")
    parser.add_argument("--python", default="python3.12", help="rehearse: the interpreter of the GPU machine's version (python3.12)")
    arguments = parser.parse_args()
    if arguments.parts in (["pack"], ["rehearse"]):
        from benchmarks.gpu import rehearsal  # needs the whole project, which the GPU machine has only after set-up

        return rehearsal.pack() if arguments.parts == ["pack"] else rehearsal.rehearse(arguments.python)
    for name in arguments.parts:
        if name not in PARTS:
            parser.error(f"{name}: no such part; there are {', '.join(PARTS)}, or alone: pack, rehearse")
    prepare_environment(arguments.tiny)
    code = 0
    for part in dict.fromkeys(["setup", *(arguments.parts or PARTS)]):
        failed = run_part(part, arguments.tiny, time.monotonic() + 60 * arguments.minutes)
        code = failed or code
        if part == "setup" and failed:
            break
    return code


def prepare_environment(tiny: bool) -> None:
    """For this process and all that it starts: the installed wheels, the tools beside this Python, and the device."""
    os.chdir(ROOT)
    sys.path.append(str(SITE))
    paths = [str(SITE), str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), str(SITE / "bin"), os.environ["PATH"]])
    os.environ["DS_ACCELERATOR"] = "cpu" if tiny else "cuda"


def run_part(part: str, tiny: bool, deadline: float) -> int:
    """Run the cells of `part` that have no record of this GPU yet, until `deadline` on the monotonic clock. Returns the exit code."""
    file = (WORK / "tiny" if tiny else FOLDER) / f"{part}.json"
    every = commands(part, tiny)
    done = {} if part == "setup" else read(file)  # a machine may be fresh: set-up looks for what is there
    here = device() if done else ""
    left = {name: command for name, command in every.items() if not any(is_complete(one, here) for one in done.get(name, []))}
    failed = []
    print(f"{part}: {len(every) - len(left)} of {len(every)} cells are measured", flush=True)
    for number, (name, command) in enumerate(left.items(), 1):
        print(f"\n[{number}/{len(left)}] {part}: {name}", flush=True)
        began, results = time.monotonic(), WORK / f"{part}.records"
        results.unlink(missing_ok=True)
        code = run_cell([sys.executable, *command], results, deadline) if began < deadline else None
        print(f"[{number}/{len(left)}] {part}: {name}: {time.monotonic() - began:.0f} s", flush=True)
        if code is None:
            print(f"{part}: the time is over; {len(left) - number + 1} cell(s) left", flush=True)
            return TIME_IS_OVER
        if results.exists():
            new, old = json.loads(results.read_text(encoding="utf-8")), read(file)
            others = [one for one in old.get(name, []) if one["device"] != new[0]["device"]]
            write(file, old | {name: new + others})
            results.unlink()
        if code:
            failed.append(name)
    if failed:
        print(f"{part}: failed: {'; '.join(failed)}", flush=True)
    return int(bool(failed))


def run_cell(command: list[str], results: Path, deadline: float) -> int | None:
    """Run `command`, whose record goes to `results`; its exit code, or None where it was ended at `deadline`."""
    results.parent.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(command, env={**os.environ, "BENCHMARK_RESULTS": str(results)})
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        import psutil

        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            one.kill()
        process.wait()
        return None


def device() -> str:
    """The device as the records name it."""
    from benchmarks import report  # needs what set-up installs

    return report.device_name()


def is_complete(record: dict[str, Any], device: str) -> bool:
    """Whether a record is of this device and has no failure."""
    return record["device"] == device and not record.get("failed")


def read(file: Path) -> dict[str, list[dict[str, Any]]]:
    """The records of a part by cell; none where it was never run."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def write(file: Path, records: dict[str, list[dict[str, Any]]]) -> None:
    """Replace the records of a part; a kill leaves the old file or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(".json.part")
    beside.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    beside.replace(file)


if __name__ == "__main__":
    sys.exit(main())
