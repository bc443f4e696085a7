"""The locked requirements are complete: whatever a locked distribution needs is locked as well."""

from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCKS = Path(__file__).parents[3] / "requirements"


@pytest.mark.parametrize("lock", ["run.txt", "dev.txt"])
def test_whatever_a_locked_distribution_needs_is_locked(lock: str) -> None:
    lines = [line.removesuffix("\\") for line in (LOCKS / lock).read_text().splitlines() if line[:1].isalnum()]
    locked = [Requirement(line) for line in lines]
    names = {canonicalize_name(each.name) for each in locked}
    here = [each for each in locked if each.marker is None or each.marker.evaluate()]
    missing = {
        f"{each.name} needs {needed.name}"
        for each in here
        for needed in needs(each.name)
        if (needed.marker is None or needed.marker.evaluate({"extra": ""})) and canonicalize_name(needed.name) not in names
    }
    assert len(names) > 30
    assert not missing, "run `make lock`"


def needs(name: str) -> list[Requirement]:
    return [Requirement(line) for line in requires(name) or ()]
