"""Where the folders are that stand in for a home of Java or of Spark: in the user's cache.

Their files are executed. When the cache belongs to another user, or others may write to it, they are made for this process alone,
in a temporary folder with a random name.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
from functools import lru_cache
from pathlib import Path

from penstock.core import folders


def shim_of(kind: str, home: Path) -> Path:
    """The folder that stands in for a home. It need not exist.

    Args:
        kind: What it is a home of, such as "java".
        home: The home.
    """
    digest = hashlib.sha256(os.fsencode(home)).hexdigest()[:16]
    return _cache() / f"{kind}-{digest}"


def _cache() -> Path:
    """A folder that only this user can change."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "penstock"
    try:
        cache = cache.resolve()
        folders.make_own(cache)
        if folders.guarded(cache):
            return cache
    except (OSError, RuntimeError, folders.UnsafeFolder):
        pass
    return _temporary(os.getpid())


@lru_cache(maxsize=1)
def _temporary(process: int) -> Path:
    """A folder of this process, removed at its end. (A forked process makes its own.)"""
    folder = folders.random_folder("penstock-", 200)
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == process else None)
    return folder
