"""Each edit of a sabotage finds what it takes out of the functions, so that a changed function shows before the soak."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import asyncpg

from tests.chaos.sabotage import Edit, Sabotage


def _sabotages(value: object) -> Iterator[Sabotage]:
    """What a module defines: sabotages and edits, alone or as the values of a dictionary."""
    if isinstance(value, Sabotage):
        yield value
    elif isinstance(value, Edit):
        yield Sabotage("", (value,))
    elif isinstance(value, dict):
        for each in value.values():
            yield from _sabotages(each)


async def test_each_edit_finds_what_it_takes_out(sql: asyncpg.Connection[Any]) -> None:
    # The other modules are programs, which end without their arguments.
    names = [name for _, name, _ in pkgutil.iter_modules([str(Path(__file__).parent)]) if name.startswith(("test_", "sabotage"))]
    modules = [import_module(f"tests.chaos.{name}") for name in names]
    found = {each: module.__name__ for module in modules for value in vars(module).values() for each in _sabotages(value)}
    wrong = []
    for sabotage, module in found.items():
        transaction = sql.transaction()
        await transaction.start()
        try:
            await sabotage.apply(sql)
        except (AssertionError, asyncpg.PostgresError) as error:
            wrong.append(f"{module}: {error}")
        finally:
            await transaction.rollback()
    assert not wrong, "\n".join(wrong)
    assert len(found) > 60
