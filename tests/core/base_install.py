"""Runs a Python program with only what `pip install penstock` installs: `python base_install.py -m penstock worker ...`.

Every other distribution of this environment is hidden from imports. Processes that the program starts see everything.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import packages_distributions, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def closure(distribution: str) -> set[str]:
    """A distribution and all that it requires, without extras."""
    found: set[str] = set()
    open = [(distribution, frozenset[str]())]
    while open:
        name, extras = open.pop()
        found.add(canonicalize_name(name))
        for line in requires(name) or ():
            needed = Requirement(line)
            wanted = needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *extras))
            if wanted and canonicalize_name(needed.name) not in found:
                open.append((needed.name, frozenset(needed.extras)))
    return found


class Shown:
    """Finds the modules of all distributions in the closure, and hides those of the others."""

    def __init__(self, allowed: Iterable[str]) -> None:
        kept = set(allowed)
        self.modules = {
            module
            for module, distributions in packages_distributions().items()
            if not kept & {canonicalize_name(each) for each in distributions}
        }

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Find a module as Python does, unless it is hidden."""
        return None if name.partition(".")[0] in self.modules else PathFinder.find_spec(name, path)


def main() -> None:
    """Run the rest of the command line."""
    shown = Shown(closure("penstock"))
    for name in [name for name in sys.modules if name.partition(".")[0] in shown.modules]:
        del sys.modules[name]
    sys.meta_path[:] = [shown if finder is PathFinder else finder for finder in sys.meta_path]
    option, program, *arguments = sys.argv[1:]
    sys.argv = [program, *arguments]
    if option == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
