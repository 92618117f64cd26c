"""Trains several runs on one machine with interleaved steps, so that a slow moment of the machine affects all of them alike.

Each run is a process of `launch/pretrain.py`, under DeepSpeed's launcher if it has several ranks. The runs are started one after another,
so that none of them trains while another one starts up. Then each in turn makes `launch.training.interleaving.STEPS` steps while the others
wait.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import psutil

from launch.comparison.trials import Trial
from launch.training import interleaving
from recipes.registry import ROOT

#: Seconds between two checks of whether a run has ended while it should make steps.
POLL_SECONDS = 0.2
#: Seconds that a stopped run has to finish its step and write a checkpoint before it is killed.
STOP_SECONDS = 120.0


class InterleavedRun:
    """The processes of one run, and a connection to each of its ranks. An existing run folder is resumed.

    Args:
        socket_path: where the ranks connect; its folder's name is recorded in `run.json` as the name of the group.
    """

    def __init__(self, trial: Trial, runs_dir: Path, socket_path: Path):
        self.trial = trial
        self._connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(socket_path))
        self._listener.listen(trial.config.ranks)
        self._listener.settimeout(POLL_SECONDS)
        resume = ["--resume"] if (runs_dir / trial.name).exists() else []
        flags = [*trial.flags, "--runs_dir", str(runs_dir), "--run_name", trial.name, *resume]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        with open(runs_dir / f"{trial.name}.out", "ab") as output:
            self.process = subprocess.Popen(
                [*_launcher(trial.config.ranks), str(ROOT / "launch/pretrain.py"), *flags],
                env={**os.environ, interleaving.VARIABLE: str(socket_path), "PATH": path},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this command only, which then stops the runs
            )

    def wait_until_ready(self) -> bool:
        """Return True when all ranks are ready for their next steps, False when the run has ended."""
        return all(self._rank_is_ready(rank) for rank in range(self.trial.config.ranks))

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
        self.disconnect()

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
    with socket.socket() as probe:  # the launcher's default port is the same for all runs
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = str(Path(sys.executable).with_name("deepspeed"))
    return [command, "--num_gpus", str(ranks), "--master_port", str(port), "--log_level", "error"]


def _is_alive(group: int) -> bool:
    """Whether the process group has a process that is not a zombie."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def train_interleaved(trials: Sequence[Trial], runs_dir: Path, on_steps: Callable[[Trial, int], None]) -> dict[str, int]:
    """Train all `trials` with interleaved steps; those that have a run folder already are resumed.

    Args:
        on_steps: called with the number of steps that a run has just made, and with 0 when it has started.

    Returns:
        The exit code of each run, by name; `<runs_dir>/<name>.out` holds its output.

    Raises:
        SystemExit: 128 + n for signal n, Ctrl-C or SIGTERM; all runs have been stopped with checkpoints.
    """
    runs_dir.mkdir(parents=True, exist_ok=True)
    runs: list[InterleavedRun] = []
    with tempfile.TemporaryDirectory(prefix="interleaved-") as sockets, _interruptible():
        try:
            active = []
            for number, trial in enumerate(trials):
                runs.append(InterleavedRun(trial, runs_dir, Path(sockets) / str(number)))
                if runs[-1].wait_until_ready():
                    active.append(runs[-1])
                on_steps(trial, 0)
            while active:
                for run in list(active):
                    run.make_steps()
                    if run.wait_until_ready():
                        on_steps(run.trial, interleaving.STEPS)
                    else:
                        active.remove(run)
                        run.disconnect()  # if its launcher was killed, its ranks stop with a checkpoint
        except SystemExit as interrupted:
            for run in runs:
                run.stop(int(interrupted.code or 0) - 128)
            raise
        finally:
            for run in runs:
                run.disconnect()
            for run in runs:
                run.end()
    return {run.trial.name: run.process.returncode for run in runs}


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
