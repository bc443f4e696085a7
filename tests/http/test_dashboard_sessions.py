"""Logins: sessions, links and what ends them."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import asyncpg
import httpx
import pytest

from penstock import Penstock
from penstock.errors import InvalidInput
from penstock.http.auth import Credentials, OneUser, Principal, Refused, Role
from penstock.http.dashboard.sessions import Sessions, new_link
from penstock.http.user_queries import add_user, remove_user
from penstock.http.users import Users, hash_secret
from penstock.testing import TemporaryDatabases
from tests.http.dashboard_browser import Reader
from tests.http.dashboard_server import reader
from tests.http.http_server import TOKEN, Served, serving


def test_a_session_ends_with_a_logout_everywhere(dashboard: Served) -> None:
    with reader(dashboard, "read") as reading, Reader(dashboard.base_url + "/") as copy:
        copy.client.cookies.update(reading.client.cookies)
        assert "Log out" in copy.get("").text
        reading.client.post("logout")
        assert copy.get("").url.path == "/login"


def test_the_cookie_can_be_read_by_no_script_and_no_other_site(dashboard: Served) -> None:
    with httpx.Client(base_url=dashboard.base_url) as client:
        answer = client.post("/login", data={"user": "read", "secret": "read-password"})
        assert answer.status_code == 303
        [cookie] = answer.headers.get_list("set-cookie")
        assert {"HttpOnly", "SameSite=Lax"} <= {part.strip() for part in cookie.split(";")}
        assert "Secure" not in cookie
        behind = client.post("/login", data={"user": "read", "secret": "read-password"}, headers={"X-Forwarded-Proto": "https"})
        assert "; Secure" in behind.headers["set-cookie"]
        token = cookie.partition("=")[2].partition(";")[0]
        assert len(token) >= 32


@pytest.mark.parametrize("user", ["", "admin"])
def test_the_printed_token_logs_in_whether_its_user_is_given_or_not(dashboard: Served, user: str) -> None:
    with httpx.Client(base_url=dashboard.base_url) as client:
        assert client.post("/login", data={"user": user, "secret": f"admin.{TOKEN}"}).status_code == 303
        assert client.post("/login", data={"user": user, "secret": f"read.{TOKEN}"}).status_code == 403


def test_a_password_may_begin_with_the_name_of_its_user(dashboard: Served) -> None:
    async def add() -> None:
        async with Penstock(dashboard.database_url) as app:
            await add_user(await app.database(), "dotted", "read", hash_secret("dotted.password"), None)

    asyncio.run(add())
    with httpx.Client(base_url=dashboard.base_url) as client:
        assert client.post("/login", data={"user": "dotted", "secret": "dotted.password"}).status_code == 303


async def test_the_database_holds_no_token(dashboard: Served) -> None:
    connection = await asyncpg.connect(dashboard.database_url)
    with reader(dashboard, "read") as reading:
        [token] = [value for name, value in reading.client.cookies.items() if name.startswith("penstock_session")]
        rows = await connection.fetch("select session::text from penstock.sessions as session")
        assert rows and not [row for row in rows if token in row[0] or token.encode().hex() in row[0]]
    await connection.close()


async def test_a_removed_user_is_out_and_another_password_ends_the_session(dashboard: Served) -> None:
    async with Penstock(dashboard.database_url) as app:
        database = await app.database()
        await add_user(database, "guest", "admin", hash_secret("guest-password"), None)
        with reader(dashboard, "guest") as reading:
            await add_user(database, "guest", "read", hash_secret("guest-password-2"), None, replace=True)
            await until_out(reading)
        with Reader(dashboard.base_url + "/") as reading:
            assert "Log out" in reading.log_in("guest", "guest-password-2").text
            await remove_user(database, "guest")
            await until_out(reading)


async def test_the_credentials_of_a_moment_ago_open_no_session(dashboard: Served) -> None:
    """A server remembers for two seconds whom it let in; a session would last for hours."""
    async with Penstock(dashboard.database_url) as app:
        database = await app.database()
        await add_user(database, "leaver", "admin", hash_secret("leaver-password"), None)
        with Reader(dashboard.base_url + "/") as reading:
            assert "Log out" in reading.log_in("leaver", "leaver-password").text
            await add_user(database, "leaver", "admin", hash_secret("leaver-password-2"), None, replace=True)
            assert reading.log_in("leaver", "leaver-password").status_code == 403
            assert "Log out" in reading.log_in("leaver", "leaver-password-2").text
            await remove_user(database, "leaver")
            assert reading.log_in("leaver", "leaver-password-2").status_code == 403


async def test_a_session_is_bound_to_the_secret_that_was_good(url: str) -> None:
    """The password is changed between its check and the start of the session."""
    async with Penstock(url) as app:
        database = await app.database()
        await add_user(database, "ann", "read", hash_secret("ann-password-1"), None)
        users = Users(database)

        async def authorizer() -> Users:
            return users

        sessions = Sessions(app.database, authorizer, timedelta(hours=1))
        recalled = await sessions.recall("ann")
        principal = await users.authorize(Credentials("ann", "ann-password-1"))
        await add_user(database, "ann", "read", hash_secret("ann-password-2"), None, replace=True)
        assert await sessions.user(await sessions.open(principal, recalled)) is None
        assert await sessions.user(await sessions.open(principal, await sessions.recall("ann"))) == principal
        await add_user(database, "ann", "admin", hash_secret("ann-password-2"), None, replace=True)
        for other in (principal, Principal("bob", Role.ADMIN)):
            with pytest.raises(Refused):
                await sessions.open(other, await sessions.recall(other.name))


async def test_a_user_with_the_name_of_the_token_gets_the_rights_of_neither(url: str) -> None:
    async with Penstock(url) as app:
        database = await app.database()
        users = OneUser("admin", "token-of-the-server", Users(database))

        async def authorizer() -> OneUser:
            return users

        sessions = Sessions(app.database, authorizer, timedelta(hours=1))
        link = await new_link(database, "token-of-the-server")
        await add_user(database, "admin", "read", hash_secret("admin-password"), None)
        principal = await users.authorize(Credentials("admin", "admin-password"))
        assert principal.role is Role.READ
        with pytest.raises(Refused):
            await sessions.open(principal, await sessions.recall("admin"))
        assert await sessions.use_link(link) is None, "there are users now"


async def test_a_session_without_a_proof_lets_in_no_user_whom_the_server_can_check(url: str) -> None:
    """As a role with the SQL functions of a server could make it."""
    async with Penstock(url) as app:
        database = await app.database()
        await add_user(database, "ann", "read", hash_secret("ann-password-1"), None)
        sessions = {}
        for kind, authorizer in {
            "users": Users(database),
            "token": OneUser("admin", "token-of-the-server", Users(database)),
        }.items():

            async def authorizer_of(authorizer: Any = authorizer) -> Any:
                return authorizer

            sessions[kind] = Sessions(app.database, authorizer_of, timedelta(hours=1))
        insert = "select penstock.open_session(sha256(convert_to($1, 'UTF8')), $2, 'admin', null, null, '1 hour')"
        with pytest.raises(InvalidInput, match="a session of user ann needs a proof"):
            await database.fetch(insert, "forged-1", "ann")
        for token, user in (("forged-2", "admin"), ("forged-3", "nobody")):
            await database.fetch(insert, token, user)
            assert [await one.user(token) for one in sessions.values()] == [None, None], user


async def test_an_authorizer_without_recall_still_lets_in(url: str) -> None:
    class Plain:
        async def authorize(self, credentials: Credentials | None) -> Principal:
            return Principal("" if credentials is None else credentials.user, Role.READ)

    async with Penstock(url) as app:
        for users in (Plain(), OneUser("admin", "token-of-the-server", Plain())):

            async def authorizer(users: Any = users) -> Any:
                return users

            sessions = Sessions(app.database, authorizer, timedelta(hours=1))
            principal = await users.authorize(Credentials("ann", "x"))
            assert await sessions.user(await sessions.open(principal, await sessions.recall("ann"))) == principal


async def until_out(reading: Reader) -> None:
    """A user is looked up every two seconds."""
    async with asyncio.timeout(60):
        while reading.get("").url.path != "/login":
            await asyncio.sleep(0.1)


def test_a_wrong_password_is_refused_and_guesses_are_slowed_down(databases: TemporaryDatabases) -> None:
    with databases.database() as url, serving(url) as served, Reader(served.base_url + "/") as reading:
        for _ in range(10):
            answer = reading.log_in("admin", "wrong-password")
            assert answer.status_code == 403 and "are not known" in answer.text
        assert "Too many failed attempts" in reading.log_in("admin", TOKEN).text


def test_no_password_is_in_the_debugged_traffic(databases: TemporaryDatabases) -> None:
    with databases.database() as url, serving(url, DEBUG_HTTP_TRAFFIC="true") as served, Reader(served.base_url + "/") as reading:
        reading.log_in("admin", "wrong-password-of-a-guess")
        reading.log_in("admin", TOKEN)
        reading.get("types")
        served.line_with("GET /types")
        log = served.log.read_text()
        assert TOKEN not in log and "wrong-password" not in log
        assert not [value for value in reading.client.cookies.values() if value and value in log]


def test_a_token_logs_in_without_a_name(dashboard: Served) -> None:
    with Reader(dashboard.base_url + "/") as reading:
        assert "Log out" in reading.log_in("", f"admin.{TOKEN}").text


def test_a_login_goes_on_where_it_began_and_to_no_other_site(dashboard: Served) -> None:
    with Reader(dashboard.base_url + "/") as reading:
        form = {"user": "read", "secret": "read-password"}
        assert reading.client.post("login", data={**form, "next": "jobs?status=failed"}).url.path == "/jobs"
        for elsewhere in ("//evil.example/", "https://evil.example/jobs", "/\\evil.example", "logout"):
            answer = reading.client.post("login", data={**form, "next": elsewhere})
            assert answer.url.host == "127.0.0.1" and answer.url.path == "/", elsewhere


def test_the_link_of_a_server_without_users_logs_in_once(databases: TemporaryDatabases) -> None:
    with databases.database() as url, serving(url, token=None) as served:
        link = next(line for line in served.output if line.startswith("dashboard: ")).split()[1]
        with Reader(served.base_url + "/") as first, Reader(served.base_url + "/") as second:
            assert "Log out" in first.get(link).text
            assert "token" not in str(first.get("").url)
            refused = second.get(link)
            assert refused.status_code == 403 and "used already" in refused.text


def test_a_link_of_a_server_that_has_ended_opens_nothing(databases: TemporaryDatabases) -> None:
    with databases.database() as url:
        with serving(url, token=None) as served:
            link = next(line for line in served.output if line.startswith("dashboard: ")).split()[1].partition("login?")[2]
        with serving(url, token=None) as served, Reader(served.base_url + "/") as reading:
            assert reading.get(f"login?{link}").status_code == 403
        with serving(url) as served, Reader(served.base_url + "/") as reading:
            assert reading.get(f"login?{link}").status_code == 403
