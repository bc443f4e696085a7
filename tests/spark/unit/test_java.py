"""Which Java Spark gets."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from penstock.spark.java import JavaNotFound, find_java, without_vector


def fake(folder: Path, version: str, modules: str = "java.base jdk.incubator.vector") -> Path:
    """A Java home whose java says what it was called with."""
    (folder / "bin").mkdir(parents=True)
    (folder / "release").write_text(f'JAVA_VERSION="{version}"\nMODULES="{modules}"\n')
    java = folder / "bin" / "java"
    java.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    java.chmod(0o755)
    return folder


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(mode=0o700)
    monkeypatch.setattr("penstock.spark.java.util.find_spec", lambda _: None)
    monkeypatch.delenv("JAVA_HOME", raising=False)


def test_java_home_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake(tmp_path / "given", "21.0.2")))
    monkeypatch.setenv("PATH", str(fake(tmp_path / "system", "17.0.15") / "bin"))
    java = find_java()
    assert (java.origin, java.version, java.home) == ("JAVA_HOME", (21, 0, 2), tmp_path / "given")


def test_the_systems_java_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(fake(tmp_path / "system", "17.0.15") / "bin"))
    assert find_java().origin == "system"


@pytest.mark.parametrize("version", ["11.0.2", "1.8.0_392", "24.0.1"])
def test_a_java_that_spark_does_not_know_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake(tmp_path / "given", version)))
    with pytest.raises(JavaNotFound, match=r"(?s)is Java .*Install Java 17 or 21"):
        find_java()


def test_a_java_home_that_is_wrong_is_not_silently_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    monkeypatch.setenv("PATH", str(fake(tmp_path / "system", "17.0.15") / "bin"))
    with pytest.raises(JavaNotFound, match="has no bin/java"):
        find_java()


def test_no_java_at_all_says_what_to_do() -> None:
    with pytest.raises(JavaNotFound, match=r"(?s)nothing found.*penstock\[jdk\]"):
        find_java()


@pytest.mark.parametrize(
    ("version", "options"), [("25.0.2", ("-XX:+UseParallelGC",)), ("25", ("-XX:+UseParallelGC",)), ("25.0.3", ())]
)
def test_early_java_25_gets_another_collector(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, options: tuple[str, ...]
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake(tmp_path / "given", version)))
    assert find_java().options == options


def test_a_java_without_the_vector_module_is_not_asked_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake(tmp_path / "it's given", "21.0.8", "java.base")))
    home = find_java().home
    assert home != tmp_path / "it's given"
    said = subprocess.run(
        [home / "bin" / "java", "-Xmx1g", "--add-modules=jdk.incubator.vector", "a b"], capture_output=True, text=True, check=True
    )
    assert said.stdout.splitlines() == ["-Xmx1g", "a b"]
    assert without_vector(tmp_path / "it's given") == home


def test_the_replacement_is_made_where_no_other_user_can_change_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = fake(tmp_path / "given", "21.0.8", "java.base")
    cached = without_vector(home)
    assert cached.is_relative_to(tmp_path / "cache")
    guessed = Path(f"/tmp/penstock-{os.getuid()}")  # where it was looked for once
    (tmp_path / "cache").chmod(0o777)
    made = without_vector(home)
    assert not made.is_relative_to(tmp_path / "cache")
    assert made.parent != guessed
    assert stat.S_IMODE(made.parent.lstat().st_mode) == 0o700
    assert without_vector(home) == made
    (tmp_path / "cache").chmod(0o700)
    assert without_vector(home) == cached


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give away a folder")
def test_a_cache_of_another_user_is_neither_used_nor_changed(tmp_path: Path) -> None:
    home = fake(tmp_path / "given", "21.0.8", "java.base")
    foreign = tmp_path / "cache" / "penstock"
    foreign.mkdir(mode=0o777)
    os.chown(foreign, 1, 1)
    before = foreign.stat()
    assert not without_vector(home).is_relative_to(tmp_path)
    assert (foreign.stat().st_uid, foreign.stat().st_mode, list(foreign.iterdir())) == (1, before.st_mode, [])
