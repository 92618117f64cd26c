"""SIGTERM and Ctrl-C: the run stops at the next step boundary, on all ranks, with a checkpoint.

A launcher does not tell all ranks at once. `deepspeed` hands a signal to its first rank, waits for it to end, and only then turns to
the next; so a rank that is asked to stop must tell the others, and does so in the reduction that every step makes anyway.

The command `deepspeed` itself, when it is killed, leaves its ranks running with nobody to stop them. So local rank 0 also
watches its launchers, and stops the run when one of them is gone.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType

WATCHED = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Notes that this process was asked to stop; `poll` says with which signal.

    Until `defer` is called a signal ends the process at once with exit code 128 + n: there is nothing to lose yet.
    A second Ctrl-C ends it at once too, for a user who will not wait for the checkpoint.
    """

    def __init__(self) -> None:
        self._signal = 0
        self._deferred = False
        self._interrupts = 0
        self._launchers = _launchers()
        for number in WATCHED:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._deferred:
            os._exit(128 + number)
        self._interrupts += number == signal.SIGINT
        if self._interrupts >= 2:
            os._exit(128 + signal.SIGINT)
        # Ctrl-C reaches a rank directly and is then followed by the launcher's SIGTERM: the first one counts.
        self._signal = self._signal or number

    def defer(self) -> None:
        """From now on a signal waits for the next step boundary."""
        self._deferred = True

    def poll(self) -> int:
        """The number of the signal that asks this process to stop, 0 for none."""
        if not self._signal and self._launchers and _launchers() != self._launchers:
            self._signal = int(signal.SIGTERM)
        return self._signal


def _launchers() -> tuple[int, ...]:
    """Process ids of the launchers above local rank 0: DeepSpeed's per-host launcher and the `deepspeed` command that started it.

    Empty for other ranks and under other launchers, which end their ranks themselves.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return ()
    parent = os.getppid()
    if b"deepspeed.launcher.launch" not in _read(f"/proc/{parent}/cmdline"):
        return ()
    # The fields after the command's name, which is in parentheses and may hold anything: state, parent, ...
    fields = _read(f"/proc/{parent}/stat").rpartition(b")")[2].split()
    grandparent = int(fields[1]) if len(fields) > 1 else 0
    return (parent, grandparent) if b"deepspeed" in _read(f"/proc/{grandparent}/cmdline") else (parent,)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
