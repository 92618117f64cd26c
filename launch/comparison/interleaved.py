"""Runs several scripts on one machine, with interleaved steps or in parallel.

Each script trains like `launch/pretrain.py`, under DeepSpeed's launcher if it has several ranks. Interleaved scripts are started one after
another, so that none trains while another starts up. Then one at a time makes `STEPS` steps (`launch.training.ranks.interleaving`) while
the others wait, so that a slow moment of the machine affects all of them alike. Parallel scripts do not wait for each other.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import FrameType

import psutil

from launch.config.hardware import device_type, gpus
from launch.training.ranks import interleaving

#: Seconds between two checks of whether a run has ended.
POLL_SECONDS = 0.2
#: Seconds that a stopped run has to finish its step and write a checkpoint before it is killed.
STOP_SECONDS = 120.0


class InterleavedRun:
    """The processes of one run, and a connection to each of its ranks.

    Args:
        script: its path and arguments.
        output: the file that holds what it prints.
        environment: its variables, beside those of this process.
        socket_path: where the ranks connect; its folder's name is recorded in `run.json` as the name of the group.
    """

    def __init__(self, ranks: int, script: Sequence[str], output: Path, socket_path: Path, environment: Mapping[str, str]):
        self.ranks = ranks
        self._connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(socket_path))
        self._listener.listen(ranks)
        self._listener.settimeout(POLL_SECONDS)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        with open(output, "wb") as stream:
            self.process = subprocess.Popen(
                [*_launcher(ranks), *script],
                env={**os.environ, **environment, interleaving.VARIABLE: str(socket_path), "PATH": path},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this command only, which then stops the runs
            )

    def wait_until_ready(self) -> bool:
        """Return True when all ranks are ready for their next steps, False when the run has ended."""
        return all(self._rank_is_ready(rank) for rank in range(self.ranks))

    def _rank_is_ready(self, rank: int) -> bool:
        while self.process.poll() is None:
            try:
                if rank == len(self._connections):
                    self._connections.append(self._listener.accept()[0])
                    self._connections[rank].settimeout(POLL_SECONDS)
                if self._connections[rank].recv(1):
                    return True
                time.sleep(POLL_SECONDS)  # this rank has ended, and the others will soon
            except TimeoutError:
                pass
            except OSError:
                time.sleep(POLL_SECONDS)  # this rank was killed
        return False

    def make_steps(self) -> None:
        """Let all ranks make `interleaving.STEPS` steps."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.sendall(b"g")

    def stop(self, number: int) -> None:
        """Send a signal to the run, which then ends with a checkpoint."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def disconnect(self) -> None:
        """Close the connections. Ranks that are still alive stop with a checkpoint."""
        for one in (self._listener, *self._connections):
            one.close()
        self._connections.clear()

    def end(self) -> None:
        """Wait until a stopped run has ended, then kill what is left of it."""
        deadline = time.monotonic() + STOP_SECONDS
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        while _is_alive(self.process.pid) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)  # ranks outlive a launcher that was killed, and write a checkpoint
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _launcher(ranks: int) -> list[str]:
    if ranks == 1:
        return [sys.executable]
    command = str(Path(sys.executable).with_name("deepspeed"))
    # The launcher's default port is the same for all runs.
    return [command, "--num_gpus", str(ranks), "--master_port", str(free_port()), "--log_level", "error"]


def free_port() -> int:
    """A port of this host on which nobody listens, below the range from which Linux assigns ports to connections."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def _is_alive(group: int) -> bool:
    """Whether the process group has a process that is not a zombie."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def run_interleaved(
    scripts: Mapping[str, tuple[int, Sequence[str]]],
    folder: Path,
    on_steps: Callable[[str, int], None],
    on_end: Callable[[str, int], None],
    parallel: int | None = None,
) -> None:
    """Run all `scripts` with interleaved steps, or `parallel` of them at the same time; on GPUs, each of these has one rank and one GPU.

    Args:
        scripts: name -> (ranks, script with its arguments).
        folder: `<folder>/<name>.out` gets the output of a script.
        on_steps: called with a name and the number of steps just made; 0 when it has started. From another thread, as `on_end`.
        on_end: called with the name and the exit code of each script that has ended by itself.

    Raises:
        SystemExit: 128 + n for signal n, Ctrl-C or SIGTERM; all runs have been stopped with checkpoints.
    """
    runs: dict[str, InterleavedRun] = {}  # those that have not ended
    stopped_by: list[int] = []
    places: queue.SimpleQueue[int] = queue.SimpleQueue()
    for place in range(parallel or 1):
        places.put(place)

    def advance(name: str, steps: int) -> None:
        """Wait until the run has made `steps`, or has ended."""
        if runs[name].wait_until_ready():
            on_steps(name, steps)
            return
        runs[name].disconnect()  # if its launcher was killed, its ranks stop with a checkpoint
        runs[name].end()
        code = runs.pop(name).process.returncode
        if not stopped_by:
            on_end(name, code)

    def train(group: list[str]) -> None:
        """Train the runs of a group, which take turns."""
        place = places.get()
        with tempfile.TemporaryDirectory(prefix="interleaved-", dir="/tmp") as sockets:  # a socket's path has up to 107 bytes
            try:
                for number, name in enumerate(group):
                    if stopped_by:
                        return
                    ranks, script = scripts[name]
                    gpu = _gpu(place) if parallel else {}
                    runs[name] = InterleavedRun(ranks, script, folder / f"{name}.out", Path(sockets) / str(number), gpu)
                    advance(name, 0)
                while (group := [name for name in group if name in runs]) and not stopped_by:
                    for name in group:
                        if not stopped_by:
                            runs[name].make_steps()
                            advance(name, interleaving.STEPS)
                    group = [*group[1:], *group[:1]]  # so that no run always follows the same other run
            finally:
                left = [runs[name] for name in group if name in runs]
                for run in left:
                    run.disconnect()
                for run in left:
                    run.end()
                places.put(place)

    groups = [[name] for name in scripts] if parallel else [[*scripts]]
    with _interruptible(), ThreadPoolExecutor(parallel or 1) as pool:
        try:
            for ended in as_completed([pool.submit(train, group) for group in groups]):
                ended.result()
        except BaseException as reason:
            stopped_by.append(int(reason.code or 0) - 128 if isinstance(reason, SystemExit) else signal.SIGTERM)
            pool.shutdown(wait=False, cancel_futures=True)
            for run in [*runs.values()]:
                run.stop(stopped_by[0])
            raise


def _gpu(place: int) -> dict[str, str]:
    """The environment of the run in a place, which selects its GPU."""
    if device_type() != "cuda":
        return {}
    visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one] or [str(n) for n in range(len(gpus()))]
    return {"CUDA_VISIBLE_DEVICES": visible[place % len(visible)]}


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Raise SystemExit on the first Ctrl-C or SIGTERM, and ignore further ones while the runs are being stopped."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for one in handlers:
            signal.signal(one, signal.SIG_IGN)
        sys.exit(128 + number)

    handlers = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)
