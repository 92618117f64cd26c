"""Training the runs of an experiment side by side, in turns of a few steps, so that a machine that drifts hits all of them alike.

Each run is a whole `launch/pretrain.py`, under DeepSpeed's launcher where it has several ranks. They are started one after another, so
that none makes steps while another starts up; then each in turn makes `launch.training.turns.STEPS` steps while the others wait.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
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
from launch.training import turns
from recipes.registry import ROOT

#: How often it is looked whether a run that should make steps has ended.
LOOK_SECONDS = 0.2
#: A launcher hands on a signal, its ranks make their step and write a checkpoint: then they have ended, or are killed.
PATIENCE_SECONDS = 120.0


class Interrupted(Exception):
    """By a signal, of which it holds the number; the runs have been stopped, with checkpoints."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class Member:
    """One run that takes turns: its processes and its ranks' ends of the socket."""

    def __init__(self, trial: Trial, runs_dir: Path, resume: bool, circle: Path):
        self.trial = trial
        self.output = runs_dir / f"{trial.name}.out"
        self._ready: dict[socket.socket, bool] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        path = circle / f"{len(os.listdir(circle))}.sock"
        self._listener.bind(str(path))
        self._listener.listen(trial.config.ranks)
        flags = [*trial.flags, "--runs_dir", str(runs_dir), "--run_name", trial.name, *(["--resume"] if resume else [])]
        environment = {**os.environ, turns.VARIABLE: str(path), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        with open(self.output, "ab") as output:
            self.process = subprocess.Popen(
                # In this folder, to which the flags' paths are relative.
                [*_launcher(trial.config.ranks), str(ROOT / "launch/pretrain.py"), *flags],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is ours to hand on
            )

    def await_ready(self) -> bool:
        """Wait until all ranks ask for a turn, and return True; False when the run has ended."""
        while len(self._ready) < self.trial.config.ranks or not all(self._ready.values()):
            if self.process.poll() is not None:
                return False
            asking, _, _ = select.select([self._listener, *self._ready], [], [], LOOK_SECONDS)
            for one in asking:
                if one is self._listener:
                    self._ready[one.accept()[0]] = False
                elif _receive(one):
                    self._ready[one] = True
                else:  # a rank has ended, and the others will
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self.process.wait(LOOK_SECONDS)
        return True

    def go(self) -> None:
        """Let all ranks make the steps of a turn."""
        for one in self._ready:
            self._ready[one] = False
            with contextlib.suppress(OSError):
                one.sendall(turns.GO)

    def stop(self, number: int) -> None:
        """Hand on a signal, after which the run ends with a checkpoint."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        self.close()  # no rank waits for a turn any more

    def end(self) -> None:
        """Wait for the end of a run that was stopped; kill what is left of it."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE_SECONDS)
        while _is_alive(self.process.pid) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)  # ranks outlive a launcher that was killed, and write a checkpoint
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        for one in (self._listener, *self._ready):
            one.close()
        self._ready.clear()


def _launcher(ranks: int) -> list[str]:
    if ranks == 1:
        return [sys.executable]
    with socket.socket() as probe:  # so that runs do not meet on the launcher's one default port
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = str(Path(sys.executable).with_name("deepspeed"))
    return [command, "--num_gpus", str(ranks), "--master_port", str(port), "--log_level", "error"]


def _is_alive(group: int) -> bool:
    """Whether a process of the group is left that is more than a zombie."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def _receive(one: socket.socket) -> bytes:
    with contextlib.suppress(OSError):
        return one.recv(1)
    return b""


def train_in_turns(
    trials: Sequence[Trial], runs_dir: Path, resume: Callable[[Trial], bool], on_turn: Callable[[Trial, int], None]
) -> dict[str, int]:
    """Train `trials` side by side to their end.

    Args:
        resume: whether a trial has a run folder already, from which it goes on.
        on_turn: called after each turn of a run with its steps, and with 0 after a start.

    Returns:
        The exit code of each, by its name; `<runs_dir>/<name>.out` holds what it printed.

    Raises:
        Interrupted: by Ctrl-C or SIGTERM; all runs have been stopped, and can be resumed.
    """
    runs_dir.mkdir(parents=True, exist_ok=True)
    circle = Path(tempfile.mkdtemp(prefix="turns-"))
    members: list[Member] = []
    codes: dict[str, int] = {}
    with _interruptible():
        try:
            for trial in trials:
                members.append(Member(trial, runs_dir, resume(trial), circle))
                members[-1].await_ready()
                on_turn(trial, 0)
            active = list(members)
            while active:
                for member in list(active):
                    if member.await_ready():
                        member.go()
                        if member.await_ready():
                            on_turn(member.trial, turns.STEPS)
                            continue
                    active.remove(member)
                    member.close()  # what is left of a run whose launcher was killed stops too, with a checkpoint
                    codes[member.trial.name] = member.process.returncode
        except Interrupted as stopped:
            for member in members:
                member.stop(stopped.number)
            raise
        finally:
            for member in members:
                member.close()
            for member in members:
                member.end()
            shutil.rmtree(circle, ignore_errors=True)
    return codes


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """The first Ctrl-C or SIGTERM raises `Interrupted` inside; others are ignored while the runs are being stopped."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for one in before:
            signal.signal(one, signal.SIG_IGN)
        raise Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
