"""The code in a document, block by block, and how to run it.

A block is what is fenced as python, sql, sh or ini, or a command line that is indented. Comments in the source of the document,
which readers do not see, say what a block needs:

* `<!-- setup: CODE -->` before a block runs Python first, with what the text takes for granted.
* `<!-- not run: REASON -->` before a block leaves it out.
* `<!-- file: NAME -->` before a block writes it into a file; `<!-- script -->` runs it as a program of its own;
  `<!-- background -->` starts a command that goes on while the following blocks run;
  `<!-- session -->` runs it in the shell of the page, with what earlier blocks defined and started there.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PARTS = re.compile(
    r"^<!-- (?P<comment>setup|not run|file|background|script|session):?\s*(?P<text>.*?)\s*-->$"
    r"|^```(?P<language>python|sql|sh|ini)\n(?P<fenced>.*?)^```$"
    r"|(?<=\n\n)(?P<indented>(?:    [^\n]*\n)+)",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """Some code of a document."""

    path: Path
    line: int
    language: str
    code: str
    setup: str = ""
    not_run: str = ""
    file: str = ""
    how: str = ""

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}"


def blocks(path: Path) -> list[Block]:
    """The code of a document, in order."""
    text = path.read_text("utf-8")
    found = []
    said: dict[str, str] = {}
    for part in _PARTS.finditer(text):
        comment = part["comment"]
        if comment == "setup":
            said["setup"] = said.get("setup", "") + textwrap.dedent(part["text"]) + "\n"
        elif comment in ("not run", "file"):
            said[comment.replace(" ", "_")] = part["text"]
        elif comment:
            said["how"] = comment
        else:
            line = text.count("\n", 0, part.start()) + 2
            code = part["fenced"] or textwrap.dedent(part["indented"])
            found.append(Block(path, line, part["language"] or "sh", code, **said))
            said = {}
    return found


async def run_python(code: str, names: dict[str, Any], where: str) -> None:
    """Run Python that may await at its top level; a traceback names the place in the document."""
    compiled = compile(code, where, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(compiled, names)
    if inspect.isawaitable(result):
        await result
