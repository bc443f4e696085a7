"""Handlers in processes: whatever becomes of a process, or of what it says, becomes of its own job alone."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock import JobRecord, Penstock, Status
from penstock.testing import on_database, run_due_jobs, running_worker
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]


@pytest.fixture
async def app(url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Penstock]:
    """The application in this process, with a worker."""
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", url)
    children_app = importlib.reload(importlib.import_module("tests.worker.children_app"))
    async with children_app.app, running_worker(children_app.app, at_once=True):
        yield children_app.app


async def ended(app: Penstock, *ids: Any) -> list[JobRecord]:
    async def over() -> list[JobRecord] | None:
        records = [await app.find(id) for id in ids]
        return records if all(record.status.finished for record in records) else None

    found: list[JobRecord] = await eventually(over, "the end of the jobs", timeout=60)
    return found


async def result(app: Penstock, name: str, **data: Any) -> list[int]:
    (record,) = await ended(app, (await app.enqueue(name, data)).id)
    assert record.status is Status.SUCCEEDED, record.errors
    assert record.result is not None
    return list(record.result)


async def test_a_process_that_dies_without_a_job_costs_none(app: Penstock) -> None:
    """As the kernel ends it when memory is short."""
    for _ in range(2):
        process, _, _ = await result(app, "single")
        os.kill(process, signal.SIGKILL)
        receipts = await app.enqueue_many("single", [{}] * 6)
        records = await ended(app, *[receipt.id for receipt in receipts])
        assert [record.status for record in records] == [Status.SUCCEEDED] * 6, [record.errors for record in records]


@pytest.mark.parametrize("name", ["single", "once"])
async def test_a_job_whose_process_dies_before_it_begins_runs_in_another(app: Penstock, name: str) -> None:
    process, _, _ = await result(app, name)
    os.kill(process, signal.SIGSTOP)
    try:
        receipt = await app.enqueue(name, {})
        await eventually(lambda: _claimed(app), "the claim")
    finally:
        os.kill(process, signal.SIGKILL)
    (record,) = await ended(app, receipt.id)
    assert record.status is Status.SUCCEEDED, record.errors
    assert record.attempt == 1


async def _claimed(app: Penstock) -> bool:
    return any(count.in_progress for count in await app.counts())


@pytest.mark.parametrize(
    ("does", "type", "says"),
    [
        ("exit", "ProcessDied", "the process of the handler ended with exit code 9 before the handler was done"),
        ("kill", "ProcessDied", "the process of the handler was ended by SIGKILL before the handler was done"),
        ("decline", "Declined", "card 4711 was declined"),
        ("refuse", "Refused", "card 4711 was refused"),
        ("answer badly", "OddFailure", "the result of the handler cannot be read"),
    ],
)
async def test_a_failure_is_that_of_one_job_and_the_next_ones_run(app: Penstock, does: str, type: str, says: str) -> None:
    receipts = await app.enqueue_many("child", [{"does": does if n == 3 else None} for n in range(16)])
    records = await ended(app, *[receipt.id for receipt in receipts])
    assert [n for n, record in enumerate(records) if record.status is not Status.SUCCEEDED] == [3]
    assert all(not record.errors for n, record in enumerate(records) if n != 3)
    errors = records[3].errors
    # A subclass of Fail is final, also when only its name and message arrive.
    assert [error["attempt"] for error in errors] == ([1] if does == "refuse" else [1, 2])
    assert {error["type"] for error in errors} == {type}
    assert errors[0]["message"].startswith(says)


async def test_cancelling_a_job_ends_its_process_and_no_other(app: Penstock, tmp_path: Path) -> None:
    waiting = [{"does": "wait", "begun": str(tmp_path / f"begun{n}"), "until": str(tmp_path / f"until{n}")} for n in range(2)]
    receipts = await app.enqueue_many("single", waiting)
    pids = [await eventually(lambda n=n: _pid(tmp_path / f"begun{n}"), "the start") for n in range(2)]
    await app.cancel(receipts[0].id)
    (record,) = await ended(app, receipts[0].id)
    assert record.status is Status.CANCELLED
    await eventually(lambda: not _alive(pids[0]), "the end of the process")
    (tmp_path / "until1").touch()
    (other,) = await ended(app, receipts[1].id)
    assert other.status is Status.SUCCEEDED
    assert other.result is not None and other.result[0] == pids[1]
    await result(app, "single")


def _pid(path: Path) -> int | None:
    return int(text) if path.exists() and (text := path.read_text()) else None


def _alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def start(url: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", "worker", "tests.worker.children_app:app"],
        env={**os.environ, "PENSTOCK_DATABASE_URL": url}, cwd=ROOT, start_new_session=True,
    )  # fmt: skip


async def test_a_worker_that_is_killed_takes_its_processes_with_it(url: str, tmp_path: Path) -> None:
    """Another worker has their jobs then."""
    begun, until = tmp_path / "begun", tmp_path / "until"
    worker = start(url)
    try:
        async with Penstock(url) as app:
            await eventually(lambda: _declared(app), "the declaration", timeout=60)
            await app.enqueue("single", {"does": "wait", "begun": str(begun), "until": str(until)})
            child = await eventually(lambda: _pid(begun), "the start", timeout=60)
            worker.kill()
            worker.wait()
            await eventually(lambda: not _alive(child), "the end of the process")
    finally:
        until.touch()
        worker.kill()
        worker.wait()


async def test_a_signal_to_the_whole_group_lets_handlers_finish(url: str, tmp_path: Path) -> None:
    """As a terminal (SIGINT) and a service manager (SIGTERM) send it."""
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        begun, until = tmp_path / f"begun{signal_number}", tmp_path / f"until{signal_number}"
        worker = start(url)
        try:
            async with Penstock(url) as app:
                await eventually(lambda: _declared(app), "the declaration", timeout=60)
                receipt = await app.enqueue("single", {"does": "wait", "begun": str(begun), "until": str(until)})
                await eventually(lambda begun=begun: _pid(begun), "the start", timeout=60)
                os.killpg(worker.pid, signal_number)
                await eventually(lambda: _draining(app), "the beginning of the end")
                until.touch()
                assert worker.wait(60) == 0
                (record,) = await ended(app, receipt.id)
                assert record.status is Status.SUCCEEDED, record.errors
                assert record.attempt == 1
        finally:
            until.touch()
            worker.kill()
            worker.wait()


async def _declared(app: Penstock) -> bool:
    return {"child", "single", "once"} <= {record.name for record in await app.job_types()}


async def _draining(app: Penstock) -> bool:
    return bool(await (await app.database()).fetchval("select exists (select from penstock.workers where state = 'draining')"))


@pytest.mark.parametrize("name", ["priced", "called"])
async def test_a_process_has_the_database_and_the_dependencies_that_a_test_has_put_in_place(
    url: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Else a handler in a process would use those of production, which its code names."""
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/production")
    children_app = importlib.reload(importlib.import_module("tests.worker.children_app"))
    app: Penstock = children_app.app

    def local() -> None:
        """Another handler's, which no process has to know."""

    app.dependency_overrides[children_app.get_rate] = children_app.fake_rate
    app.dependency_overrides[local] = local
    with on_database(app, url):
        async with app:
            receipt = await app.enqueue(name, "")
            await run_due_jobs(app)
            record = await app.find(receipt.id)
    assert record.result == ([70, url] if name == "priced" else url), record.errors


async def test_a_stand_in_that_a_process_cannot_import_fails_the_job_and_says_so(app: Penstock) -> None:
    children_app = importlib.import_module("tests.worker.children_app")
    app.dependency_overrides[children_app.get_rate] = lambda: 7
    (record,) = await ended(app, (await app.enqueue("priced", "")).id)
    assert record.status is Status.FAILED
    assert "<lambda> cannot run in a process, which imports it by its name" in record.errors[0]["message"]
