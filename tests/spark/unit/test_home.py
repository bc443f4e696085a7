"""Which home of Spark a session gets."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pyspark
import pytest

from penstock.spark.home import installed_modules, without_archive


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(mode=0o700)
    monkeypatch.delenv("SPARK_HOME", raising=False)
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        monkeypatch.setenv(name, sys.executable)


def test_a_jvm_that_starts_gets_the_home_without_the_archive_of_pyspark() -> None:
    with installed_modules({}):
        home = Path(os.environ["SPARK_HOME"])
    assert "SPARK_HOME" not in os.environ
    assert (home / "bin" / "spark-submit").is_file()
    assert list((home / "jars").glob("spark-core_*.jar"))
    assert not (home / "python").exists()
    with pytest.raises(ZeroDivisionError), installed_modules({}):
        raise ZeroDivisionError
    assert "SPARK_HOME" not in os.environ


@pytest.mark.parametrize(
    ("environment", "config"),
    [
        ({"SPARK_HOME": "/opt/spark"}, {}),
        ({"PYSPARK_PYTHON": "/opt/python"}, {}),
        ({"PYSPARK_DRIVER_PYTHON": "/opt/python"}, {}),
        ({}, {"spark.pyspark.python": "/opt/python"}),
    ],
)
def test_another_spark_and_another_python_keep_their_archive(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], config: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with installed_modules(config):
        assert os.environ.get("SPARK_HOME") == environment.get("SPARK_HOME")


def test_a_pyspark_that_only_this_process_finds_keeps_its_archive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pyspark, "__file__", str(tmp_path / "pyspark" / "__init__.py"))
    (tmp_path / "pyspark" / "jars").mkdir(parents=True)
    with installed_modules({}):
        assert "SPARK_HOME" not in os.environ


def test_the_home_follows_the_package(tmp_path: Path) -> None:
    package = tmp_path / "pyspark"
    for part in ("bin", "jars", "python"):
        (package / part).mkdir(parents=True)
    home = without_archive(package)
    assert sorted(part.name for part in home.iterdir()) == ["bin", "jars"]
    (package / "conf").mkdir()
    (home / "jars").unlink()
    (home / "jars").symlink_to(tmp_path)
    assert without_archive(package) == home
    assert {part.name: part.readlink() for part in home.iterdir()} == {n: package / n for n in ("bin", "conf", "jars")}
