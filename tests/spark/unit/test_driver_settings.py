"""Settings for spark-submit, which go through a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import InvalidInput
from penstock.spark.driver import property_line, settings_of


def test_settings_are_taken_out_of_the_arguments(tmp_path: Path) -> None:
    theirs = tmp_path / "their.conf"
    theirs.write_text("spark.a 1\nspark.b 2")
    arguments = [
        "--master",
        "yarn",
        "--conf",
        "spark.b=3",
        "-c",
        "spark.c = x=y",
        "--conf=spark.d=4",
        f"--properties-file={theirs}",
    ]
    others, settings = settings_of([*arguments, "--driver-memory", "1g"])
    assert others == ["--master", "yarn", "--driver-memory", "1g"]
    assert settings.splitlines() == ["spark.a 1", "spark.b 2", "spark.b=3", "spark.c=x\\=y", "spark.d=4"]


@pytest.mark.parametrize(
    ("value", "line"), [("a b", "n=a\\ b"), ("a\\b\n", "n=a\\\\b\\n"), ("#!:=", "n=\\#\\!\\:\\="), ("ü", "n=ü")]
)
def test_a_value_is_written_as_java_reads_it(value: str, line: str) -> None:
    assert property_line("n", value) == f"{line}\n"


@pytest.mark.parametrize("arguments", [["--conf"], ["--conf", "spark.a"], ["--properties-file", "/nowhere/it.conf"]])
def test_arguments_that_name_no_setting_are_refused(arguments: list[str]) -> None:
    with pytest.raises(InvalidInput, match="has no value|cannot be read"):
        settings_of(arguments)
