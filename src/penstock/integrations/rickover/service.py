"""The client of the downstream service: its settings, one POST for each job, and the meaning of the answer."""

from __future__ import annotations

import base64
import sys
from urllib.parse import quote

import aiohttp
import orjson
from pydantic import AliasChoices, Field, SecretStr
from pydantic_settings import SettingsConfigDict
from yarl import URL

from penstock._version import __version__
from penstock.core.logs import get_logger
from penstock.errors import InvalidInput, PenstockError
from penstock.jobs.handler import Job
from penstock.settings import FromEnvironment

log = get_logger("penstock.downstream")
_MOST_ANSWER = 64 << 10
_KEPT_S = 1.0


def _rickover(field: str, name: str) -> AliasChoices:
    return AliasChoices(field, f"PENSTOCK_DOWNSTREAM_{field.upper()}", name)


class DownstreamSettings(FromEnvironment):
    """Settings of the downstream service. Rickover's environment variables keep their names."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_DOWNSTREAM_")

    url: str = Field(default="", validation_alias=_rickover("url", "DOWNSTREAM_URL"), description="The service.")
    password: SecretStr = Field(
        default=SecretStr(""),
        validation_alias=_rickover("password", "DOWNSTREAM_WORKER_AUTH"),
        description="Password of the user jobs of the service.",
    )
    connections: int = Field(
        default=100, ge=1, le=10_000, validation_alias=_rickover("connections", "HTTP_MAX_IDLE_CONNS"),
        description="Most connections to the service.",
    )  # fmt: skip
    pool_size: int = Field(
        default=4, ge=1, le=200, validation_alias=_rickover("pool_size", "PG_WORKER_POOL_SIZE"),
        description="Most database connections.",
    )  # fmt: skip
    timeout_s: float = Field(default=6.5, gt=0, le=600, description="Longest time to wait for the answer to a request.")
    concurrency: int = Field(default=1_000, ge=1, le=100_000, description="Most jobs in flight of this process.")
    debug_traffic: bool = Field(
        default=False, validation_alias=_rickover("debug_traffic", "DEBUG_HTTP_TRAFFIC"),
        description="Write all traffic to standard error, without credentials.",
    )  # fmt: skip

    def require_url(self) -> str:
        """The URL without a user and a slash at its end. Raises `InvalidInput` when it is missing or not valid.

        The user is always `jobs`. A password in the URL would appear in errors and logs.
        """
        try:
            url = URL(self.url)
            if url.scheme in ("http", "https") and url.host and not url.query_string and not url.fragment:
                return str(url.with_user(None)).rstrip("/")
        except ValueError:
            pass
        raise InvalidInput(
            f"invalid downstream URL: {self.url.rpartition('@')[2]!r}",
            hint="Give --downstream-url or DOWNSTREAM_URL, such as https://jobs.example.com.",
        )


class Refused(PenstockError):
    """The service refused the job."""

    foreign = True


class Unreachable(PenstockError):
    """The service cannot be reached, so it does not have the job."""


class Unavailable(PenstockError):
    """The service asked to send the job again later."""


class Service:
    """The downstream service.

    Args:
        settings: Its URL, password and limits.
    """

    def __init__(self, settings: DownstreamSettings) -> None:
        self._settings = settings
        self._base = settings.require_url()
        self._session: aiohttp.ClientSession | None = None
        self._once: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Open the connection pools."""
        self._session = self._open(keep=True)
        # The service may close a kept connection at the moment of a request, so that it is unknown whether it has read the
        # request. A connection is therefore kept for less time than services usually wait, and a job that may be sent only once
        # never uses a kept one.
        self._once = self._open(keep=False)

    def _open(self, *, keep: bool) -> aiohttp.ClientSession:
        credentials = f"jobs:{self._settings.password.get_secret_value()}".encode()
        return aiohttp.ClientSession(
            # No limit here: the worker limits the connections, and divides them among the job types.
            connector=aiohttp.TCPConnector(limit=0, force_close=True)
            if not keep
            else aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_S),
            # `sock_connect` limits the time to reach the service, `sock_read` the time until its answer.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._settings.timeout_s, sock_read=self._settings.timeout_s),
            headers={
                "Authorization": f"Basic {base64.b64encode(credentials).decode()}",
                "Accept": "application/json",
                "Content-Type": "application/json",
                "User-Agent": f"penstock/{__version__}",
            },
        )

    async def close(self) -> None:
        """Close the connections."""
        for session in (self._session, self._once):
            if session is not None:
                await session.close()

    async def post(self, job: Job[str], *, again: bool) -> bool:
        """Send a job. Returns True when the service has it, False when it may have it.

        Args:
            job: The job, with its data as JSON text.
            again: Whether a kept connection may be used.

        Raises:
            Refused, Unreachable, Unavailable: The service does not have the job.
        """
        body = f'{{"data":{job.data},"id":"job_{job.id}","attempts":{job.max_attempts - job.attempt + 1}}}'.encode()
        try:
            return await self._post(self._session if again else self._once, job, body)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            log.info("downstream_answer_lost", job_id=str(job.id), error=error)
            return False

    async def _post(self, session: aiohttp.ClientSession | None, job: Job[str], body: bytes) -> bool:
        assert session is not None  # noqa: S101
        url = f"{self._base}/v1/jobs/{quote(job.name, safe='')}/job_{job.id}"
        self._dump(">", f"POST {url} ", body)
        try:
            # The service may go on with the trace.
            headers = None if job.traceparent is None else {"traceparent": job.traceparent}
            async with session.post(URL(url, encoded=True), data=body, headers=headers, allow_redirects=False) as response:
                content = await _beginning(response)
                self._dump("<", f"{response.status} ", content)
                if response.status < 300:
                    return True
                raise _refusal(response.status, content)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Unreachable(f"the downstream service cannot be reached: {error}") from None
        except TimeoutError:
            log.info("downstream_answer_late", job_id=str(job.id))
            return False
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            raise
        except aiohttp.ClientError as error:
            raise Refused(f"the downstream service sent an answer that is not valid HTTP: {error}") from None

    def _dump(self, direction: str, what: str, body: bytes) -> None:
        if self._settings.debug_traffic:
            sys.stderr.write(f"{direction} {what}{body.decode('utf-8', 'replace')}\n")


async def _beginning(response: aiohttp.ClientResponse) -> bytes:
    """The first 64 KiB of the answer. The connection of a longer answer is closed."""
    content = b""
    async for part in response.content.iter_any():
        content += part
        if len(content) > _MOST_ANSWER:
            response.close()
            break
    return content


def _refusal(status: int, content: bytes) -> PenstockError:
    title, id = f"the downstream service answered {status}", ""
    try:
        error = orjson.loads(content)
        if isinstance(error, dict):
            title, id = f"{title}: {str(error.get('title') or '')[:500]}", str(error.get("id") or "")
    except orjson.JSONDecodeError:
        pass
    return Unavailable(title) if id == "service_unavailable" else Refused(title)
