"""The parts of the dashboard that do no input or output."""

from __future__ import annotations

import hashlib
import json
import random
import re
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote, unquote
from uuid import uuid4

import orjson
import pytest
from starlette.types import Message

from penstock.core.signatures import normalised, signature_of, signed
from penstock.errors import InvalidInput
from penstock.http.auth import Principal, Role
from penstock.http.dashboard.live import version_of
from penstock.http.dashboard.pages.history import others_of
from penstock.http.dashboard.pages.job import indented
from penstock.http.dashboard.pages.overview import as_old_as
from penstock.http.dashboard.pages.pools import cells
from penstock.http.dashboard.pages.types import example_of
from penstock.http.dashboard.poller import Reading
from penstock.http.dashboard.rendering import environment, pretty_json, span
from penstock.http.dashboard.request import DashboardRequest, split_address
from penstock.http.dashboard.searching import Wanted, parse_field
from penstock.http.dashboard.targets import find
from penstock.http.dashboard.view import View, whole_number
from penstock.http.jobs.access import job_shown_to, why_shown_to
from penstock.http.masking import MASK, Masking, Rule
from penstock.http.paths import with_escapes
from penstock.http.workers.access import shown_to
from penstock.jobs.failures import Failure
from penstock.jobs.http_queries import StoredJob
from penstock.jobs.records import HandlerRecord, Status, Why
from penstock.jobs.top import TopRecord
from penstock.pools.models import PoolMember
from penstock.worker import problems
from penstock.worker.fleets import WorkerRecord
from penstock.worker.overview import Overview
from penstock.worker.problems import Problem
from tests.http.nowhere import Nowhere, poller_of_nowhere

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
STORED = StoredJob(
    id=uuid4(), name="mine", status=Status.CANCELLED, attempt=1, max_attempts=1, priority=0, key=None, unique=None, data="1",
    created_at=NOW, run_after=NOW, expires_at=None, started_at=None, finished_at=NOW, worker=None, errors=None, result=None,
    progress=None, replay_of=None, cancel_requested_at=None, reason="dependency", replayed_by=[], time_limit_s=None, snoozes=0,
    log=None, encrypted=False, after=[], when="succeeded", workflow=None, updated_at=NOW,
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("data.customer = 'acme'", ("customer",), "acme"),
        ("data.order.id=42", ("order", "id"), "42"),
        ('customer = "a b"', ("customer",), "a b"),
        ("data.name = 'it''s'", ("name",), "it's"),
        ("data.data = 1", ("data",), "1"),
    ],
)
def test_a_field_of_the_payload_is_read(text: str, path: tuple[str, ...], value: str) -> None:
    assert parse_field(text) == (path, value)


@pytest.mark.parametrize("text", ["", "customer", "= 1", "data. = 1", "data.a == 1", "data.a = 'b", "a.b = "])
def test_a_field_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="cannot read the condition"):
        parse_field(text)


def test_the_address_of_a_search_is_the_search() -> None:
    given = {"status": "failed", "type": "a&b", "key": "acme", "since": "2026-01-01T00:00Z", "field": "data.x = 'y'"}
    wanted = Wanted.of(given)
    assert wanted.search.names == ("a&b",)
    assert wanted.search.since == datetime(2026, 1, 1, tzinfo=UTC)
    assert wanted.finished
    assert "type=a%26b" in wanted.address()
    assert wanted.operation() is None, "no operation goes by a field of the payload"
    filter = Wanted.of({name: given[name] for name in ("status", "type", "key")}).operation()
    assert filter is not None
    assert filter.as_json() == {"name": "a&b", "status": "failed", "key": "acme"}


@pytest.mark.parametrize("query", [{"status": "gone"}, {"since": "yesterday"}, {"id": "17"}, {"field": "x"}])
def test_a_search_that_cannot_be_read_is_refused(query: dict[str, str]) -> None:
    with pytest.raises(InvalidInput):
        Wanted.of(query)


def test_a_rule_masks_its_field_and_nothing_else() -> None:
    value = {"iban": 1, "customer": {"email": "a@b", "name": "n", "iban": [1, 2]}, "email": "top", "rows": [{"iban": 3, "n": 4}]}
    masking = Masking((Rule.of("iban"), Rule.of("customer.email"), Rule.of("other:name")))
    assert masking.shown("invoices", value) == {
        "iban": MASK, "customer": {"email": MASK, "name": "n", "iban": MASK}, "email": "top", "rows": [{"iban": MASK, "n": 4}],
    }  # fmt: skip
    assert masking.shown("other", {"name": 1}) == {"name": MASK}
    assert Masking().shown("invoices", value) == value
    assert masking.text("invoices", "words") == "words"


