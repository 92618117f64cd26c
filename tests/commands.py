"""Commands of this project in processes of their own, forked from one that has imported torch and DeepSpeed: no seconds of imports each."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import pty
import runpy
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch._dynamo", "torch.utils.tensorboard", "transformers", "deepspeed", "scipy.stats", "matplotlib.figure", "tests.distributed.jobs"]
)


def run_script(
    script: str,
    *arguments: object,
    cwd: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    timeout: float = 120,
    columns: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """What `python SCRIPT ARGUMENTS` in the folder `cwd` ends with and prints. `script` is relative to the project's folder.

    columns: it prints to a terminal of this width, 0 if that is unknown; `stdout` is all that this terminal gets.

    Raises:
        subprocess.TimeoutExpired: it was killed after `timeout` seconds.
    """
    words = [str(ROOT / script), *map(str, arguments)]
    if columns is not None:
        with _terminal(columns) as (name, got):
            code = _exit_code(words, cwd, environment, [name, name], timeout)
        return subprocess.CompletedProcess(words, code, b"".join(got).decode(), "")
    with tempfile.TemporaryDirectory(prefix="command-") as folder:
        printed = [Path(folder) / name for name in ("stdout", "stderr")]
        code = _exit_code(words, cwd, environment, [str(file) for file in printed], timeout)
        output, errors = (file.read_text(encoding="utf-8") for file in printed)
        return subprocess.CompletedProcess(words, code, output, errors)


def _exit_code(words: list[str], cwd: Path, environment: Mapping[str, str] | None, printed: list[str], timeout: float) -> int:
    values = dict(os.environ if environment is None else environment)
    process = CONTEXT.Process(target=_run, args=(words, str(cwd), values, printed))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise subprocess.TimeoutExpired(words, timeout)
    return process.exitcode


@contextlib.contextmanager
def _terminal(columns: int) -> Iterator[tuple[str, list[bytes]]]:
    """The name of a terminal, and what it has got, all of it after the body."""
    reader, own = pty.openpty()
    fcntl.ioctl(own, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    got: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # nobody has it open any more
            while data := os.read(reader, 2**16):
                got.append(data)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield os.ttyname(own), got
    finally:
        os.close(own)
        thread.join()
        os.close(reader)


def _run(words: list[str], cwd: str, environment: dict[str, str], printed: list[str]) -> None:
    for descriptor, file in enumerate((os.devnull, *printed)):
        os.dup2(os.open(file, os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    for name in ("stdout", "stderr"):  # the server's may be files, in which one can seek
        stream = getattr(sys, name)
        setattr(sys, name, open(stream.fileno(), "w", buffering=1, encoding=stream.encoding, errors=stream.errors, closefd=False))  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
    runpy.run_path(words[0], run_name="__main__")
