"""How far a long preparation is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm

#: Seconds between two lines where no bar can be drawn.
SECONDS_BETWEEN_LINES = 15.0


class Progress:
    """Documents, tokens, MB of text a second, and the time left by the share of the source that is behind.

    Args:
        n_bytes: the size of the source; 0 where it is not known, and then there is no time left to tell.
        behind: how much of it was done by an interrupted run.
    """

    def __init__(self, n_bytes: int, quiet: bool, behind: int = 0):
        self.quiet, self.n_bytes = quiet, n_bytes
        self.documents = self.tokens = self.text_bytes = 0
        self._started = self._told = time.monotonic()
        self._bar = tqdm(
            total=n_bytes or None,
            initial=behind,
            unit="B",
            unit_scale=True,
            desc="encoding",
            leave=False,
            disable=quiet or not sys.stderr.isatty(),
            bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}" if n_bytes else "{desc} {elapsed}{postfix}",
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        self._bar.close()

    def update(self, n_read: int, documents: int, tokens: int, text_bytes: int) -> None:
        """So many more documents, tokens and bytes of text; `n_read` of the source is behind in all."""
        self.documents, self.tokens, self.text_bytes = self.documents + documents, self.tokens + tokens, self.text_bytes + text_bytes
        now = time.monotonic()
        if not self._bar.disable:
            self._bar.set_postfix_str(self._said(now), refresh=False)
            self._bar.update(max(0, min(n_read, self.n_bytes or n_read) - self._bar.n))
        elif not self.quiet and now - self._told >= SECONDS_BETWEEN_LINES:
            self._told = now
            share = f"{100 * min(1.0, n_read / self.n_bytes):.0f}%: " if self.n_bytes else ""
            print(f"encoding {share}{self._said(now)}", flush=True)

    def _said(self, now: float) -> str:
        rate = self.text_bytes / max(now - self._started, 1e-9) / 1e6
        return f"{self.documents:,} documents, {self.tokens:,} tokens, {rate:,.1f} MB/s"
