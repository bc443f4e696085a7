"""Each part works with the access that docs/deploying.md names for it, and nothing is refused (P17)."""

from __future__ import annotations

import os
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from penstock import Penstock, Settings
from penstock.testing import TemporaryDatabases, running_worker
from penstock.worker import maintenance
from tests.command_line import Command, penstock
from tests.history.keeping import counts, fill
from tests.http.http_server import serving
from tests.roles import role_of
from tests.waiting import eventually

Sql = Any
OFTEN = timedelta(milliseconds=50)


async def finish_job(sql: Sql, days: int, name: str = "bill") -> None:
    """A job that ended so many days ago, and a message as old without copies."""
    await sql.execute("select set_config('penstock.clock', (now() - make_interval(days => $1))::text, false)", days)
    await sql.execute("select penstock.ensure_archive(penstock.clock())")
    await sql.execute("select penstock.cancel(penstock.enqueue($1, '{}', p_id => gen_random_uuid()))", name)
    await sql.execute("select penstock.publish('news', '{}')")
    await sql.execute("select set_config('penstock.clock', '', false)")


async def kept(sql: Sql) -> tuple[int, int]:
    """How many finished jobs and messages there are."""
    return tuple(
        await sql.fetchrow("select (select count(*) from penstock.archived_jobs), (select count(*) from penstock.topic_messages)")
    )


async def retention(sql: Sql) -> dict[str, timedelta | None]:
    return {row["kind"]: row["keep"] for row in await sql.fetch("select kind, keep from penstock.retention")}


@pytest.mark.parametrize("access", ["worker", "server"])
async def test_retention_runs_with_access(
    databases: TemporaryDatabases, url: str, sql: Sql, access: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "PRUNE_EVERY_S", 0.0)
    await sql.execute("select penstock.create_job_type('bill'), penstock.declare_topic('news')")
    for days in (31, 40, 1):
        await finish_job(sql, days)
    await fill(sql, 1, 400)
    # The lakes lack those jobs, and would keep them.
    await sql.execute("update penstock.lakes set guards = false")
    assert (await kept(sql), (await counts(sql))["rollups"]) == ((3, 3), 4)
    with role_of(databases, url, access) as limited:
        async with Penstock(limited, settings=Settings(maintenance_interval=OFTEN)) as app:
            app.job("bill")(lambda job: None)
            async with running_worker(app):
                await eventually(lambda: _is(sql, (1, 1), 2), "retention")


async def _is(sql: Sql, of_jobs: tuple[int, int], of_history: int) -> bool:
    return await kept(sql) == of_jobs and set((await counts(sql)).values()) == {of_history}


async def test_a_worker_lengthens_the_retention_and_never_shortens_it(
    databases: TemporaryDatabases, url: str, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "PRUNE_EVERY_S", 0.0)
    await sql.execute("select penstock.create_job_type('bill'), penstock.declare_topic('news')")
    await finish_job(sql, 40)
    expected: dict[str, timedelta | None] = {"jobs": timedelta(days=30), "history": timedelta(days=365)}
    assert await retention(sql) == expected

    async def run(url: str, jobs: int = 1, **settings: Any) -> None:
        async with Penstock(url, settings=Settings(maintenance_interval=OFTEN, **settings)) as app:
            app.job("bill")(lambda job: None)
            async with running_worker(app):
                await eventually(lambda: _is_retention(sql, expected), f"retention {expected}")
                await eventually(lambda: _is_kept(sql, (jobs, jobs)), f"{jobs} finished jobs and messages")

    with role_of(databases, url, "worker") as limited:
        expected["jobs"] = timedelta(days=60)
        await run(limited, keep=timedelta(days=60), keep_history=timedelta(days=1))
        assert await kept(sql) == (1, 1), "nothing is deleted by a shorter one than the worker was told"
        await run(limited, keep=timedelta(days=1))
        expected["history"] = None
        await run(limited, keep_history=None)
        await run(limited)
        assert await kept(sql) == (1, 1)
        for call in ("change_retention('jobs', '1 day')", "prune('1 day')", "prune_messages('1 day')", "prune_history('1 day')"):
            other = await asyncpg.connect(url)
            await other.execute(f"set session authorization {limited.split('//')[1].split(':')[0]}")
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await other.execute(f"select penstock.{call}")
            await other.close()
        # As refusals that the test has made, these may be in the log.
        databases_log_is_forgiven(databases)
    # The owner's setting is stored as it is.
    expected |= {"jobs": timedelta(days=7)}
    await run(url, 0, keep=timedelta(days=7))


