"""The examples in the docstrings of public names run as they stand there."""

from __future__ import annotations

import asyncio
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import asyncpg
import pytest

from penstock import Penstock
from scripts.reference.documented import documented
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


def examples() -> Iterator[Any]:
    for each in documented():
        for part in each.everything():
            for number, block in enumerate(BLOCK.findall(f"\n\n{part.text}\n")):
                yield pytest.param(part.name, textwrap.dedent(block), id=f"{part.name}-{number}")


def test_there_are_examples() -> None:
    assert len(list(examples())) >= 8


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
