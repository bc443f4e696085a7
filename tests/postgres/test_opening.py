"""Opening an application while its database comes and goes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import DatabaseUnavailable, InvalidInput, Penstock

Sql: TypeAlias = "asyncpg.Connection[Any]"

# The server ends the first connections that read the protocol of the schema. A number of a sequence stays drawn, whatever becomes
# of the transaction.
LOSES = """
    create schema losing;
    create sequence losing.reads;
    create function losing.answers() returns boolean volatile language plpgsql as $$
    begin
        if nextval('losing.reads') <= 2 then
            perform pg_terminate_backend(pg_backend_pid());
            perform pg_sleep(600);
        end if;
        return true;
    end
    $$;
    alter table penstock.protocol rename to kept_protocol;
    create view penstock.protocol as select * from penstock.kept_protocol where losing.answers();
"""


async def test_a_service_that_starts_waits_also_for_a_database_that_answers_and_is_lost_again(url: str, sql: Sql) -> None:
    await sql.execute(LOSES)
    app = Penstock(url)
    app.job_type("ship")
    await app.open(timeout=timedelta(seconds=60))
    try:
        assert [record.name for record in await app.job_types()] == ["ship"]
        assert await sql.fetchval("select last_value from losing.reads") >= 3
    finally:
        await app.close()


async def test_without_a_time_to_wait_the_first_loss_is_an_error(url: str, sql: Sql) -> None:
    await sql.execute(LOSES)
    app = Penstock(url)
    with pytest.raises(DatabaseUnavailable):
        await app.open()
    await app.close()


@pytest.mark.parametrize("password", ["s3cret/x", "s3cret#x", "x?s3cret", "[s3cret"])
async def test_a_url_that_cannot_be_divided_is_refused_without_a_part_of_its_password(password: str) -> None:
    with pytest.raises(InvalidInput, match="the database URL is not valid") as refused:
        await Penstock(f"postgresql://ada:{password}@localhost/shop").open()
    assert "s3cret" not in str(refused.value)
    assert "percent-encoded" in str(refused.value)


@pytest.mark.parametrize(
    "wrong", ["mysql://ada@localhost/shop", "postgresql://ada@127.0.0.1:99999/shop", "postgresql://ada@h:x/shop"]
)
async def test_a_url_that_is_not_valid_is_no_fault_of_the_database(wrong: str) -> None:
    with pytest.raises(InvalidInput, match="the database URL is not valid"):
        await Penstock(wrong).open()
