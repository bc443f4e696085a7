"""The dashboard's pages of job groups and runs: progress, children, graphs, what waits for what, cancelling and retrying."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from html import unescape
from uuid import UUID

import pytest

from penstock import Job, JobFailed, NewJob, Penstock
from penstock.http.user_queries import add_user
from penstock.http.users import hash_secret
from penstock.testing import TemporaryDatabases, run_due_jobs
from tests.http.dashboard_browser import Reader, text_of
from tests.http.http_server import TOKEN, Served, serving
from tests.waiting import until


@pytest.fixture(scope="module")
def served(databases: TemporaryDatabases) -> Iterator[Served]:
    with databases.database() as url:
        asyncio.run(prepare(url))
        with serving(url) as served:
            yield served


async def prepare(url: str) -> None:
    """An open group of three children, of which one failed; a group in it; what waits for it."""
    async with Penstock(url) as app:
        database = await app.database()
        await add_user(database, "narrow", "admin", hash_secret("narrow-password"), ["row"])
        for name in ("row", "report"):
            await app.create_job_type(name, max_attempts=1)
        group = await app.job_group("import-7", then="report", on_failure="continue").open()
        await app.enqueue_many("row", [NewJob({"n": n}, group=group) for n in range(3)])
        await app.job_group("part-of-7", parent=group).open()
        [claimed] = await database.fetch("select * from penstock.claim('w', array['row'], 1)")
        await database.fetch(
            "select penstock.settle(array[$1::uuid], array[1::smallint], array[$2::bigint], array['failed'], array[$3::jsonb])",
            claimed["id"], claimed["lease"], '{"type": "ValueError", "message": "row is broken"}',
        )  # fmt: skip


@pytest.fixture
def admin(served: Served) -> Iterator[Reader]:
    with Reader(served.base_url + "/") as reading:
        reading.log_in("admin", TOKEN)
        yield reading


def group_id(served: Served, name: str = "import-7") -> UUID:
    with served.client() as client:
        return UUID(client.get(f"/v1/workflows/{name}").json()["id"])


def test_a_group_is_listed_with_its_progress(served: Served, admin: Reader) -> None:
    page = admin.get("workflows")
    words = text_of(page.text)
    assert "import-7" in words and "part-of-7" in words and "1 failed" in words
    assert f'href="./workflows/{group_id(served)}"' in page.text


def test_a_group_shows_its_children_by_status_and_leads_to_them(served: Served, admin: Reader) -> None:
    id = group_id(served)
    for name in (str(id), "import-7"):
        page = admin.get(f"workflows/{name}")
        words = text_of(page.text)
        assert "ValueError: row is broken" in words and "the others go on" in words
        assert "1 of 4 have ended" in words, words
        assert "part-of-7" in words, "the group in it"
    assert page.text.count('data-row="') == 3, "one that failed, and two that wait"
    failed = admin.get(f"jobs?status=failed&group={id}")
    assert failed.text.count('data-row="') == 1
    waiting = admin.get(f"jobs?status=unfinished&group={id}")
    assert waiting.text.count('data-row="') == 2
    row = waiting.text.split('data-row="')[1].partition('"')[0]
    assert f'href="../workflows/{id}">import-7</a>' in admin.get(f"jobs/{row}").text
    assert "no id of a job group" in admin.get("jobs?group=seven").text


def test_a_waiting_job_says_what_it_waits_for(served: Served, admin: Reader) -> None:
    id = group_id(served)
    page = admin.get("jobs?status=waiting")
    assert f'waits for the group <a href="./workflows/{id}">import-7</a>' in page.text
    then = page.text.split('data-row="')[1].partition('"')[0]
    assert f'the job group <a href="../workflows/{id}">import-7</a>' in admin.get(f"jobs/{then}").text
    assert f"jobs/{then}" in admin.get(f"workflows/{id}").text


def test_users_of_some_types_learn_nothing_of_groups(served: Served) -> None:
    id = group_id(served)
    with Reader(served.base_url + "/") as reading:
        reading.log_in("narrow", "narrow-password")
        assert "Workflows" not in text_of(reading.get("").text)
        assert reading.get("workflows").status_code == reading.get(f"workflows/{id}").status_code == 403
        assert reading.post(f"workflows/{id}/cancel").status_code == 403
        page = reading.get(f"jobs?status=unfinished&group={id}").text
        assert "users with access to all job types" in page and 'data-row="' not in page
        row = reading.get("jobs?status=unfinished").text.split('data-row="')[1].partition('"')[0]
        assert "import-7" not in reading.get(f"jobs/{row}").text


async def test_users_of_some_types_are_not_told_for_which_groups_their_jobs_wait(served: Served, admin: Reader) -> None:
    async with Penstock(served.database_url) as app:
        # `report` is open to no user of `row`; `row` waits for a group and for a job of it.
        group = await app.job_group("foreign").open()
        other = await app.job_type("report").enqueue({"n": 1})
        row = app.job_type("row")
        waits = await row.options(after=[group]).enqueue({"n": 2})
        dropped = await row.options(after=[other.id]).enqueue({"n": 3})
        await app.cancel(other.id)
        with pytest.raises(JobFailed, match="of report"):
            await app.wait(dropped.id)
    with Reader(served.base_url + "/") as reading, served.client(auth=("narrow", "narrow-password")) as client:
        reading.log_in("narrow", "narrow-password")
        for id, words, hidden in (
            (waits.id, "It waits for the end of other jobs", "foreign"),
            (dropped.id, "a job after which it was to run did not succeed", "of report"),
        ):
            assert hidden in unescape(admin.get(f"jobs/{id}").text)
            for text in (reading.get(f"jobs/{id}").text, client.get(f"/v1/jobs/row/{id}?details=true").text):
                assert words in text and hidden not in text
        for text in (
            reading.get("jobs?status=cancelled").text,
            client.get("/v1/archived-jobs?details=true").text,
            client.get(f"/v1/jobs/row/{dropped.id}/result").text,
        ):
            assert str(dropped.id) in text and "of report" not in text
        assert "of report" in admin.get("jobs?status=cancelled").text


def test_a_group_is_cancelled_and_the_audit_says_so(served: Served, admin: Reader) -> None:
    with served.client() as client:
        assert client.post("/v1/workflows", json={"name": "unwanted"}).status_code == 201
    id = group_id(served, "unwanted")
    answer = admin.post(f"workflows/{id}/cancel")
    assert answer.url.path == f"/workflows/{id}" and "are being cancelled" in answer.text
    until(lambda: "Cancelled" in text_of(admin.get(f"workflows/{id}").text), "the cancellation on the page")
    assert "cancel job group" in admin.get("audit").text
    assert admin.get("workflows/absent").status_code == admin.post("workflows/absent/cancel").status_code == 404


async def test_a_run_shows_its_graph_and_a_table_of_the_same(served: Served, admin: Reader) -> None:
    async with Penstock(served.database_url) as app:
        run = await started(app, "nightly <1>")
        await run_due_jobs(app)
        steps = {step.name: step for step in await app.workflow_steps(run)}
    page = admin.get(f"workflows/{run}").text
    assert "a run of the workflow nightly" in text_of(page)
    graph = page.partition("<svg")[2].partition("</svg>")[0]
    assert graph.count('class="step ') == 4 and graph.count("<path d=") == 4
    assert f'href="../jobs/{steps["extract"].job}" aria-label="extract, of the type step: succeeded, took ' in graph
    assert (
        f'href="../workflows/{steps["images"].job}" aria-label="images, of the type step: failed, 3 of 3 jobs, 1 failed' in graph
    )
    assert '<desc id="graph-description">4 steps: 2 succeeded, 1 failed, 1 cancelled. The table below has the same' in graph
    assert "style=" not in page and "<style" not in page and "nightly &lt;1&gt;" in graph
    table = page.partition('aria-label="Steps"')[2].partition("</table>")[0]
    assert [row.partition('"')[0] for row in table.split('data-row="')[1:]] == ["step-1", "step-2", "step-3", "step-4"]
    assert "transform, images" in text_of(table) and "3 of 3 1 failed" in text_of(table) and "dependency" in table
    job = text_of(admin.get(f"jobs/{steps['extract'].job}").text)
    assert "extract of the run nightly &lt;1&gt; of the workflow nightly" in job and "Job group" not in job
    child = admin.get(f"jobs?status=failed&group={steps['images'].job}").text.split('data-row="')[1].partition('"')[0]
    assert "images of the run nightly &lt;1&gt; of the workflow nightly" in text_of(admin.get(f"jobs/{child}").text)


async def test_a_run_is_retried_from_what_failed_and_from_a_step(served: Served, admin: Reader) -> None:
    async with Penstock(served.database_url) as app:
        run = await started(app, "retried")
        assert admin.post(f"workflows/{run}/retry").status_code == 409, "it has not ended"
        assert "/retry" not in admin.get(f"workflows/{run}").text
        await run_due_jobs(app)
        page = until(
            lambda: "Retry what did not succeed" in (text := admin.get(f"workflows/{run}").text) and text, "the end on the page"
        )
        assert '<option value="transform">' in page
        assert admin.post(f"workflows/{run}/retry", from_step="absent").status_code == 400
        answer = admin.post(f"workflows/{run}/retry")
        assert "This is the new run" in answer.text and "retried~2" in answer.text
        assert 'retry of <a href="../workflows/retried">retried</a>' in answer.text
        link = 'retried by <a href="../workflows/retried~2">retried~2</a>'
        until(lambda: link in admin.get(f"workflows/{run}").text, "the retry on the page of the run before")
        assert "succeeded, from the run before" in answer.text
        await run_due_jobs(app)
        again = await app.find_workflow_run("retried~2")
        until(lambda: "Retry what did not succeed" in admin.get(f"workflows/{again.id}").text, "the end on the page")
        assert (again.shared, again.status) == (2, "failed")
        assert "retried~3" in admin.post(f"workflows/{again.id}/retry", from_step="extract").text
        assert (await app.find_workflow_run("retried~3")).shared == 0
        await run_due_jobs(app)
    assert "retry workflow" in admin.get("audit").text


async def test_a_run_says_for_which_signals_it_waits_and_sends_them(served: Served, admin: Reader) -> None:
    app = Penstock(served.database_url)

    @app.job("approval")
    async def approval(job: Job[dict[str, str]]) -> None:
        await job.wait_for("approved", str, timeout=timedelta(days=1))

    async with app:
        graph = app.workflow("order")
        graph.add(approval, step="ask")
        run = await graph.start(id="order-1")
        await run_due_jobs(app)
        page = admin.get(f"workflows/{run}").text
        assert "Waits for signals" in page and text_of(page).count("approved") == 1
        (asked,) = await app.workflow_steps(run)
        assert f'action="../jobs/{asked.job}/signal"' in page
        assert "Signalled." in admin.post(f"jobs/{asked.job}/signal", name="approved", value='"yes"').text
        await run_due_jobs(app)
        assert (await app.wait_for_workflow(run)).status == "succeeded"
    until(lambda: "Waits for signals" not in admin.get(f"workflows/{run}").text, "the end on the page")


async def test_a_run_of_many_steps_is_drawn_by_its_layers(served: Served, admin: Reader) -> None:
    async with Penstock(served.database_url) as app:
        graph = app.workflow("wide")
        row = app.job_type("row")
        first = graph.add(row, step="first")
        for number in range(600):
            graph.add(row, after=first, step=f"part {number}")
        run = await graph.start(id="wide-1")
        page = admin.get(f"workflows/{run}").text
        await app.cancel_workflow(run)
    words = text_of(page)
    assert "too large to be drawn step by step" in words and "Layer 2" in words and "600 steps, 0 ended" in words
    assert page.partition("<svg")[2].partition("</svg>")[0].count('class="step ') == 2
    assert page.count('data-row="step-') == 500 and "101 more are left out" in words
    assert '<input name="from_step"' not in page, "it has not ended"


async def test_the_history_has_the_runs_of_a_period(served: Served, admin: Reader) -> None:
    async with Penstock(served.database_url) as app:
        database = await app.database()
        await database.fetch("select penstock.open_lake('main', 'file:///main')")
        await database.fetch(
            """
            insert into penstock.run_history
            select
                'main', penstock.new_id(), 'past-' || n, 'past',
                (case when n = 2 then 'failed' else 'succeeded' end)::penstock.archived_job_status, null,
                now() - n * interval '3 hours', now() - n * interval '3 hours' + interval '90 seconds', 90, 4, 0, 4,
                (n = 2)::integer, 0, 0
            from generate_series(1, 3) as n
            """
        )
    words = text_of(admin.get("history?period=day").text)
    assert "Runs of workflows" in words and "past 3 2 1 0 1 min 30 s" in words
    assert words.index("past-1") < words.index("past-2") < words.index("past-3")
    assert "past" not in text_of(admin.get("history?period=hour").text)
    with Reader(served.base_url + "/") as reading:
        reading.log_in("narrow", "narrow-password")
        assert "past" not in text_of(reading.get("history?period=day").text)


async def started(app: Penstock, id: str) -> UUID:
    """Start a run: two steps behind the first, of which one has three jobs, one of which fails; and one behind both."""

    @app.job("step", max_attempts=1)
    async def step(job: Job[str]) -> None:
        if job.data == "2":
            raise ValueError("no image")

    graph = app.workflow("nightly")
    extract = graph.add(step, "extract", step="extract")
    transform = graph.add(step, "transform", after=extract, step="transform")
    images = graph.add_many(step, ["1", "2", "3"], after=extract, step="images")
    graph.add(step, "publish", after=[transform, images], step="publish")
    return await graph.start(id=id)
