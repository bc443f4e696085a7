"""The examples in the docstrings of public names run as they stand there."""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import asyncpg
import pytest

import penstock
from penstock import Penstock
from penstock.public import DEFINED_IN
from tests.docs.snippets import run_python
from tests.waiting import eventually

# What the examples take for granted.
SETUP = """
import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any

import httpx
from pyspark.sql import SparkSession
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from penstock import *

@dataclass
class Shipment:
    id: str

@dataclass
class Page:
    url: str

@dataclass
class Clients:
    http: httpx.AsyncClient

@dataclass
class Order:
    customer: str
    total: int

@dataclass
class Delay:
    dest: str
    minutes: int

app = Penstock()
engine = create_async_engine(app.database_url("asyncpg"))
pool = app.pool("examples", payload=int)
orders = app.stream("orders", Order, partitions=2)

@app.job("extract")
async def extract(day: str) -> int:
    return 1

@app.job("publish")
async def publish() -> None: ...
"""
# A script that one of them names; it is not run.
SCRIPT = Path("jobs", "rollup.py")
BLOCK = re.compile(r"(?<=\n\n)(?:    [^\n]*\n|\n(?=    ))+")
# These go on until they are stopped: what one has done by then.
ENDLESS = {
    "Pool.worker": ("await pool.enqueue('a', 1)", "select 1 from penstock.archived_jobs where status = 'succeeded'"),
    "Stream.consume": ("await orders.append(Order('acme', 3))", "select 1 from penstock.groups where name like '%billing%'"),
}
# Declared here and by the example too.
OWN = {"Stream": "orders"}


def documented() -> Iterator[tuple[str, Any]]:
    """The public names, and the methods and properties that classes of Penstock give to theirs.

    Each process of the tests collects them, so they are looked up: to parse the sources, as `make reference` does, takes seconds.
    """
    for name in DEFINED_IN:
        found = getattr(penstock, name)
        yield name, found
        for member in dir(found) if inspect.isclass(found) else ():
            of = inspect.getattr_static(found, member)
            function = of.fget if isinstance(of, property) else getattr(of, "__func__", of)
            if not member.startswith("_") and inspect.isfunction(function) and function.__module__.startswith("penstock."):
                yield f"{name}.{member}", function


def examples() -> Iterator[Any]:
    for name, of in documented():
        for number, block in enumerate(BLOCK.findall(f"\n\n{inspect.getdoc(of) or ''}\n")):
            yield pytest.param(name, textwrap.dedent(block), id=f"{name}-{number}")


def test_there_are_examples() -> None:
    assert len(list(examples())) >= 16


@pytest.mark.parametrize(("name", "code"), list(examples()))
async def test_an_example_in_a_docstring_runs(
    name: str, code: str, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", url)
    monkeypatch.chdir(tmp_path)
    SCRIPT.parent.mkdir()
    SCRIPT.write_text("from penstock import current_job\n")
    module = ModuleType("examples_of_docstrings")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names = module.__dict__
    setup = "\n".join(line for line in SETUP.splitlines() if not line.startswith(f"{OWN.get(name)} = "))
    await run_python(setup, names, "setup")
    try:
        if name in ENDLESS:
            before, done = ENDLESS[name]
            await run_python(before, names, "before")
            running = asyncio.create_task(run_python(code, names, name))
            connection = await asyncpg.connect(url)
            await eventually(lambda: running.done() or connection.fetchval(done), f"what {name} does", 60)
            await connection.close()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        else:
            await run_python(code, names, name)
    finally:
        for app in [value for value in names.values() if isinstance(value, Penstock)]:
            await app.close()
