"""The reference of the Python API is complete."""

from __future__ import annotations

import subprocess
import sys

import pytest

import penstock
from penstock.public import DEFINED_IN
from scripts.reference import PAGES, page_of
from scripts.reference.documented import Documented, documented

NAMES = {each.name: each for each in documented()}


def test_the_names_of_the_package_are_those_of_the_table() -> None:
    assert set(penstock.__all__) == {*DEFINED_IN, "__version__"}
    for name, module in DEFINED_IN.items():
        found = getattr(penstock, name)
        assert found.__module__ == module, f"{name} is defined in {found.__module__}"
        assert name in dir(penstock)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Penstok'"):
        penstock.Penstok  # noqa: B018


def test_importing_the_package_imports_none_of_its_parts() -> None:
    code = "import sys, penstock; print(*(name for name in sys.modules if name.startswith('penstock.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"penstock._version", "penstock.public"}


@pytest.mark.parametrize("name", DEFINED_IN)
def test_every_parameter_of_a_public_name_is_documented(name: str) -> None:
    missing = [
        f"{each.name}({parameter.name})"
        for each in NAMES[name].everything()
        for parameter in each.parameters
        if not parameter.text
    ]
    assert not missing, "describe it in the docstring, or refer to a docstring that does: See `Penstock.enqueue`."


@pytest.mark.parametrize("name", DEFINED_IN)
def test_every_public_name_and_member_has_a_place_in_the_reference(name: str) -> None:
    page = (PAGES / f"{page_of(name)}.md").read_text("utf-8")
    assert f"\n## {name}\n" in page
    for member in NAMES[name].members:
        assert member.text, f"{member.name} has no docstring"
        assert f"\n### {member.name}\n" in page
    assert set(public_methods(name)) <= {member.name for member in NAMES[name].members}, "each public method has a docstring"


def public_methods(name: str) -> list[str]:
    """Methods of a public class that it or its bases in the package define."""
    found = getattr(penstock, name)
    if not isinstance(found, type):
        return []
    return [
        f"{name}.{member}"
        for base in found.__mro__
        if base.__module__.startswith("penstock.")
        for member, value in vars(base).items()
        if not member.startswith("_") and (callable(value) or isinstance(value, (property, classmethod, staticmethod)))
    ]


def test_an_undocumented_parameter_is_seen() -> None:
    enqueue = next(each for each in NAMES["Pool"].members if each.name == "Pool.enqueue")
    assert {parameter.name: parameter.text for parameter in enqueue.parameters}["connection"] == "See `Penstock.enqueue`."
    assert isinstance(enqueue, Documented) and enqueue.signature.startswith("async Pool.enqueue(")