def test_a_rule_for_a_whole_type_masks_its_words_too() -> None:
    masking = Masking((Rule.of("invoices:*"),))
    assert masking.shown("invoices", {"a": 1}) == MASK
    assert masking.text("invoices", "words") == MASK
    assert masking.shown("other", {"a": 1}) == {"a": 1}
    assert masking.hides_words(None) and masking.hides_words("invoices") and not masking.hides_words("other")


@pytest.mark.parametrize(
    ("rule", "name", "path", "hidden"),
    [
        ("iban", None, ("customer", "iban"), True),
        ("iban", "t", ("customer", "iban", "x"), True),
        ("customer.email", "t", ("customer", "email"), True),
        ("customer.email", "t", ("email",), False),
        ("customer.email", "t", ("customer", "0", "email"), True),
        ("customer.email", "t", ("-1", "customer", "0", "email", "x"), True),
        ("rows.5.iban", "t", ("rows", "0", "5", "iban"), True),
        ("rows.iban", "t", ("rows", "x", "iban"), False),
        ("t:x", "t.dead", ("x",), True),
        ("t:x", "other", ("x",), False),
        ("t:x", None, ("x",), True),
        ("t:*", "t", ("anything",), True),
    ],
)
def test_a_masked_field_cannot_be_searched(rule: str, name: str | None, path: tuple[str, ...], hidden: bool) -> None:
    assert Masking((Rule.of(rule),)).hides(name, path) is hidden


@pytest.mark.parametrize("text", ["", "*", "a..b", ":x", "t:", "."])
def test_a_rule_that_masks_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no field to mask"):
        Rule.of(text)


def test_indentation_changes_no_sign_of_a_document() -> None:
    seed = random.randrange(1 << 30)
    made = random.Random(seed)

    def document(depth: int) -> Any:
        kind = made.randrange(7 if depth < 4 else 5)
        if kind < 5:
            return made.choice([None, True, 10**30, 0.1, "", 'a"b\\', "{[,:]}", "ä\n", 12345678901234567890])
        if kind == 5:
            return [document(depth + 1) for _ in range(made.randrange(4))]
        return {made.choice(["a", 'b"', "c{"]): document(depth + 1) for _ in range(made.randrange(4))}

    for _ in range(300):
        text = json.dumps(document(0))
        shown = indented(text)
        assert json.loads(shown) == json.loads(text), f"seed {seed}: {text}"
        assert "".join(shown.split()) == "".join(text.split()), f"seed {seed}: {text}"
    assert indented('{"a":{},"b":[],"c":[1]}') == '{\n  "a": {},\n  "b": [],\n  "c": [\n    1\n  ]\n}'


def test_the_indentation_of_a_deep_document_is_bounded() -> None:
    text = "[" * 900 + "1," * 10_000 + "1" + "]" * 900
    shown = indented(text)
    assert "".join(shown.split()) == text
    assert len(shown) < 60 * len(text)


def nested(depth: int) -> str:
    return '{"a":' * depth + "17" + "}" * depth


@pytest.mark.parametrize("depth", [300, 600, 2_000])
def test_a_document_that_is_nested_too_deeply_is_masked_or_shown_and_no_error(depth: int) -> None:
    masking = Masking((Rule.of("iban"),))
    shown = masking.json_text("invoices", nested(depth))
    assert shown in (MASK, nested(depth))
    assert (shown == MASK) == (depth == 2_000) or depth == 600, "600 levels may be too many for the stack"
    assert Masking().json_text("invoices", nested(depth)) == nested(depth)


def test_a_masked_document_keeps_its_numbers() -> None:
    assert Masking((Rule.of("iban"),)).json_text("t", '{"n": 12345678901234567890123, "iban": 1}') == (
        f'{{"n":12345678901234567890123,"iban":"{MASK}"}}'
    )


@pytest.mark.parametrize("value", [{"n": 1 << 70}, [[[]]], orjson.loads(nested(300))])
def test_every_filter_can_be_shown(value: Any) -> None:
    assert json.loads(pretty_json(value)) == value


