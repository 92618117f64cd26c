"""What several tests need and none of them is about."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def free_port() -> int:
    """A port of this host on which nobody listens at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def copy_checkout(folder: Path) -> Path:
    """A copy of the working tree in `folder`, without what git ignores."""
    ignored = ("data", "runs", "__pycache__", "*.egg-info", ".git", ".venv", ".*cache", ".hypothesis")
    return Path(shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*ignored)))
