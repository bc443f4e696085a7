"""Job groups over HTTP and its clients: open, fill, seal, look at and cancel them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import httpx
import psycopg
import pytest

from penstock import Conflict, InvalidInput, JobFilter, NotFound
from penstock.client import Client
from tests.http.http_server import TOKEN, Served
from tests.waiting import until


@pytest.fixture
def penstock(served: Served) -> Iterator[Client]:
    with Client(served.base_url, "admin", TOKEN) as client:
        yield client


@pytest.fixture
def group() -> str:
    return f"import {uuid4()}"


def test_then_runs_when_the_children_have_ended(penstock: Client, echo: str, group: str) -> None:
    opened = penstock.open_group(group, then=echo, then_data={"end": True})
    assert penstock.open_group(group, then=echo, then_data={"end": True}).id == opened.id
    for number in range(2):
        penstock.enqueue(echo, number, group=opened.id)
    sealed = penstock.seal_group(group)
    assert (sealed.status, sealed.added, sealed.ended) == ("running", 2, 0)
    assert group in [one.name for one in penstock.job_groups(open=True)]
    for job in penstock.claim(echo, "w1", limit=10):
        penstock.settle(job, "succeeded")
    (then,) = until(lambda: penstock.claim(echo, "w1"), "the job of the end")
    assert (then.id, then.data) == (opened.then_job, {"end": True})
    ended = penstock.find_group(opened.id)
    assert (ended.status, ended.succeeded, ended.ended) == ("succeeded", 2, 2)
    with pytest.raises(Conflict, match="takes no more children"):
        penstock.enqueue(echo, 3, group=opened.id)


def test_a_group_is_cancelled(penstock: Client, echo: str, group: str) -> None:
    opened = penstock.open_group(group)
    child = penstock.enqueue(echo, 1, group=opened.id)
    assert penstock.cancel_group(group).cancelled_at is not None
    assert until(lambda: (found := penstock.find(child.id)).status.finished and found, "its end").status == "cancelled"
    assert until(lambda: (found := penstock.find_group(group)).finished_at and found, "the end").status == "cancelled"


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("workflows", {"name": "import", "on_fialure": "continue"}),
        ("workflow-runs/nightly/start", {"workflow": "nightly", "steps": [{"name": "a", "type": "b"}], "on_fialure": "cancel"}),
        ("workflow-runs/nightly/retry", {"form_step": "a"}),
    ],
)
def test_a_field_that_does_not_exist_is_refused(client: httpx.Client, echo: str, path: str, sent: Any) -> None:
    run = {"workflow": "nightly", "steps": [{"name": "a", "type": echo}]}
    assert client.post("/v1/workflow-runs/nightly/start", json=run).status_code == 201
    answer = client.post(f"/v1/{path}", json=sent)
    assert (answer.status_code, answer.json()["id"]) == (400, "invalid_parameter")
    assert "Extra inputs are not permitted" in answer.json()["title"]


def test_wrong_calls_say_what_is_wrong(penstock: Client, client: httpx.Client, group: str) -> None:
    with pytest.raises(NotFound, match="no such job group"):
        penstock.find_group(group)
    penstock.open_group(group)
    with pytest.raises(Conflict, match="opened with another on_failure"):
        penstock.open_group(group, on_failure="continue")
    for body, code in (({}, 400), ({"name": "x", "on_failure": "stop"}, 400), ({"name": "", "then": "x"}, 400)):
        assert client.post("/v1/workflows", json=body).status_code == code
    with pytest.raises(NotFound, match="no such job type"):
        penstock.open_group(f"{group} 2", then="absent")


def test_children_are_listed_and_replayed_by_their_group(penstock: Client, client: httpx.Client, echo: str, group: str) -> None:
    opened = penstock.open_group(group)
    child, _ = penstock.enqueue(echo, 1, group=opened.id), penstock.enqueue(echo, 2)
    assert [job.id for job in penstock.find_many(workflow=opened.id)] == [child.id]
    assert penstock.find(child.id).workflow == opened.id
    assert penstock.find_many(name=echo, workflow=uuid4()) == []
    preview = penstock.operations.preview("cancel", JobFilter(workflow=opened.id))
    assert (preview.jobs, preview.sample) == (1, [child.id])
    assert client.get("/v1/queued-jobs", params={"workflow": "import"}).status_code == 400


def test_a_group_of_any_name_is_found(penstock: Client, group: str) -> None:
    for name in (f"{group} 100%", f"{group}%2F", f"{group}?#ü"):
        opened = penstock.open_group(name)
        assert penstock.find_group(name).id == opened.id
        assert penstock.seal_group(name).id == opened.id
        assert penstock.cancel_group(name).id == opened.id


def test_the_digits_of_the_payload_of_then_stay(client: httpx.Client, penstock: Client, echo: str, group: str) -> None:
    sent = f'{{"name": "{group}", "then": "{echo}", "then_data": {{"big": 123456789012345678901234567890, "price": 1.10}}}}'
    opened = client.post("/v1/workflows", content=sent)
    assert opened.status_code == 201, opened.text
    penstock.seal_group(group)
    claim = {"worker": "w1", "limit": 1}
    then = until(
        lambda: (claimed := client.post(f"/v1/jobs/{echo}/claim", json=claim)).json()["jobs"] and claimed, "the job of the end"
    )
    assert "123456789012345678901234567890" in then.text and "1.10" in then.text
    assert client.post("/v1/workflows", json={"name": f"{group} 2", "then_data": "x" * 200_000}).status_code == 413


def test_a_signal_reaches_the_job_once(penstock: Client, client: httpx.Client, echo: str) -> None:
    job = penstock.enqueue(echo, 1)
    assert penstock.signal(job.id, "approved", {"by": "ada"}) is True
    assert penstock.signal(job.id, "approved", {"by": "grace"}) is False
    assert client.post(f"/v1/jobs/{echo}/job_{job.id}/signals/a%20note", json={}).json()["first"] is True
    for path, body, code in (
        (f"/v1/jobs/job_{job.id}/signals/approved", {"valeu": 1}, 400),
        (f"/v1/jobs/job_{job.id}/signals/" + "x" * 201, {"value": 1}, 400),
        (f"/v1/jobs/job_{job.id}/signals/a%2Fb", {"value": 1}, 400),
        (f"/v1/jobs/job_{job.id}/signals/large", {"value": "x" * 300_000}, 413),
        (f"/v1/jobs/other/job_{job.id}/signals/approved", {"value": 1}, 404),
        (f"/v1/jobs/job_{uuid4()}/signals/approved", {"value": 1}, 404),
    ):
        assert client.post(path, json=body).status_code == code, (path, client.post(path, json=body).text)
    penstock.cancel(job.id)
    with pytest.raises(Conflict, match="has ended: cancelled"):
        penstock.signal(job.id, "late")


def test_the_steps_of_a_job_are_read_with_their_results_as_far_as_these_are_small(
    penstock: Client, client: httpx.Client, served: Served, echo: str
) -> None:
    job = penstock.enqueue(echo, 1)
    (claimed,) = penstock.claim(echo, "w1")
    results = {"pay": '{"big": 123456789012345678901234567890}', **{f"large {n}": f'"{"x" * 250_000}"' for n in range(5)}}
    with psycopg.connect(served.database_url, autocommit=True) as sql:
        sql.execute(
            "select penstock.write_steps(array_fill(%s::uuid, array[6]), array_fill(%s::bigint, array[6]), %s, %s::jsonb[])",
            [job.id, claimed.lease, list(results), list(results.values())],
        )
    steps = {step.name: step for step in penstock.steps(job.id)}
    assert (steps["pay"].kind, steps["pay"].state) == ("step", "done")
    assert steps["pay"].result == {"big": 123456789012345678901234567890}, "to the digit"
    assert {step.size for step in steps.values()} == {len(text) for text in results.values()}
    assert [steps[f"large {n}"].result is None for n in range(5)] == [False, False, False, False, True], "1 MiB in all"
    answer = client.get(f"/v1/jobs/{echo}/job_{job.id}/steps")
    assert "123456789012345678901234567890" in answer.text
    assert client.get(f"/v1/jobs/other/job_{job.id}/steps").status_code == 404
    assert "next" not in answer.links
    found, following = [], f"/v1/jobs/{echo}/job_{job.id}/steps?limit=4"
    for _ in range(2):
        answer = client.get(following)
        found += [step["name"] for step in answer.json()]
        following = answer.links.get("next", {}).get("url")
    names = list(steps)
    assert (found, following) == (names, None)
    assert [step.name for step in penstock.steps(job.id, after=steps[names[0]].cursor, limit=2)] == names[1:3]
    assert client.get(f"/v1/jobs/job_{job.id}/steps", params={"after": "x"}).status_code == 400
    with pytest.raises(NotFound):
        penstock.steps(uuid4())


def test_a_run_is_started_once_looked_at_retried_and_cancelled(penstock: Client, echo: str, group: str) -> None:
    steps = [
        {"name": "first", "type": echo, "data": {"n": 1}},
        {"name": "rest", "type": echo, "after": ["first"], "jobs": [{"data": 2}, {"data": 3}]},
    ]
    run = penstock.start_workflow(group, "shipping", steps)
    assert penstock.start_workflow(group, "shipping", steps).id == run.id
    assert (run.workflow, run.status, run.steps) == ("shipping", "running", 2)
    assert group in [one.name for one in penstock.workflow_runs("shipping", open=True)]
    (first,) = penstock.claim(echo, "w1", limit=10)
    penstock.settle(first, "failed-for-good")
    ended = until(lambda: (found := penstock.find_workflow_run(group)).finished_at and found, "the end of the run")
    assert (ended.status, ended.failed, ended.cancelled) == ("failed", 1, 1)
    assert [(step.status, step.jobs) for step in penstock.workflow_steps(run.id)] == [("failed", None), ("cancelled", 2)]
    again = penstock.retry_workflow(group, id=f"{group} again")
    assert (again.name, again.retry_of, again.shared) == (f"{group} again", group, 0)
    assert penstock.find_workflow_run(group).retried_by == again.name
    assert penstock.cancel_workflow(again.id).cancelled_at is not None
    ended = until(lambda: (found := penstock.find_workflow_run(again.id)).finished_at and found, "the end of the retry")
    assert ended.status == "cancelled"


def test_wrong_runs_are_refused(penstock: Client, client: httpx.Client, echo: str, group: str) -> None:
    with pytest.raises(NotFound, match="no such run"):
        penstock.workflow_steps(group)
    with pytest.raises(InvalidInput, match="which is no step of this graph"):
        penstock.start_workflow(group, "shipping", [{"name": "a", "type": echo, "after": ["b"]}])
    penstock.open_group(group)
    with pytest.raises(Conflict, match="is a job group"):
        penstock.start_workflow(group, "shipping", [{"name": "a", "type": echo}])
    for body in ({}, {"workflow": "shipping"}, {"workflow": "shipping", "steps": {}}, {"workflow": "", "steps": []}):
        assert client.post(f"/v1/workflow-runs/{group}/start", json=body).status_code == 400


def test_the_digits_of_the_payload_of_a_step_stay(client: httpx.Client, echo: str, group: str) -> None:
    sent = f'{{"workflow": "w", "steps": [{{"name": "a", "type": "{echo}", "data": {{"big": 123456789012345678901234567890}}}}]}}'
    started = client.post(f"/v1/workflow-runs/{group}/start", content=sent)
    assert started.status_code == 201, started.text
    assert "123456789012345678901234567890" in client.post(f"/v1/jobs/{echo}/claim", json={"worker": "w1", "limit": 1}).text
