"""The snippets of docs/frameworks.md and docs/embedded.md, run as they stand, on one embedded server."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from penstock import Penstock
from penstock.postgres.embedded import EmbeddedServer
from penstock.testing import TemporaryDatabases, memory_folder

DOCS = Path(__file__).parents[2] / "docs"


def files(document: str) -> dict[str, str]:
    """The files of a document: Python blocks whose first line is a comment with a path."""
    blocks = re.findall(r"```python\n# (\S+)\n(.*?)```", (DOCS / document).read_text(), re.DOTALL)
    return dict(blocks)


def commands(document: str, *starting: str) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", (DOCS / document).read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith(starting)]


CALL_WEB = """
import asyncio

from httpx import ASGITransport, AsyncClient
from web import lifespan, web


async def main():
    async with lifespan(web), AsyncClient(transport=ASGITransport(app=web), base_url="http://shop") as client:
        answer = await client.post("/orders", params={"customer": "bolt"})
        print(answer.status_code, answer.text)


asyncio.run(main())
"""


CALL_STARLETTE = """
import asyncio

from httpx import ASGITransport, AsyncClient
from starlette_web import web


async def main():
    async with web.router.lifespan_context(web), AsyncClient(transport=ASGITransport(web), base_url="http://shop") as client:
        answer = await client.post("/orders", params={"customer": "cleo"})
        print(answer.status_code, answer.json()["job"])


asyncio.run(main())
"""
CALL_FLASK = """
from flask_web import app, web

client = web.test_client()
answer = client.post("/orders?customer=dora")
print(answer.status_code, answer.json["job"])
print(client.get("/jobs/" + answer.json["job"]).json["status"])
print(client.post("/orders?customer=nobody").status_code)
app.sync.close()
"""


class Project:
    """A folder with an application and its embedded server."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url

    def write(self, name: str, text: str) -> None:
        (self.folder / name).parent.mkdir(exist_ok=True)
        (self.folder / name).write_text(text)

    def fetch(self, query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            found = connection.execute(query)
            return found.fetchall() if found.description else []

    def run(self, command: str, **environment: str) -> str:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        given = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "PG", "DATABASE_"))}
        given |= {"PATH": path, "PYTHONPATH": os.pathsep.join([str(self.folder), *filter(None, sys.path)]), **environment}
        done = subprocess.run(command, shell=True, cwd=self.folder, env=given, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def project() -> Iterator[Project]:
    with tempfile.TemporaryDirectory(prefix="penstock-docs-", dir=memory_folder(), ignore_cleanup_errors=True) as folder:
        # Held here, so that the server does not restart for each command.
        server = EmbeddedServer(Path(folder) / ".penstock")
        project = Project(Path(folder), server.start())
        try:
            yield project
        finally:
            server.stop()


def tables(project: Project, schema: str) -> set[str]:
    return {row[0] for row in project.fetch(f"select tablename from pg_tables where schemaname = '{schema}'")}


def test_sqlalchemy_fastapi_starlette_flask_and_alembic(project: Project) -> None:
    found = files("frameworks.md")
    for name in ("shop.py", "place_order.py"):
        project.write(name, found[name])
    for command in commands("frameworks.md", "penstock declare", "python place_order"):
        project.run(command)
    assert "orders" in tables(project, "public")
    before = tables(project, "penstock")
    assert "queued_jobs" in before and "orders" not in before
    assert project.fetch("select o.id = data::int from orders o, penstock.queued_jobs") == [(True,)]

    project.write("web.py", found["web.py"])
    # The lifespan, then one request.
    project.write("request.py", CALL_WEB)
    assert project.run("python request.py").split() == ["200", "2"]
    assert project.fetch("select count(*) from penstock.queued_jobs") == [(2,)]

    for framework, call, failing in (("starlette", CALL_STARLETTE, False), ("flask", CALL_FLASK, True)):
        project.write(f"{framework}_web.py", found[f"{framework}_web.py"])
        project.write("request.py", call)
        orders, jobs = project.fetch("select count(*), (select count(*) from penstock.queued_jobs) from orders")[0]
        said = project.run("python request.py").split()
        assert said[0] == "201"
        assert project.fetch("select id::text from penstock.queued_jobs order by id desc limit 1") == [(said[1],)]
        # One order with its job; a request that fails leaves neither.
        assert project.fetch("select count(*), (select count(*) from penstock.queued_jobs) from orders") == [
            (orders + 1, jobs + 1)
        ]
        assert said[2:] == (["queued", "404"] if failing else [])

    project.fetch("drop table orders")
    project.run("alembic init migrations")
    project.write("migrations/env.py", found["migrations/env.py"])
    for command in commands("frameworks.md", "alembic"):
        project.run(command)
    (revision,) = (project.folder / "migrations" / "versions").glob("*.py")
    assert "create_table('orders'" in revision.read_text()
    assert "penstock" not in revision.read_text().replace("penstock-docs", "")
    assert {"orders", "alembic_version"} <= tables(project, "public")
    assert tables(project, "penstock") == before


def test_django(project: Project) -> None:
    project.write("settings.py", files("frameworks.md")["settings.py"])
    (command,) = commands("frameworks.md", "python -m django")
    project.run(command, DJANGO_SETTINGS_MODULE="settings")
    assert {"auth_user", "django_migrations"} <= tables(project, "public")
    assert not {name for name in tables(project, "penstock") if name.startswith(("auth", "django"))}


def test_commands_with_the_embedded_server(project: Project) -> None:
    first, second, _ = commands("embedded.md", "penstock exec")
    assert "run_after" in project.run(first)
    project.run(second)
    assert "CREATE SCHEMA penstock" in (project.folder / "shop.sql").read_text()
    said = project.run(
        'penstock exec python -c \'import os; print(os.environ["DATABASE_URL"], os.environ["PENSTOCK_DATABASE_URL"])\''
    )
    assert len(set(said.split())) == 1 and said.startswith("postgresql://penstock@/penstock?host=")
    assert project.run("penstock exec sh -c 'exit 7' || echo $?").strip() == "7"
    assert "cannot run" in project.run("penstock exec no-such-program 2>&1 || true")


def test_the_url_of_an_application(tmp_path: Path) -> None:
    app = Penstock("postgresql://u:p@host:5/db")
    assert app.database_url() == "postgresql://u:p@host:5/db"
    assert app.database_url("psycopg") == "postgresql+psycopg://u:p@host:5/db"


def test_throw_away_databases_have_public_first(databases: TemporaryDatabases, url: str) -> None:
    for given in (databases, TemporaryDatabases(databases.server_url)):
        if given is databases:
            with psycopg.connect(url) as connection:
                assert connection.execute("select current_schemas(false)").fetchone() == (["public"],)
            continue
        # A server that is given may have no such setting for its user, whose name may be that of Penstock's schema.
        asyncio.run(databases.execute("alter role current_user reset search_path"))
        try:
            with given, given.database() as other, psycopg.connect(other) as connection:
                assert connection.execute("select current_schemas(false)").fetchone() == (["public"],)
        finally:
            asyncio.run(databases.execute("alter role current_user set search_path = public"))
