"""The pages and actions of the dashboard tell a user of some job types nothing of others, not even that there is something."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import AsyncIterator, Iterator
from urllib.parse import quote
from uuid import uuid4

import pytest

from penstock.http.dashboard.pages import ACTIONS, PAGES
from tests.http.tenants import Tenants, tenants

# What a page or form takes beside its path, and names: the value of the other tenant by kind.
FIELDS: dict[str, dict[str, str]] = {
    "jobs": {"type": "word", "key": "word", "id": "job", "group": "group", "error": "word", "after": "word"},
    "failures": {"type": "word"},
    "pools/{name}": {"key": "word"},
    "types": {"after": "word"},
    "streams/{name}/events": {"key": "word"},
    "operations/new": {"type": "word", "key": "word", "group": "group", "error": "word"},
    "operations/start": {"type": "word", "group": "group"},
    "jobs/selected": {"id": "job"},
    "failures/mute": {"type": "word"},
    "failures/unmute": {"type": "word"},
    "pools/{name}/key": {"key": "word"},
    "pools/{name}/standing": {"key": "word"},
    "pools/{name}/drain": {"worker": "word"},
    "topics/{name}/unsubscribe": {"client_id": "word"},
}
BASE: dict[str, dict[str, str]] = {
    "operations/new": {"kind": "cancel", "type": "mine"},
    "operations/start": {"kind": "cancel", "type": "mine", "key": "none"},
    "jobs/selected": {"action": "cancel"},
    "failures/mute": {"signature": "0123456789abcdef"},
    "failures/unmute": {"signature": "0123456789abcdef"},
    "pools/{name}/key": {"action": "resume"},
    "pools/{name}/standing": {"action": "stop"},
}
# The slot of a key is its hash, which differs by key in a pool of the user's own.
_VARIES = re.compile(r"<time[^>]*>[^<]*</time>|data-(version|at|content)=\"[^\"]*\"|[0-9]+ (s|ms)\b|slot [0-9]+")


class Stopped:
    """A clock that stands still, so that a reading is kept until a change, however slow the machine is."""

    def monotonic(self) -> float:
        return 10_000.0


@pytest.fixture
async def asked(url: str) -> AsyncIterator[Tenants]:
    async with tenants(url) as application:
        for who in ("mine", "theirs"):
            for method, path, body in (
                ("POST", "/v1/jobs", {"name": who, "delivery_strategy": "at_least_once", "attempts": 3, "concurrency": 5}),
                ("POST", "/v1/pools", {"name": f"{who}-pool", "slots": 4}),
                ("POST", f"/v1/pools/{who}-pool/jobs", {"key": who, "data": f"secret of {who}"}),
                ("POST", "/v1/streams", {"name": who, "partitions": 1}),
                ("POST", f"/v1/streams/{who}/events", {"data": f"secret of {who}", "key": who}),
                ("POST", "/v1/topics", {"name": who}),
                ("PUT", f"/v1/topics/{who}/subscribers/{who}", {}),
                ("POST", "/v1/workflows", {"name": who}),
            ):
                answer, _ = await application.ask("admin", method, path, json=body)
                assert answer.status_code < 300, answer.text
        yield application


def tried() -> Iterator[tuple[str, str, str, str, str]]:
    """Method, path, where the parameter is, its name, and its kind."""
    for method, targets in (("GET", PAGES), ("POST", ACTIONS)):
        for target in targets:
            for name in re.findall(r"{(\w+)}", target.path):
                kind = "word"
                if name == "id":
                    first = target.path.partition("/")[0]
                    kind = {"jobs": "job", "operations": "operation", "workflows": "group", "topics": "message"}.get(
                        first, "word"
                    )
                yield method, target.path, "path", name, kind
            for name, kind in FIELDS.get(target.path, {}).items():
                yield method, target.path, "field", name, kind


class Values:
    """Values of the other tenant's by kind, and such that there are not: of jobs, which are kept by id, each time others."""

    def __init__(self, asked: Tenants, operation: str, message: str, group: str) -> None:
        self._asked = asked
        self._theirs = {"word": "theirs", "operation": operation, "message": message, "group": group}
        self._numbers = itertools.count(1)

    async def theirs(self, kind: str) -> list[str]:
        return [await self._job(cancelled=False), await self._job(cancelled=True)] if kind == "job" else [self._theirs[kind]]

    def absent(self, kind: str) -> str:
        # In the order of names it is where that of the other tenant is.
        return f"theirr{next(self._numbers)}" if kind == "word" else str(uuid4())

    async def _job(self, *, cancelled: bool) -> str:
        id = str(uuid4())
        body = {"data": "secret of theirs", "key": "theirs"}
        answer, _ = await self._asked.ask("admin", "PUT", f"/v1/jobs/theirs/job_{id}", json=body)
        assert answer.status_code < 300, answer.text
        if cancelled:
            answer, _ = await self._asked.ask("admin", "POST", f"/v1/jobs/theirs/job_{id}/cancel")
            assert answer.status_code < 300, answer.text
        return id


