"""Libraries that import torch where they find it, kept from it: two seconds and 300 MB that preparing text has no use for."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def torch_hidden() -> Iterator[None]:
    """What is imported inside takes torch for not installed, unless somebody has imported it already."""
    hide = "torch" not in sys.modules
    if hide:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hide:
            del sys.modules["torch"]
