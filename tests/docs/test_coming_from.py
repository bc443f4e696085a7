"""docs/coming-from: the four programs run, the pages quote them whole, and their figures are counted from the files.

The pages are celery.md, dramatiq.md and procrastinate.md, each beside Penstock, and README.md, which has all four.
"""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "coming-from"
PROGRAMS = ROOT / "examples" / "coming_from"
OTHERS = ["celery", "dramatiq", "procrastinate"]
SYSTEMS = [*OTHERS, "penstock"]
QUOTED = re.compile(r"<!-- from: (\S+) -->\n\n```python\n(.*?)```", re.DOTALL)
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER
}  # fmt: skip


def program(system: str) -> Path:
    return PROGRAMS / f"with_{system}.py"


def checked_by(system: str) -> Path:
    return PROGRAMS / f"test_with_{system}.py"


def lines(text: str) -> int:
    """The lines of a program that have code: no blank lines, comments and docstrings."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    written = text.splitlines()
    return sum(bool(written[number - 1].strip()) for number in found)


def root_of(node: ast.expr) -> str:
    """The name at which a chain of attributes and calls begins: `app` of `app.conf.timezone`."""
    while isinstance(node, ast.Attribute | ast.Call):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id if isinstance(node, ast.Name) else ""


def concepts(system: str, text: str) -> list[str]:
    """The words of a system that a program uses: what it imports, attributes and methods, options and keys of settings.

    Left out are the words of Python, of psycopg and of the order service: names from elsewhere and what hangs on them, the
    connection to the database, and the parameters of the program's own functions.
    """
    tree = ast.parse(text)
    found: set[str] = set()
    foreign = {"connection"}
    own: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name
            names = {alias.name for alias in node.names}
            if module.split(".")[0] != system:
                foreign |= names
            elif isinstance(node, ast.ImportFrom):
                found |= names
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            own |= {argument.arg for argument in node.args.args}
    own -= {"connection"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and root_of(node) not in foreign:
            found.add(node.attr)
        elif isinstance(node, ast.Call) and root_of(node) not in foreign:
            found |= {keyword.arg for keyword in node.keywords if keyword.arg}
        elif isinstance(node, ast.Dict):
            keys = [key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
            found |= {key for key in keys if key.isidentifier()}
    return sorted(found - own, key=lambda word: (word.lower(), word))


def figures(systems: list[str]) -> list[str]:
    """The lines of the table of figures and of the lists of concepts, as they have to stand in a page."""
    texts = {system: program(system).read_text("utf-8") for system in systems}
    words = {system: concepts(system, text) for system, text in texts.items()}
    rows = {
        "lines of the program": [lines(text) for text in texts.values()],
        "lines of its test": [lines(checked_by(system).read_text("utf-8")) for system in systems],
        "concepts": [len(each) for each in words.values()],
    }
    table = [f"| {what} | {' | '.join(str(count) for count in counts)} |" for what, counts in rows.items()]
    return [*table, *(f"* {system.capitalize()}: {', '.join(f'`{word}`' for word in words[system])}" for system in systems)]


def without_blank(text: str) -> list[str]:
    """The lines of a file that a page quotes: all but blank ones, and but the comments that stand for headings of the page."""
    return [line for line in text.splitlines() if line.strip() and not line.startswith("# -- ")]


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_program_of_each_system_passes_its_test(system: str, url: str) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "PYTEST_", "ORDERS_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(checked_by(system)), "-p", "no:cacheprovider", "-q", "--no-header"],
        cwd=ROOT,
        env={**kept, "PENSTOCK_TEST_DATABASE_URL": url},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "1 passed" in done.stdout


@pytest.mark.parametrize("system", OTHERS)
def test_a_page_quotes_both_programs_and_their_tests_whole(system: str) -> None:
    quoted: dict[str, str] = {}
    for name, code in QUOTED.findall((PAGES / f"{system}.md").read_text("utf-8")):
        quoted[name] = quoted.get(name, "") + code
    files = [program(system), program("penstock"), checked_by(system), checked_by("penstock")]
    assert set(quoted) == {str(file.relative_to(ROOT)) for file in files}
    for file in files:
        assert without_blank(quoted[str(file.relative_to(ROOT))]) == without_blank(file.read_text("utf-8"))


@pytest.mark.parametrize("system", [*OTHERS, "README"])
def test_the_figures_of_a_page_are_those_of_the_files(system: str) -> None:
    page = (PAGES / f"{system}.md").read_text("utf-8").splitlines()
    wanted = figures(SYSTEMS if system == "README" else [system, "penstock"])
    missing = [line for line in wanted if line not in page]
    assert not missing, "these lines belong into the page:\n" + "\n".join(missing)


COUNTED = [
    ('"""Text."""\n\nimport penstock\n\n# why\nx = """\na\n\nb"""\n', 4, []),
    ("from penstock import Job\nimport os\nos.environ.get('A')\n", 3, ["Job"]),
    ("def f(order_id):\n    g.send(order_id=1, delay=2)\n    connection.execute('a', binary=True)\n", 3, ["delay", "send"]),
    ("from datetime import timedelta\na.conf.b = {'task': timedelta(days=1), 'a-name': 1}\n", 2, ["b", "conf", "task"]),
]


@pytest.mark.parametrize(("text", "count", "words"), COUNTED)
def test_lines_and_concepts_are_counted(text: str, count: int, words: list[str]) -> None:
    assert (lines(text), concepts("penstock", text)) == (count, words)
