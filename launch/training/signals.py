"""SIGTERM and Ctrl-C: the run stops at the next step boundary, on all ranks, with a checkpoint.

A launcher does not tell all ranks at once. `deepspeed` hands a signal to its first rank, waits for it to end, and only then turns to
the next; so a rank that is asked to stop must tell the others, and does so in the reduction that every step makes anyway.

The command `deepspeed` itself, when it is killed, leaves its ranks running with nobody to stop them. So every rank also watches its
launchers, and asks for the stop when one of them is gone.

What the launchers make of it (DeepSpeed 0.19.8, measured by tests/distributed/test_signals.py):

    the signal goes to                   `deepspeed` ends with
    a rank                               143
    the command `deepspeed`, its group   killed by the signal, which a shell shows as 143, or 130 for Ctrl-C; the ranks end after it
    `deepspeed.launcher.launch`          1, whatever its ranks say

`deepspeed.launcher.launch` kills a rank that has not ended 30 seconds after it handed on a signal. Where a step and a checkpoint, or
two where one is being written, take longer, signal a rank or the command `deepspeed`: neither sets a limit.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from pathlib import Path

from launch.errors import say

#: A terminal that closes (SIGHUP) asks for the same as SIGTERM; `nohup` asks for the contrary, and is heeded.
WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LAUNCHER_CHECK_SECONDS = 0.5


class StopRequest:
    """Notes that this process was asked to stop; `poll` says with which signal.

    Until `defer` is called a signal ends the process at once with exit code 128 + n: there is nothing to lose yet.
    A second Ctrl-C ends it at once too, for a user who will not wait for the checkpoint.

    A thread does this: Python runs a signal's handler between two instructions of the main thread, and a rank that waits for the others
    inside a collective has none for as long as they let it wait.
    """

    def __init__(self) -> None:
        self._signal = 0
        self._deferred = False
        self._interrupts = 0
        self._launchers = _launchers()
        arrived, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for number in WATCHED:
            if signal.getsignal(number) is not signal.SIG_IGN or number != signal.SIGHUP:
                signal.signal(number, lambda number, frame: None)  # the wake-up is written before it would run
        threading.Thread(target=self._watch, args=(arrived,), name="signals", daemon=True).start()

    def _watch(self, arrived: int) -> None:
        while True:
            ready, _, _ = select.select([arrived], [], [], LAUNCHER_CHECK_SECONDS)
            for number in os.read(arrived, 64) if ready else b"":
                if number in WATCHED:
                    self._on_signal(number)
            self._check_launchers()

    def _check_launchers(self) -> None:
        if self._launchers != () and (self._launchers is None or _launchers() != self._launchers):
            self._launchers = ()
            self._on_signal(signal.SIGTERM)

    def _on_signal(self, number: int) -> None:
        if not self._deferred:
            os._exit(128 + number)
        self._interrupts += number == signal.SIGINT
        if self._interrupts >= 2:
            os._exit(128 + signal.SIGINT)
        if not self._signal:
            # Ctrl-C reaches a rank directly and is then followed by the launcher's SIGTERM: the first one counts.
            self._signal = int(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
            say("stopping after this step, with a checkpoint (Ctrl-C once more: at once, without one)", sys.stderr)

    def request(self) -> None:
        """Ask for a stop as SIGTERM does, for a reason that has been said."""
        self._signal = self._signal or int(signal.SIGTERM)

    def defer(self) -> None:
        """From now on a signal waits for the next step boundary."""
        self._deferred = True

    def poll(self) -> int:
        """The number of the signal that asks this process to stop, 0 for none."""
        self._check_launchers()  # 30 us; the thread looks twice a second, and steps can be shorter
        return self._signal


def _launchers() -> tuple[int, ...] | None:
    """Process ids of the launchers above this rank: DeepSpeed's per-host launcher and the `deepspeed` command that started it.

    Empty under other launchers, which end their ranks themselves. None where the `deepspeed` command of this host is gone already.
    """
    parent = os.getppid()
    command = _read(f"/proc/{parent}/cmdline")
    if b"deepspeed.launcher.launch" not in command:
        return ()
    # The fields after the command's name, which is in parentheses and may hold anything: state, parent, ...
    fields = _read(f"/proc/{parent}/stat").rpartition(b")")[2].split()
    grandparent = int(fields[1]) if len(fields) > 1 else 0
    if b"deepspeed" in _read(f"/proc/{grandparent}/cmdline"):
        return (parent, grandparent)
    # With --node_rank it was started from another host, by a shell that may be anything. Without, its parent was the command.
    return None if grandparent == 1 and b"--node_rank" not in command else (parent,)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
