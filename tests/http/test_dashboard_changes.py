"""Changes through the dashboard: priorities, signals, dead letters, mutes, operations that are started again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from html import escape, unescape

import asyncpg
import pytest

from penstock import Job, NewJob, Penstock
from penstock.testing import TemporaryDatabases, run_due_jobs
from tests.http.dashboard_browser import Reader, text_of
from tests.http.http_server import TOKEN, Served, serving
from tests.waiting import until

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture(scope="module")
def served(databases: TemporaryDatabases) -> Iterator[Served]:
    with databases.database() as url:
        asyncio.run(prepare(url))
        with serving(url) as served:
            yield served


async def prepare(url: str) -> None:
    async with Penstock(url) as app:
        await app.create_job_type("mail")
        await app.enqueue_many("mail", [{"n": n} for n in range(5)])
        await app.create_job_type("later")
        await app.enqueue_many("later", [NewJob(n, run_after=timedelta(days=n)) for n in range(4)])
        await app.create_job_type("bill", max_attempts=1)
        await app.enqueue_many("bill", [{"n": n} for n in range(3)])
        database = await app.database()
        claimed = await database.fetch("select id, lease from penstock.claim('w', array['bill'], 3)")
        for job, signature in zip(claimed, ("a" * 16, "a" * 16, "b" * 16), strict=True):
            await database.fetch(
                "select penstock.settle(array[$1::uuid], '{1}', array[$2::bigint], '{failed}', array[$3::jsonb])",
                job["id"], job["lease"], f'{{"type": "ValueError", "message": "no price", "signature": "{signature}"}}',
            )  # fmt: skip
        await app.create_stream("orders", 1)
        await app.create_stream("orders.dead", 1)
        dead = await app.find_stream("orders.dead")
        for number in range(4):
            told = {
                "stream": "orders", "partition": 0, "offset": 10 + number, "group": "billing",
                "error": f"ValueError: order {number} has no price", "failed_at": datetime.now(UTC).isoformat(),
            }  # fmt: skip
            await dead.append({"order": number}, key=f"c{number}", headers={"dead": told})
        await app.create_stream("returns", 1)
        await app.create_stream("returns.dead", 1)
        returns = await app.find_stream("returns.dead")
        # All who may append can write such headers.
        odd = {"group": "g" * 100_000, "error": "e" * 100_000, "failed_at": "0001-01-01T00:00:00+14:00"}
        for number, headers in enumerate(({"dead": odd}, {"erased": {"operation": "0190b7a0"}}, {"dead": {"group": "billing"}})):
            await returns.append({"back": number}, headers=headers)


@pytest.fixture
def admin(served: Served) -> Iterator[Reader]:
    with Reader(served.base_url + "/") as reading:
        reading.log_in("admin", TOKEN)
        yield reading


def rows(page: str) -> list[str]:
    return [row.partition('"')[0] for row in page.split('data-row="')[1:]]


def test_a_job_and_selected_jobs_get_another_priority(admin: Reader) -> None:
    first, second, *_ = rows(admin.get("jobs?status=unfinished&type=mail").text)
    assert "Its priority is -7." in admin.post(f"jobs/{first}/set-priority", priority="-7").text
    assert "It stays as it is" in admin.post(f"jobs/{first}/set-priority", priority="-7").text
    assert admin.post(f"jobs/{first}/set-priority").status_code == 400
    form = {"id": [first, second], "action": "set-priority", "priority": "-7"}
    answer = admin.client.post("jobs/selected", data=form)
    assert "1 of 2 jobs given another priority. 1 stayed as they are." in answer.text
    assert admin.client.post("jobs/selected", data={**form, "priority": ""}).status_code == 400
    assert "set-priority" in admin.get("audit").text


async def test_a_job_shows_its_steps_and_is_signalled(served: Served, admin: Reader) -> None:
    app = Penstock(served.database_url)

    @app.job("order")
    async def order(job: Job[str]) -> None:
        await job.step("pay", lambda: {"paid": 12})
        await job.wait_for("approved & signed", dict[str, str], timeout=None if job.data == "ada" else timedelta(days=7))

    async with app:
        receipt, timed = await order.enqueue("ada"), await order.enqueue("bob")
        await run_due_jobs(app)
        page = admin.get(f"jobs/{receipt.id}").text
        words = text_of(unescape(page))
        assert "Not before" not in words and "Not before" in text_of(admin.get(f"jobs/{timed.id}").text)
        assert "Durable steps" in words and "pay step done" in words and '"paid": 12' in words
        assert "approved & signed wait the job waits for this signal" in words
        action, form = f"jobs/{receipt.id}/signal", {"name": "approved & signed"}
        assert f'name="name" value="{escape(form["name"])}"' in page
        assert admin.post(action, **form, value="{").status_code == 400
        assert admin.post(action).status_code == 400, "it has no name"
        assert "Signalled." in admin.post(action, **form, value='{"by": "ada"}').text
        assert "has a signal of this name already" in admin.post(action, **form).text
        await run_due_jobs(app)
        assert (await app.find(receipt.id)).status == "succeeded"
    page = admin.get(f"jobs/{receipt.id}").text
    assert '"by": "ada"' in unescape(page) and f"{receipt.id}/signal" not in page
    assert "signal" in admin.get("audit").text


def test_all_that_match_get_another_priority_after_a_preview(admin: Reader) -> None:
    page = admin.get("jobs?status=unfinished&type=mail").text
    assert "operations/new?kind=set-priority&amp;status=unfinished&amp;type=mail" in page
    asked = admin.get("operations/new?kind=set-priority&status=unfinished&type=mail").text
    assert 'name="priority"' in asked and "jobs match now" not in text_of(asked)
    assert admin.get("operations/new?kind=set-priority&type=mail&priority=x").status_code == 400
    preview = admin.get("operations/new?kind=set-priority&status=unfinished&type=mail&priority=50").text
    assert "5 jobs match now" in text_of(preview)
    assert admin.post("operations/start", kind="set-priority", type="mail").status_code == 400
    started = admin.post("operations/start", kind="set-priority", type="mail", priority="50")
    assert "new_priority = 50" in text_of(started.text)
    until(lambda: "finished" in text_of(admin.get("operations").text), "the end of the operation")
    again = admin.get("operations").text.split('href="./operations/new?')[1].partition('"')[0].replace("&amp;", "&")
    assert "0 jobs match now" in text_of(admin.get(f"operations/new?{again}").text), "all have it"


def test_all_that_match_are_made_due_after_a_preview(admin: Reader) -> None:
    assert "kind=run-now" not in admin.get("jobs?status=in-progress").text
    page = admin.get("jobs?status=unfinished&type=later").text
    assert "operations/new?kind=run-now&amp;status=unfinished&amp;type=later" in page
    preview = admin.get("operations/new?kind=run-now&status=unfinished&type=later").text
    assert "3 jobs match now" in text_of(preview), "one of the four is due"
    assert "run-now" in text_of(admin.post("operations/start", kind="run-now", status="unfinished", type="later").text)
    until(
        lambda: "0 jobs match now" in text_of(admin.get("operations/new?kind=run-now&status=unfinished&type=later").text),
        "all are due",
    )
    assert "run-now all" in text_of(admin.get("audit").text)


def test_dead_letters_say_what_failed_and_are_replayed(admin: Reader) -> None:
    assert "Dead letters: 4" in text_of(admin.get("streams/orders").text)
    page = admin.get("streams/orders/dead")
    words = text_of(page.text)
    assert rows(page.text) == ["3", "2", "1", "0"]
    assert "ValueError: order 2 has no price" in words and "billing" in words and "4 were not replayed" in words
    assert 'streams/orders/events?partition=0&amp;offset=12">0/12</a>' in page.text
    # One that is ahead takes those before it along.
    answer = admin.post("streams/orders/replay-dead", partition="0", offset="1")
    assert "2 dead letters were appended again." in answer.text
    until(lambda: "2 were not replayed" in text_of(admin.get("streams/orders/dead").text), "the replay on the page")
    assert "1 dead letters were" in admin.post("streams/orders/replay-dead", partition="0", offset="0").text, "again"
    assert "2 dead letters were" in admin.post("streams/orders/replay-dead").text, "the rest"
    assert admin.post("streams/orders/replay-dead", partition="0", offset="4").status_code == 400
    until(lambda: "0 were not replayed" in text_of(admin.get("streams/orders/dead").text), "the replay on the page")
    events = unescape(admin.get("streams/orders/events").text)
    assert [events.count(f'{{"order":{number}}}') for number in range(4)] == [2, 1, 1, 1]


def test_the_mark_of_an_erased_event_is_not_replayed_nor_what_is_behind_it(admin: Reader) -> None:
    page = admin.get("streams/returns/dead").text
    assert rows(page) == ["2", "1", "0"] and len(page) < 20_000
    assert page.count('name="offset"') == 2, "the mark has no button"
    assert "1 dead letters were" in admin.post("streams/returns/replay-dead", partition="0", offset="1").text, "the one before"
    assert "0 dead letters were" in admin.post("streams/returns/replay-dead", partition="0", offset="1").text
    events = unescape(admin.get("streams/returns/events").text)
    assert [events.count(f'{{"back":{number}}}') for number in range(3)] == [1, 0, 0]
    assert "1 dead letters were" in admin.post("streams/returns/replay-dead", partition="0", offset="2").text


def test_muted_failures_are_no_longer_among_what_is_wrong(served: Served, admin: Reader) -> None:
    wrong = "jobs of bill failed in the last hour"
    assert f"3 {wrong}" in text_of(admin.get("").text)
    page = admin.get("failures?type=bill").text
    signature = next(row for row in rows(page) if row.startswith("bill/")).removeprefix("bill/")
    answer = admin.post("failures/mute", type="bill", signature=signature, only="bill")
    assert answer.url.query == b"type=bill" and "Muted" in answer.text
    assert "muted by admin" in text_of(admin.get("failures?type=bill").text)
    assert f"1 {wrong}" in text_of(admin.get("").text), "failures of another cause"
    assert "mute failures" in admin.get("audit").text
    assert "counts these failures of bill again" in admin.post("failures/unmute", type="bill", signature=signature).text
    assert f"3 {wrong}" in text_of(admin.get("").text)
    for form in ({}, {"type": "bill"}, {"type": "bill", "signature": "'; drop"}):
        assert admin.post("failures/mute", **form).status_code == 400


def test_a_stream_without_dead_letters_says_so(admin: Reader) -> None:
    assert "No dead letter is stored." in admin.get("streams/orders.dead/dead").text
    assert "Dead letters" not in text_of(admin.get("streams/orders.dead").text).replace("Dead letters of", "")


async def test_a_job_shows_its_trace_and_the_jobs_of_its_key(served: Served, admin: Reader) -> None:
    connection = await asyncpg.connect(served.database_url)
    async with connection.transaction():
        await connection.execute(f"set local penstock.traceparent = '00-{TRACE}-00f067aa0ba902b7-01'")
        id = await connection.fetchval("select penstock.enqueue('mail', '1', p_key => 'acme')")
    await connection.close()
    page = admin.get(f"jobs/{id}").text
    assert TRACE in page and "its finished jobs" in page
