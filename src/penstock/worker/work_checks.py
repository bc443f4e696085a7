"""Checks of `penstock doctor` about work: who works on what, what keeps it waiting, and what was quarantined."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from penstock.jobs import type_queries, worker_queries
from penstock.jobs.records import JobTypeRecord
from penstock.jobs.top import MOST, TopRecord, top
from penstock.pools import views as pool_views
from penstock.postgres import health
from penstock.postgres.database import Database
from penstock.schedules import queries as schedule_queries
from penstock.worker import fleets, problems
from penstock.worker.findings import MOST_NAMED, Finding, first, named
from penstock.workflows import queries as workflow_queries

_ENDLESS = timedelta(days=1)
_WAITS_LONG_S = 60.0
_OLD_TICK_S = 60.0


async def workers(database: Database) -> list[Finding]:
    """Whether work has a worker that makes progress."""
    found: list[Finding] = []
    loads = await pool_views.load_of_types(database, timedelta(minutes=1))
    found += first([
        Finding(
            "workers",
            "problem",
            f"{load.ready} jobs of {load.name} wait, and no worker works on this type",
            "Start one: penstock worker MODULE:APP. If one runs: does its application declare a handler for this type?",
        )
        for load in sorted(loads, key=lambda load: -load.ready)
        if load.ready and not load.workers
    ])  # fmt: skip
    found += first([
        Finding(
            "workers",
            "warning",
            f"the oldest job of {load.name} has waited {load.oldest_ready_s:.0f} s for a worker",
            "See penstock scale advise, and penstock jobs list for what holds the others up.",
        )
        for load in sorted(loads, key=lambda load: -(load.oldest_ready_s or 0.0))
        if load.workers and (load.oldest_ready_s or 0.0) > _WAITS_LONG_S
    ])  # fmt: skip
    paused = [record for record in await type_queries.job_types(database) if problems.is_paused(record)]
    waiting = {one.name: one.ready for one in await _waiting(database, paused)}
    found += first([
        Finding(
            "workers",
            "warning",
            f"{problems.paused_since(record)}, and {waiting[record.name]} jobs wait",
            problems.end_of_pause(record),
        )
        for record in paused
        if waiting.get(record.name)
    ])  # fmt: skip
    found += await _quarantined(database)
    idle = sorted(load.name for load in loads if not load.workers and not load.ready and not waiting.get(load.name))
    if idle:
        found.append(
            Finding("workers", "warning", f"no worker works on {named(idle)}", "Nothing waits. Start one before something does.")
        )
    for worker in await fleets.workers(database):
        if not worker.alive:
            continue
        if worker.blocked_since is not None:
            found.append(
                Finding(
                    "workers",
                    "problem",
                    f"the event loop of {worker.id} makes no progress: {worker.blocked_by or 'something'} blocks it",
                    'Declare the handler without async, or with executor="process"; restart the worker if it does not end.',
                )
            )
        found += [
            Finding(
                "workers",
                "problem",
                f"the consumer {consumer} has ended in {worker.id}: it halted",
                "Correct the cause, which penstock workers --json shows, and restart the worker.",
            )
            for consumer in worker.halted
        ]
    return found or [Finding("workers", "ok", f"workers work on all {len(loads)} job types")]


async def _quarantined(database: Database) -> list[Finding]:
    return first([
        Finding(
            "workers",
            "warning",
            f"{one.jobs} jobs of {one.name} were quarantined within a day: they cannot be read, or ended workers that ran "
            "nothing else",
            f"See why: penstock jobs show {one.latest}. When the cause is gone, run them again: penstock jobs replay ID.",
        )
        for one in await worker_queries.recently_quarantined(database)
    ])  # fmt: skip


async def _waiting(database: Database, paused: Sequence[JobTypeRecord]) -> list[TopRecord]:
    if not paused:
        return []
    return await top(database, "types", names=[record.name for record in paused[:MOST]], limit=MOST)


async def workflows(database: Database) -> list[Finding]:
    """Whether what waits for other jobs ends."""
    found: list[Finding] = []
    amounts = {one.gauge: one.amount for one in await health.gauges(database)}
    if (age := amounts["workflow_tick_seconds"]) > _OLD_TICK_S:
        found.append(
            Finding(
                "workflows",
                "problem",
                f"what waits for jobs that have ended was not released for {age:.0f} s",
                "Start a worker or a server, whose maintenance does it. If one runs, its log says why maintenance fails, or a "
                "transaction that stays open has locked a job group or a waiting job: see the transactions.",
            )
        )
    found += [
        Finding(
            "workflows",
            "problem",
            f"job {stuck.job} of {stuck.name} waits for {stuck.after}, which has ended or is gone",
            f"Cancel it, and enqueue it again: penstock jobs cancel {stuck.job}. Please report it, since this does not happen.",
        )
        for stuck in await workflow_queries.stuck_dependencies(database)
    ]
    endless = await workflow_queries.endless_waits(database, _ENDLESS)
    if signals := [f"{wait.id} of {wait.name} for {wait.waits_for}" for wait in endless if wait.kind == "signal"]:
        found.append(
            Finding(
                "workflows",
                "warning",
                f"jobs have waited for more than a day for a signal, without a timeout: {named(signals)}",
                "Send it, penstock jobs signal ID NAME VALUE, or end the job: penstock jobs cancel ID. Give the wait a timeout "
                "where the signal may not come: job.wait_for(..., timeout=...).",
            )
        )
    if unsealed := [wait.name for wait in endless if wait.kind == "group"]:
        found.append(
            Finding(
                "workflows",
                "warning",
                f"job groups that are not sealed have not changed for a day: {named(unsealed)}",
                "Open each again with async with, which seals it, or end it: penstock workflows cancel NAME. "
                "One whose children have ended is cancelled after a week, or after keep, by penstock.prune_due, which workers "
                "call; without workers it stays open.",
            )
        )
    return found or [Finding("workflows", "ok", "what waits for other jobs is released when they end")]


async def keys(database: Database) -> list[Finding]:
    """What waits for a key of encryption that a worker of it lacks."""
    found: list[Finding] = []
    for work in await worker_queries.locked_work(database):
        lacks = f"lack the key {work.key_id} of {work.name}" if work.key_id else f"have no key, and {work.name} is encrypted"
        if work.holders:
            message = f"workers {lacks}: {named(work.lacking)}; what is encrypted goes to {named(work.holders)} alone"
        else:
            message = f"workers {lacks}, and no other worker of it has it: {named(work.lacking)}; what is encrypted waits"
        found.append(
            Finding(
                "keys",
                "warning" if work.holders else "problem",
                message,
                "Give them the keys that the producers have: Penstock(keys=[...]), or PENSTOCK_KEYS; penstock keys list shows "
                "the ids of keys.",
            )
        )
    return first(found) or [Finding("keys", "ok", "no work waits for a key of encryption that a worker lacks")]


async def schedules(database: Database) -> list[Finding]:
    """Schedules that two applications declare with other times, and time zones whose rules differ between machines."""
    found = []
    for subject, stored, said, workers in await schedule_queries.differences(database):
        if stored is None:
            found.append(
                Finding(
                    "schedules",
                    "warning",
                    f"the rules of the time zone {subject} differ between machines: {named(workers)} have {said}",
                    "Update tzdata on all of them, as a package of the system and of Python, and restart the workers.",
                )
            )
        else:
            found.append(
                Finding(
                    "schedules",
                    "warning",
                    f"schedule {subject} runs by {stored}, and {named(workers)} declare it as {said} and do not run it",
                    "Restart them with the code that the others have, or give one of the two schedules another name.",
                )
            )
    return found[:MOST_NAMED] or [Finding("schedules", "ok", "all workers have the same schedules and time zones")]
