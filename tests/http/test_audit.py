"""The audit of what is done over the API, and of logins; what it does not hold."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import asyncpg
import httpx
import pytest

from penstock import Penstock
from penstock.http.user_queries import add_user
from penstock.http.users import hash_secret
from penstock.testing import TemporaryDatabases
from tests.http.http_server import TOKEN, Served, serving


@pytest.fixture
def audited(databases: TemporaryDatabases) -> Iterator[Served]:
    async def prepare(url: str) -> None:
        async with Penstock(url) as app:
            await add_user(await app.database(), "ann", "admin", hash_secret("password-of-ann"), None)
            await app.create_job_type("mail")
            await app.create_pool("shops", slots=4)

    with databases.database() as url:
        asyncio.run(prepare(url))
        with serving(url, PENSTOCK_HTTP_HSTS_PRELOAD="true") as served:
            yield served


def changes(served: Served) -> list[tuple[str, str, dict[str, Any], int | None, str | None]]:
    async def read() -> list[Any]:
        connection = await asyncpg.connect(served.database_url)
        rows = await connection.fetch("select user_name, action, filter::text, changed, error from penstock.changes order by id")
        await connection.close()
        return [(row[0], row[1], json.loads(row[2]), row[3], row[4]) for row in rows]

    return asyncio.run(read())


def test_the_audit_has_what_admins_change_over_the_api(audited: Served) -> None:
    with audited.client(auth=("ann", "password-of-ann")) as client:
        assert client.post("/v1/jobs/mail/pause").status_code == 200
        assert client.post("/v1/jobs/mail/resume").status_code == 200
        assert client.post("/v1/pools/shops/keys/acme/pause").status_code == 200
        assert client.delete("/v1/jobs/absent").status_code == 404
        assert client.post("/v1/operations", json={"kind": "cancel", "filter": {"name": "mail"}}).status_code == 202
        # What changes nothing, and what enqueues, is not in it.
        assert client.get("/v1/jobs/mail").status_code == 200
        assert client.post("/v1/operations/preview", json={"kind": "cancel", "filter": {"name": "mail"}}).status_code == 200
        assert client.put("/v1/jobs/mail/random_id", json={"data": "payload"}).status_code == 202
    assert changes(audited) == [
        ("ann", "pause", {"name": "mail"}, 1, None),
        ("ann", "resume", {"name": "mail"}, 1, None),
        ("ann", "pause key", {"pool": "shops", "key": "acme"}, 1, None),
        ("ann", "drop job type", {"name": "absent"}, None, "answered with 404"),
        ("ann", "start operation", {}, 1, None),
    ]


def test_the_audit_has_logins_and_no_word_that_may_be_a_password(audited: Served) -> None:
    with httpx.Client(base_url=audited.base_url) as client:
        assert client.post("/login", data={"user": "ann", "secret": "wrong"}).status_code == 403
        assert client.post("/login", data={"user": "password-of-ann", "secret": ""}).status_code == 403
        assert client.post("/login", data={"user": "ann", "secret": "password-of-ann"}).status_code == 303
        assert client.post("/logout").status_code == 303
        assert client.post("/login", data={"user": "", "secret": f"admin.{TOKEN}"}).status_code == 303
    here = {"client": "127.0.0.1"}
    assert changes(audited) == [
        ("ann", "log in", here, None, "refused: forbidden"),
        ("unknown", "log in", here, None, "refused: forbidden"),
        ("ann", "log in", here, 1, None),
        ("ann", "log out", here, 1, None),
        ("admin", "log in", here, 1, None),
    ]


def test_the_audit_has_the_role_of_the_database_that_wrote_it(audited: Served) -> None:
    async def read() -> tuple[Any, Any]:
        connection = await asyncpg.connect(audited.database_url)
        await connection.execute("select penstock.begin_change('somebody', 'pause', '{}')")
        written = await connection.fetchrow("select database_role, session_user::text from penstock.changes")
        await connection.close()
        return written[0], written[1]

    role, me = asyncio.run(read())
    assert role == me


def test_preload_is_said_where_the_setting_says_so(audited: Served) -> None:
    with audited.client() as client:
        for path in ("/v1/jobs", "/", "/v1/queued-jobs"):
            said = client.get(path).headers["strict-transport-security"]
            assert said == "max-age=31536000; includeSubDomains; preload"
