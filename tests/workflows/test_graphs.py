"""Graphs: named steps that are started together, each once, behind those after which it runs; cancelled and retried."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Conflict, Fail, InvalidInput, Job, NewJob, NotFound, Penstock, Step, Workflow
from penstock.core.encryption import new_key
from penstock.testing import run_due_jobs, running_worker
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
CLAIMS = "select last_value from penstock.lease_id"


@dataclass
class Ran:
    """What ran, in order, and which payloads fail."""

    payloads: list[Any]
    failing: set[Any]


@pytest.fixture
def ran(app: Penstock) -> Ran:
    """A type `step`, whose jobs return what they got, and fail while `failing` has it."""
    ran = Ran([], set())

    @app.job("step", max_attempts=1, keep_result=True)
    async def step(job: Job[Any]) -> Any:
        ran.payloads.append(job.data)
        if str(job.data) in ran.failing:
            raise Fail("as told")
        return job.data

    @app.job("other", max_attempts=1)
    async def other(job: Job[Any]) -> None:
        ran.payloads.append(job.data)

    return ran


async def statuses(app: Penstock, run: Any) -> dict[str, str]:
    return {step.name: step.status for step in await app.workflow_steps(run)}


def diamond(app: Penstock, **options: Any) -> Workflow:
    """a, then b and c, then d."""
    step = app.types["step"]
    graph = app.workflow("diamond", **options)
    a = graph.add(step, "a", step="a")
    b = graph.add(step, "b", after=a, step="b")
    c = graph.add(step, "c", after="a", step="c")
    graph.add(step, "d", after=[b, c], step="d")
    return graph


async def test_steps_run_once_behind_those_after_which_they_run(app: Penstock, ran: Ran) -> None:
    run = await diamond(app).start(id="night")
    assert await statuses(app, run) == {"a": "queued", "b": "waiting", "c": "waiting", "d": "waiting"}
    assert await diamond(app).start(id="night") == run
    await run_due_jobs(app)
    assert (ran.payloads[0], sorted(ran.payloads[1:3]), ran.payloads[3:]) == ("a", ["b", "c"], ["d"])
    found = await app.find_workflow_run("night")
    assert (found.id, found.workflow, found.status, found.steps, found.succeeded) == (run, "diamond", "succeeded", 4, 4)
    assert found.finished_at is not None
    steps = {step.name: step for step in await app.workflow_steps("night")}
    assert [step.after for step in steps.values()] == [[], [1], [1], [2, 3]]
    assert all(step.finished_at and step.started_at and step.attempt == 1 for step in steps.values())
    assert (await app.find(steps["d"].job)).status == "succeeded"


async def test_two_starts_at_the_same_time_are_one(app: Penstock, ran: Ran) -> None:
    runs = await asyncio.gather(*(diamond(app).start(id="night") for _ in range(8)))
    assert len(set(runs)) == 1
    await run_due_jobs(app)
    assert sorted(ran.payloads) == ["a", "b", "c", "d"]


async def test_a_worker_goes_through_a_run_at_once(app: Penstock, ran: Ran) -> None:
    async with running_worker(app):
        run = await diamond(app).start()
        assert (await app.wait_for_workflow(run)).status == "succeeded"
    assert len(ran.payloads) == 4
    with pytest.raises(NotFound, match="no such run"):
        await app.wait_for_workflow("absent")


async def test_payloads_take_results_of_steps_before_and_do_not_carry_them(app: Penstock, ran: Ran, sql: Sql) -> None:
    step = app.types["step"]
    graph = app.workflow("results")
    a = graph.add(step, {"rows": 7}, step="a")
    b = graph.add(step, [a.result, 2], after=a, step="b")
    graph.add(step, {"a": a.result, "b": {"inner": b.result}, "plain": {"$result": 5}}, after=b, step="c")
    graph.add(step, a.result, after=b, step="d")
    run = await graph.start()
    await run_due_jobs(app)
    rows = {"rows": 7}
    assert ran.payloads[:2] == [rows, [rows, 2]]
    assert {"a": rows, "b": {"inner": [rows, 2]}, "plain": {"$result": 5}} in ran.payloads
    assert ran.payloads.count(rows) == 2
    stored = {step.name: (await app.find(step.job)).data for step in await app.workflow_steps(run)}
    assert stored["b"] == [{"$result": "a"}, 2]
    # A job outside of workflows has such a payload as it is, and so has one that names what is no step of its run.
    await app.enqueue("step", {"$result": "a"})
    await run_due_jobs(app)
    assert ran.payloads[-1] == {"$result": "a"}


async def test_a_step_that_failed_gives_no_result(app: Penstock, ran: Ran) -> None:
    ran.failing.add("a")
    step = app.types["step"]
    graph = app.workflow("results")
    a = graph.add(step, "a", step="a")
    graph.add(step, [a.result], after=a, when="finished")
    await graph.start()
    await run_due_jobs(app)
    assert ran.payloads == ["a", [None]]


async def test_results_of_encrypted_types_are_read(url: str) -> None:
    got: list[Any] = []
    async with Penstock(url, keys=[new_key()]) as app:

        @app.job("secret", encrypted=True, keep_result=True)
        async def secret(job: Job[Any]) -> Any:
            return {"secret": job.data}

        @app.job("plain")
        async def plain(job: Job[Any]) -> None:
            got.append(job.data)

        graph = app.workflow("encrypted")
        first = graph.add(secret, 5)
        graph.add(plain, [first.result], after=first)
        with pytest.raises(InvalidInput, match="is encrypted, and cannot name results"):
            graph.add(secret, [first.result], after=first)
        await graph.start()
        await run_due_jobs(app)
    assert got == [[{"secret": 5}]]


@pytest.mark.parametrize("way", ["one result often", "many results"])
async def test_a_payload_that_grows_too_large_with_its_results_fails_with_what_is_wrong(
    app: Penstock, ran: Ran, way: str
) -> None:
    @app.job("large", keep_result=True)
    async def large(size: int) -> str:
        return "x" * size

    @app.job("taken", max_attempts=5)
    async def taken(job: Job[Any]) -> None:
        ran.payloads.append(job.data)

    graph = app.workflow("amplified")
    count, size = (1_000, 17_000) if way == "one result often" else (20, 900_000)
    steps = [graph.add(large, size, step=f"s{n}") for n in range(1 if way == "one result often" else count)]
    fits = graph.add(taken, [steps[0].result] * 3, after=steps, step="fits")
    graph.add(taken, [steps[n % len(steps)].result for n in range(count)], after=steps, step="grows")
    run = await graph.start()
    await run_due_jobs(app)
    assert ran.payloads == [["x" * size] * 3]
    found = {step.name: step for step in await app.workflow_steps(run)}
    assert (found[fits.name].status, found["grows"].status, found["grows"].attempt) == ("succeeded", "failed", 1)
    assert "at most 16 MiB are possible" in str(found["grows"].error)
    assert ("s0 alone 1,000 times" in str(found["grows"].error)) == (way == "one result often")


async def test_a_job_whose_results_cannot_be_read_yet_does_not_fail(app: Penstock, ran: Ran, sql: Sql) -> None:
    @app.job("once", delivery="at_most_once")
    async def once(job: Job[Any]) -> None:
        ran.payloads.append(job.data)

    step = app.types["step"]
    graph = app.workflow("results")
    a = graph.add(step, 7, step="a")
    graph.add(once, [a.result], after=a)
    run = await graph.start()
    await run_due_jobs(app, "step")
    await sql.execute(
        """
        create sequence public.reads;
        alter function penstock.step_results(uuid, text[]) rename to step_results_read;
        create function penstock.step_results(p_job uuid, p_names text[])
        returns table (name text, type text, job uuid, result jsonb) language plpgsql as $$
        begin
            if nextval('public.reads') <= 2 then
                raise exception 'on purpose' using errcode = '57P01';
            end if;
            return query select * from penstock.step_results_read(p_job, p_names);
        end
        $$;
        """
    )
    await run_due_jobs(app)
    assert ran.payloads == [7, [7]]
    assert (await app.wait_for_workflow(run)).status == "succeeded"


async def test_a_job_whose_results_are_encrypted_waits_for_a_worker_with_the_key(
    url: str, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.worker.step_results.PAUSE_WITHOUT_KEY_S", 0.01)
    key, got = new_key(), []

    def application(key: str) -> Penstock:
        app = Penstock(url, keys=[key])

        @app.job("secret", encrypted=True, keep_result=True)
        async def secret(job: Job[Any]) -> Any:
            return job.data

        @app.job("plain", delivery="at_most_once")
        async def plain(job: Job[Any]) -> None:
            got.append(job.data)

        return app

    async with application(key) as app:
        graph = app.workflow("encrypted")
        first = graph.add(app.types["secret"], 5)
        graph.add(app.types["plain"], [first.result], after=first, step="second")
        run = await graph.start()
        await run_due_jobs(app, "secret")
        async with application(new_key()) as other, running_worker(other, "plain"):
            claims = await sql.fetchval(CLAIMS)
            await eventually(lambda: _claimed_twice(sql, claims))
        assert (got, await statuses(app, run)) == ([], {"secret": "succeeded", "second": "queued"})
        await run_due_jobs(app)
    assert got == [[5]]


async def _claimed_twice(sql: Sql, before: int) -> bool:
    return bool(await sql.fetchval(CLAIMS) >= before + 2)


async def test_a_step_of_many_jobs_is_one_for_those_behind_it(app: Penstock, ran: Ran) -> None:
    step = app.types["step"]
    graph = app.workflow("many")
    a = graph.add(step, "a", step="a")
    parts = graph.add_many(step, range(250), after=a, step="parts")
    nothing = graph.add_many(step, [], after=parts, step="nothing")
    graph.add(step, "end", after=nothing, step="end")
    graph.add(step, "beside", after=[parts, a], step="beside")
    run = await graph.start(id="many")
    await run_due_jobs(app)
    assert (ran.payloads[0], sorted(ran.payloads[1:251]), set(ran.payloads[251:])) == ("a", list(range(250)), {"end", "beside"})
    steps = {step.name: step for step in await app.workflow_steps(run)}
    assert (steps["parts"].jobs, steps["parts"].ended, steps["parts"].failed, steps["parts"].status) == (250, 250, 0, "succeeded")
    assert (await app.find_workflow_run(run)).succeeded == 5


async def test_what_a_failed_step_does_to_the_others(app: Penstock, ran: Ran) -> None:
    ran.failing.add("b")
    run = await diamond(app).start(id="goes on")
    await run_due_jobs(app)
    assert await statuses(app, run) == {"a": "succeeded", "b": "failed", "c": "succeeded", "d": "cancelled"}
    (b,) = [step for step in await app.workflow_steps(run) if step.name == "b"]
    assert b.error == "as told"
    assert (await app.find_workflow_run(run)).status == "failed"
    # With cancel the first failure cancels what waits elsewhere.
    graph = diamond(app, on_failure="cancel")
    graph.add(app.types["step"].options(run_after=timedelta(hours=1)), "late", step="late")
    run = await graph.start(id="stops")
    await run_due_jobs(app)
    await (await app.database()).fetch("select penstock.advance_operation()")
    await run_due_jobs(app)
    found = await statuses(app, run)
    assert (found["b"], found["d"], found["late"]) == ("failed", "cancelled", "cancelled")


async def test_a_run_is_cancelled_with_all_that_waits_and_runs(app: Penstock, ran: Ran) -> None:
    begun = asyncio.Event()

    @app.job("slow", max_attempts=1)
    async def slow() -> None:
        begun.set()
        await asyncio.sleep(600)

    graph = app.workflow("long")
    first = graph.add(slow, step="first")
    graph.add(app.types["step"].options(run_after=timedelta(hours=1)), "deferred", step="deferred")
    many = graph.add_many(app.types["step"], range(5), after=first, step="many")
    graph.add(app.types["step"], "end", after=many, step="end")
    async with running_worker(app):
        run = await graph.start()
        await begun.wait()
        assert (await app.cancel_workflow(run)).cancelled_at is not None
        assert (await app.wait_for_workflow(run)).status == "cancelled"
    assert set((await statuses(app, run)).values()) == {"cancelled"}
    assert ran.payloads == []
    assert (await app.cancel_workflow(run)).status == "cancelled"


async def test_a_retry_runs_what_did_not_succeed_and_shares_the_rest(app: Penstock, ran: Ran) -> None:
    step = app.types["step"]
    graph = app.workflow("retried")
    a = graph.add(step, "a", step="a")
    b = graph.add(step, [a.result], after=a, step="b")
    parts = graph.add_many(step, ["p1", "p2", "p3"], after=a, step="parts")
    graph.add(step, [a.result, b.result], after=[b, parts], step="c")
    ran.failing |= {"['a']", "p2"}
    run = await graph.start(id="night")
    with pytest.raises(Conflict, match="has not ended"):
        await app.retry_workflow(run)
    await run_due_jobs(app)
    assert (await app.find_workflow_run(run)).status == "failed"
    ran.failing.clear()
    ran.payloads.clear()
    for id in ("night/parts", "00000000-0000-0000-0000-000000000007", "00000000-0000-0000-0000-000000000007.resize"):
        with pytest.raises(InvalidInput, match="invalid id of a retry of run night"):
            await app.retry_workflow("night", id=id)
    again = await app.retry_workflow("night")
    with pytest.raises(Conflict, match="night~2 is a retry of another run of retried"):
        await graph.start(id="night~2")
    assert (again.name, again.retry_of, again.retried_by, again.steps, again.shared) == ("night~2", "night", None, 4, 1)
    assert [(one.name, one.retried_by) for one in await app.workflow_runs()] == [("night~2", None), ("night", "night~2")]
    assert (await app.retry_workflow("night")).id == again.id
    with pytest.raises(Conflict, match="was retried already, as night~2"):
        await app.retry_workflow("night", from_step="a")
    await run_due_jobs(app)
    assert sorted(map(str, ran.payloads)) == ["['a', ['a']]", "['a']", "p2"]
    assert (await app.find_workflow_run(again.id)).status == "succeeded"
    assert set((await statuses(app, again.id)).values()) == {"succeeded"}
    with pytest.raises(Conflict, match="each step of run night~2 succeeded"):
        await app.retry_workflow(again.id)
    ran.payloads.clear()
    # From a step on: with all behind it, and all of its jobs.
    third = await app.retry_workflow(again.id, from_step="parts", id="parts again")
    assert (third.name, third.shared) == ("parts again", 2)
    await run_due_jobs(app)
    assert (sorted(map(str, ran.payloads[:-1])), ran.payloads[-1]) == (["p1", "p2", "p3"], ["a", ["a"]])
    with pytest.raises(InvalidInput, match="no step x"):
        await app.retry_workflow(third.id, from_step="x")


async def test_a_start_in_the_callers_transaction_is_there_when_it_commits(app: Penstock, ran: Ran, sql: Sql) -> None:
    await app.open()
    transaction = sql.transaction()
    await transaction.start()
    await diamond(app).start(id="rolled back", connection=sql)
    await transaction.rollback()
    async with sql.transaction():
        run = await diamond(app).start(id="committed", connection=sql)
    await run_due_jobs(app)
    assert [found.id for found in await app.workflow_runs()] == [run]
    assert len(ran.payloads) == 4


async def test_days_are_kept_while_a_run_that_needs_them_has_not_ended(app: Penstock, ran: Ran, sql: Sql) -> None:
    step = app.types["step"]
    # The jobs of a step of many belong to a group that has ended.
    graph = app.workflow("kept")
    parts = graph.add_many(step, ["p"], step="parts")
    graph.add(step.options(run_after=timedelta(days=30)), "late", after=parts, step="late")
    first = await graph.start(id="kept")
    await run_due_jobs(app)
    await sql.execute("select set_config('penstock.clock', (now() + interval '10 days')::text, false)")
    assert await sql.fetch("select * from penstock.prune('1 day') where jobs > 0") == []
    assert {step.status for step in await app.workflow_steps(first)} == {"succeeded", "queued"}
    await app.cancel_workflow(first)
    # Those that a retry shares are of a run that has ended.
    ran.failing.add("d")
    await diamond(app).start(id="night")
    await run_due_jobs(app)
    again = await app.retry_workflow("night")
    await sql.execute("select penstock.advance_operation()")
    while await sql.fetchval("select penstock.resolve_workflows()"):
        pass
    assert await sql.fetch("select * from penstock.prune('1 day') where jobs > 0") == []
    assert (await statuses(app, again.id))["a"] == "succeeded"
    ran.failing.clear()
    await run_due_jobs(app)
    assert (await app.find_workflow_run(again.id)).status == "succeeded"
    assert await sql.fetch("select * from penstock.prune('1 day') where jobs > 0") != []


@pytest.mark.parametrize(
    ("steps", "wrong"),
    [
        ("[]", "1 to 10000 steps, not 0"),
        ("{}", "must be a JSON array"),
        ('["a"]', "not an object"),
        ('[{"type": "step"}]', "invalid step number 1: it needs a name"),
        ('[{"name": "a/b", "type": "step"}]', "it needs a name"),
        ('[{"name": "a"}]', "it needs a type"),
        ('[{"name": "a", "type": "step", "unique": "x"}]', "unknown field: unique"),
        ('[{"name": "a", "type": "step", "after": "b"}]', "after is an array"),
        ('[{"name": "a", "type": "step", "after": ["b"]}]', "step a is to run after b, which is no step of this graph"),
        ('[{"name": "a", "type": "step", "after": ["a"]}]', "step a is to run after itself"),
        ('[{"name": "a", "type": "step", "after": ["b"]}, {"name": "b", "type": "step", "after": ["a"]}]', "comes behind it"),
        ('[{"name": "a", "type": "step"}, {"name": "a", "type": "step"}]', "two steps have the name a"),
        ('[{"name": "a", "type": "step", "when": "finished"}]', "when is given without after"),
        ('[{"name": "a", "type": "step", "when": "soon", "after": []}]', "when is succeeded or finished"),
        ('[{"name": "a", "type": "step", "jobs": 3}]', "jobs is an array"),
        ('[{"name": "a", "type": "step", "jobs": [], "data": 1}]', "whose data and options stand in these"),
        ('[{"name": "a", "type": "step", "jobs": [{"id": "x"}]}]', "invalid job of a step: unknown field: id"),
        ('[{"name": "a", "type": "absent"}]', "no such job type: absent"),
    ],
)
async def test_a_wrong_graph_is_refused_as_a_whole(app: Penstock, ran: Ran, sql: Sql, steps: str, wrong: str) -> None:
    await app.open()
    with pytest.raises(asyncpg.PostgresError, match=wrong):
        await sql.fetch("select penstock.start_workflow('wrong', 'wrong', $1::jsonb)", steps)
    assert await sql.fetchval("select count(*) from penstock.job_groups") == 0
    assert await sql.fetchval("select count(*) from penstock.queued_jobs") == 0


async def test_wrong_calls_say_what_is_wrong(app: Penstock, ran: Ran) -> None:
    step, other = app.types["step"], app.types["other"]
    graph = app.workflow("wrong")
    with pytest.raises(InvalidInput, match="has no steps"):
        await graph.start()
    a = graph.add(step, 1)
    with pytest.raises(InvalidInput, match="'b' is no step"):
        graph.add(step, 1, after="b")
    with pytest.raises(InvalidInput, match="of another graph"):
        graph.add(step, 1, after=app.workflow("second").add(step, 1))
    with pytest.raises(InvalidInput, match="the name of a step is empty"):
        graph.add(step, 1, step="")
    with pytest.raises(InvalidInput, match="two steps"):
        graph.add(step, 1, step="step")
    with pytest.raises(InvalidInput, match="when is given without after"):
        graph.add(step, 1, when="finished")
    with pytest.raises(InvalidInput, match="other keeps no results"):
        _ = graph.add(other, 1).result
    with pytest.raises(InvalidInput, match="many jobs, and no result"):
        _ = graph.add_many(step, [1]).result
    with pytest.raises(InvalidInput, match="does not run after it"):
        graph.add(step, [a.result])
    with pytest.raises(InvalidInput, match="takes no option unique"):
        graph.add(step.options(unique="x"), 1)
    with pytest.raises(InvalidInput, match="takes no option connection"):
        graph.add(step.options(connection=object()), 1)
    with pytest.raises(InvalidInput, match="not 'step'"):
        graph.add("step", 1)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="at most 100"):
        graph.add(step, 1, after=[graph.add(step, n) for n in range(101)])
    with pytest.raises(InvalidInput, match="on_failure"):
        app.workflow("x", on_failure="stop")  # type: ignore[arg-type]
    assert a.name == "step"
    for id in ("00000000-0000-0000-0000-000000000007", "00000000-0000-0000-0000-000000000007.resize", "night/parts"):
        with pytest.raises(InvalidInput, match="invalid id of a run of wrong"):
            await graph.start(id=id)
    await app.job_group("group").open()
    with pytest.raises(Conflict, match="group is a job group, and no run of wrong"):
        await graph.start(id="group")
    with pytest.raises(NotFound, match="no such run"):
        await app.workflow_steps("group")


async def test_a_graph_of_thousands_of_edges_is_started_and_ends(app: Penstock, sql: Sql) -> None:
    seed = int(os.environ.get("PENSTOCK_TEST_SEED", secrets.randbits(32)))
    print(f"PENSTOCK_TEST_SEED={seed}")
    chance = random.Random(seed)
    graph = app.workflow("large")
    edge = app.job_type("edge")
    names: list[Step] = []
    for _ in range(1500):
        names.append(graph.add(edge, after=chance.sample(names, min(chance.randint(0, 3), len(names))) or None))
    await graph.start(id="large")
    claimed = await sql.fetch("select id, attempt, lease from penstock.claim('w', '{edge}', 5000)")
    ended = 0
    while claimed:
        await sql.fetch(
            "select * from penstock.settle($1, $2::smallint[], $3::bigint[])",
            [row["id"] for row in claimed], [row["attempt"] for row in claimed], [row["lease"] for row in claimed],
        )  # fmt: skip
        ended += len(claimed)
        while await sql.fetchval("select penstock.resolve_workflows()"):
            pass
        claimed = await sql.fetch("select id, attempt, lease from penstock.claim('w', '{edge}', 5000)")
    assert ended == 1500
    assert (await app.find_workflow_run("large")).status == "succeeded"


async def test_jobs_beside_a_graph_are_no_steps(app: Penstock, ran: Ran) -> None:
    """A step can enqueue further children into its run, which ends after them."""

    @app.job("grow")
    async def grow(job: Job[int]) -> None:
        await app.enqueue_many("step", [NewJob(n, group=await app.group_of(job.id)) for n in range(job.data)])

    graph = app.workflow("grown")
    graph.add(grow, 3)
    run = await graph.start()
    await run_due_jobs(app)
    assert sorted(ran.payloads) == [0, 1, 2]
    found = await app.find_workflow_run(run)
    assert (found.status, found.steps, found.succeeded) == ("succeeded", 1, 4)


async def test_a_step_can_have_durable_steps_of_its_own(app: Penstock, ran: Ran) -> None:
    @app.job("asks")
    async def asks(job: Job[Any]) -> None:
        ran.payloads.append(await job.wait_for("approved", str, timeout=timedelta(days=1)))

    graph = app.workflow("approved")
    first = graph.add(asks, step="first")
    graph.add(app.types["step"], "second", after=first, step="second")
    run = await graph.start()
    await run_due_jobs(app)
    steps = await app.workflow_steps(run)
    assert [step.status for step in steps] == ["waiting", "waiting"]
    await app.signal(steps[0].job, "approved", "ada")
    await run_due_jobs(app)
    assert ran.payloads == ["ada", "second"]
    assert (await app.find_workflow_run(run)).status == "succeeded"
