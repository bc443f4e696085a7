"""Batches: NDJSON in, NDJSON out, with the same memory for ten lines and ten million.

Lines are enqueued by the thousand while the body arrives. The outcomes are spooled, and sent when the body is read: a client
that sends everything before it reads anything would otherwise wait for the server, and the server for the client.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from typing import IO

import orjson
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from penstock.errors import DatabaseUnavailable, NotFound, PenstockError
from penstock.http import bodies, shapes
from penstock.http.api.common import Name, body_of, needs, principal_of, router, service_of
from penstock.http.auth import Role
from penstock.http.errors import ApiError, from_penstock, no_such_type, too_large
from penstock.http.models import BatchJob, BatchOutcome
from penstock.http.service import New, Service, batch_of
from penstock.job import make_id
from penstock.postgres import http, jobs

api = router("batches")
_LINES = 1_000
_MOST_ERRORS = 1_000
_FURTHER = f"The first {_MOST_ERRORS:,} errors are told line by line; lines are the first and the last of each row of bad lines."
_BYTES = 4 << 20
_LONGEST_LINE = 256 << 10
_IN_MEMORY = 1 << 20
_NDJSON = "application/x-ndjson"
_EXAMPLE = '{"id": "job_282227eb-3c76-4ef7-af7e-25dff933077f", "data": {"n": 1}}\n{"data": {"n": 2}, "key": "acme"}\n'
_OUTCOME = '{"line":1,"id":"job_282227eb-3c76-4ef7-af7e-25dff933077f","outcome":"queued"}\n'
_ANSWER = {_NDJSON: {"schema": BatchOutcome.model_json_schema(), "example": _OUTCOME}}


@api.post(
    "/v1/jobs/{name:name}/batch",
    response_class=Response,
    responses={200: {"description": "A line for each job.", "content": _ANSWER}},
    openapi_extra=body_of(BatchJob, _EXAMPLE, content=_NDJSON),
)
@needs(Role.ENQUEUE, batch=True)
async def enqueue_batch(request: Request, name: Name) -> Response:
    """Enqueue a job for each line; answers with a line for each: an outcome, or an error.

    A line that cannot be enqueued does not stop the others; after 1,000 errors the bad lines are told as ranges. When the
    connection breaks, send the batch again: with ids of your own the jobs that are there already come back as duplicates.
    """
    service = service_of(request)
    principal_of(request).require(name, request.url.path)
    if await http.job_type(service.database, name) is None:
        raise no_such_type(name)
    spool = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115
    try:
        batch = _Batch(service, name, spool)
        await batch.read(request)
    except BaseException:
        spool.close()
        raise
    spool.seek(0)
    return StreamingResponse(_stream(spool), media_type=_NDJSON)


class _Batch:
    """One batch on its way in."""

    def __init__(self, service: Service, name: str, spool: IO[bytes]) -> None:
        self._service = service
        self._name = name
        self._spool = spool
        self._line = 0
        self._waiting: list[tuple[int, New]] = []
        self._bytes = 0
        self._outcomes: dict[int, bytes] = {}
        self._errors = 0
        # First and last of the lines in a row that were refused, once single errors are no longer told.
        self._refused: list[list[int]] = []

    async def read(self, request: Request) -> None:
        """Enqueue everything. Raises `ApiError` when the body cannot be split into lines, or the database is away."""
        rest = b""
        async for chunk in request.stream():
            lines = (rest + chunk).split(b"\n")
            rest = lines.pop()
            if len(rest) > _LONGEST_LINE:
                raise too_large(f"Line {self._line + len(lines) + 1} is too long ({_LONGEST_LINE} bytes max)")
            for line in lines:
                await self._take(line)
        await self._take(rest)
        await self._flush()
        await self._summarise()

    async def _take(self, line: bytes) -> None:
        self._line += 1
        if not line.strip():
            return
        try:
            parsed, data = bodies.batch_line(line)
            id = bodies.job_id(parsed.id) if parsed.id is not None else make_id()
            self._waiting.append((self._line, New(id, bodies.check_data(data), parsed)))
            self._bytes += len(line)
        except PenstockError as error:
            self._fail(self._line, error)
        if len(self._waiting) + len(self._outcomes) >= _LINES or self._bytes >= _BYTES:
            await self._flush()
        if len(self._refused) >= _LINES:
            await self._summarise()

    async def _flush(self) -> None:
        if self._waiting:
            await self._enqueue(self._waiting)
        self._waiting = []
        self._bytes = 0
        written = b"".join(line for _, line in sorted(self._outcomes.items()))
        self._outcomes = {}
        if written:
            await run_in_threadpool(self._spool.write, written)

    async def _enqueue(self, lines: list[tuple[int, New]]) -> None:
        """Enqueue some lines; when they are refused, halve them until the bad ones are alone."""
        batch = batch_of(self._name, [job for _, job in lines])
        try:
            try:
                exceptions = await jobs.enqueue_many(self._service.database, batch)
            except DatabaseUnavailable:
                exceptions = await jobs.enqueue_many(self._service.database, batch)
        except (DatabaseUnavailable, NotFound):
            raise
        except PenstockError as error:
            if len(lines) == 1:
                self._fail(lines[0][0], error)
                return
            middle = len(lines) // 2
            await self._enqueue(lines[:middle])
            await self._enqueue(lines[middle:])
            return
        for place, (line, job) in enumerate(lines):
            id, admission = exceptions.get(place, (job.id, "queued"))
            outcome = {"line": line, "id": shapes.job_id(id), "outcome": str(admission)}
            self._outcomes[line] = orjson.dumps(outcome, option=orjson.OPT_APPEND_NEWLINE)

    async def _summarise(self) -> None:
        """Write which further lines were refused: an error is larger than a bad line, and there may be any number."""
        if not self._refused:
            return
        # A batch that the database refused is halved, so that its bad lines are not found in order.
        lines, self._refused = sorted(self._refused), []
        many = sum(last - first + 1 for first, last in lines)
        error = {"title": f"{many} further lines were refused", "id": "invalid_lines", "detail": _FURTHER}
        summary = orjson.dumps({"lines": lines, "error": error}, option=orjson.OPT_APPEND_NEWLINE)
        await run_in_threadpool(self._spool.write, summary)

    def _fail(self, line: int, error: PenstockError) -> None:
        self._errors += 1
        if self._errors > _MOST_ERRORS:
            if self._refused and self._refused[-1][1] == line - 1:
                self._refused[-1][1] = line
            else:
                self._refused.append([line, line])
            return
        answer: ApiError = from_penstock(error)
        failed = {"line": line, "error": answer.as_dict()}
        self._outcomes[line] = orjson.dumps(failed, option=orjson.OPT_APPEND_NEWLINE)


async def _stream(spool: IO[bytes]) -> AsyncIterator[bytes]:
    try:
        while chunk := await run_in_threadpool(spool.read, 1 << 16):
            yield chunk
    except ClientDisconnect:
        return
    finally:
        spool.close()