def failure(name: str, message: str, minutes: int) -> Failure:
    return Failure(uuid4(), name, NOW - timedelta(minutes=minutes), None, "ValueError", message)


def test_signatures_are_those_of_the_history_pipeline() -> None:
    assert normalised("  user 7c9e6679-7425-40de-944b-e07fc1f90ae7 at 10.0.0.1:80\nmore") == "user <id> at <address>"
    # md5 of the type, a newline and the normalised message, as Spark makes it.
    assert (
        signature_of("ValueError", "no order 17")
        == signature_of("ValueError", "no order 18")
        != signature_of("KeyError", "no order 17")
    )
    assert signature_of("ValueError", "no order 17") == hashlib.md5(b"ValueError\nno order <n>").hexdigest()[:16]


@pytest.mark.parametrize(
    ("error", "added"),
    [
        (
            '{"type": "ValueError", "message": "no order 17"}',
            {"signature": signature_of("ValueError", "no order <n>"), "version": "v2"},
        ),
        ('\n {"message": "x", "version": "v1"}', {"signature": signature_of("Error", "x")}),
        ('{"message": "x", "signature": "own"}', {"version": "v2"}),
        ('{"type": "E", "penstock": {"v": 1}}', {}),
        ('{"type": 1, "message": "x"}', {}),
        ('{"message": null}', {}),
        ("[1]", {}),
        ("nothing", None),
    ],
)  # fmt: skip
def test_an_error_gets_its_signature_and_stays_what_it_was(error: str, added: dict[str, str] | None) -> None:
    found = signed(error, "v2")
    if not added:
        assert found == error
    else:
        assert json.loads(found) == json.loads(error) | added


def test_numbers_of_an_error_stay_as_they_are() -> None:
    assert str(1 << 70) in signed(f'{{"message": "x", "n": {1 << 70}}}')


def load(name: str, ready: int, waited: float | None = 1.0) -> TopRecord:
    return TopRecord(name, None, ready, 0, 0, waited, 0, 1.0)


def test_a_type_that_no_worker_works_on_is_a_problem() -> None:
    found = problems.of_types([load("a", 3), load("b", 0, None)], [], [])
    assert [(one.level, one.to) for one in found] == [("problem", "types/a")]
    assert "no worker works on this type" in found[0].text


def test_problems_come_before_warnings() -> None:
    order = problems.worst_first([problems.Problem("warning", "w", ""), problems.Problem("problem", "p", "")])
    assert [one.text for one in order] == ["p", "w"]


def test_of_many_types_with_one_problem_the_fullest_are_named() -> None:
    found = problems.of_types([load(f"t{n}", 1_000 - n) for n in range(100)], [], [])
    assert len(found) == 21
    assert found[0].text.startswith("1,000 jobs of t0 wait")
    assert (found[-1].level, found[-1].text, found[-1].to) == (
        "problem",
        "The same holds for at least 80 more job types",
        "types",
    )


def test_failures_of_the_last_hour_are_counted() -> None:
    found = problems.of_failures([failure("a", "x", 1), failure("a", "x", 2), failure("a", "x", 90)], NOW, whole=True)
    assert [one.text for one in found] == ["2 jobs of a failed in the last hour"]


def test_a_form_begins_with_what_the_schema_says() -> None:
    schema = {
        "$defs": {"Address": {"type": "object", "properties": {"city": {"type": "string"}}}},
        "type": "object",
        "properties": {
            "id": {"type": "string"}, "weight": {"type": "number", "default": 1.5}, "to": {"$ref": "#/$defs/Address"},
            "kind": {"enum": ["parcel", "letter"]}, "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "tags": {"type": "array"},
        },
    }  # fmt: skip
    made = orjson.loads(example_of(HandlerRecord("job", "a", schema)))
    assert made == {"id": "", "weight": 1.5, "to": {"city": ""}, "kind": "parcel", "note": "", "tags": []}
    endless = {"$ref": "#"}
    assert orjson.loads(example_of(HandlerRecord("job", "a", endless))) is None
    assert orjson.loads(example_of(None)) == {}


