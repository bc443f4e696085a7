"""The pages of what is wrong and of jobs: overview, jobs, a job, failures, operations, the audit."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit
from uuid import UUID

import asyncpg

from penstock import Penstock
from tests.http.dashboard_browser import Reader, links_of, text_of
from tests.http.dashboard_server import JOB, reader
from tests.http.http_server import Served
from tests.waiting import until


def test_the_overview_begins_with_what_is_wrong(dashboard: Served, admin: Reader) -> None:
    assert "60 jobs of mine failed in the last hour" in text_of(admin.get("").text)
    app = Penstock(dashboard.database_url)

    def shown() -> bool:
        # Tests of other pages of this server enqueue some too.
        (waiting,) = [count.ready for count in app.sync.counts() if count.name == "theirs"]
        words = f"{waiting} jobs of theirs wait, and no worker works on this type"
        return waiting >= 3 and words in text_of(admin.get("").text)

    try:
        until(shown, "that no worker works on the type")
    finally:
        app.sync.close()


def test_a_search_finds_a_field_of_the_payload(admin: Reader) -> None:
    text = admin.get("jobs", params={"status": "failed", "type": "mine", "field": "data.n = 17"}).text
    assert "no order 17 of mine" in text and "no order 16 of mine" not in text
    text = admin.get("jobs", params={"status": "unfinished", "field": "data.customer = 'mine'"}).text
    assert text.count('data-row="') == 3


def test_a_list_goes_on_by_pages_without_a_gap(admin: Reader) -> None:
    seen: list[str] = []
    link: str | None = "jobs?status=failed"
    while link:
        answer = admin.get(link)
        seen += [row.partition('"')[0] for row in answer.text.split('data-row="')[1:]]
        link = next((one for one in links_of(answer) if "after=" in one), None)
        # The last page links to the newest one too.
        link = link if 'rel="next"' in answer.text else None
    assert len(seen) == len(set(seen)) == 180


def test_a_job_shows_its_error_and_is_replayed_with_another_payload(admin: Reader) -> None:
    page = admin.get(f"jobs/{JOB}")
    text = text_of(page.text)
    assert "Attempt 1 failed" in text and "ValueError : no order 1 of theirs" in text and "Traceback of theirs" in text
    answer = admin.post(f"jobs/{JOB}/replay", data='{"customer": "corrected", "big": 12345678901234567890123}', force="yes")
    assert answer.status_code == 200 and "this is the new job" in answer.text
    assert "12345678901234567890123" in answer.text and JOB in answer.text
    again = admin.post(f"jobs/{JOB}/replay")
    assert again.status_code == 409, "an earlier replay waits"
    bad = admin.post(f"jobs/{JOB}/replay", data="{")
    assert bad.status_code == 400 and "not valid JSON" in bad.text


def test_selected_jobs_are_cancelled_and_the_audit_says_who_did_it(admin: Reader) -> None:
    page = admin.get("jobs", params={"status": "unfinished", "type": "mine"})
    ids = [row.partition('"')[0] for row in page.text.split('data-row="')[1:]][:2]
    answer = admin.client.post("jobs/selected", data={"id": ids, "action": "cancel", "back": "jobs?status=unfinished"})
    assert answer.url.path == "/jobs" and "2 of 2 jobs cancelled." in answer.text
    audit = admin.get("audit").text
    assert ids[0] in audit and "cancel" in audit and "iban" not in audit


def test_a_refused_change_is_in_the_audit_with_the_reason(admin: Reader) -> None:
    assert admin.post("schedules/absent/run").status_code == 404
    assert "refused: no such schedule" in text_of(admin.get("audit").text)


def test_failures_are_grouped_and_a_group_is_replayed(admin: Reader) -> None:
    page = admin.get("failures", params={"type": "mine"})
    assert "no order &lt;n&gt; of mine" in page.text
    (preview,) = [link for link in links_of(page) if "operations/new" in link]
    assert "60 jobs match now" in text_of(admin.get(preview).text)
    group = dict(parse_qsl(urlsplit(preview).query))
    assert "was started" in admin.post("operations/start", **group).text
    (failures,) = [link for link in links_of(page) if "jobs?status=failed" in link]
    assert "no order 7 of mine" in admin.get(failures).text


def test_an_operation_is_previewed_and_started(admin: Reader) -> None:
    page = admin.get("operations/new", params={"kind": "replay", "type": "secret", "status": "failed"})
    assert "60 jobs match now" in text_of(page.text)
    answer = admin.post("operations/start", kind="replay", type="secret", status="failed")
    assert answer.url.path == "/operations" and "was started" in answer.text
    assert "name = secret" in text_of(answer.text)


async def test_only_admins_stop_an_erasure_and_see_whom_it_removes(dashboard: Served, admin: Reader) -> None:
    async with Penstock(dashboard.database_url) as app:
        database = await app.database()
        # The erasure waits for those who reach the lake.
        await database.fetch("select penstock.open_lake('away', 'file:///away')")
        id = await database.fetchval("""select (penstock.start_erasure('{"key": "erased-person"}')).id""")
        with reader(dashboard, "enqueue") as reading:
            until(lambda: str(id) in admin.get("operations").text, "the erasure on the page")
            page = reading.get("operations").text
            assert str(id) in page and "erased-person" not in page and f"{id}/stop" not in page
            assert reading.post(f"operations/{id}/stop").status_code == 403
            assert await database.fetchval("select state from penstock.operations where id = $1", id) == "running"
        page = admin.get("operations").text
        assert "erased-person" in page and f"{id}/stop" in page
        assert "It is cancelled" in admin.post(f"operations/{id}/stop").text
        await database.fetch("select penstock.drop_lake('away')")


async def test_a_job_without_the_usual_fields_of_errors_and_logs_is_shown(dashboard: Served, admin: Reader) -> None:
    connection = await asyncpg.connect(dashboard.database_url)
    job = "0190b7a0-0000-7000-8000-0000000000aa"
    await connection.execute(
        """
        insert into penstock.archived_jobs
            (id, finished_at, created_at, run_after, status, attempt, max_attempts, priority, name, data, errors)
        values ($1, now() - interval '1 minute', now(), now(), 'cancelled', 1, 1, 0, 'mine', '{}', '[{"code": 5}, 7]')
        """,
        UUID(job),
    )
    await connection.close()
    answer = admin.get(f"jobs/{job}")
    assert answer.status_code == 200 and "Attempt ? failed" in answer.text
    assert admin.get(f"jobs?id={job}").status_code == 200


async def test_what_is_nested_deeply_takes_no_list_down(dashboard: Served, admin: Reader) -> None:
    deep = {depth: f'{"[" * depth}"deep-{depth}"{"]" * depth}' for depth in (300, 600, 2_000)}
    async with Penstock(dashboard.database_url) as app:
        database = await app.database()
        await app.create_job_type("deep")
        await app.create_stream("deep", 1)
        await app.topic("deep").declare()
        for text in deep.values():
            await database.fetch("select penstock.enqueue('deep', $1::text::jsonb)", text)
            await database.fetch("select penstock.publish('deep', $1::text::jsonb)", text)
            await database.fetch("select penstock.append_many('deep', array[$1::text::json])", text)
    with reader(dashboard, "read") as reading:
        for who in (admin, reading):
            for page, rows in (("jobs?status=unfinished&type=deep", 3), ("streams/deep/events", 3), ("topics/deep", 3)):
                answer = who.get(page)
                assert answer.status_code == 200 and answer.text.count('data-row="') == rows, (page, text_of(answer.text)[-500:])
            page = who.get("jobs?status=unfinished&type=deep").text
            for row in page.split('data-row="')[1:]:
                assert who.get("jobs/" + row.partition('"')[0]).status_code == 200
