"""Commands of this project in processes of their own, forked from one that has imported torch and DeepSpeed: no seconds of imports each."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch._dynamo", "torch.utils.tensorboard", "transformers", "deepspeed", "scipy.stats", "matplotlib.figure", "tests.distributed.jobs"]
)


def run_script(
    script: str, *arguments: object, cwd: Path = ROOT, environment: Mapping[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """What `python SCRIPT ARGUMENTS` in the folder `cwd` ends with and prints. `script` is relative to the project's folder.

    Raises:
        subprocess.TimeoutExpired: it was killed after `timeout` seconds.
    """
    words = [str(ROOT / script), *map(str, arguments)]
    with tempfile.TemporaryDirectory(prefix="command-") as folder:
        printed = [Path(folder) / name for name in ("stdout", "stderr")]
        values = dict(os.environ if environment is None else environment)
        process = CONTEXT.Process(target=_run, args=(words, str(cwd), values, [str(file) for file in printed]))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(words, timeout)
        output, errors = (file.read_text(encoding="utf-8") for file in printed)
        return subprocess.CompletedProcess(words, process.exitcode, output, errors)


def _run(words: list[str], cwd: str, environment: dict[str, str], printed: list[str]) -> None:
    for descriptor, file in enumerate((os.devnull, *printed)):
        os.dup2(os.open(file, os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
    runpy.run_path(words[0], run_name="__main__")