def databases_log_is_forgiven(databases: TemporaryDatabases) -> None:
    """Empty the log of the embedded server."""
    if databases.server is not None:
        with (databases.server.data_dir / "postgres.log").open("r+b") as log:
            log.truncate(0)


async def _is_retention(sql: Sql, expected: dict[str, timedelta | None]) -> bool:
    return await retention(sql) == expected


async def _is_kept(sql: Sql, expected: tuple[int, int]) -> bool:
    return await kept(sql) == expected


async def test_a_call_of_prune_due_is_bounded_by_rows(app: Penstock, sql: Sql) -> None:
    await sql.execute("select penstock.create_job_type('bill'), penstock.declare_topic('news')")
    for days in (40, 41, 42):
        await finish_job(sql, days)
    dropped = [len(await sql.fetch("select * from penstock.prune_due(1000)")) for _ in range(4)]
    assert dropped == [1, 1, 1, 0], "each partition counts for at least a thousand jobs"
    assert [await sql.fetchval("select penstock.prune_messages_due(2)") for _ in range(3)] == [2, 1, 0]


@pytest.mark.parametrize("call", ["'jobs', '-1 day'", "'jobs', '2000 years'", "'all', '1 day'", "null, '1 day'"])
@pytest.mark.parametrize("function", ["change_retention", "lengthen_retention"])
async def test_a_retention_that_makes_no_sense_is_refused(app: Penstock, sql: Sql, function: str, call: str) -> None:
    with pytest.raises(asyncpg.PostgresError) as refused:
        await sql.execute(f"select penstock.{function}({call})")
    assert refused.value.sqlstate == "PS400"


async def test_a_member_hands_over_its_own_slots_and_no_others(app: Penstock, sql: Sql) -> None:
    await sql.execute("select penstock.declare_group('work', 4)")
    mine, other = uuid.uuid4(), uuid.uuid4()
    await sql.execute("select penstock.join_group('work', 'a', $1), penstock.join_group('work', 'b', $2)", mine, other)
    for member, session in (("a", other), ("b", mine), ("a", None), ("nobody", mine)):
        with pytest.raises(asyncpg.PostgresError) as refused:
            await sql.execute("select penstock.hand_over_slots('work', $1, $2)", member, session)
        assert refused.value.sqlstate == "PS404"
    before = await sql.fetchval("select generation from penstock.groups")
    for _ in range(2):
        await sql.execute("select penstock.hand_over_slots('work', 'a', $1)", mine)
    states = {row["id"]: row["state"] for row in await sql.fetch("select id, state from penstock.members")}
    assert states == {"a": "draining", "b": "active"}
    assert await sql.fetchval("select generation from penstock.groups") == before + 1


async def test_a_worker_with_access_worker_hands_its_slots_over(databases: TemporaryDatabases, url: str, sql: Sql) -> None:
    with role_of(databases, url, "worker") as limited:

        async def slots_of(workers: int) -> bool:
            owned = await sql.fetch("select owner, count(*) from penstock.slots where owner is not null group by owner")
            return len(owned) == workers and sum(row["count"] for row in owned) == 16

        async with Penstock(limited) as stays, Penstock(limited) as leaves:
            for app in (stays, leaves):
                app.pool("tenants", slots=16).job(lambda job: None)
            async with running_worker(stays):
                async with running_worker(leaves):
                    await eventually(lambda: slots_of(2), "both own slots")
                await eventually(lambda: slots_of(1), "the other one owns all slots")


# -- the server


@pytest.mark.parametrize("command", ["server", "dashboard"])
def test_it_starts_with_access_server(databases: TemporaryDatabases, url: str, command: str) -> None:
    assert penstock(url, "users", "add", "ada", "--role", "admin", PENSTOCK_USER_PASSWORD="a-secret-of-ada").returncode == 0
    with role_of(databases, url, "server") as limited, serving(limited, token=None, command=(command,)) as served:
        with served.client(auth=("ada", "a-secret-of-ada")) as client:
            assert client.get("/readyz").status_code == 200
        assert "no users yet" not in served.said


def test_a_server_without_users_starts_with_access_server(databases: TemporaryDatabases, url: str) -> None:
    with role_of(databases, url, "server") as limited, serving(limited, token=None) as served:
        assert "no users yet" in served.said


