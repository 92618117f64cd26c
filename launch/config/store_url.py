"""The URL of `--checkpoint_store`: what is refused before anything connects to it."""

from __future__ import annotations

import os
import re

from launch.errors import UsageError


def check_url(url: str, runs_dir: str) -> str | None:
    """Check the URL of `--checkpoint_store`. Returns the line for a store whose backend is not installed here, else None.

    Raises:
        UsageError: it is not a URL, holds a password, has a scheme that fsspec does not know or that keeps nothing, is relative, or is the
            folder of the runs.
    """
    import fsspec

    found = re.fullmatch(r"([a-z][a-z0-9+.-]*)://(.*)", url)
    shown = re.sub(r"(//[^/@:]*):[^@]*@", r"\1:***@", url)  # without the password
    if not found or not found[2].strip("/") or "::" in url or not url.isprintable():  # fsspec would read two URLs at "::"
        raise UsageError(f"--checkpoint_store {shown!r}: must be a URL such as s3://bucket/folder or file:///folder")
    if shown != url:
        raise UsageError(
            f"--checkpoint_store {shown}: holds a password, which every process of the host can read; "
            "leave it out, and set the backend's variables (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for s3)"
        )
    if found[1] in ("memory", "local"):  # the one ends with the process, the other is file:// without its checks
        raise UsageError(f"--checkpoint_store {url}: cannot keep checkpoints; give s3:// or file://")
    if found[1] == "file" and not found[2].startswith("/"):
        raise UsageError(f"--checkpoint_store {url}: names a path relative to the working folder; give file:// and an absolute path")
    if found[1] == "file" and os.path.realpath(found[2]) == os.path.realpath(runs_dir):
        raise UsageError(f"--checkpoint_store {url}: is --runs_dir, whose run.json and metrics.jsonl it would overwrite; give another")
    try:
        fsspec.get_filesystem_class(found[1])
    except ValueError:
        raise UsageError(f"--checkpoint_store {url}: fsspec has no scheme {found[1]!r}; give s3:// or file://") from None
    except ImportError as reason:
        return f"--checkpoint_store {url}: {reason}" + ('; pip install -e ".[s3]" -c constraints.txt' if found[1] == "s3" else "")
    return None
