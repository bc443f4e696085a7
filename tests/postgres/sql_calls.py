"""Which SQL functions a part of Penstock can call, read from its Python code.

From the modules of a part it follows names that are imported from Penstock: to functions, and to classes, of which every method
counts. Annotations are not followed, and neither are the classes that users hold (`FACADES`), which have a method for everything:
a part names the methods of them that it calls.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
SCHEMA = SOURCE / "penstock/postgres/schema"
FACADES = {
    "penstock.app.Penstock", "penstock.jobs.job_type.JobType", "penstock.pools.pool.Pool", "penstock.streams.stream.Stream",
    "penstock.topics.topic.Topic", "penstock.schedules.schedule.Schedule",
}  # fmt: skip
_CALL = re.compile(r"\bpenstock\.(\w+)\s*\(")


@cache
def functions_of_schema() -> frozenset[str]:
    """The names of all functions in the schema."""
    made = re.compile(r"create or replace (?:function|procedure) penstock\.(\w+)")
    return frozenset(name for file in SCHEMA.rglob("*.sql") for name in made.findall(file.read_text("utf-8")))


class _Module:
    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        tree = ast.parse(path.read_text("utf-8"))
        self.parts: dict[str, ast.AST] = {}
        self.imported: dict[str, str] = {}
        self.constants: dict[str, ast.AST] = {}
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self.parts[node.name] = node
            elif isinstance(node, ast.ClassDef):
                self.parts[node.name] = node
                for item in node.body:
                    if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
                        self.parts[f"{node.name}.{item.name}"] = item
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name):
                        self.parts[target.id] = node.value
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("penstock"):
                for alias in node.names:
                    self.imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"


@cache
def _modules() -> dict[str, _Module]:
    found = {}
    for path in (SOURCE / "penstock").rglob("*.py"):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        found[name] = _Module(name, path)
    return found


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all below it but annotations."""
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns"):
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST):
                yield from _nodes(item)


def _resolved(name: str) -> str | None:
    """`module:part` of a dotted name that is imported; what a package re-exports is where it is defined."""
    module, _, part = name.rpartition(".")
    followed = set()
    while (module, part) not in followed and (found := _modules().get(module)) is not None:
        if part in found.parts:
            return f"{module}:{part}"
        if part not in found.imported:
            return None
        followed.add((module, part))
        module, _, part = found.imported[part].rpartition(".")
    return None


def _references(module: _Module, node: ast.AST) -> Iterator[str]:
    for part in _nodes(node):
        if isinstance(part, ast.Name):
            if part.id in module.parts:
                yield f"{module.name}:{part.id}"
            elif part.id in module.imported and (found := _resolved(module.imported[part.id])):
                yield found
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id in module.imported:
            target = module.imported[part.value.id]
            if target in _modules() and (found := _resolved(f"{target}.{part.attr}")):
                yield found


def calls_of(modules: Iterable[str], parts: Iterable[str] = ()) -> dict[str, str]:
    """The SQL functions that can be called, each with one place that calls it.

    Args:
        modules: Patterns of modules, as `penstock.worker.*`; those with a minus before them are left out.
        parts: Functions and methods, as `penstock.app:Penstock.open`.
    """
    wanted = set()
    for pattern in modules:
        expression = re.compile(re.escape(pattern.removeprefix("-")).replace(r"\*", ".*"))
        matched = {name for name in _modules() if expression.fullmatch(name)}
        assert matched, f"no module is {pattern}"
        wanted = wanted - matched if pattern.startswith("-") else wanted | matched
    waiting = [f"{name}:{part}" for name in wanted for part in _modules()[name].parts]
    waiting += list(parts)
    seen: set[str] = set()
    found: dict[str, str] = {}
    while waiting:
        place = waiting.pop()
        name, _, part = place.partition(":")
        if place in seen or (f"{name}.{part}" in FACADES and place not in parts):
            continue
        seen.add(place)
        module = _modules()[name]
        assert part in module.parts, f"no such part: {place}"
        node = module.parts[part]
        waiting.extend(_references(module, node))
        for item in _nodes(node):
            if isinstance(item, ast.Constant) and isinstance(item.value, str):
                for function in _CALL.findall(item.value):
                    if function in functions_of_schema():
                        found.setdefault(function, place)
    return found
