"""Memory of a large preparation: the peak of every process of `prepare.py`, which must not grow with the corpus.

    python benchmarks/prepare_memory.py                     # 5 GB, about half an hour and 9 GB of disk on two cores
    python benchmarks/prepare_memory.py --gigabytes 1

The text is the standard library over and over with invented words between, so that there is always something new to count: one lone file of
up to 1.5 GB, which is read in blocks, a `.jsonl.gz` of a tenth of all, and plain files of 16 MB. The peak is VmHWM of /proc/PID/status,
the largest resident set that a process ever had, shared pages counted in each. The bar is 600 MB.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from benchmarks import report
from benchmarks.report import Row

BAR = 600_000_000
QUICK = ("--gigabytes", "0.1")
SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnpqrstvwxz" for vowel in ("a", "e", "i", "o", "u", "ö", "ya")]


def blocks(seed: int) -> Iterator[str]:
    """Text without end, in blocks of about 1 MB: files of the standard library, and a twentieth of words that nobody has seen."""
    generator = random.Random(seed)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [file.read_text(encoding="utf-8") for file in files]
    while True:
        chosen, size = [], 0
        while size < 950_000:
            chosen.append(generator.choice(texts))
            size += len(chosen[-1])
        words = ("".join(generator.choices(SYLLABLES, k=generator.randint(2, 4))) for _ in range(7_000))
        yield "".join(chosen) + "\n" + " ".join(words) + "\n"


def write_source(folder: Path, n_bytes: int) -> None:
    """`n_bytes` of text in `folder`: what the module's docstring says."""
    text = blocks(0)

    def fill(file: Path, size: int) -> int:
        written = 0
        with open(file, "w", encoding="utf-8") as stream:
            while written < size:
                written += stream.write(next(text))
        return written

    written = fill(folder / "lone.txt", min(1_500_000_000, n_bytes * 3 // 10))
    with gzip.open(folder / "records.jsonl.gz", "wt", compresslevel=1, encoding="utf-8") as stream:
        end = written + n_bytes // 10
        while written < end:
            block = next(text)
            written += len(block)
            for start in range(0, len(block), 5_000):
                stream.write(json.dumps({"text": block[start : start + 5_000]}) + "\n")
    number = 0
    while written < n_bytes:
        written += fill(folder / f"plain-{number:04d}.txt", min(16_000_000, n_bytes - written))
        number += 1


def peaks(session: int) -> dict[int, tuple[str, int]]:
    """(role, largest resident set in bytes) of each living process of a session."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) != session:
                continue
            command = (folder / "cmdline").read_text()
            role = "worker" if "spawn_main" in command else "resource tracker" if "resource_tracker" in command else "prepare.py"
            lines = (folder / "status").read_text().splitlines()
            found[int(folder.name)] = role, next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
        except (OSError, StopIteration):  # it has ended
            pass
    return found


def rows(record: dict[str, Any]) -> list[Row]:
    what = f"largest process of prepare.py on {record['gigabytes']:g} GB of text"
    return [Row(what, f"{record['largest_peak'] / 1e6:.0f} MB", bar=f"under {BAR / 1e6:.0f} MB")]


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="text to prepare (1)")
    parser.add_argument("--tokenizer", default="bpe:8192", help="as prepare.py's (bpe:8192)")
    parser.add_argument("--workers", default="2", help="as prepare.py's (2)")
    parser.add_argument("--folder", type=Path, help="where the text and the corpus lie for the time being (a temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=arguments.folder) as folder:
        source = Path(folder, "source")
        source.mkdir()
        began = time.monotonic()
        write_source(source, int(arguments.gigabytes * 1e9))
        print(f"{arguments.gigabytes:g} GB of text written in {time.monotonic() - began:.0f} s", flush=True)
        options = ["--tokenizer", arguments.tokenizer, "--workers", arguments.workers]
        command = [sys.executable, "data_pipeline/prepare.py", "--source", str(source), "--out", f"{folder}/corpus", *options]
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ, start_new_session=True)
        largest: dict[int, tuple[str, int]] = {}
        while process.poll() is None:
            largest.update(peaks(process.pid))
            time.sleep(0.1)
    print(f"{'process':18}{'peak':>10}   (bar {BAR / 1e6:.0f} MB)")
    for role, peak in largest.values():
        print(f"{role:18}{peak / 1e6:>7.0f} MB")
    if process.returncode:
        return process.returncode
    peak = max(peak for _, peak in largest.values())
    if not arguments.no_record:
        report.append("prepare_memory", {"gigabytes": arguments.gigabytes, "largest_peak": peak}, "cpu")
    return 0 if peak < BAR else 1


if __name__ == "__main__":
    sys.exit(main())
