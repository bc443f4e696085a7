"""Job groups: children of any number, from several processes and from children, and a job that runs once when all have ended."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg
import pytest

from penstock import Conflict, Fail, InvalidInput, Job, JobFilter, JobGroupRecord, NewJob, NotFound, Penstock, Settings, Status
from penstock.jobs.models import make_id
from penstock.postgres.database import Database
from penstock.testing import run_due_jobs, running_worker
from penstock.workflows import queries

Sql: TypeAlias = "asyncpg.Connection[Any]"
HOUR = timedelta(hours=1)


def declare(app: Penstock, ran: list[str]) -> Any:
    """A job type whose payload says how it ends ("fail" or otherwise), and one for the end. `ran` gets the payloads in order."""

    @app.job("step", max_attempts=1)
    async def step(job: Job[str]) -> None:
        ran.append(job.data)
        if job.data == "fail":
            raise Fail("as told")

    @app.job("report")
    async def report(job: Job[Any]) -> None:
        ran.append(f"report {job.data}")

    return step


def counts(group: JobGroupRecord) -> tuple[str, int, int, int, int]:
    return group.status, group.added, group.succeeded, group.failed, group.cancelled


async def resolve(sql: Sql) -> None:
    while await sql.fetchval("select penstock.resolve_workflows()"):
        pass


async def test_then_runs_once_when_all_children_have_ended(app: Penstock) -> None:
    ran: list[str] = []
    step = declare(app, ran)
    async with app.job_group("import", then="report", then_data="import") as group:
        await step.options(group=group).enqueue_many([f"{n}" for n in range(20)])
        # It is not sealed, so nothing follows from the end of these.
        await run_due_jobs(app)
        assert counts(await group.find()) == ("open", 20, 20, 0, 0)
        await step.options(group=group).enqueue("last")
    assert (await group.find()).status == "running"
    await run_due_jobs(app)
    assert ran[-2:] == ["last", "report import"]
    assert ran.count("report import") == 1
    assert counts(await group.find()) == ("succeeded", 21, 21, 0, 0)
    await run_due_jobs(app)
    assert ran.count("report import") == 1


async def test_a_worker_starts_then_at_once(app: Penstock) -> None:
    ran: list[str] = []
    step = declare(app, ran)
    async with running_worker(app):
        async with app.job_group("import", then="report") as group:
            await step.options(group=group).enqueue_many([f"{n}" for n in range(500)])
        then = (await group.find()).then_job
        assert then is not None
        assert (await app.wait(then)).status is Status.SUCCEEDED
    assert len(ran) == 501


async def test_what_is_released_while_a_worker_becomes_idle_starts_at_once(
    url: str, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Penstock(url, settings=Settings(poll_interval=HOUR)) as app:
        step = declare(app, [])

        async def resolve_unseen(database: Database, *, if_due: bool) -> int | None:
            # As when the registration of the idle worker commits a moment after the look of the release.
            await sql.execute("delete from penstock.listeners where kind = 'jobs'")
            return await queries.resolve(database, if_due=if_due)

        monkeypatch.setattr("penstock.worker.maintenance.workflows", SimpleNamespace(resolve=resolve_unseen))
        async with running_worker(app):
            async with app.job_group("import", then="report") as group:
                await step.options(group=group).enqueue("one")
            then = (await group.find()).then_job
            assert then is not None
            # Otherwise it would be found when the worker registers again, after 30 seconds.
            assert (await app.wait(then, timeout=timedelta(seconds=25))).status is Status.SUCCEEDED


async def test_a_group_without_children_ends_when_it_is_sealed(app: Penstock) -> None:
    ran: list[str] = []
    declare(app, ran)
    async with app.job_group("empty", then="report"):
        pass
    await run_due_jobs(app)
    assert ran == ["report {}"]


@pytest.mark.parametrize(("on_failure", "expected"), [("continue", ("failed", 3, 2, 1, 0)), ("cancel", ("failed", 3, 0, 1, 2))])
async def test_the_first_child_that_fails_cancels_the_others_unless_they_go_on(
    app: Penstock, sql: Sql, on_failure: Any, expected: tuple[str, int, int, int, int]
) -> None:
    ran: list[str] = []
    step = declare(app, ran)
    async with app.job_group("import", then="report", on_failure=on_failure) as group:
        await step.options(group=group, priority=-1).enqueue("fail")
        await step.options(group=group, run_after=timedelta(milliseconds=1)).enqueue("good")
        await step.options(group=group, after=await step.options(run_after=HOUR).enqueue("other"), when="finished").enqueue(
            "waits"
        )
    claimed = await sql.fetchrow("select id, attempt, lease from penstock.claim('psql', '{step}', 1)")
    await sql.fetch(
        "select * from penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint], '{failed}')", *claimed
    )
    await resolve(sql)
    await sql.execute("select penstock.advance_operation()")
    await resolve(sql)
    for job in await app.find_many(name="step", status="queued"):
        if job.run_after > job.created_at + HOUR / 2:
            await app.cancel(job.id)
    await run_due_jobs(app)
    assert counts(await group.find()) == expected
    then = await app.find((await group.find()).then_job or UUID(int=0))
    assert (str(then.status), then.reason) == (("succeeded", None) if on_failure == "continue" else ("cancelled", "dependency"))


async def test_children_enqueue_children_after_the_seal(app: Penstock) -> None:
    ran: list[str] = []
    declare(app, ran)

    @app.job("tree")
    async def tree(job: Job[int]) -> None:
        ran.append("tree")
        for _ in range(2 if job.data else 0):
            await app.enqueue("tree", job.data - 1, group=await app.group_of(job.id))

    async with app.job_group("tree", then="report") as group:
        await app.enqueue("tree", 4, group=group)
    await run_due_jobs(app)
    assert (ran.count("tree"), ran[-1], ran.count("report {}")) == (31, "report {}", 1)
    assert counts(await group.find()) == ("succeeded", 31, 31, 0, 0)


async def test_a_group_does_not_end_while_a_transaction_adds_a_child(app: Penstock, sql: Sql, url: str) -> None:
    ran: list[str] = []
    declare(app, ran)
    other = await asyncpg.connect(url)
    async with app.job_group("import", then="report") as group:
        await app.enqueue("step", "first", group=group)
        transaction = sql.transaction()
        await transaction.start()
        await app.enqueue("step", "slow", group=group, connection=sql)
    await run_due_jobs(app)
    # Neither the seal nor a resolve has waited for the transaction.
    assert ran == ["first"]
    await transaction.commit()
    await run_due_jobs(app)
    assert ran == ["first", "slow", "report {}"]
    # A rollback lets the group end as well.
    async with app.job_group("second", then="report") as group:
        transaction = sql.transaction()
        await transaction.start()
        await app.enqueue("step", "never", group=group, connection=sql)
    await asyncio.wait_for(resolve(other), 20)
    assert (await group.find()).status == "running"
    await transaction.rollback()
    await run_due_jobs(app)
    assert ran[3:] == ["report {}"]
    await other.close()


async def test_a_group_that_has_ended_takes_no_more_children(app: Penstock) -> None:
    step = declare(app, [])
    async with app.job_group("import") as group:
        await step.options(group=group).enqueue("one")
    await run_due_jobs(app)
    with pytest.raises(Conflict, match="job group import takes no more children"):
        await step.options(group=group).enqueue("two")
    assert (await app.counts())[0].ready == 0


async def test_a_group_is_opened_again_by_its_name(app: Penstock, sql: Sql) -> None:
    ran: list[str] = []
    declare(app, ran)
    ids = [make_id() for _ in range(3)]
    # The process dies in the block: the next one enqueues the same jobs again.
    group = await app.job_group("import", then="report").open()
    await app.enqueue_many("step", [NewJob(f"{n}", id=id, group=group) for n, id in enumerate(ids[:2])])
    async with app.job_group("import", then="report") as again:
        assert again.id == group.id
        await app.enqueue_many("step", [NewJob(f"{n}", id=id, group=again) for n, id in enumerate(ids)])
    await run_due_jobs(app)
    assert (sorted(ran[:3]), ran[3:]) == (["0", "1", "2"], ["report {}"])
    assert counts(await again.find()) == ("succeeded", 3, 3, 0, 0)
    with pytest.raises(Conflict, match="opened with another on_failure"):
        await app.job_group("import", on_failure="continue").open()
    assert await sql.fetchval("select count(*) from penstock.workflow_ticks") == 0


async def test_a_block_that_raises_cancels_the_group(app: Penstock, sql: Sql) -> None:
    ran: list[str] = []
    step = declare(app, ran)
    with pytest.raises(ZeroDivisionError):
        async with app.job_group("import", then="report", on_failure="continue") as group:
            await step.options(group=group).enqueue("one")
            raise ZeroDivisionError
    await sql.execute("select penstock.advance_operation()")
    await run_due_jobs(app)
    assert ran == []
    record = await group.find()
    assert counts(record) == ("cancelled", 1, 0, 0, 1)
    then = await app.find(record.then_job or UUID(int=0))
    assert (then.status, then.reason) == (Status.CANCELLED, "group")


@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_what_a_group_cancels_has_the_reason_group(app: Penstock, sql: Sql, how: str) -> None:
    ran: list[str] = []
    step = declare(app, ran)
    async with app.job_group("import", then="report", parent=await app.job_group("outer").open()) as group:
        waited_for = await step.options(run_after=HOUR).enqueue("other")
        runs = await step.options(group=group).enqueue("runs")
        [held] = await sql.fetch("select id, attempt, lease from penstock.claim('psql', '{step}', 1)")
        queued = await step.options(group=group, run_after=HOUR).enqueue("queued")
        waits = await step.options(group=group, after=waited_for).enqueue("waits")
        async with app.job_group("inner", parent=group) as inner:
            nested = await step.options(group=inner, run_after=HOUR).enqueue("nested")
        alone = await step.options(group=group, run_after=HOUR).enqueue("cancelled by itself")
        await app.cancel(alone.id)
        if how == "failed":
            await step.options(group=group).enqueue("fail")
            [failing] = await sql.fetch("select id, attempt, lease from penstock.claim('psql', '{step}', 1)")
    settle = "select * from penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint], array[$4])"
    if how == "failed":
        await sql.fetch(settle, *failing, "failed-for-good")
    else:
        await group.cancel()
    await resolve(sql)
    while await sql.fetchval("select id from penstock.advance_operation()") is not None:
        pass
    await sql.fetch(settle, *held, "cancelled")
    ended = {job.id: await app.find(job.id) for job in (runs, queued, waits, nested, alone)}
    assert {job.status for job in ended.values()} == {Status.CANCELLED}
    assert [job.reason for job in ended.values()] == ["group"] * 4 + [None]


async def test_nested_groups_end_from_the_inside(app: Penstock) -> None:
    ran: list[str] = []
    step = declare(app, ran)
    async with app.job_group("outer", then="report", then_data="outer") as outer:
        async with app.job_group("inner", then="report", then_data="inner", parent=outer) as inner:
            await step.options(group=inner).enqueue("a")
        await step.options(group=outer).enqueue("b")
    await run_due_jobs(app)
    assert ran[2:] == ["report inner", "report outer"]
    assert counts(await outer.find()) == ("succeeded", 3, 3, 0, 0)
    assert (await inner.find()).parent == outer.id


async def test_a_cancelled_group_cancels_the_groups_in_it(app: Penstock, sql: Sql) -> None:
    ran: list[str] = []
    step = declare(app, ran)
    outer = await app.job_group("outer", then="report").open()
    inner = await app.job_group("inner", parent=outer).open()
    for group in (outer, inner):
        await step.options(group=group).enqueue("x")
    await app.cancel_group("outer")
    while await sql.fetchval("select id from penstock.advance_operation()") is not None:
        pass
    await run_due_jobs(app)
    assert ran == []
    assert [group.status for group in await app.job_groups()] == ["cancelled", "cancelled"]


async def test_a_job_waits_for_a_group(app: Penstock) -> None:
    ran: list[str] = []
    step = declare(app, ran)
    async with app.job_group("import") as group:
        await step.options(group=group).enqueue("child")
        after = await app.enqueue("step", "after", after=group)
    why = await app.why(after.id)
    assert (why.reason, "job group import" in why.message) == ("dependencies", True)
    await run_due_jobs(app)
    late = await app.enqueue("step", "late", after=group)
    await run_due_jobs(app)
    assert ran == ["child", "after", "late"]
    assert (await app.find(late.id)).status is Status.SUCCEEDED


async def test_why_counts_the_children_of_a_group_at_once(app: Penstock, sql: Sql) -> None:
    step = declare(app, [])
    group = await app.job_group("import", then="report").open()
    then = (await group.find()).then_job or UUID(int=0)
    first, _ = await step.options(group=group).enqueue("one"), await step.options(group=group, run_after=HOUR).enqueue("two")
    assert "job group import, of whose 2 children 0 have ended and more may come" in (await app.why(then)).message
    await app.cancel(first.id)
    # No worker has added up what the cancellation noted.
    assert await sql.fetchval("select added from penstock.job_groups") == 0
    why = await app.why(then)
    assert "job group import, of whose 2 children 1 have ended and more may come" in why.message
    assert (why.reason, why.by_job) == ("dependencies", group.id)


async def test_jobs_of_one_call_can_be_in_several_groups(app: Penstock) -> None:
    declare(app, [])
    one, two = [await app.job_group(name).open() for name in ("one", "two")]
    ids = [make_id() for _ in range(6)]
    new = [NewJob(f"{n}", id=id, group=(one, two, None)[n % 3], unique=f"u{n}" if n > 2 else None) for n, id in enumerate(ids)]
    assert [receipt.id for receipt in await app.enqueue_many("step", new)] == ids
    assert [(await group.find()).added for group in (one, two)] == [2, 2]
    # Again with the same ids: no child is counted twice.
    await app.enqueue_many("step", new)
    assert [(await group.find()).added for group in (one, two)] == [2, 2]


async def test_a_day_is_kept_while_a_group_of_it_goes_on(app: Penstock, sql: Sql) -> None:
    step = declare(app, [])
    group = await app.job_group("import").open()
    await step.options(group=group).enqueue("one")
    await run_due_jobs(app)
    await sql.execute("select set_config('penstock.clock', (now() + interval '5 days')::text, false)")
    assert await sql.fetch("select * from penstock.prune('1 day') where jobs > 0") == []
    await group.seal()
    await resolve(sql)
    assert len(await sql.fetch("select * from penstock.prune('1 day') where jobs > 0")) == 1
    await sql.execute("select set_config('penstock.clock', (now() + interval '20 days')::text, false)")
    await sql.fetch("select * from penstock.prune('1 day') where jobs > 0")
    with pytest.raises(NotFound, match="no such job group: import"):
        await app.find_group("import")


async def test_prune_forgets_groups_before_it_locks_the_archive(app: Penstock, sql: Sql) -> None:
    step = declare(app, [])
    async with app.job_group("import") as group:
        await step.options(group=group).enqueue("one")
    await run_due_jobs(app)
    await sql.execute(
        """
        create function public.refuse() returns trigger language plpgsql as $$
        begin
            if exists (
                select from pg_locks as held
                where held.pid = pg_backend_pid() and held.mode = 'AccessExclusiveLock'
                    and held.relation::regclass::text like '%archived_jobs%'
            ) then
                raise exception 'the archive is locked meanwhile';
            end if;
            return old;
        end
        $$;
        create trigger refuse before delete on penstock.job_groups for each row execute function public.refuse();
        """
    )
    await sql.execute("select set_config('penstock.clock', (now() + interval '5 days')::text, false)")
    assert len(await sql.fetch("select * from penstock.prune('1 day') where jobs > 0")) == 1
    with pytest.raises(NotFound):
        await app.find_group("import")


async def test_a_group_that_is_never_sealed_is_cancelled_a_week_after_its_last_child_ended(app: Penstock, sql: Sql) -> None:
    ran: list[str] = []
    step = declare(app, ran)
    group = await app.job_group("left", then="report").open()
    await step.options(group=group).enqueue("one")
    busy = await app.job_group("busy").open()
    await step.options(group=busy, run_after=30 * 24 * HOUR).enqueue("later")
    await run_due_jobs(app)
    prune = "select set_config('penstock.clock', (now() + $1::interval)::text, false), penstock.prune('1 day')"
    for days, status in ((6, "open"), (8, "running")):
        await sql.fetch(prune, timedelta(days=days))
        assert (await group.find()).status == status
    await resolve(sql)
    # What runs or waits in a group keeps it open.
    assert [(await one.find()).status for one in (group, busy)] == ["cancelled", "open"]
    then = await app.find((await group.find()).then_job or UUID(int=0))
    assert (ran, then.reason) == (["one"], "group")


async def test_what_waits_for_a_group_is_released_with_the_end_of_its_last_child(app: Penstock, sql: Sql) -> None:
    """One pass does it, since it is what people wait for."""
    step = declare(app, [])
    async with app.job_group("import", then="report") as group:
        await step.options(group=group).enqueue_many([f"{n}" for n in range(3)])
    await resolve(sql)
    claimed = await sql.fetch("select id, attempt, lease from penstock.claim('psql', '{step}', 3)")
    await sql.fetch(
        "select * from penstock.settle($1::uuid[], $2::smallint[], $3::bigint[])",
        *[[row[n] for row in claimed] for n in range(3)],
    )
    await sql.fetchval("select penstock.resolve_workflows()")
    assert (await app.find((await group.find()).then_job or UUID(int=0))).status is Status.QUEUED
    assert await sql.fetchval("select penstock.resolve_workflows()") == 0


async def test_folded_ticks_write_no_index_of_the_groups(app: Penstock, sql: Sql) -> None:
    step = declare(app, [])
    group = await app.job_group("import").open()
    for number in range(30):
        await step.options(group=group).enqueue(f"{number}")
        await resolve(sql)
    await sql.fetch("select pg_stat_force_next_flush()")
    row = await sql.fetchrow(
        "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where schemaname = 'penstock' and relname = 'job_groups'"
    )
    # One update may move to another page.
    assert row["n_tup_upd"] >= 30 and row["n_tup_upd"] - row["n_tup_hot_upd"] <= 1, tuple(row)


async def test_the_cancellation_of_a_group_looks_at_its_own_jobs_alone(app: Penstock, sql: Sql) -> None:
    step = declare(app, [])
    await step.enqueue_many([f"{n}" for n in range(500)])
    async with app.job_group("import") as group:
        await step.options(group=group).enqueue_many([f"{n}" for n in range(5)])
        first = await step.enqueue("first")
        await step.options(group=group, after=first).enqueue("waits")
    await group.cancel()
    operation = await sql.fetchrow("select * from penstock.advance_operation(4)")
    operation = await sql.fetchrow("select * from penstock.advance_operation(4)")
    assert (operation["state"], operation["looked_at"], operation["done"]) == ("finished", 6, 6)
    await resolve(sql)
    assert (counts(await group.find()), (await app.counts())[0].ready) == (("cancelled", 6, 0, 0, 6), 501)


async def test_children_are_found_by_their_group(app: Penstock, sql: Sql) -> None:
    step = declare(app, [])
    await step.enqueue("other")
    async with app.job_group("import", on_failure="continue") as group:
        await step.options(group=group).enqueue_many(["good", "fail"])
        await step.options(group=group, after=await step.options(run_after=HOUR).enqueue("first")).enqueue("waits")
    assert {job.data for job in await app.find_many(workflow=group)} == {"good", "fail", "waits"}
    await run_due_jobs(app)
    found = await app.find_many(workflow=group.id, status="failed")
    assert [(job.data, job.workflow) for job in found] == [("fail", group.id)]
    preview = await app.operations.preview("replay", JobFilter(workflow=group))
    assert (preview.jobs, preview.sample) == (1, [found[0].id])
    with pytest.raises(InvalidInput, match="workflow must be a job group.*\\n.*await app.find_group\\(name\\)"):
        await app.find_many(workflow="import")  # type: ignore[arg-type]


async def test_what_is_given_in_place_of_an_id_is_named_with_what_to_give(app: Penstock) -> None:
    receipt: Any = await app.enqueue(app.job_type("alone"), {})
    found: Any = await app.job_group("named").open()
    for call in (app.find, app.cancel, app.why):
        with pytest.raises(InvalidInput, match="invalid job id.*\nGive its id, such as receipt.id"):
            await call(receipt)
    for call in (app.find_group, app.cancel_group, app.find_workflow_run, app.cancel_workflow, app.retry_workflow):
        with pytest.raises(InvalidInput, match="is found by its id or name, not by.*\nGive its id, such as group.id"):
            await call(found)
    with pytest.raises(InvalidInput, match="the name of a job group is not text that PostgreSQL can store"):
        await app.find_group("a\0b")


async def test_a_group_is_opened_again_with_the_same_options_alone(app: Penstock) -> None:
    declare(app, [])
    await app.create_job_type("other")
    outer = await app.job_group("outer").open()
    options: dict[str, Any] = {"then": "report", "then_data": {"n": 1}, "on_failure": "continue", "parent": outer}
    group = await app.job_group("import", **options).open()
    assert (await app.job_group("import", **options).open()).id == group.id
    others = {"then": ["other", None], "then_data": [{"n": 2}, None], "on_failure": ["cancel"], "parent": [None]}
    for option, values in others.items():
        for value in values:
            with pytest.raises(Conflict, match=f"job group import was opened with another {option}\n"):
                await app.job_group("import", **{**options, option: value}).open()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"group": "import"}, "group must be a job group"),
        ({"group": UUID(int=7)}, "does not exist: 00000000-0000-0000-0000-000000000007"),
    ],
)
async def test_what_is_no_group_is_refused(app: Penstock, options: Any, error: str) -> None:
    declare(app, [])
    with pytest.raises(InvalidInput, match=error):
        await app.enqueue("step", "x", **options)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"name": 7}, "name of a job group"),
        ({"on_failure": "stop"}, "on_failure must be"),
        ({"then": 7}, "then must be a job type"),
    ],
)
def test_wrong_options_of_a_group_are_refused(arguments: Any, error: str) -> None:
    with pytest.raises(InvalidInput, match=error):
        Penstock("postgresql://localhost/none").job_group(**{"name": "import", **arguments})


async def test_sql_opens_fills_and_seals_a_group(sql: Sql) -> None:
    await sql.execute("select penstock.create_job_type('step')")
    group = await sql.fetchval("select penstock.open_group('import', 'step', '\"end\"')")
    child = await sql.fetchval("select penstock.enqueue('step', p_group => $1)", group)
    await sql.execute("select penstock.seal_group($1)", group)
    await sql.execute("select penstock.seal_group($1)", group)
    assert await sql.fetchval("select penstock.group_of($1)", child) == group
    claimed = await sql.fetchrow("select id, attempt, lease from penstock.claim('psql', '{step}', 1)")
    await sql.fetch("select * from penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint])", *claimed)
    await resolve(sql)
    row = await sql.fetchrow("select status, added, succeeded from penstock.group_list()")
    assert tuple(row) == ("succeeded", 1, 1)
    assert await sql.fetchval("select data from penstock.claim('psql', '{step}', 1)") == '"end"'
    for name in ("", "a/b", "a\n"):
        with pytest.raises(asyncpg.PostgresError, match="invalid name of a job group"):
            await sql.execute("select penstock.open_group($1)", name)
    for call in ("seal_group", "cancel_group"):
        with pytest.raises(asyncpg.PostgresError, match="no such job group") as refused:
            await sql.execute(f"select penstock.{call}(penstock.new_id())")
        assert refused.value.sqlstate == "PS404"
