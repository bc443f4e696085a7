"""Mirrors: for a class of the application, a class with the same methods, parameters and docstrings that runs them on a loop."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from scripts.generate_sync.common import NOTICE, blocking_words, path_of

# The parameter that says how long the call itself waits, and methods that take as long as there is to do.
WAIT = "timeout"
UNLIMITED = {"load", "migrate", "prune"}


@dataclass(frozen=True)
class Mirror:
    """A class to be mirrored.

    Attributes:
        module: The module that it is in.
        name: Its name; that of the mirror has `Sync` in front.
        also: Plain methods, properties and attributes that the mirror has too. It calls methods and properties on the loop.
        without: Coroutines that mean nothing without a loop, or for this class.
        closes: Whether its `close` ends the loop as well.
        connection: Attribute with the caller's connection through which the calls write, if it has one.
    """

    module: str
    name: str
    also: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    closes: bool = False
    connection: str = ""


MIRRORS = {
    "penstock.jobs.sync": [
        Mirror("penstock.jobs.job_type", "JobType", without=("ensure", "declare_if_allowed")),
        Mirror("penstock.jobs.job_type", "JobCall", connection="connection"),
    ],
    "penstock.pools.sync": [
        Mirror("penstock.pools.pool", "Pool", without=("declare_type",)),
        Mirror("penstock.pools.pull_worker", "PoolWorker", also=("id", "slots")),
        Mirror(
            "penstock.pools.pull_worker",
            "PulledJob",
            also=(
                "id", "name", "key", "attempt", "max_attempts", "data", "created_at", "snoozes", "cancelled", "progress", "log",
            ),
            without=("step", "sleep", "wait_for", "gather"),
        ),
    ],
    "penstock.streams.sync": [
        Mirror("penstock.streams.stream", "Stream"),
        Mirror("penstock.streams.producer", "Producer", also=("id", "sequence")),
        Mirror("penstock.streams.reader", "StreamReader"),
    ],
    "penstock.streams.consumer.sync": [Mirror("penstock.streams.consumer.pull", "Consumption", also=("partitions", "done"))],
    "penstock.schedules.sync": [Mirror("penstock.schedules.schedule", "Schedule")],
    "penstock.worker.sync": [Mirror("penstock.worker.leader", "LeaderTask")],
    "penstock.workflows.sync": [
        Mirror("penstock.workflows.job_group", "JobGroup", also=("id", "name")),
        Mirror("penstock.workflows.graph", "Workflow", also=("name", "steps", "add", "add_many")),
    ],
    "penstock.operations.sync": [Mirror("penstock.operations.operations", "Operations")],
    "penstock.topics.sync": [Mirror("penstock.topics.topic", "Topic")],
    "penstock.sync": [Mirror("penstock.app", "Penstock", without=("database", "worker", "run_worker"), closes=True)],
}  # fmt: skip
PLACES = {mirror.name: module for module, mirrors in MIRRORS.items() for mirror in mirrors}


@dataclass
class Module:
    """A module that is being written: its classes, and what they have to import."""

    name: str
    needed: set[tuple[str, str]] = field(default_factory=set)
    annotated: set[tuple[str, str]] = field(default_factory=set)
    classes: list[str] = field(default_factory=list)

    def text(self, what: str) -> str:
        """The whole module: the blocking half of what."""
        lines = [f'"""The blocking half of {what}.\n\n{NOTICE}"""', "from __future__ import annotations"]
        lines += [f"from {module} import {name}" for module, name in sorted(self.needed)]
        lines.append("if TYPE_CHECKING:")
        lines += [f"    from {module} import {name}" for module, name in sorted(self.annotated - self.needed)]
        for name, kind in (("T", "TypeVar"), ("P", "ParamSpec")):
            if any(re.search(rf"\b{name}\b", text) for text in self.classes):
                lines.append(f'{name} = {kind}("{name}")')
        return "\n".join([*lines, *self.classes])


def mirrored(name: str, mirrors: list[Mirror]) -> str:
    """The text of a module of mirrors."""
    module = Module(name)
    module.needed |= {
        ("typing", "TYPE_CHECKING"),
        ("typing", "Generic"),
        ("typing", "TypeVar"),
        ("typing", "ParamSpec"),
        ("typing", "Self"),
    }
    module.annotated.add(("penstock.core.blocking", "BackgroundLoop"))
    for mirror in mirrors:
        module.classes.append(MirroredClass(mirror, module).text())
    return module.text(mirrors[0].module)


class MirroredClass:
    """The mirror of one class."""

    def __init__(self, mirror: Mirror, module: Module) -> None:
        self.mirror = mirror
        self.module = module
        self.source, self.origins = read_class(mirror.module, mirror.name)
        generic = [base.slice for base in self.source.bases if isinstance(base, ast.Subscript) and _class_of(base) == "Generic"]
        # The type variable of a generic class, in brackets.
        self.variable = f"[{ast.unparse(generic[0])}]" if generic else ""

    def text(self) -> str:
        """The class."""
        name = self.mirror.name
        self.module.annotated.add(("typing", "Any"))
        parts = [
            f"class Sync{name}{f'(Generic{self.variable})' if self.variable else ''}:",
            f'    """The blocking half of `{name}`, for threads without an event loop: `{name}.sync`."""',
            # Any: the class names its mirror in the type of `sync`, and two modules that name each other are a circle. The calls
            # below fit the class, since they are made from it.
            "    def __init__(self, of: Any, loop: BackgroundLoop) -> None:",
            "        self._of = of",
            "        self._loop = loop",
        ]
        if any(isinstance(node, ast.AsyncFunctionDef) and node.name == "__anext__" for node in self.source.body):
            parts.append("        self._items = loop.each(of, lambda item: item)")
        for node in self.source.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                parts += self._method(node)
        own = self.origins
        for body, names in _bases(self.source, own):
            self.origins = names
            for node in body:
                if isinstance(node, ast.AsyncFunctionDef) or (
                    isinstance(node, ast.FunctionDef) and node.name in self.mirror.also
                ):
                    parts += self._method(node)
            parts += self._attributes(body)
        self.origins = own
        parts += self._attributes(self.source.body)
        return "\n".join(parts)

    def _method(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
        if node.name.startswith("__a"):
            return ["    " + line for line in self._special(node)]
        if node.name.startswith("_") or node.name in self.mirror.without or not self._has_mirror(node):
            return []
        if _is_iteration(node):
            return self._iteration(node)
        returns, mirror = self._returned(node.returns)
        parameters = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        given = {parameter.arg for parameter in parameters}
        body = self._body(node, given) + (".sync" if mirror else "")
        decorator = ["    @property"] if _is_property(node) else []
        return [
            *decorator,
            f"    def {'close' if node.name == 'aclose' else node.name}({self._parameters(node.args)}) -> {returns}:",
            _docstring(node),
            # The object that returns itself is the asynchronous one.
            *(
                [f"        {body}", "        return self"]
                if returns == "Self"
                else [f"        {'' if returns == 'None' else 'return '}{body}"]
            ),
        ]

    def _iteration(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
        """An iterator over the items of an asynchronous iterator."""
        assert isinstance(node.returns, ast.Subscript)
        self.module.annotated.add(("collections.abc", "Iterator"))
        item, mirror = self._returned(node.returns.slice)
        made = f"lambda item: item{'.sync' if mirror else ''}"
        return [
            f"    def {node.name}({self._parameters(node.args)}) -> Iterator[{item}]:",
            _docstring(node),
            f"        return self._loop.each(self._of.{node.name}({_arguments(node.args)}), {made})",
        ]

    def _special(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
        """What makes a context manager or an iterator."""
        if node.name == "__aenter__":
            return ["def __enter__(self) -> Self:", "    self._loop.run(self._of.__aenter__())", "    return self"]
        if node.name == "__aexit__":
            self.module.annotated.add(("typing", "Any"))
            leave = "self.close()" if self.mirror.closes else "self._loop.run(self._of.__aexit__(*error))"
            return ["def __exit__(self, *error: Any) -> None:", f"    {leave}"]
        if node.name == "__aiter__":
            return ["def __iter__(self) -> Self:", "    return self"]
        return [f"def __next__(self) -> {self._annotation(node.returns)}:", "    return next(self._items)"]

    def _has_mirror(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        if node.name in self.mirror.also:
            return True
        if isinstance(node, ast.AsyncFunctionDef):
            return not node.decorator_list
        return not node.decorator_list and (_class_of(node.returns) in PLACES or _is_iteration(node))

    def _body(self, node: ast.FunctionDef | ast.AsyncFunctionDef, given: set[str]) -> str:
        reached = f"self._of.{node.name}"
        call = f"{reached}({_arguments(node.args)})"
        if self.mirror.closes and node.name == "close":
            return f"self._loop.close({call})"
        if isinstance(node, ast.AsyncFunctionDef):
            options = [f"wait={WAIT}"] if WAIT in given else []
            options += ["connection=connection"] if "connection" in given else []
            options += [f"connection=self._of.{self.mirror.connection}"] if self.mirror.connection else []
            options += ["unlimited=True"] if node.name in UNLIMITED else []
            return f"self._loop.run({', '.join([call, *options])})"
        if node.name not in self.mirror.also:
            return call
        return f"self._loop.call(lambda: {reached if _is_property(node) else call})"

    def _attributes(self, body: list[ast.stmt]) -> list[str]:
        """Properties for attributes: those that a class declares, or sets from the parameter of the same name."""
        found: dict[str, ast.expr | None] = {}
        for node in body:
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                found |= {argument.arg: argument.annotation for argument in node.args.args if argument.arg not in found}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = node.annotation
        lines = []
        for name, annotation in found.items():
            if name in self.mirror.also:
                lines += ["    @property", f"    def {name}(self) -> {self._annotation(annotation)}:"]
                lines += [f'        """See `{self.mirror.name}`."""', f"        return self._of.{name}"]
        return lines

    def _parameters(self, arguments: ast.arguments) -> str:
        for argument in ast.walk(arguments):
            if isinstance(argument, ast.arg):
                self._annotation(argument.annotation)
        for default in [*arguments.defaults, *filter(None, arguments.kw_defaults)]:
            self.module.needed |= self._names(default)
        return ast.unparse(arguments)

    def _annotation(self, node: ast.expr | None) -> str:
        if node is None:
            return ""
        self.module.annotated |= self._names(node)
        return ast.unparse(node)

    def _returned(self, node: ast.expr | None) -> tuple[str, bool]:
        """What a method of the mirror returns, and whether that is a mirror itself."""
        name = _class_of(node)
        if node is None or name not in PLACES:
            return self._annotation(node), False
        if PLACES[name] != self.module.name:
            self.module.annotated.add((PLACES[name], f"Sync{name}"))
        if isinstance(node, ast.Subscript):
            self._annotation(node.slice)
        return f"Sync{ast.unparse(node)}", True

    def _names(self, node: ast.expr) -> set[tuple[str, str]]:
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        return {self.origins[name] for name in names if name in self.origins and name not in ("T", "P")}


def read_class(module: str, name: str) -> tuple[ast.ClassDef, dict[str, tuple[str, str]]]:
    """A class, and where the names of its module come from."""
    tree = ast.parse(path_of(module).read_text())
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return found, dict(_origins(tree, module))


def _bases(
    source: ast.ClassDef, origins: dict[str, tuple[str, str]]
) -> Iterator[tuple[list[ast.stmt], dict[str, tuple[str, str]]]]:
    """The bodies of the classes of ours from which a class inherits, and where their names come from."""
    for base in source.bases:
        module, name = origins.get(_class_of(base), ("", ""))
        if module.startswith("penstock."):
            found, names = read_class(module, name)
            yield found.body, names
            yield from _bases(found, names)


def _origins(tree: ast.Module, module: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Where each name of a module comes from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                yield name.asname or name.name, (node.module, f"{name.name} as {name.asname}" if name.asname else name.name)
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name, (module, node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((target.id, (module, target.id)) for target in targets if isinstance(target, ast.Name))


def _class_of(annotation: ast.expr | None) -> str:
    """The name of a class, whatever it is a class of."""
    outer = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    return outer.id if isinstance(outer, ast.Name) else ""


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(decorator, ast.Name) and decorator.id == "property" for decorator in node.decorator_list)


def _is_iteration(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return isinstance(node, ast.FunctionDef) and _class_of(node.returns) == "AsyncIterator"


def _arguments(given: ast.arguments) -> str:
    """The parameters of a method, passed on."""
    parts = [argument.arg for argument in given.posonlyargs + given.args if argument.arg != "self"]
    parts += [f"*{given.vararg.arg}"] if given.vararg else []
    parts += [f"{argument.arg}={argument.arg}" for argument in given.kwonlyargs]
    parts += [f"**{given.kwarg.arg}"] if given.kwarg else []
    return ", ".join(parts)


def _docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    lines = blocking_words(ast.get_docstring(node) or "").splitlines()
    text = "\n".join("        " + line if line else "" for line in lines)
    return f'        """{text.strip()}' + ('\n        """' if len(lines) > 1 else '"""')
