"""The URL of `--checkpoint_store`: what is refused before anything connects to it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from launch.errors import UsageError

#: Schemes of fsspec under which no checkpoint can be kept.
NO_STORE = {"memory": "which ends with the process", "local": "which is file://"}


def check_url(url: str, runs_dir: str) -> str:
    """Return the URL of `--checkpoint_store`.

    Raises:
        UsageError: it is not a URL, holds a password, has a scheme that fsspec does not know or that keeps nothing, is relative, or is the
            folder of the runs.
    """
    from fsspec.registry import known_implementations

    found = re.fullmatch(r"([a-z][a-z0-9+.-]*)://(.*)", url)
    if not found or not found[2].strip("/") or not url.isprintable():
        raise UsageError(f"--checkpoint_store {without_password(url)!r}: must be a URL such as s3://bucket/folder or file:///folder")
    if without_password(url) != url:
        raise UsageError(
            f"--checkpoint_store {without_password(url)}: holds a password, which every process of the host can read; "
            "leave it out, and set the backend's variables (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for s3)"
        )
    if why := NO_STORE.get(found[1]):
        raise UsageError(f"--checkpoint_store {url}: names fsspec's {found[1]!r}, {why}; give s3:// or file://")
    if found[1] == "file" and not found[2].startswith("/"):
        raise UsageError(f"--checkpoint_store {url}: names a path relative to the working folder; give file:// and an absolute path")
    if found[1] == "file" and Path(found[2]).resolve() == Path(runs_dir).resolve():
        raise UsageError(f"--checkpoint_store {url}: is --runs_dir, whose run.json and metrics.jsonl it would overwrite; give another")
    if found[1] not in known_implementations:
        raise UsageError(f"--checkpoint_store {url}: fsspec has no scheme {found[1]!r}; give s3:// or file://")
    return url


def without_password(url: str) -> str:
    """`url` without `user:password@`."""
    return re.sub(r"(//[^/@:]*):[^@]*@", r"\1:***@", url)


def missing_package(url: str) -> str | None:
    """The line for a store whose backend is not installed here, else None."""
    from fsspec.registry import known_implementations

    known = known_implementations[url.split("://")[0]]
    package = known["class"].split(".")[0]
    if importlib.util.find_spec(package) is not None:
        return None
    fix = 'pip install -e ".[s3]" -c constraints.txt' if package == "s3fs" else known.get("err", f"install {package}")
    return f"--checkpoint_store {url}: needs the package {package}, which is not installed; {fix}"