def test_the_map_of_a_pool_has_a_square_for_each_slot() -> None:
    members = [PoolMember("w1", slots=[0, 2], going=[2]), PoolMember("w2", slots=[1], coming=[2]), PoolMember(None, slots=[3])]
    assert [(cell.slot, cell.owner, cell.moves) for cell in cells(members)] == [
        (0, 1, False), (1, 2, False), (2, 1, True), (3, 0, False),
    ]  # fmt: skip
    assert cells([PoolMember("w1", slots=["acme"])]) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0.0123, "12 ms"),
        (4.25, "4.2 s"),
        (59.6, "1 min"),
        (3_725, "1 h 2 min"),
        (90_000, "1 d 1 h"),
        (86_401, "1 d"),
    ],
)
def test_spans_have_at_most_two_units(seconds: float | None, text: str) -> None:
    assert span(seconds) == text


def test_a_path_finds_a_page_or_an_action() -> None:
    page, parameters = find("/jobs/selected")
    action, _ = find("/jobs/selected", posted=True)
    assert page is not None and page.page is not None and parameters == {"id": "selected"}
    assert action is not None and action.action is not None
    assert find("/streams/a%2Fb/events")[1] == {"name": "a/b"}
    for path in ("/v1/jobs", "/docs", "/metrics", "/healthz", "/home", "/jobber/queue", "/jobs/a/b/c", "/\n", "/jobs\n"):
        assert find(path) == (None, {})


def test_every_template_can_be_read() -> None:
    templates = environment().list_templates()
    assert len(templates) > 20
    for template in templates:
        assert environment().get_template(template).name == template


def test_templates_have_neither_inline_scripts_nor_styles() -> None:
    for template in environment().list_templates():
        loader = environment().loader
        assert loader is not None
        text = loader.get_source(environment(), template)[0]
        assert " style=" not in text, template
        assert "<style" not in text, template
        assert re.search(r"\son\w+=", text) is None, template
        assert text.count("<script") == text.count('<script type="module" src="{{ base }}static/'), template


def test_contents_that_differ_have_other_versions() -> None:
    assert version_of("a") == version_of("a") != version_of("b")


def request_of(headers: dict[str, str] | None = None, **scope: Any) -> DashboardRequest:
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
    given = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": pairs, **scope}

    async def nothing() -> Message:
        return {"type": "http.disconnect"}

    return DashboardRequest(given, nothing)


def test_a_cookie_that_cannot_be_read_hides_no_other() -> None:
    request = request_of({"cookie": 'a={"x":1}; b=[2]; penstock_session_80=token', "host": "localhost:80"})
    assert request.cookies.get(request.session_cookie) == "token"


def test_no_page_without_encryption_can_set_the_cookie_of_an_encrypted_session() -> None:
    assert request_of(scheme="https").session_cookie == "__Secure-penstock_session"
    assert request_of().session_cookie == "penstock_session"


def test_the_cookie_of_what_was_done_is_for_the_dashboard_alone() -> None:
    assert request_of(path="/ops/jobs/selected", root_path="/ops").top == "/ops/"
    assert request_of(path="/jobs/selected").top == "/"


@pytest.mark.parametrize("name", ["a?b", "a#b", "a%b", "a/b", "a b", "ü", "a%2Fb", "a:b", "?"])
def test_the_address_of_a_page_leads_to_it(name: str) -> None:
    raw = f"/types/{quote(name, safe='')}"
    scope = with_escapes({"path": unquote(raw), "raw_path": raw.encode()})
    request = request_of(path=scope["path"], query_string=b"x=%3F")
    address = split_address(request.relative)
    assert address is not None and address[1] == "x=%3F"
    target, parameters = find(address[0])
    assert target is not None and (target.template, parameters) == ("/types/{name}", {"name": name})


@pytest.mark.parametrize("address", ["//[", "//evil.example/jobs", "https://evil.example/jobs", "javascript:x"])
def test_an_address_of_elsewhere_is_no_page(address: str) -> None:
    assert split_address(address) is None


@pytest.mark.parametrize(
    ("text", "number"), [("17", 17), ("\N{SUPERSCRIPT TWO}", None), ("9" * 5000, None), ("", None), ("-1", None)]
)
def test_a_number_of_an_address_is_one_of_the_database(text: str, number: int | None) -> None:
    assert whole_number(text) == number


@pytest.mark.parametrize("text", ["9" * 20, "-" + "9" * 20, "9" * 5000, "x", "1.5"])
def test_a_number_of_a_form_is_one_of_the_database(text: str) -> None:
    nowhere: Any = Nowhere()
    view = View(
        nowhere, poller_of_nowhere(), Principal("u", Role.ADMIN), Masking(), "/", {}, {}, {"n": [text], "seven": [" -7 "]}
    )
    assert (view.number("seven"), view.number("none")) == (-7, None)
    with pytest.raises(InvalidInput, match="n is not a whole number of 64 bits"):
        view.number("n")


