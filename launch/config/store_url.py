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

    # memory:// ends with the process, local:// is file:// without its checks, and fsspec would read two URLs at "::".
    found = re.fullmatch(r"(file)://(/.*[^/].*)|(?!file:|memory:|local:)([a-z][a-z0-9+.-]*)://.*[^/].*", url)
    shown = re.sub(r"(//[^/@:]*):[^@]*@", r"\1:***@", url)  # without the password
    if not found or "::" in url or not url.isprintable():
        raise UsageError(f"--checkpoint_store {shown!r}: must be a URL such as s3://bucket/folder or file:///folder")
    if shown != url:
        raise UsageError(
            f"--checkpoint_store {shown}: holds a password, which every process of the host can read; "
            "leave it out, and set the backend's variables (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for s3)"
        )
    scheme = found[1] or found[3]
    if found[1] and os.path.realpath(found[2]) == os.path.realpath(runs_dir):
        raise UsageError(f"--checkpoint_store {url}: is --runs_dir, whose run.json and metrics.jsonl it would overwrite; give another")
    try:
        fsspec.get_filesystem_class(scheme)
    except ValueError:
        raise UsageError(f"--checkpoint_store {url}: fsspec has no scheme {scheme!r}; give s3:// or file://") from None
    except ImportError as reason:
        return f"--checkpoint_store {url}: {reason}" + ('; pip install -e ".[s3]" -c constraints.txt' if scheme == "s3" else "")
    return None
