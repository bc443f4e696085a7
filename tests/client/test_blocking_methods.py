"""Every blocking method is called here, beside a running worker; one that is not called fails the test by its name."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from typing import Any

import psycopg
import pytest

from penstock import Batch, Conflict, Erasure, Job, JobFilter, JobType, NewEvent, NewMessage, NotFound, Penstock, Status, Tick
from penstock.sync import SyncPenstock
from penstock.testing import running_worker
from scripts.generate_sync import MIRRORS
from tests.waiting import eventually, until

DAY = timedelta(days=1)
SECOND = timedelta(seconds=1)


def blocking_halves() -> Iterator[type]:
    """The generated classes."""
    for module, mirrors in MIRRORS.items():
        for mirror in mirrors:
            yield getattr(import_module(module), f"Sync{mirror.name}")


def methods_of(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods that a class has itself."""
    for name, method in vars(kind).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            yield name, method


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the blocking methods that have been called, and have returned or refused."""
    names: set[str] = set()

    def recording(name: str, method: Any) -> Any:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            names.add(name)
            return method(*args, **kwargs)

        return call

    for kind in blocking_halves():
        for name, method in methods_of(kind):
            monkeypatch.setattr(kind, name, recording(f"{kind.__name__}.{name}", method))
    return names


async def test_every_blocking_method_is_called(url: str, called: set[str]) -> None:
    listed = {f"{kind.__name__}.{name}" for kind in blocking_halves() for name, _ in methods_of(kind)}
    async with Penstock(url) as app:

        @app.job("ship")
        async def ship(job: Job[Any]) -> None: ...

        @app.timer(every=DAY, name="nightly")
        async def nightly(tick: Tick) -> None: ...

        @app.stream("spoiled", int, partitions=1).consumer(group="g", on_failure="dead-letter")
        async def refuse(batch: Batch[int]) -> None:
            raise ValueError("never")

        async with running_worker(app):
            await eventually(app.handlers, "the worker has said what it handles")
            await asyncio.to_thread(call_all, url)
    assert sorted(listed - called) == []


def call_all(url: str) -> None:
    """In the order in which a program would, and each with what it is to do."""
    app = Penstock(url)
    try:
        of_the_database(app.sync)
        ship = of_jobs(app, app.sync)
        of_operations(app)
        of_job_groups(app, app.sync, ship)
        of_workflows(app, app.sync, ship)
        of_workers_and_schedules(app, app.sync)
        of_pools(app, app.sync, url)
        of_streams(app, app.sync)
        of_topics(app, app.sync)
    finally:
        app.sync.close()


def of_the_database(sync: SyncPenstock) -> None:
    assert sync.start_server().startswith("postgresql://")
    assert sync.migrate().tables == []
    assert sync.plan_migration().statements == []
    sync.open()
    assert {one.check for one in sync.doctor()} >= {"schema", "workers"}
    assert sync.declare() == []


def of_jobs(app: Penstock, sync: SyncPenstock) -> JobType[Any]:
    assert sync.create_job_type("mail", max_attempts=3).max_attempts == 3
    assert sync.change_job_type("mail", max_attempts=4).max_attempts == 4
    sync.pause("mail")
    assert {record.name: record.paused_at is None for record in sync.job_types()}["mail"] is False
    first = sync.enqueue("mail", {"n": 1})
    assert sync.why(first.id).reason == "paused"
    assert sync.set_priority(first.id, -5) is True
    assert sync.run_now(first.id) is False, "it is not deferred"
    sync.resume("mail")
    assert len(sync.enqueue_many("mail", [{"n": 2}, {"n": 3}])) == 2
    assert {count.name: count.ready for count in sync.counts()}["mail"] == 3
    assert [(one.name, one.ready) for one in sync.top("types", name="mail")] == [("mail", 3)]
    assert len(sync.find_many(name="mail", status="queued")) == 3
    assert sync.find(first.id).data == {"n": 1}
    assert (sync.signal(first.id, "approved", {"by": "ada"}), sync.signal(first.id, "approved")) == (True, False)
    assert [(step.name, step.kind, step.result) for step in sync.steps(first.id)] == [("approved", "signal", {"by": "ada"})]
    assert sync.cancel(first.id) == "cancelled"
    assert sync.replay(first.id).id != first.id
    assert "mail" in {advice.name for advice in sync.scale_advice()}
    assert sync.prune(DAY) == {}
    sync.drop_job_type("mail", force=True)
    ship = app.job_type("ship")
    ship.sync.declare()
    sent = [ship.sync.enqueue({"n": 1}), ship.sync.options(priority=1).enqueue({"n": 2}), *ship.sync.enqueue_many([{"n": 3}])]
    assert {sync.wait(receipt.id).status for receipt in sent} == {Status.SUCCEEDED}
    return ship


def of_operations(app: Penstock) -> None:
    operations = app.operations.sync
    filter = JobFilter(name="ship", status="succeeded")
    assert operations.preview("replay", filter).jobs == 3
    started = operations.start("replay", filter)
    assert operations.wait(started.id).done == 3
    assert operations.find(started.id).state == "finished"
    assert [operation.id for operation in operations.list()] == [started.id]
    assert operations.cancel(started.id).state == "finished"
    assert operations.preview_erasure(Erasure(key="of no job")).queued == 0
    assert operations.cancel(operations.erase(Erasure(key="of no job")).id).kind == "erase"


def of_job_groups(app: Penstock, sync: SyncPenstock, ship: JobType[Any]) -> None:
    group = app.job_group("import").sync.open()
    sent = ship.sync.options(group=group).enqueue_many([{"n": 1}, {"n": 2}])
    behind = ship.sync.options(after=group).enqueue({"n": 3})
    group.seal()
    assert {sync.wait(receipt.id).status for receipt in [*sent, behind]} == {Status.SUCCEEDED}
    of_child = sync.group_of(sent[0].id)
    assert of_child is not None
    assert of_child.id == group.id
    assert sync.group_of(behind.id) is None
    until(lambda: sync.find_group("import").status == Status.SUCCEEDED, "the end of the group")
    assert (group.find().succeeded, [found.id for found in sync.job_groups()]) == (2, [group.id])
    with app.job_group("never", parent=app.job_group("above").sync.open()).sync as stopped:
        stopped.cancel()
    assert sync.cancel_group(stopped.id).cancelled_at is not None


def of_workflows(app: Penstock, sync: SyncPenstock, ship: JobType[Any]) -> None:
    graph = app.workflow("shipping").sync
    first = graph.add(ship, {"n": 1}, step="first")
    graph.add_many(ship, [{"n": 2}], after=first, step="rest")
    assert (graph.name, [step.name for step in graph.steps]) == ("shipping", ["first", "rest"])
    run = graph.start(id="shipping-1")
    assert sync.wait_for_workflow(run).status == Status.SUCCEEDED
    assert [step.status for step in sync.workflow_steps("shipping-1")] == [Status.SUCCEEDED] * 2
    assert [found.id for found in sync.workflow_runs("shipping")] == [run]
    again = sync.retry_workflow(run, from_step="rest")
    assert sync.cancel_workflow(again.id).name == sync.find_workflow_run("shipping-1~2").name


def of_workers_and_schedules(app: Penstock, sync: SyncPenstock) -> None:
    assert "ship" in {handler.name for handler in sync.handlers()}
    assert sync.leaders() == [] and sync.fleets() == []
    (worker,) = sync.workers()
    assert sync.overview().workers == 1
    with pytest.raises(Conflict, match="is of no fleet"):
        sync.drain_worker(worker.id)
    with pytest.raises(NotFound, match="no such fleet"):
        sync.drain_fleet("nothing")
    assert [schedule.name for schedule in sync.list_schedules()] == ["nightly"]
    run = sync.run_schedule("nightly")
    assert run is not None and sync.wait(run).status == Status.SUCCEEDED
    assert [found.id for found in sync.schedule_runs("nightly")] == [run]
    with pytest.raises(Conflict, match="is declared by a running worker"):
        sync.drop_schedule("nightly")

    @app.timer(every=DAY, name="weekly")
    async def weekly(tick: Tick) -> None: ...

    @app.on_leader
    async def follow_prices() -> None: ...

    weekly.sync.declare()
    follow_prices.sync.declare()
    assert "weekly" in {record.name for record in sync.list_schedules()}
    assert "follow-prices" in {record.name for record in sync.leaders()}


def of_pools(app: Penstock, sync: SyncPenstock, url: str) -> None:
    assert sync.create_pool("other", slots=4).slots == 4
    sync.find_pool("other").resize(8)
    pool = app.pool("tenants", slots=4).sync
    pool.declare()
    assert {found.name for found in sync.list_pools()} == {"other", "tenants"}
    assert pool.details().slots == 4 and len(pool.slots()) == 4
    assert pool.workers()[0].id is None
    pool.set_weight("acme", 3)
    assert pool.weights() == {"acme": 3}
    pool.pause_key("acme")
    assert [paused.key for paused in pool.paused_keys()] == ["acme"]
    assert pool.resume_key("acme")
    assert pool.quarantined_keys() == []
    with pytest.raises(NotFound):
        pool.release_key("acme")
    assert pool.start("acme", 1) == "starting"
    pool.notify("acme", "hello")
    assert [standing.key for standing in pool.standing_jobs()] == ["acme"]
    assert pool.reconcile({"acme": 1, "bolt": 2}) == (1, 0, 0)
    assert pool.stop("bolt")
    first = pool.enqueue("acme", 0)
    assert len(pool.enqueue_many([("acme", n) for n in range(1, 6)])) == 5
    assert len(pool.list(key="acme")) == 6 and pool.state("acme").ready == 6
    with pool.worker("puller") as worker:
        worker.set_metadata({"client": "c"})
        jobs = worker.jobs()
        job = next(jobs)
        assert (job.id, job.data) == (first.id, 0)
        assert job.group() is None
        job.log("begun")
        job.progress({"done": 1})
        job.extend()
        job.release()
        job = next(jobs)
        job.ack()
        next(jobs).fail("broken", retry=False)
        next(jobs).snooze(timedelta(milliseconds=10))
        job = next(jobs)
        with psycopg.connect(url) as connection:
            job.finish(connection)
        assert pool.drain("puller").id == "puller" and pool.undrain("puller").id == "puller"
    statuses = [sync.find(id).status for id in (first.id, job.id)]
    assert statuses == [Status.SUCCEEDED, Status.SUCCEEDED]
    sync.drop_pool("other")
    with pytest.raises(NotFound):
        sync.find_pool("other")


def of_streams(app: Penstock, sync: SyncPenstock) -> None:
    assert sync.create_stream("other", 1).partitions == 1
    assert sync.find_stream("other").change(keep_age="1 day").keep_age == DAY
    sync.find_stream("other").drop()
    events = app.stream("events", int, partitions=2).sync
    assert events.declare().partitions == events.ready().partitions == 2
    assert events.append(0, key="a").offset == 0
    assert len(events.append_many([NewEvent(1, "a"), 2])) == 2
    assert events.load([3, 4]) == 2
    producer = events.producer("p")
    assert producer.append(5) is not None and producer.append_many([6, 7])
    assert {stream.name: stream.events for stream in sync.list_streams()}["events"] == 8
    assert sum(bounds.next for bounds in events.bounds().values()) == 8
    assert [segment.events for segment in events.segments()] == [8]
    assert set(events.offsets_at("earliest").values()) == {0}
    assert sum(len(events.read(partition)) for partition in range(2)) == 8
    tail = events.tail("earliest")
    assert next(tail).offset == 0
    tail.close()
    consumption = events.consume("g", idle_timeout=30 * SECOND)
    consumption.open()
    assert next(iter(consumption)).records()
    consumption.done()
    consumption.close()
    assert {lag.group for lag in events.lag()} == {"g"}
    assert events.pause("g", [0], reason="repairs") == 1 and events.resume("g", [0]) == 1
    events.seek("g", "latest")
    assert sum(lag.lag for lag in events.lag("g")) == 0
    events.drop_group("g")
    assert events.grow(4).partitions == 4 and events.held_back() == []
    sync.drop_stream("events")
    spoiled = app.stream("spoiled", int, partitions=1).sync
    spoiled.append(1)
    until(lambda: "spoiled.dead" in {stream.name for stream in sync.list_streams()}, "the dead letter")
    assert spoiled.replay_dead() == 1


def of_topics(app: Penstock, sync: SyncPenstock) -> None:
    topic = app.topic("memos", catch_up=10)
    memos = topic.sync
    memos.declare()
    assert memos.subscribe("desk", ttl=DAY).queue == "memos_desk"

    @topic.subscriber("hall")
    async def read(job: Job[Any]) -> None: ...

    sync.subscribe(read)
    assert [found.client_id for found in memos.subscribers()] == ["desk", "hall"]
    assert memos.renew("desk")
    receipt = memos.publish({"n": 1})
    assert len(memos.publish_many([{"n": 2}, NewMessage({"n": 3})])) == 2
    assert memos.outcomes(receipt).complete is False
    assert [message.data["n"] for message in memos.read(0)] == [1, 2, 3]
    copy = sync.find_many(name="memos_desk")[-1]
    assert memos.sequence_of(copy.id) == 1
    assert memos.details().last_seq == 3
    assert [counts.name for counts in sync.topic_counts()] == ["memos"]
    assert sync.find_topic("memos").unsubscribe("desk", drop=True)
