"""Settings of the HTTP server. Rickover's environment variables keep their names; the others begin with `PENSTOCK_HTTP_`."""

from __future__ import annotations

import ipaddress
import re
from datetime import timedelta
from typing import Annotated, Any

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, SecretStr
from pydantic_settings import NoDecode, SettingsConfigDict

from penstock.http.masking import Rule
from penstock.settings import FromEnvironment, Span

SHORTEST_TOKEN = 16
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_.-]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+/?")


def _split(value: Any) -> Any:
    """A list as the environment has it: with commas."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _check_networks(given: tuple[str, ...]) -> tuple[str, ...]:
    for one in given:
        ipaddress.ip_network(one, strict=False)
    return given


def _check_hosts(given: tuple[str, ...]) -> tuple[str, ...]:
    for one in given:
        if not _HOST.fullmatch(one):
            raise ValueError(f"{one!r} is not a host: write names such as jobs.example.com or *.example.com, with commas")
    return given


def _check_origins(given: tuple[str, ...]) -> tuple[str, ...]:
    for one in given:
        if not _ORIGIN.fullmatch(one.lower()):
            raise ValueError(f"{one!r} is not an origin: write https://ops.example.com, with commas")
    return given


def _check_token(token: SecretStr | None) -> SecretStr | None:
    if token is not None and len(token.get_secret_value()) < SHORTEST_TOKEN:
        raise ValueError(f"a token has at least {SHORTEST_TOKEN} characters: make one with openssl rand -hex 24")
    return token


def _check_masked(given: tuple[str, ...]) -> tuple[str, ...]:
    for one in given:
        Rule.of(one)
    return given


Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]


def _rickover(field: str, name: str) -> AliasChoices:
    return AliasChoices(field, f"PENSTOCK_HTTP_{field.upper()}", name)


class HttpSettings(FromEnvironment):
    """Settings of a server process."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_HTTP_")

    host: str = Field(default="127.0.0.1", description="Address to listen on; elsewhere than on loopback users are needed.")
    port: int = Field(default=9090, ge=0, le=65535, validation_alias=_rickover("port", "PORT"), description="0: any free one.")
    processes: int = Field(default=1, ge=1, le=256, description="Server processes.")
    pool_size: int = Field(
        default=10, ge=1, le=200, validation_alias=_rickover("pool_size", "PG_SERVER_POOL_SIZE"),
        description="Most database connections of one process.",
    )  # fmt: skip
    token: Annotated[SecretStr | None, AfterValidator(_check_token)] = Field(
        default=None, description="Token of the user admin, of 16 characters at least; none: generated when there are no users."
    )
    allowed_hosts: Annotated[Words, AfterValidator(_check_hosts)] = Field(
        default=(),
        description="Host names that the server answers to, with commas, such as jobs.example.com,*.internal; none: any.",
    )
    trusted_origins: Annotated[Words, AfterValidator(_check_origins)] = Field(
        default=(), description="Origins of other sites whose pages may call the server, such as https://ops.example.com."
    )
    trusted_proxies: Annotated[Words, AfterValidator(_check_networks)] = Field(
        default=(),
        description="Addresses or networks of proxies whose X-Forwarded-For tells the client, such as 10.0.0.0/8.",
    )
    allow_unencrypted_proxy_traffic: bool = Field(
        default=False,
        validation_alias=_rickover("allow_unencrypted_proxy_traffic", "ALLOW_UNENCRYPTED_PROXY_TRAFFIC"),
        description="Accept requests that a proxy received without TLS.",
    )
    hsts_preload: bool = Field(
        default=False,
        description="Let browsers list the domain and all below it as HTTPS alone (preload), which is hard to take back.",
    )
    debug_traffic: bool = Field(
        default=False, validation_alias=_rickover("debug_traffic", "DEBUG_HTTP_TRAFFIC"),
        description="Write all traffic to standard error, without credentials.",
    )  # fmt: skip
    homepage_title: str = Field(
        default="Penstock",
        validation_alias=_rickover("homepage_title", "HOMEPAGE_TITLE"),
        description="Title of the dashboard and of the page /home.",
    )
    homepage_iframe_url: str = Field(
        default="", validation_alias=_rickover("homepage_iframe_url", "HOMEPAGE_IFRAME_URL"),
        description="A dashboard of your own to show on the page /home.",
    )  # fmt: skip
    dashboard_session: Span = Field(
        default=timedelta(hours=12),
        gt=timedelta(0),
        le=timedelta(days=31),
        description="How long a login to the dashboard lasts.",
    )
    dashboard_masked: Annotated[Words, AfterValidator(_check_masked)] = Field(
        default=(),
        description="Fields of payloads that the dashboard masks, with commas, such as iban,customer.email,invoices:*.",
    )
    dashboard_unmasked_role: str = Field(
        default="admin", pattern="^(read|enqueue|work|admin)$", description="The lowest role for which no field is masked."
    )
    max_body: int = Field(default=1 << 20, ge=1 << 17, description="Largest request body in bytes, batches excepted.")
    max_batch: int = Field(default=1 << 30, ge=1 << 17, description="Largest body of a batch in bytes.")
    head_timeout: Span = Field(default=timedelta(seconds=15), description="Longest time for a request line and its headers.")
    body_timeout: Span = Field(
        default=timedelta(seconds=30), description="Longest time for a request body, a second more for each KiB of it."
    )
    write_timeout: Span = Field(default=timedelta(seconds=60), description="How long a client may read nothing of its answer.")
    max_connections: int = Field(default=10_000, ge=1, description="Most connections of one process.")
    keep_alive: Span = Field(default=timedelta(seconds=75), description="How long an idle connection is kept.")
    longest_wait: Span = Field(default=timedelta(minutes=5), description="Longest ?wait= and long poll.")
    live_keep_alive: Span = Field(
        default=timedelta(seconds=15), description="How often a live connection (events, WebSocket) shows that it lives."
    )
    longest_live: Span = Field(
        default=timedelta(days=1), description="Longest time of a live connection; its client comes back and goes on."
    )
    max_live: int = Field(default=8_000, ge=1, description="Most live connections of one process.")
    shutdown_grace: Span = Field(default=timedelta(seconds=10), description="Time for running requests at shutdown.")
    jobber_visibility_timeout: Span = Field(
        default=timedelta(seconds=15), description="Visibility timeout of types made by POST /jobber/queue."
    )
    log_requests: bool = Field(default=False, description="Log every request, not only what went wrong.")
    log_format: str = Field(default="console", pattern="^(console|json)$", description="console or json.")

    def as_environment(self) -> dict[str, str]:
        """The environment variables that give these settings to a process that is started."""
        environment = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, SecretStr):
                value = value.get_secret_value()
            elif isinstance(value, timedelta):
                value = value.total_seconds()
            elif isinstance(value, tuple):
                value = ",".join(value)
            environment[f"PENSTOCK_HTTP_{name.upper()}"] = "" if value is None else str(value)
        return environment