async def test_no_page_and_no_action_tells_of_another_tenant(asked: Tenants, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.http.dashboard.poller.time", Stopped())
    body = {"kind": "replay", "filter": {"name": "theirs"}}
    started, _ = await asked.ask("admin", "POST", "/v1/operations", json=body)
    published, _ = await asked.ask("admin", "POST", "/v1/topics/theirs/messages", json={"data": "secret of theirs"})
    group, _ = await asked.ask("admin", "GET", "/v1/workflows/theirs")
    values = Values(asked, started.json()["id"], published.json()["id"], group.json()["id"])
    wrong: list[str] = []
    for method, path, place, name, kind in tried():
        answers = []
        # The first request reads what is kept for all.
        for value in [values.absent(kind), *await values.theirs(kind), values.absent(kind)]:
            own = "mine-pool" if path.startswith("pools") else "mine"
            given = value if kind != "word" or place == "field" or not path.startswith("pools") else f"{value}-pool"
            names = dict.fromkeys(re.findall(r"{(\w+)}", path), own) | ({name: given} if place == "path" else {})
            fields = BASE.get(path, {}) | ({name: value} if place == "field" else {})
            url = "/" + path.format_map({word: quote(said, safe="") for word, said in names.items()})
            sent = {"params" if method == "GET" else "data": fields}
            answer, statements = await asked.ask("narrow", method, url, **sent)
            assert answer.status_code < 500, (path, name, answer.text)
            assert "secret of theirs" not in answer.text, (path, name)
            # Whether jobs have changed is asked once for all.
            own_statements = [one for one in statements if "job_marks" not in one]
            text = _VARIES.sub("", answer.text.replace(given, "SAID").replace(value, "SAID"))
            answers.append((answer.status_code, own_statements, text))
        *_, last = answers
        wrong += [f"{method} {path} {name}:\n{told(last)}\n{told(one)}" for one in answers[1:-1] if one != last]
    assert not wrong, "\n".join(wrong)


def told(answer: tuple[int, list[str], str]) -> str:
    status, statements, text = answer
    return f"  {status} {statements} {hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()}"


async def test_operations_of_others_do_not_take_the_place_of_a_users_own(asked: Tenants) -> None:
    own, _ = await asked.ask(
        "admin", "POST", "/v1/operations", json={"kind": "replay", "filter": {"name": "mine", "key": "own-key"}}
    )
    assert own.status_code == 202, own.text
    for _ in range(100):
        answer, _ = await asked.ask("admin", "POST", "/v1/operations", json={"kind": "replay", "filter": {"name": "theirs"}})
        assert answer.status_code == 202, answer.text
    page, _ = await asked.ask("narrow", "GET", "/operations")
    assert "own-key" in page.text
    assert "theirs" not in page.text
