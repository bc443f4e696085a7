"""Translation: a module of the asynchronous client without its `async` and `await`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from scripts.generate_sync.common import NOTICE, blocking_words

CLIENT = "penstock.client.aio"
MODULES = {CLIENT: "penstock.client.sync", "websockets.asyncio.client": "websockets.sync.client"}
LASTING = "lasting"
"""The decorator of iterations that go on after a cancelled request: a blocking request is never cancelled."""
NAMES = {
    "asyncio": "time", "aclose": "close", "aread": "read", "aiter_sse": "iter_sse",
    "__aenter__": "__enter__", "__aexit__": "__exit__", "__aiter__": "__iter__", "__anext__": "__next__",
}  # fmt: skip


class Translation(ast.NodeTransformer):
    """Asynchronous code without its `async` and `await`, in the names of blocking code."""

    def visit(self, node: ast.AST) -> ast.AST:
        """Translate a node and what is below it."""
        if isinstance(node, ast.Module):
            node.body = [part for part in node.body if not _imports_lasting(part)]
        elif isinstance(node, ast.AsyncFunctionDef):
            node.decorator_list = [one for one in node.decorator_list if not (isinstance(one, ast.Name) and one.id == LASTING)]
        self.generic_visit(node)
        if isinstance(node, ast.Await):
            return node.value
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Awaitable":
            return node.slice
        for field_name in ("name", "id", "attr", "module", "asname"):
            if isinstance(value := getattr(node, field_name, None), str):
                setattr(node, field_name, renamed(value))
        if isinstance(node, ast.comprehension):
            node.is_async = 0
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value.value = blocking_words(node.value.value)
        plain = {ast.AsyncFunctionDef: ast.FunctionDef, ast.AsyncWith: ast.With, ast.AsyncFor: ast.For}.get(type(node))
        return node if plain is None else plain(**dict(ast.iter_fields(node)))


def renamed(name: str) -> str:
    """The name of something in blocking code."""
    for before, after in MODULES.items():
        if name == before or name.startswith(f"{before}."):
            return after + name[len(before) :]
    return NAMES.get(name, re.sub(r"^Async(?=[A-Z])", "", name))


def _imports_lasting(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and [name.name for name in node.names] == [LASTING]


def translated(path: Path) -> str:
    """The text of a blocking module."""
    tree = ast.parse(path.read_text())
    Translation().visit(tree)
    summary = (ast.get_docstring(tree) or "").rstrip()
    tree.body[0] = ast.Expr(ast.Constant(f"{summary}\n\n{NOTICE}"))
    return ast.unparse(ast.fix_missing_locations(tree))
