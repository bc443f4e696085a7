"""Batches of jobs: a job for each line. See `penstock.http.ndjson`."""

from __future__ import annotations

from functools import partial
from typing import Literal

from fastapi import Request, Response

from penstock.http import bodies
from penstock.http.auth import Principal
from penstock.http.errors import no_such_type
from penstock.http.jobs.enqueuing import New, SingleJobs
from penstock.http.jobs.models import BatchJob
from penstock.http.ndjson import CONTENT, LineOutcome, Lines, outcomes
from penstock.http.openapi import json_body
from penstock.http.routing import BATCH, CurrentService, Instance, OpenType, Traceparent, User, router
from penstock.jobs import http_queries as http
from penstock.jobs.models import make_id

api = router("batches")
_LONGEST_LINE = 256 << 10
_EXAMPLE = '{"id": "job_282227eb-3c76-4ef7-af7e-25dff933077f", "data": {"n": 1}}\n{"data": {"n": 2}, "key": "acme"}\n'
_OUTCOME = '{"line":1,"id":"job_282227eb-3c76-4ef7-af7e-25dff933077f","outcome":"queued"}\n'


class BatchOutcome(LineOutcome):
    """One line of the answer to a batch: an outcome or an error. After 1,000 errors `lines` tells the bad ones as ranges."""

    id: str | None = None
    outcome: Literal["queued", "waiting", "duplicate", "coalesced", "archived", "taken"] | None = None


@api.post(
    "/v1/jobs/{name:name}/batch",
    dependencies=[BATCH],
    response_class=Response,
    responses=outcomes(BatchOutcome, _OUTCOME),
    openapi_extra=json_body(BatchJob, _EXAMPLE, content=CONTENT),
)
async def enqueue_batch(
    request: Request, name: OpenType, service: CurrentService, user: User, path: Instance, traceparent: Traceparent
) -> Response:
    """Enqueue a job for each line; answers with a line for each: an outcome, or an error.

    A line that cannot be enqueued does not stop the others; after 1,000 errors the bad lines are told as ranges. When the
    connection breaks, send the batch again: with ids of your own the jobs that are there already come back as duplicates.
    """
    if await http.job_type(service.database, name) is None:
        raise no_such_type(name)
    write = partial(service.part(SingleJobs).enqueue_lines, name)
    return await Lines(partial(_read, user, name, path, traceparent), write, longest=_LONGEST_LINE).answer(request)


def _read(user: Principal, name: str, path: str, traceparent: str | None, line: bytes) -> New:
    parsed, data = bodies.batch_line(line)
    id = bodies.job_id(parsed.id) if parsed.id is not None else make_id()
    return New(user, name, id, data, parsed, path, traceparent)