@pytest.mark.parametrize("text", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
def test_a_time_that_no_time_zone_can_have_is_shown(text: str) -> None:
    shown = environment().from_string("{{ moment | at }}").render(moment=datetime.fromisoformat(text))
    assert shown == text.replace("T", " ")


@pytest.mark.parametrize(
    ("period", "others"),
    [
        ("hour", ["before", "day", "week", "month"]), ("day", ["before", "day", "week", "month"]),
        ("week", ["before", "week", "month"]), ("month", ["before", "month"]),
    ],
)  # fmt: skip
def test_a_period_is_compared_with_one_that_it_does_not_overlap(period: str, others: list[str]) -> None:
    assert list(others_of(period)) == others


def test_an_overview_is_as_old_as_its_oldest_reading_and_says_when_it_could_not_be_read() -> None:
    none: dict[str, Any] = dict.fromkeys((field.name for field in fields(Overview)), 0)
    warning = Problem("warning", "something", "")
    found = Overview(**none | {"at": NOW, "problems": [warning]})
    old, young = Reading(1, NOW - timedelta(minutes=4), 0.1), Reading(2, NOW, 0.1)
    shown = as_old_as([young, old], found)
    assert (shown.at, shown.problems) == (old.at, [warning])
    late = as_old_as([young, replace(old, problem="no connection to 10.0.0.7")], found)
    assert [problem.level for problem in late.problems] == ["problem", "warning"]
    assert "is old" in late.problems[0].text and "10.0.0.7" not in repr(late)


def test_a_user_of_some_types_is_not_told_for_what_a_job_waited() -> None:
    error = {"type": "DependencyNotSucceeded", "message": "it was to run after job 7 of theirs, which failed", "job": "7"}
    own = {"type": "ValueError", "message": "mine", "n": 1 << 70}
    job = replace(STORED, errors=json.dumps([own, error]))
    why = Why("dependencies", "It waits for the job group theirs.", NOW, None, uuid4(), None, None, None, 1, None)
    narrow, all = Principal("narrow", Role.ADMIN, frozenset(["mine"])), Principal("all", Role.READ)
    assert job_shown_to(all, job) == job and why_shown_to(all, why) == why
    shown = job_shown_to(narrow, job)
    assert shown.errors is not None and "theirs" not in shown.errors
    assert json.loads(shown.errors) == [own, {**error, "message": "a job after which it was to run did not succeed"}]
    assert "theirs" not in str(why_shown_to(narrow, why))
    behind = replace(why, reason="behind")
    assert why_shown_to(narrow, behind) == behind
    assert job_shown_to(narrow, replace(job, errors='["DependencyNotSucceeded"')).errors is None


def worker_of(**given: Any) -> WorkerRecord:
    none: dict[str, Any] = {
        "id": "w", "host": "h", "pid": 1, "fleet": None, "names": [], "concurrency": 1, "state": "running", "in_flight": 0,
        "alive": True, "started_at": NOW, "seen_at": NOW, "silent_s": 0.0, "blocked_since": None, "blocked_by": None,
        "halted": {}, "no_key": {}, "pools": [], "topics": [], "consumers": [], "schedules": [], "leader_tasks": [],
        "version": None, "code_version": None,
    }  # fmt: skip
    return WorkerRecord(**none | given)


def test_a_user_of_some_types_sees_nothing_of_what_a_shared_worker_does_for_others() -> None:
    both = ["mine", "theirs"]
    worker = worker_of(
        names=both, pools=both, topics=both, schedules=both, consumers=["mine/a", "theirs/a"], leader_tasks=["theirs"],
        halted={"mine/a": "mine", "theirs/a": "theirs"}, no_key={"mine": None, "theirs": "k"}, blocked_since=NOW,
        blocked_by="theirs 0190b7a0",
    )  # fmt: skip
    shown = shown_to(Principal("narrow", Role.ADMIN, frozenset(["mine"])), worker)
    assert "theirs" not in repr(shown)
    assert (shown.names, shown.halted, shown.no_key) == (["mine"], {"mine/a": "mine"}, {"mine": None})
    assert "theirs" not in repr(problems.of_workers([shown]))
    assert shown_to(Principal("all", Role.READ), worker) == worker
