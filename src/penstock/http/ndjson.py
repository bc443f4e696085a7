"""Bodies of lines (NDJSON): one contract for jobs, events and messages.

Each line gets an outcome, or an error, in a line of the answer; a line that is refused does not stop the others. The lines are
written in their order, in parts of 1,000 or 4 MiB, while the body arrives, with the same memory for ten lines and ten million.
The outcomes are spooled, and sent when the body is read: a client that sends everything before it reads anything would otherwise
wait for the server, and the server for the client.

What ends a request as a whole (the database is away, a line without end) is an error of the request, which says at which line it
was and how many lines before it are done. So a client that sends lines gives them ids of their own, or a producer's numbers,
and sends all of them again.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import IO, Annotated, Any, Generic, TypeVar

import orjson
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from penstock.core.coalescing import in_halves
from penstock.errors import DatabaseUnavailable, NotFound, PenstockError
from penstock.http.call import Call
from penstock.http.errors import ApiError, from_penstock, too_large
from penstock.http.live_access import Watch

T = TypeVar("T")
CONTENT = "application/x-ndjson"
_LINES, _BYTES = 1_000, 4 << 20
_MOST_ERRORS = 1_000
_IN_MEMORY = 1 << 20
_FURTHER = f"The first {_MOST_ERRORS:,} errors are told line by line; lines are the first and the last of each row of bad lines."


class LineOutcome(BaseModel):
    """One line of the answer: an outcome or an error. After 1,000 errors `lines` tells the bad ones as ranges."""

    line: int | None = None
    lines: list[Annotated[list[int], Field(min_length=2, max_length=2)]] | None = None
    error: dict[str, Any] | None = None


def are_lines(request: Request) -> bool:
    """Whether the content type of a body says that it is lines."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == CONTENT


def outcomes(model: type[LineOutcome], example: str) -> dict[int | str, dict[str, Any]]:
    """What the OpenAPI document says of the answer to lines."""
    content = {CONTENT: {"schema": model.model_json_schema(), "example": example}}
    return {200: {"description": "To lines: a line for each.", "content": content}}


class Lines(Generic[T]):
    """One body of lines on its way in.

    Args:
        read: Reads a line. Raises `PenstockError` for one that is refused.
        write: Writes what some lines say, all or nothing, and returns what became of each. Raises `PenstockError`.
        longest: Most bytes of a line.
        divisible: Whether a part that is refused may be written in halves, until the bad lines are alone; otherwise all of its
            lines are refused, and `write` is asked about the next part.
    """

    def __init__(
        self,
        read: Callable[[bytes], T],
        write: Callable[[list[T]], Awaitable[Sequence[Mapping[str, Any]]]],
        *,
        longest: int,
        divisible: bool = True,
    ) -> None:
        self._read = read
        self._write = write
        self._longest = longest
        self._divisible = divisible
        self._line = 0
        self._done = 0
        self._part: list[tuple[int, T]] = []
        self._bytes = 0
        self._outcomes: dict[int, bytes] = {}
        self._errors = 0
        # First and last of the lines in a row that were refused, once single errors are no longer told.
        self._refused: list[list[int]] = []

    async def answer(self, request: Request) -> Response:
        """Write everything. Raises `ApiError` when the body cannot be split into lines, or the database is away."""
        spool = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115
        call: Call = request.scope["call"]
        try:
            # A body of lines may go on for hours.
            with call.watching() as watch:
                await self._all(request, spool, watch)
        except PenstockError as error:
            spool.close()
            raise self._at_line(from_penstock(error, request.url.path)) from None
        except BaseException:
            spool.close()
            raise
        spool.seek(0)
        return StreamingResponse(_stream(spool), media_type=CONTENT)

    async def _all(self, request: Request, spool: IO[bytes], watch: Watch) -> None:
        async for line in lines_of(request.stream(), self._longest):
            watch.check()
            self._line += 1
            if line.strip():
                self._take(line)
            if len(self._part) + len(self._outcomes) >= _LINES or self._bytes >= _BYTES:
                await self._flush(spool)
            if len(self._refused) >= _LINES:
                await self._summarise(spool)
        await self._flush(spool)
        await self._summarise(spool)

    def _take(self, line: bytes) -> None:
        try:
            self._part.append((self._line, self._read(line)))
            self._bytes += len(line)
        except PenstockError as error:
            self._fail(self._line, error)

    async def _flush(self, spool: IO[bytes]) -> None:
        part, self._part, self._bytes = self._part, [], 0
        if part:
            undivided = (DatabaseUnavailable, NotFound) if self._divisible else PenstockError
            await in_halves(part, self._write_part, self._refused_part, undivided)
        written = b"".join(line for _, line in sorted(self._outcomes.items()))
        self._outcomes = {}
        if written:
            await run_in_threadpool(spool.write, written)

    async def _write_part(self, part: Sequence[tuple[int, T]]) -> None:
        found = await self._write([said for _, said in part])
        self._done += len(part)
        for (line, _), outcome in zip(part, found, strict=True):
            self._outcomes[line] = orjson.dumps({"line": line, **outcome}, option=orjson.OPT_APPEND_NEWLINE)

    async def _refused_part(self, part: Sequence[tuple[int, T]], error: PenstockError) -> None:
        if isinstance(error, (DatabaseUnavailable, NotFound)):
            self._line = part[0][0]
            raise error
        for line, _ in part:
            self._fail(line, error)

    async def _summarise(self, spool: IO[bytes]) -> None:
        """Write which further lines were refused: an error is larger than a bad line, and there may be any number."""
        if not self._refused:
            return
        # A part that the database refused is halved, so that its bad lines are not found in order.
        lines, self._refused = sorted(self._refused), []
        many = sum(last - first + 1 for first, last in lines)
        error = {"title": f"{many} further lines were refused", "id": "invalid_lines", "detail": _FURTHER}
        summary = orjson.dumps({"lines": lines, "error": error}, option=orjson.OPT_APPEND_NEWLINE)
        await run_in_threadpool(spool.write, summary)

    def _fail(self, line: int, error: PenstockError) -> None:
        self._errors += 1
        if self._errors > _MOST_ERRORS:
            if self._refused and self._refused[-1][1] == line - 1:
                self._refused[-1][1] = line
            else:
                self._refused.append([line, line])
            return
        failed = {"line": line, "error": from_penstock(error).as_dict()}
        self._outcomes[line] = orjson.dumps(failed, option=orjson.OPT_APPEND_NEWLINE)

    def _at_line(self, error: ApiError) -> ApiError:
        if not self._done:
            return error
        detail = f"{self._done:,} lines before line {self._line:,} are done. Send all of them again."
        return ApiError(
            error.status,
            error.id,
            error.message,
            detail=f"{error.hint.rstrip('.')}. {detail}" if error.hint else detail,
            instance=error.instance,
            in_body=error.in_body,
            headers=error.headers,
        )


async def lines_of(chunks: AsyncIterator[bytes], longest: int) -> AsyncIterator[bytes]:
    """The lines of a body as it arrives, without their ends. Raises `ApiError` 413 for one of more than `longest` bytes."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > longest or any(len(line) > longest for line in lines):
            raise too_large(f"A line is too long ({longest} bytes max)")
        for line in lines:
            yield line
    yield rest


async def _stream(spool: IO[bytes]) -> AsyncIterator[bytes]:
    try:
        while chunk := await run_in_threadpool(spool.read, 1 << 16):
            yield chunk
    except ClientDisconnect:
        return
    finally:
        spool.close()
