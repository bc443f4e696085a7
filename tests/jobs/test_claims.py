"""The order of the jobs of a claim."""

from __future__ import annotations

from penstock import NewJob, Penstock
from penstock.jobs import claim_queries
from penstock.jobs.models import Outcome, Settlement


async def test_released_jobs_keep_their_place_in_the_next_claim(app: Penstock) -> None:
    database = await app.database()
    for name in ("a", "b"):
        await app.job_type(name).declare()
        await app.enqueue_many(name, [NewJob(n, priority=n % 2) for n in range(6)])
    first = (await claim_queries.claim(database, "w", ["a", "b"], 100, {})).jobs
    expected = [(name, n) for name in ("a", "b") for n in (0, 2, 4, 1, 3, 5)]
    assert [(job.name, int(job.data)) for job in first] == expected
    # Jobs that are released in reverse order are stored in reverse order.
    for job in reversed(first):
        await claim_queries.settle(database, [Settlement(job.id, job.attempt, job.lease, Outcome.RELEASED)])
    again = (await claim_queries.claim(database, "w", ["a", "b"], 100, {})).jobs
    assert [(job.name, int(job.data)) for job in again] == expected
