"""Passwords from a function: short-lived ones, which another part of the system renews, at a real server that asks for them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

from penstock import DatabaseUnavailable, InvalidInput, Penstock, PenstockError, Settings
from penstock.postgres.credentials import with_password
from penstock.postgres.embedded import EmbeddedServer
from tests.command_line import penstock
from tests.postgres.embedded_processes import execute

pytestmark = pytest.mark.embedded


class Vault:
    """The password of the role `shop`, which is changed in the server and given out here."""

    def __init__(self, admin: str, place: Path) -> None:
        self._admin = admin
        self.place = place
        self.asked = 0
        self.rotate("first / of 1 @ day")

    def rotate(self, password: str) -> None:
        with psycopg.connect(self._admin, autocommit=True) as connection:
            connection.execute(psycopg.sql.SQL("alter role shop password {}").format(password))
        self.place.write_text(password)

    def password(self) -> str:
        self.asked += 1
        return self.place.read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """URLs of the administrator and of the role `shop`, which logs in with a password."""
    folder = tmp_path_factory.mktemp("passwords")
    with EmbeddedServer(folder) as server:
        execute(server.url, "create role shop login")
        execute(server.url, "grant create on database penstock to shop")
        rules = next(folder.rglob("pg_hba.conf"))
        rules.write_text("local all shop scram-sha-256\n" + rules.read_text())
        execute(server.url, "select pg_reload_conf()")
        parts = urlsplit(server.url)
        yield server.url, parts._replace(netloc=f"shop@{parts.netloc.rpartition('@')[2]}").geturl()


@pytest.fixture
def vault(server: tuple[str, str], tmp_path: Path) -> Vault:
    return Vault(server[0], tmp_path / "password")


async def test_each_new_connection_asks_for_the_password(server: tuple[str, str], vault: Vault) -> None:
    async def awaited() -> str:
        return await asyncio.to_thread(vault.password)

    for function in (vault.password, awaited):
        app = Penstock(server[1], settings=Settings(database_password=function))
        await app.migrate()
        async with app:

            @app.job
            async def invoice(number: int) -> None: ...

            first = await invoice.enqueue(number=1)
            asked = vault.asked
            vault.rotate(f"the next of {asked}")
            # The connections that are open stay; a new one has the new password.
            assert await invoice.enqueue(number=2) != first and vault.asked == asked
            database = await app.context.database()
            connection = await database.connect()
            assert await connection.fetchval("select session_user") == "shop" and vault.asked > asked
            await connection.close()


async def test_without_the_function_or_with_an_old_password_nothing_connects(server: tuple[str, str], vault: Vault) -> None:
    with pytest.raises(PenstockError, match="password"):
        await Penstock(server[1], settings=Settings()).open()
    old = vault.password()
    vault.rotate("another")
    with pytest.raises(PenstockError, match="cannot log in"):
        await Penstock(server[1], settings=Settings(database_password=lambda: old)).open()
    # A URL with a password of its own is taken as it is.
    own = server[1].replace("shop@", "shop:another@")
    await Penstock(own, settings=Settings(database_password=lambda: old)).migrate()


async def test_a_function_that_fails_says_no_secret(server: tuple[str, str]) -> None:
    def failing() -> str:
        raise RuntimeError("no token for hunter2")

    for function, error, text in (
        (failing, DatabaseUnavailable, "failed: RuntimeError"),
        (lambda: b"bytes", InvalidInput, "returned a value of type bytes"),
    ):
        given: Callable[[], str] = function  # type: ignore[assignment]
        with pytest.raises(error, match=text) as raised:
            await Penstock(server[1], settings=Settings(database_password=given)).open()
        assert "hunter2" not in f"{raised.value} {raised.value.hint}"


def test_commands_find_the_function_by_its_place(server: tuple[str, str], vault: Vault, tmp_path: Path) -> None:
    (tmp_path / "secrets_of_shop.py").write_text(
        f"from pathlib import Path\n\n\ndef password() -> str:\n    return Path({str(vault.place)!r}).read_text()\n"
    )
    place = {"PENSTOCK_DATABASE_PASSWORD_FROM": "secrets_of_shop:password", "cwd": tmp_path}
    done = penstock(server[1], "migrate", **place)  # type: ignore[arg-type]
    assert done.returncode == 0, done.stderr
    ran = penstock(server[1], "exec", "psql", "--tuples-only", "--command=select session_user", **place)  # type: ignore[arg-type]
    assert ran.stdout.split() == ["shop"] or "psql" in ran.stderr, ran.stderr
    for wrong, text in (
        ("secrets_of_shop:missing", "there is no function missing in secrets_of_shop"),
        ("no_such_module:password", "no_such_module cannot be imported"),
        ("hunter2", "PENSTOCK_DATABASE_PASSWORD_FROM"),
    ):
        refused = penstock(server[1], "jobs", "list", cwd=tmp_path, PENSTOCK_DATABASE_PASSWORD_FROM=wrong)
        assert refused.returncode == 1 and text in refused.stderr.replace("\n", " "), refused.stderr
        assert "hunter2" not in refused.stdout + refused.stderr


def test_drivers_without_functions_get_a_url_with_the_password(server: tuple[str, str], vault: Vault) -> None:
    settings = Settings(database_password=vault.password)
    assert execute(with_password(server[1], settings), "select session_user") == [("shop",)]
    assert with_password(server[0].replace("@", ":own@"), settings) == server[0].replace("@", ":own@")
    assert os.environ.get("PENSTOCK_DATABASE_PASSWORD_FROM") is None