@pytest.mark.parametrize(("command", "access", "named"), [("server", "worker", "server"), ("dashboard", "reader", "server")])
def test_a_refused_command_names_the_access_that_it_needs(
    databases: TemporaryDatabases, url: str, command: str, access: str, named: str
) -> None:
    with role_of(databases, url, access) as limited:
        done = penstock(limited, command, "--port", "0")
        databases_log_is_forgiven(databases)
    assert done.returncode == 1
    assert f"grant_access('<role>', '{named}')" in " ".join(done.stderr.split()), done.stderr
    with role_of(databases, url, "server") as limited:
        done = penstock(limited, "pause", "bill")
        databases_log_is_forgiven(databases)
    assert "grant_access('<role>', 'admin')" in " ".join(done.stderr.split()), done.stderr


# -- every part, with real processes


async def test_every_part_does_its_work_and_is_refused_nothing(
    databases: TemporaryDatabases, url: str, sql: Sql, tmp_path: Path
) -> None:
    assert penstock(url, "declare", "tests.worker.rights_app:app").returncode == 0
    assert penstock(url, "users", "add", "ada", "--role", "admin", PENSTOCK_USER_PASSWORD="a-secret-of-ada").returncode == 0
    await finish_old(sql)
    files = (Path(os.devnull), tmp_path / "out", tmp_path / "err")
    with (
        role_of(databases, url, "worker") as of_worker,
        role_of(databases, url, "server") as of_server,
        role_of(databases, url, "producer") as of_producer,
        role_of(databases, url, "reader") as of_reader,
    ):
        variables = {"PENSTOCK_DATABASE_URL": of_worker}
        with Command("worker", "tests.worker.rights_app:app", files=files, cwd=None, environment=variables) as worker:
            await produce(of_producer)
            await eventually(lambda: _none_left(sql), "the end of work of every shape")
            await eventually(
                lambda: sql.fetchval("select count(*) = 0 from penstock.archived_jobs where name = 'old'"), "retention"
            )
            shown = ("jobs", "types", "pools", "workers", "schedules", "streams", "topics", "operations")
            for words in (["doctor"], ["stats"], ["pools", "show", "tenants"], *([noun, "list"] for noun in shown)):
                done = penstock(of_reader, *words)
                assert "denied" not in done.stdout + done.stderr and (done.returncode == 0 or words == ["doctor"]), (words, done)
            with serving(of_server, token=None) as served, served.client(auth=("ada", "a-secret-of-ada")) as client:
                for path in (
                    "/v1/jobs", "/v1/pools", "/v1/streams", "/v1/topics", "/v1/workers", "/v1/schedules", "/v1/operations",
                    "/v1/jobs/bill", "/metrics", "/readyz", "/openapi.json",
                ):  # fmt: skip
                    assert client.get(path).status_code == 200, path
                assert client.put(f"/v1/jobs/bill/job_{uuid.uuid4()}", json={"data": {}}).status_code < 300
                log = served.log.read_text()
            worker.terminate()
            assert worker.wait(60) == 0
    said = files[1].read_text() + files[2].read_text() + log
    for words in ("denied", "maintenance_failed", "ownership_call_failed", "promotion_failed", "declaration_failed"):
        assert words not in said, said


async def produce(url: str) -> None:
    """Work of every shape, from an application that declares nothing, with the access producer."""
    async with Penstock(url) as app:
        for name in ("bill", "fails", "stepping"):
            await app.enqueue(name, {})
        await app.enqueue("tenants", {}, key="ada")
        await app.stream("orders", partitions=2).append({"n": 1}, key="ada")
        await app.topic("news").publish({"n": 1})


async def finish_old(sql: Sql) -> None:
    """A job that ended 40 days ago, and a message of that day."""
    await sql.execute("select penstock.create_job_type('old')")
    await finish_job(sql, 40, "old")


async def _left(sql: Sql) -> list[str]:
    """The work that has not ended yet."""
    ended = {
        (row["name"], row["status"]) for row in await sql.fetch("select name, status::text as status from penstock.archived_jobs")
    }
    names = ("bill", "stepping", "tenants", "news_reader", "as-job")
    left = [
        f"{name} {status}"
        for name, status in [*((name, "succeeded") for name in names), ("fails", "failed")]
        if (name, status) not in ended
    ]
    if not await sql.fetchval("select coalesce(sum(next_offset), 0) > 0 from penstock.group_offsets"):
        left.append("orders")
    if not await sql.fetchval("select last_finished_at is not null from penstock.schedules where name = 'in-place'"):
        left.append("in-place")
    return left


async def _none_left(sql: Sql) -> bool:
    return not await _left(sql)
