"""Write the reference of the Python API, and the types of the package's names: `make reference` runs this.

`penstock.public` has the names. Signatures and docstrings are read from the source (griffe), and a page is written for each
capability. Nothing is written by hand: to change a page, change the docstring.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.public import DEFINED_IN
from scripts.generate_sync import formatted
from scripts.reference.documented import Documented, documented
from scripts.reference.pages import NOTICE, index, page

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reference"
STUB = ROOT / "src" / "penstock" / "__init__.pyi"
_APPLICATION = {"app", "core", "settings"}


def generated() -> Iterator[tuple[Path, str]]:
    """Each generated file, and what it has to contain."""
    yield STUB, formatted(stub(), STUB)
    pages: dict[str, list[Documented]] = {}
    for each in documented():
        pages.setdefault(page_of(each.name), []).append(each)
    for title, names in pages.items():
        yield PAGES / f"{title}.md", page(title, names)
    yield PAGES / "README.md", index(pages)


def page_of(name: str) -> str:
    """The page of a public name: the capability whose folder defines it."""
    _, folder, *module = DEFINED_IN[name].split(".")
    if folder in _APPLICATION or module in (["leader"], ["fleets"]):
        return "application"
    return "pools" if folder == "worker" else folder


def stub() -> str:
    """The types of the names of the package."""
    imports = "".join(f"from {module} import {name} as {name}\n" for name, module in DEFINED_IN.items())
    names = "".join(f"    {name!r},\n" for name in (*DEFINED_IN, "__version__"))
    return f'"""{NOTICE}"""\n\nfrom penstock._version import __version__ as __version__\n{imports}\n__all__ = [\n{names}]\n'
