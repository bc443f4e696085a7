"""The home of Spark that a local session gets: that of the installed pyspark, less its archive of pyspark.

Spark puts the archive `python/lib/pyspark.zip` of its home first on the path of every Python process that it starts. An archive
has no compiled modules, so each of these processes would compile pyspark again, which takes longer than all its other imports
together. Where these processes run the Python of this process, which has pyspark installed, none of them needs the archive. The
remedy is a folder with links to all other parts of the home.
"""

from __future__ import annotations

import os
import secrets
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from penstock.spark.shims import shim_of

_PARTS = ("RELEASE", "bin", "conf", "data", "examples", "jars", "licenses", "sbin")
_OTHER_PYTHON = ("spark.pyspark.python", "spark.pyspark.driver.python")
_HOME = "SPARK_HOME"


@contextmanager
def installed_modules(config: Mapping[str, str]) -> Iterator[None]:
    """Let the Python processes of a JVM that starts meanwhile import pyspark from where it is installed, where that is possible.

    Args:
        config: Settings of the session.
    """
    package = _installed(config)
    if package is None:
        yield
        return
    # Only while the JVM starts, which keeps it: another program of Spark, such as one for YARN, needs the whole home.
    os.environ[_HOME] = str(without_archive(package))
    try:
        yield
    finally:
        del os.environ[_HOME]


def without_archive(home: Path) -> Path:
    """A home of Spark with the parts of `home`, and without its archive. It is made once, in the user's cache.

    Args:
        home: Folder of the package pyspark.
    """
    shim = shim_of("spark", home)
    shim.mkdir(exist_ok=True)
    for part in _PARTS:
        target, link = home / part, shim / part
        if target.exists() and not (link.is_symlink() and link.readlink() == target):
            # Made beside and renamed, so that a process that starts at this moment finds the old link or the new one.
            fresh = link.with_name(f"{part}.{secrets.token_hex(8)}")
            fresh.symlink_to(target)
            fresh.replace(link)
    return shim


def _installed(config: Mapping[str, str]) -> Path | None:
    """The folder of pyspark; None: Spark's Python processes might not have it, or the user has chosen another Spark."""
    import pyspark

    python = os.environ.get("PYSPARK_PYTHON")
    pythons = {python, os.environ.get("PYSPARK_DRIVER_PYTHON", python)}
    if os.name == "nt" or _HOME in os.environ or pythons != {sys.executable} or any(name in config for name in _OTHER_PYTHON):
        return None
    package = Path(pyspark.__file__).parent
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    if site.ENABLE_USER_SITE:
        folders.add(site.getusersitepackages())
    # A distribution within the package is another Spark, which pyspark prefers.
    if str(package.parent) in folders and (package / "jars").is_dir() and not (package / "spark-distribution").exists():
        return package
    return None
