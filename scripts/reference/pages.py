"""The pages of the reference, as Markdown."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.reference.documented import Documented, Parameter

NOTICE = "Generated from the docstrings: change those, and run `make reference`."
RUFF = Path(sys.executable).with_name("ruff")


def index(pages: Mapping[str, Sequence[Documented]]) -> str:
    """The first page: all public names, with the first sentence of each."""
    lines = [f"<!-- {NOTICE} -->", "# Reference of the Python API", ""]
    lines += [
        "All names are imported from `penstock`, as in `from penstock import Penstock`. What is `async` has a blocking half:"
    ]
    lines += [
        "`app.sync`, `orders.sync` and so on have the same methods, with the same parameters, for threads without an event loop."
    ]
    for title, names in pages.items():
        lines += ["", f"## [{title.capitalize()}]({title}.md)", "", "| name | |", "|---|---|"]
        lines += [f"| [`{each.name}`]({title}.md#{each.name.lower()}) | {_summary(each)} |" for each in names]
    return "\n".join(lines) + "\n"


def page(title: str, names: Sequence[Documented]) -> str:
    """The page of a capability."""
    lines = [f"<!-- {NOTICE} -->", f"# {title.capitalize()}", ""]
    for each in names:
        lines += [f"## {each.name}", "", *_body(each)]
        for member in each.members:
            lines += [f"### {member.name}", "", *_body(member)]
    return "\n".join(lines).rstrip() + "\n"


def _body(of: Documented) -> list[str]:
    lines = []
    if of.kind == "function":
        lines += ["```python", _wrapped(of.signature), "```", ""]
    elif of.kind == "property":
        lines += [f"Property: `{of.signature}`", ""]
    lines += [of.text, ""]
    if of.parameters:
        lines += [*map(_row, of.parameters), ""]
    if of.returns:
        lines += [f"Returns: {of.returns}", ""]
    if of.raises:
        lines += ["Raises:", "", *(f"* `{error}`: {text}" for error, text in of.raises), ""]
    return lines


def _row(parameter: Parameter) -> str:
    type = f" (`{parameter.type}`)" if parameter.type else ""
    default = f" Default: `{parameter.default}`." if parameter.default is not None else ""
    return f"* `{parameter.name}`{type}: {parameter.text}{default}"


def _wrapped(signature: str) -> str:
    """A long signature on several lines, as `make format` would write it."""
    if len(signature) <= 100:
        return signature
    asynchronous = signature.startswith("async ")
    name, _, rest = signature.removeprefix("async ").partition("(")
    stub = f"{'async ' if asynchronous else ''}def {name.replace('.', '__')}({rest}: ..."
    arguments = [str(RUFF), "format", "--quiet", "--stdin-filename", "signature.py", "-"]
    done = subprocess.run(arguments, input=stub, capture_output=True, text=True, check=True).stdout
    return done.strip().removesuffix(": ...").replace(name.replace(".", "__"), name).replace("def ", "", 1)


def _summary(of: Documented) -> str:
    first = of.text.split("\n\n")[0].replace("\n", " ")
    return first.split(". ")[0].removesuffix(".").replace("|", "\\|")
