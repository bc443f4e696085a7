"""Tests stand in the folder of what they test, and are independent of each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[2]
SOURCES = TESTS.parent / "src" / "penstock"
# Folders of tests that are about no folder of the package.
OTHERS = {"benchmarks", "browser", "chaos", "checker", "docs", "encryption", "gearman"}
DATABASE = {"app", "databases", "sql", "url", "served", "spark"}


def modules() -> Iterator[tuple[Path, ast.Module]]:
    found = sorted(TESTS.rglob("test_*.py"))
    assert len(found) > 100
    for path in found:
        yield path, ast.parse(path.read_text("utf-8"))


def test_each_test_stands_in_a_folder_of_the_package() -> None:
    folders = OTHERS | {path.name for path in SOURCES.iterdir() if path.is_dir()}
    for path, _ in modules():
        folder, *rest = path.relative_to(TESTS).parts[:-1] or [""]
        assert folder in folders, f"{path} stands in no folder of src/penstock"
        assert rest in ([], ["unit"], ["sql"]), f"{path}: a folder of tests has the folders unit and sql"


def test_no_test_imports_another() -> None:
    for path, module in modules():
        for node in ast.walk(module):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert not name.rpartition(".")[2].startswith("test_"), (
                    f"{path} imports {name}: move what both need into a module of its own"
                )


def test_unit_tests_need_no_database() -> None:
    for path, module in modules():
        if path.parent.name != "unit":
            continue
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                asked = DATABASE & {argument.arg for argument in node.args.args}
                parametrized = {
                    ast.unparse(decorator) for decorator in node.decorator_list if "parametrize" in ast.unparse(decorator)
                }
                real = {name for name in asked if not any(name in one for one in parametrized)}
                assert not real, f"{path}: {node.name} uses {real}: it belongs one folder up"
