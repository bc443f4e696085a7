"""Masking: what users may not see of payloads, errors and logs."""

from __future__ import annotations

from functools import partial
from hashlib import md5

from penstock import Penstock
from penstock.http.auth import Principal, Role
from penstock.http.dashboard.pages.jobs import search
from penstock.http.dashboard.poller import Poller
from penstock.http.dashboard.view import View
from penstock.http.masking import MASK, Masking, Rule
from tests.http.dashboard_browser import Reader, text_of
from tests.http.dashboard_server import JOB, reader
from tests.http.http_server import Served
from tests.waiting import until


def shows(reading: Reader, page: str, words: str) -> bool:
    return words in reading.get(page).text


async def test_the_words_of_a_masked_type_are_hidden_on_all_pages(dashboard: Served, admin: Reader) -> None:
    async with Penstock(dashboard.database_url) as app:
        database = await app.database()
        await app.create_stream("secret", 1)
        await app.create_stream("secret.dead", 1)
        await (await app.find_stream("secret.dead")).append({"n": "dead-words"})
        await database.fetch("select penstock.declare_consumer_group('secret', 'billing', 'earliest')")
        await database.fetch("select penstock.pause_partitions('secret', 'billing', null, 'told-words')")
    pages = {"streams/secret": "told-words", "streams/secret.dead/events": "dead-words", "failures?type=secret": "ValueError",
             "jobs?status=failed&type=secret": "ValueError"}  # fmt: skip
    with reader(dashboard, "work") as reading:
        for page, words in pages.items():
            until(partial(shows, admin, page, words), f"{words} on {page}")
            hidden = reading.get(page).text
            assert words not in hidden and "•••" in hidden, page


def test_masked_fields_are_shown_to_admins_alone(dashboard: Served, admin: Reader) -> None:
    events = "streams/theirs-stream/events"
    with reader(dashboard, "work") as reading:
        for path in (f"jobs/{JOB}", "jobs?status=failed&type=theirs", events):
            assert "DE42" in admin.get(path).text, path
            page = reading.get(path).text
            assert "DE42" not in page and "•••" in page, path
        refused = reading.get("jobs", params={"field": "data.iban = 'DE42'"}).text
        assert "the field iban is masked for you" in refused
        assert reading.get(f"jobs/{JOB}/edit").status_code == 400
        assert reading.post(f"jobs/{JOB}/replay", data="{}").status_code == 400
        hidden = reading.get("jobs?status=failed&type=secret").text
        assert "of secret" not in hidden and "•••" in hidden
        assert "of secret" not in reading.get("failures?type=secret").text
        assert "errors of some job types are hidden" in reading.get("jobs", params={"error": "no order"}).text


async def test_the_filters_of_subscribers_are_masked_as_payloads_are(dashboard: Served, admin: Reader) -> None:
    async with Penstock(dashboard.database_url) as app:
        await app.topic("payments").declare()
        await (await app.find_topic("payments")).subscribe("auditor", filter={"customer": {"iban": "DE99"}, "kind": "large"})
    until(partial(shows, admin, "topics/payments", "DE99"), "the subscriber")
    with reader(dashboard, "work") as reading:
        page = reading.get("topics/payments").text
        assert "DE99" not in page and "•••" in page and "large" in page


async def test_the_results_of_steps_are_masked_as_payloads_are(dashboard: Served, admin: Reader) -> None:
    async with Penstock(dashboard.database_url) as app:
        ids = [await app.enqueue(name, {}) for name in ("mine", "secret")]
        for receipt in ids:
            await app.signal(receipt.id, "approved", {"iban": "DE44", "by": "grace"})
    for receipt, words in zip(ids, (("DE44", "grace"), ("grace", "by")), strict=True):
        page = admin.get(f"jobs/{receipt.id}").text
        assert "approved" in page and all(word in page for word in words)
    with reader(dashboard, "work") as reading:
        page = reading.get(f"jobs/{ids[0].id}").text
        assert "DE44" not in page and "grace" in page and MASK in page
        page = reading.get(f"jobs/{ids[1].id}").text
        assert "approved" in page and "grace" not in page and MASK in page


def test_errors_that_are_hidden_are_not_counted_either_and_their_signatures_lead_to_them(dashboard: Served) -> None:
    signature = md5(b"secret", usedforsecurity=False).hexdigest()[:16]
    with reader(dashboard, "work") as reading:
        link = f"jobs?status=failed&amp;type=secret&amp;error={signature}"
        assert link in reading.get("failures?type=secret").text
        found = reading.get(f"jobs?status=failed&type=secret&error={signature}").text
        assert found.count('data-row="') == 50 and "of secret" not in found
        page = "operations/new?kind=replay&type=secret"
        assert "60 jobs match now" in text_of(reading.get(f"{page}&error={signature}").text)
        refused = reading.get(f"{page}&error=ValueError")
        assert refused.status_code == 400 and "errors of some job types are hidden" in refused.text
        started = reading.post("operations/start", kind="replay", type="secret", error="ValueError")
        assert started.status_code == 400
        assert "are hidden" in reading.get(f"jobs?status=unfinished&type=secret&error={signature}").text


async def test_a_list_keeps_no_whole_payload_and_is_read_for_each_masking(dashboard: Served) -> None:
    async with Penstock(dashboard.database_url) as app:
        poller = Poller(app)
        await app.enqueue("mine", {"iban": "DE43", "text": "x" * 10_000}, key="large")
        for rules, text in (((), "DE43"), ((Rule.of("iban"),), MASK), ((), "DE43")):
            query = {"status": "unfinished", "key": "large"}
            view = View(app, poller, Principal("u", Role.READ), Masking(rules), "/jobs", {}, query)
            [(job, payload, _)] = (await search(view)).values["jobs"]
            assert text in payload and len(payload) < 200
            assert job.data == ""
        await poller.close()
