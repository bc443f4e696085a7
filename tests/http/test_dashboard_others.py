"""The pages of job types, streams, topics and pools."""

from __future__ import annotations

import re

from penstock import Penstock
from tests.http.dashboard_browser import Reader, links_of, text_of
from tests.http.http_server import Served
from tests.waiting import until


def test_a_type_is_paused_changed_and_resumed(admin: Reader) -> None:
    assert "Paused" in text_of(admin.post("types/mine/pause").text)
    assert "Resumed." in admin.post("types/mine/resume").text
    answer = admin.post(
        "types/mine/change", max_attempts="7", concurrency="5", rate_limit="10", rate_period_s="60", max_waiting=""
    )
    assert "Changed." in answer.text and "of 5" in text_of(answer.text)
    assert admin.post("types/mine/change", max_attempts="0").status_code == 400
    assert admin.post("types/mine/change", max_attempts="x").status_code == 400


async def test_a_long_list_has_pages(dashboard: Served, admin: Reader) -> None:
    async with Penstock(dashboard.database_url) as app:
        database = await app.database()
        await database.fetch("select penstock.create_job_type(format('z-%s', n)) from generate_series(1, 120) as n")
        names = sorted(record.name for record in await app.job_types())
    until(lambda: "Next page" in admin.get("types").text, "the new types")
    seen: list[str] = []
    address = "types"
    while address:
        page = admin.get(address)
        rows = re.findall(r'<tr data-row="([^"]+)">', page.text)
        assert 0 < len(rows) <= 50
        seen += rows
        assert ("First page" in page.text) == (address != "types")
        address = next((link for link in links_of(page) if "types?after=" in link), "")
    assert seen == names
    behind = text_of(admin.get("types?after=zzz").text)
    assert "First page" in behind and "There is no job type yet" not in behind


def test_a_job_is_enqueued_by_the_form(admin: Reader) -> None:
    answer = admin.post("types/theirs/new", data='{"customer": "by form"}', key="k", priority="-5")
    assert answer.url.path.startswith("/jobs/") and "by form" in answer.text and "The job is queued." in answer.text


def test_a_stream_is_browsed_and_takes_an_event(admin: Reader) -> None:
    answer = admin.post("streams/mine-stream/append", data='{"text": "appended by form"}', key="k")
    assert "Appended at offset 1 of partition 0" in answer.text
    assert "appended by form" in admin.get("streams/mine-stream/events").text
    assert "appended by form" not in admin.get("streams/mine-stream/events?offset=0&key=mine").text


async def test_a_group_skips_the_event_at_which_it_stands(dashboard: Served, admin: Reader) -> None:
    async with Penstock(dashboard.database_url) as app:
        database = await app.database()
        await database.fetch("select penstock.declare_consumer_group('mine-stream', 'billing', 'earliest')")
        await database.fetch("select penstock.pause_partitions('mine-stream', 'billing', null, 'poison')")
    until(lambda: "poison" in admin.get("streams/mine-stream").text, "the pause on the page")
    answer = admin.post("streams/mine-stream/groups/billing/skip", partition="0", offset="0")
    assert "billing goes on behind offset 0 of partition 0" in answer.text
    assert admin.post("streams/mine-stream/groups/billing/skip", partition="0", offset="0").status_code == 400
    preview = admin.get("streams/mine-stream/groups/billing/seek", params={"to": "earliest"})
    assert "1 events come again" in text_of(preview.text)
    assert "1 partitions of billing were moved" in admin.post("streams/mine-stream/groups/billing/seek-to", to="earliest").text


def test_a_message_is_published_and_its_outcomes_are_shown(admin: Reader) -> None:
    answer = admin.post("topics/mine-topic/publish", data='{"text": "by form"}')
    assert "/messages/" in answer.url.path and "mine-client" in answer.text
    assert "by form" in admin.get("topics/mine-topic").text
    assert "other gets each message" in admin.post("topics/mine-topic/subscribe", client_id="other").text
    assert "other gets no more messages" in admin.post("topics/mine-topic/unsubscribe", client_id="other").text


def test_the_outcomes_of_a_message_are_those_of_its_topic(admin: Reader) -> None:
    id = admin.post("topics/mine-topic/publish", data='{"text": "outcomes"}').url.path.rpartition("/")[2]
    assert admin.get(f"topics/theirs-topic/messages/{id}").status_code == 404
    assert admin.get(f"topics/mine-topic/messages/{id}").status_code == 200


def test_a_key_of_a_pool_is_paused_and_resumed(admin: Reader) -> None:
    assert "Paused" in text_of(admin.post("pools/mine-pool/key", key="acme", action="pause").text)
    assert "The key goes on." in admin.post("pools/mine-pool/key", key="acme", action="resume").text
    assert "Started." in admin.post("pools/mine-pool/standing", key="acme", action="start").text
    assert "acme" in admin.get("pools/mine-pool").text
