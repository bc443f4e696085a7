"""Tests stand in the folder of what they test, and are independent of each other."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
SOURCES = TESTS.parent / "src" / "penstock"
# Folders of tests that are about no folder of the package.
OTHERS = {"hostile", "benchmarks", "browser", "chaos", "checker", "docs", "encryption", "gearman"}
# Uses of what is private to the package, each with its reason.
PRIVATE = {
    ("chaos/broken_worker.py", "_watch_fence"): "removes this guarantee from a running worker",
    ("pools/test_standing_races.py", "_acquire"): "cuts one process off from the database, and not others in this process",
    ("pools/test_standing_races.py", "_beat"): "cuts one process off from the database, and not others in this process",
    ("worker/test_metrics.py", "_version"): "the version itself, which `penstock.__version__` shows",
    ("gearman/conftest.py", "_onConnect"): "the way in which `gear` is extended",
}
# Public for all their underscore: of named tuples, and the exit of a child process.
NOT_PRIVATE = {"_replace", "_asdict", "_fields", "_exit"}
DATABASE = {"app", "databases", "sql", "url", "served", "spark"}


@functools.cache
def modules() -> dict[Path, ast.Module]:
    """The modules of the tests. Parsing them takes longer than what any test looks for."""
    found = {path: ast.parse(path.read_text("utf-8")) for path in sorted(TESTS.rglob("*.py"))}
    assert sum(path.name.startswith("test_") for path in found) > 100
    return found


def misplaced(path: Path) -> str:
    """What is wrong with the place of a test, relative to tests/; empty when it is right."""
    folders = OTHERS | {path.name for path in SOURCES.iterdir() if path.is_dir()}
    folder, *rest = path.parts[:-1] or [""]
    if folder not in folders:
        return f"{path} stands in no folder of src/penstock"
    return "" if rest in ([], ["unit"], ["sql"]) else f"{path}: a folder of tests has the folders unit and sql"


def imported_tests(module: ast.Module) -> set[str]:
    """The modules of tests that a module imports, and the tests that it imports from them."""
    names = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if any(part.startswith("test_") for part in name.split("."))}


def uses_a_database(test: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The fixtures of a database that a test asks for; an argument that a table gives is none."""
    asked = DATABASE & {argument.arg for argument in test.args.args}
    tables = [text for decorator in test.decorator_list if "parametrize" in (text := ast.unparse(decorator))]
    return {name for name in asked if not any(name in table for table in tables)}


def test_each_test_stands_in_a_folder_of_the_package() -> None:
    found = list(TESTS.rglob("test_*.py"))
    assert len(found) > 100
    assert not [wrong for path in found if (wrong := misplaced(path.relative_to(TESTS)))]


@pytest.mark.parametrize("place", ["test_a.py", "nowhere/test_a.py", "http/more/test_a.py", "http/unit/more/test_a.py"])
def test_another_place_is_refused(place: str) -> None:
    assert misplaced(Path(place))


def test_no_module_of_tests_imports_a_test() -> None:
    for path, module in modules().items():
        found = imported_tests(module)
        assert not found, f"{path} imports {found}: move what both need into a module of its own"


@pytest.mark.parametrize(
    "line",
    [
        "import tests.http.test_batch",
        "import tests.http.test_batch as other",
        "from tests.http import test_batch",
        "from tests.http.test_batch import served",
        "from . import test_batch",
        "from .test_batch import served",
        "def f():\n    from tests.http.test_batch import served",
    ],
)
def test_an_import_of_a_test_is_seen(line: str) -> None:
    assert imported_tests(ast.parse(line))


def private(module: ast.Module) -> Iterator[str]:
    """The private names of others that a module uses: attributes, imports, and names given to `setattr` or `getattr`."""
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (part for alias in node.names for part in (alias.name, *(node.module or "").split(".")))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("setattr", "getattr", "delattr"):
            names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            yield from (part for name in names if isinstance(name, str) for part in name.split("."))


def test_no_test_uses_what_is_private() -> None:
    used = set()
    for path, module in modules().items():
        for name in private(module):
            if re.match(r"_[A-Za-z]", name) and name not in NOT_PRIVATE:
                used.add((str(path.relative_to(TESTS)), name))
    unknown = sorted(used - PRIVATE.keys())
    assert not unknown, f"use what is public, make it so, or state the reason in PRIVATE: {unknown}"
    assert not PRIVATE.keys() - used, "these are no longer used"


def test_unit_tests_need_no_database() -> None:
    for path, module in modules().items():
        if path.parent.name == "unit" and path.name.startswith("test_"):
            for node in ast.walk(module):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                    found = uses_a_database(node)
                    assert not found, f"{path}: {node.name} uses {found}: it belongs one folder up"


def test_a_fixture_with_a_database_is_told_from_a_column_of_a_table() -> None:
    [asked, given] = ast.parse("def test_a(url): ...\n@pytest.mark.parametrize('url', [''])\ndef test_b(url): ...").body
    assert isinstance(asked, ast.FunctionDef) and isinstance(given, ast.FunctionDef)
    assert (uses_a_database(asked), uses_a_database(given)) == ({"url"}, set())
