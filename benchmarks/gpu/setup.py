"""The GPU machine made ready: the carried wheels, an import of everything, and a corpus of the installed packages' own sources.

    python3 -m benchmarks.gpu setup

What is there already is kept, so that every part can begin with it.
"""

from __future__ import annotations

import argparse
import configparser
import importlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from benchmarks.gpu.parts import SITE, WHEELS, corpus

#: What the part `correctness` needs beside setup.cfg's requirements.
TEST_MODULES = ("pytest", "xdist", "hypothesis")
OURS = ("model", "data_pipeline", "recipes", "launch", "benchmarks")


def install() -> None:
    """Unpack the carried wheels beside the machine's packages, without an index."""
    if not WHEELS.exists():
        return
    wanted = sorted(wheel.name for wheel in WHEELS.glob("*.whl"))
    finished = SITE / "installed.json"
    if finished.exists() and json.loads(finished.read_text(encoding="utf-8")) == wanted:
        return
    shutil.rmtree(SITE, ignore_errors=True)  # half of an interrupted installation
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
    subprocess.run([*pip, "--target", str(SITE), *(str(WHEELS / name) for name in wanted)], check=True)
    finished.write_text(json.dumps(wanted), encoding="utf-8")
    importlib.invalidate_caches()


def import_everything() -> None:
    """Import what setup.cfg requires and every module of this project. Raises the first ImportError."""
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    extras = metadata["options.extras_require"]
    required = "\n".join([metadata["options"]["install_requires"], extras["fp8"], extras["liger"]])
    names = [re.split(r"[<>=;\[]", line)[0].strip() for line in required.splitlines() if line.strip() and not line.startswith("#")]
    for name in (*names, *TEST_MODULES):
        importlib.import_module(name.replace("-", "_"))
    for folder in OURS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            if file.stem != "__main__":
                parts = file.relative_to(ROOT).with_suffix("").parts
                importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))


def prepare_corpus(tiny: bool) -> None:
    """The Python sources of all installed packages, with GPT-2's number of tokens; of one package and 1,024 tokens where `tiny`."""
    packages = sysconfig.get_paths()["purelib"]
    source = f"{packages}/torch/nn/**/*.py" if tiny else f"{packages}/**/*.py"
    command = [sys.executable, "data_pipeline/prepare.py", "--source", source, "--out", str(corpus(tiny)), "--resume", "--on_error", "skip"]
    subprocess.run([*command, "--tokenizer", "bpe:1024" if tiny else "bpe:50257"], cwd=ROOT, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a corpus of one package")
    arguments = parser.parse_args()
    seconds, began = {}, time.monotonic()

    def done(name: str) -> None:
        nonlocal began
        seconds[name], began = round(time.monotonic() - began, 1), time.monotonic()
        print(f"{name}: {seconds[name]} s", flush=True)

    install()
    done("install")
    import_everything()
    done("import")
    prepare_corpus(arguments.tiny)
    done("corpus")
    from benchmarks import report

    manifest = json.loads((corpus(arguments.tiny) / "manifest.json").read_text(encoding="utf-8"))
    tokens = {split: manifest["splits"][split]["tokens"] for split in ("train", "val")}
    wheels = [wheel.name for wheel in sorted(WHEELS.glob("*.whl"))]
    report.append("setup", [], {"seconds": seconds, "wheels": wheels, "tokens": tokens, "nvcc": shutil.which("nvcc")})
    return 0


if __name__ == "__main__":
    sys.exit(main())
