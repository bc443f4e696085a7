"""Penstock in a web application of FastAPI, Starlette and Flask, and in a Django project."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from httpx import ASGITransport, AsyncClient
from starlette.applications import Starlette
from starlette.responses import Response

from penstock import NotFound, Penstock
from penstock.errors import DatabaseUnavailable, EmbeddedServerError
from penstock.integrations.fastapi import exception_handlers, lifespan

MANAGE = """
import os
import sys

from django.core.management import execute_from_command_line

os.environ["DJANGO_SETTINGS_MODULE"] = "settings"
execute_from_command_line(sys.argv)
"""
SETTINGS = """
import os
from urllib.parse import parse_qs, unquote, urlsplit

url = urlsplit(os.environ["SHOP_DATABASE"])
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": url.path[1:],
        "USER": unquote(url.username or ""),
        "PASSWORD": unquote(url.password or ""),
        "HOST": url.hostname or parse_qs(url.query)["host"][0],
        "PORT": url.port or "",
    }
}
INSTALLED_APPS = [
    "django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes", "django.contrib.messages",
    "django.contrib.sessions", "penstock.integrations.django", "shop",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware", "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [{
    "BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True,
    "OPTIONS": {"context_processors": [
        "django.template.context_processors.request", "django.contrib.auth.context_processors.auth",
        "django.contrib.messages.context_processors.messages",
    ]},
}]
ROOT_URLCONF = "urls"
SECRET_KEY = "change me"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
ALLOWED_HOSTS = ["testserver"]
PENSTOCK = {"APP": "shop.jobs:app"}
"""
URLS = """
from django.contrib import admin
from django.urls import path

urlpatterns = [path("admin/", admin.site.urls)]
"""
JOBS = """
import os

from penstock import Penstock
from penstock.integrations.django import database_url

app = Penstock(os.environ.get("JOBS_DATABASE") or database_url())


@app.job
def send_invoice(order: int, customer: str = "") -> None:
    from django.contrib.auth.models import User

    User.objects.filter(pk=order).update(first_name="invoiced")
"""
USE = """
import django

django.setup()
from django.contrib.auth.models import User
from django.db import transaction
from django.test import Client

from penstock.errors import InvalidInput
from penstock.integrations.django import enqueue, same_database
from shop.jobs import app, send_invoice

app.sync.declare()
print("same", same_database(send_invoice))
try:
    with transaction.atomic():
        user = User.objects.create_superuser("rolled", "r@example.com", "secret")
        enqueue(send_invoice, user.pk)
        raise RuntimeError
except RuntimeError:
    pass
with transaction.atomic():
    user = User.objects.create_superuser("ada", "ada@example.com", "secret")
    id = enqueue(send_invoice.options(key="ada"), user.pk, customer="ada")
    before = [each.ready for each in app.sync.counts()]
try:
    enqueue(send_invoice, "no number")
except InvalidInput as error:
    print("refused")
print("outside", before, "after", [each.ready for each in app.sync.counts()])
record = app.sync.find(id)
print("job", record.key, record.data["customer"])
client = Client()
client.force_login(user)
for page in ("", "penstock/jobtype/", "penstock/queuedjob/", f"penstock/queuedjob/{id}/change/", "penstock/archivedjob/"):
    print(page, client.get("/admin/" + page).status_code)
print("add", client.get("/admin/penstock/queuedjob/add/").status_code)
print("delete", client.post(f"/admin/penstock/queuedjob/{id}/delete/", {"post": "yes"}).status_code)
app.sync.close()
"""


async def finished(app: Penstock, id: Any) -> Any:
    async with asyncio.timeout(60):
        while True:
            try:
                if (record := await app.find(id)).status.finished:
                    return record
            except NotFound:
                pass
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("kind", [FastAPI, Starlette])
async def test_a_worker_runs_inside_a_web_application(url: str, kind: Any) -> None:
    app = Penstock(url)
    seen: list[str] = []

    @app.job
    async def greet(name: str) -> None:
        seen.append(name)

    @asynccontextmanager
    async def inner(web: Any) -> AsyncIterator[dict[str, Any]]:
        seen.append("inner")
        yield {"answer": 42}

    web = kind(lifespan=lifespan(app, inner=inner))

    async def hello(request: Request) -> Any:
        from starlette.responses import JSONResponse

        receipt = await greet.enqueue("ada")
        return JSONResponse({"id": str(receipt.id)})

    web.add_route("/hello", hello, ["POST"])
    async with (
        web.router.lifespan_context(web) as state,
        AsyncClient(transport=ASGITransport(web), base_url="http://shop") as client,
    ):
        assert state == {"answer": 42}
        answer = await client.post("/hello")
        record = await finished(app, answer.json()["id"])
    assert (str(record.status), seen) == ("succeeded", ["inner", "ada"])
    assert not app.is_open


async def test_a_web_application_without_a_worker_only_opens(url: str, sql: Any) -> None:
    app = Penstock(url)

    @app.job
    async def greet(name: str) -> None: ...

    web = FastAPI(lifespan=lifespan(app, worker=False))
    async with web.router.lifespan_context(web):
        assert app.is_open
        # The declarations are written when it opens: an enqueue in the caller's transaction needs them.
        assert await sql.fetchval("select array_agg(name) from penstock.jobs") == ["greet"]
        assert await sql.fetchval("select count(*) from penstock.workers") == 0
        await greet.enqueue("ada")
        assert [each.ready for each in await app.counts()] == [1]


@pytest.mark.parametrize("kind", [FastAPI, Starlette])
async def test_errors_of_penstock_are_answered_as_its_own_http_api_answers_them(url: str, kind: Any) -> None:
    app = Penstock(url)

    @app.job(max_waiting=1)
    async def greet(name: str) -> None: ...

    @app.job
    async def translate(text: str) -> None: ...

    web = kind(lifespan=lifespan(app, worker=False), exception_handlers=exception_handlers)

    async def endpoint(request: Request) -> Any:
        match request.path_params["what"]:
            case "enqueue":
                await greet.enqueue("ada")
            case "invalid":
                await greet.enqueue(1)  # type: ignore[arg-type]
            case "large":
                await translate.enqueue("x" * 3_000_000)
            case "missing":
                await app.find("01890000-0000-7000-8000-000000000001")
            case "conflict":
                await app.create_job_type("greet")
            case "away":
                raise DatabaseUnavailable("host db.internal is away")
            case "bug":
                raise EmbeddedServerError("not about the request")
        return Response("done")

    web.add_route("/{what}", endpoint, ["POST"])
    answers: dict[str, tuple[int, str | None, str]] = {}
    async with (
        web.router.lifespan_context(web),
        AsyncClient(transport=ASGITransport(web, raise_app_exceptions=False), base_url="http://shop") as client,
    ):
        await client.post("/enqueue")
        for what in ("enqueue", "invalid", "large", "missing", "conflict", "away", "bug"):
            answer = await client.post(f"/{what}")
            answers[what] = answer.status_code, answer.headers.get("retry-after"), answer.text
    assert {what: answer[:2] for what, answer in answers.items()} == {
        "enqueue": (429, "1"),
        "invalid": (400, None),
        "large": (413, None),
        "missing": (404, None),
        "conflict": (409, None),
        "away": (503, "1"),
        "bug": (500, None),
    }
    assert '{"detail":"the queue of greet is full: 1 of at most 1 jobs wait' in answers["enqueue"][2]
    # What is wrong with the database, or with the application, is not for its clients.
    assert "db.internal" not in answers["away"][2] and "request" not in answers["bug"][2]


@pytest.mark.parametrize("other", [False, True], ids=["same database", "another database"])
def test_a_django_project(tmp_path: Path, databases: Any, url: str, other: bool) -> None:
    (tmp_path / "shop").mkdir()
    for name, text in {
        "manage.py": MANAGE,
        "settings.py": SETTINGS,
        "urls.py": URLS,
        "shop/__init__.py": "",
        "shop/jobs.py": JOBS,
    }.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "use.py").write_text(USE)
    with databases.database() as theirs:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "PG", "DATABASE_"))},
            "SHOP_DATABASE": url,
            "JOBS_DATABASE": theirs if other else "",
            "DJANGO_SETTINGS_MODULE": "settings",
            "PYTHONPATH": str(tmp_path),
        }

        def run(*command: str) -> str:
            done = subprocess.run(
                [sys.executable, *command],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=100,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
            return done.stdout

        assert "applied: nothing" in run("manage.py", "penstock", "migrate")
        assert "job send-invoice" in run("manage.py", "penstock", "declare")
        run("manage.py", "migrate", "-v", "0")
        said = run("use.py").splitlines()
        assert said[0] == f"same {not other}"
        # Before the commit no other connection sees the job, and a transaction that was rolled back leaves none.
        assert said[1:4] == ["refused", "outside [0] after [1]", "job ada ada"]
        pages = [line.rsplit(" ", 1)[1] for line in said[4:]]
        # Pages of jobs are in Django's own database.
        there = "302" if other else "200"
        assert pages == ["200", "200", "200", there, "200", "403", "403"]

        working = subprocess.Popen([sys.executable, "manage.py", "penstock", "worker"], cwd=tmp_path, env=environment)
        try:
            asyncio.run(_invoiced(theirs if other else url, url))
        finally:
            working.terminate()
            assert working.wait(60) == 0


async def _invoiced(jobs: str, users: str) -> None:
    import asyncpg

    connection = await asyncpg.connect(users)
    try:
        async with asyncio.timeout(60):
            while not await connection.fetchval("select exists(select from auth_user where first_name = 'invoiced')"):
                await asyncio.sleep(0.05)
    finally:
        await connection.close()
