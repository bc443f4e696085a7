"""All settings with their defaults and environment variables.

A setting is an argument of `Penstock`, with the environment (`PENSTOCK_...`) as the fallback. All are checked at start.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AliasChoices, BeforeValidator, Field, InstanceOf, SecretStr, TypeAdapter, ValidationError, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from penstock.errors import InvalidInput


def _seconds(value: object) -> object:
    """Read numbers, also as text from the environment, as seconds."""
    if isinstance(value, bool):
        raise ValueError("it must be a duration")
    try:
        if isinstance(value, (int, float)):
            return timedelta(seconds=value)
        return timedelta(seconds=float(value)) if isinstance(value, str) else value
    except OverflowError:
        raise ValueError("it is too long") from None
    except ValueError:
        return value


class FromEnvironment(BaseSettings):
    """Settings whose fallback is the environment. Validation errors do not show the value, which may be a password."""

    model_config = SettingsConfigDict(
        frozen=True, extra="ignore", populate_by_name=True, env_ignore_empty=True, hide_input_in_errors=True
    )

    @classmethod
    def read(cls, **given: Any) -> Self:
        """The settings from these arguments and the environment.

        Args:
            given: Settings by name; the environment gives the others.

        Raises:
            InvalidInput: A setting is not valid; the message names its environment variable or its argument.
        """
        try:
            return cls(**given)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            place = str(first["loc"][0]) if first["loc"] else ""
            reason = first["msg"].removeprefix("Value error, ")
            name = next((name for name in cls.model_fields if place in (name, *cls.variables(name))), None)
            if name is None:
                raise InvalidInput(f"invalid settings: {reason}") from None
            secret = "SecretStr" in str(cls.model_fields[name].annotation) or "url" in name or "password" in name
            value = "" if secret else f" {str(first['input'])[:50]!r}"
            variable = next((one for one in cls.variables(name) if one in _environment()), None)
            if name in given or variable is None:
                raise InvalidInput(f"invalid settings: {name}{value} is not valid: {reason}") from None
            raise InvalidInput(
                f"invalid settings: the environment variable {variable}{value} is not valid: {reason}",
                hint=f"Correct {variable}, or unset it.",
            ) from None

    @classmethod
    def variables(cls, name: str) -> list[str]:
        """The environment variables of a setting, in the order of their precedence.

        Args:
            name: Name of the setting.
        """
        alias = cls.model_fields[name].validation_alias
        if isinstance(alias, AliasChoices):
            return [str(choice) for choice in alias.choices if str(choice) != name]
        return [f"{cls.model_config.get('env_prefix', '')}{name}".upper()]


def _environment() -> set[str]:
    return {name.upper() for name, value in os.environ.items() if value}


Span = Annotated[timedelta, BeforeValidator(_seconds), Field(gt=timedelta(0), le=timedelta(days=366_000))]


@dataclass(frozen=True, slots=True)
class Keep:
    """How long finished jobs are kept, by their outcome. A span is rounded up to the next of 1, 3, 7, 30, 90 and 365 days.

    Attributes:
        succeeded: How long jobs that succeeded are kept; None: as long as a span in the settings says, which need both.
        failed: How long jobs that failed, expired or were cancelled are kept; None: likewise.
    """

    succeeded: timedelta | None = None
    failed: timedelta | None = None


def longest_kept(keep: Keep | timedelta | None) -> timedelta | None:
    """The longer span of a `Keep`: how long jobs of types are kept that this process does not declare. None: for ever."""
    return max(filter(None, (keep.succeeded, keep.failed)), default=None) if isinstance(keep, Keep) else keep


def _kept(value: object) -> object:
    """Read a document from the environment as a `Keep`, and refuse spans that no retention class has."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = TypeAdapter(Keep).validate_json(value)
    if isinstance(value, Keep):
        for span in (value.succeeded, value.failed):
            if not isinstance(span, timedelta) or not timedelta(0) < span <= timedelta(days=365):
                raise ValueError("both spans of a Keep must be given here: timedeltas, positive and at most 365 days")
    return value


def _whole(value: object) -> object:
    """Refuse values that would be taken for another number: True for 1, 1.0 for 1."""
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        return value
    raise ValueError("it must be an integer")


def _flag(value: object) -> object:
    """Refuse numbers, which would be taken for True or False."""
    if value is None or isinstance(value, (bool, str)):
        return value
    raise ValueError("it must be True or False")


def _password(value: object) -> object:
    """Refuse a password itself, which would be shown with the settings."""
    if (
        value is None
        or (callable(value) and not isinstance(value, type))
        or (isinstance(value, str) and re.fullmatch(r"[\w.]+:\w+", value))
    ):
        return value
    raise ValueError("it must be a function that returns the password, or its place as MODULE:FUNCTION")


Count = Annotated[int, BeforeValidator(_whole)]
Flag = Annotated[bool | None, BeforeValidator(_flag)]


def _listed(value: object) -> object:
    """Read text from the environment as a list of keys; the bytes of a key become base64 text."""
    if isinstance(value, str):
        return tuple(value.replace(",", " ").split())
    if isinstance(value, (list, tuple)):
        return tuple(base64.b64encode(key).decode() if isinstance(key, bytes) else key for key in value)
    return value


class Settings(FromEnvironment):
    """Settings of a process. A duration is a `timedelta`, a number of seconds, or ISO 8601 text such as `PT5M`.

    [settings.md](../settings.md) lists them.
    """

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_")

    database_url: SecretStr | None = Field(
        default=None,
        validation_alias=AliasChoices("PENSTOCK_DATABASE_URL", "DATABASE_URL"),
        description="PostgreSQL to use, 15 or newer; none: the embedded server.",
    )
    database_password: Annotated[Callable[[], str | Awaitable[str]] | str | None, BeforeValidator(_password)] = Field(
        default=None,
        validation_alias=AliasChoices("PENSTOCK_DATABASE_PASSWORD_FROM", "database_password"),
        description="Function that returns the password for each new connection, or its place as MODULE:FUNCTION,"
        " for a database_url without a password.",
    )
    data_dir: Path = Field(default=Path(".penstock"), description="Folder of the embedded server.")
    pool_size: Count = Field(default=4, ge=1, le=200, description="Maximum number of database connections of one process.")
    command_timeout: Span = Field(default=timedelta(seconds=30), description="Longest time for one database call.")
    connect_timeout: Span = Field(default=timedelta(seconds=10), description="Longest time to open a connection.")
    start_timeout: Span = Field(
        default=timedelta(seconds=60), description="How long a worker or server that starts waits for the database."
    )
    statement_cache: Flag = Field(
        default=None, description="Whether to prepare statements; none: unless a pooler such as PgBouncer is detected."
    )
    listen_url: SecretStr | None = Field(
        default=None, description="Direct connection for LISTEN when database_url leads through PgBouncer."
    )

    keys: Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_listed)] = Field(
        default=(), description="Keys of encrypted payloads, 32 bytes in base64 each: the first encrypts, all decrypt."
    )

    traces: Flag = Field(
        default=False, description="Whether to make OpenTelemetry spans; needs `penstock[otel]` and a tracer provider."
    )
    otel_metrics: Flag = Field(
        default=False,
        description="Whether to give metrics to OpenTelemetry; needs `penstock[otel]` and a meter provider.",
    )
    rates: Flag = Field(
        default=True,
        description="Whether to write how many jobs end, and their times, into the database once a minute, for the dashboard.",
    )
    code_version: Annotated[str, Field(strict=True, min_length=1, max_length=100, pattern=r"^[^\x00]+$")] | None = Field(
        default=None, description="Version of the application's code, such as a commit: failures and workers are shown with it."
    )

    concurrency: Count = Field(
        default=100, ge=1, le=100_000, description="Maximum number of async handlers at once in one process."
    )
    threads: Count = Field(default=16, ge=1, le=1_000, description="Number of threads for plain handlers in one process.")
    processes_for_handlers: Count = Field(
        default=2, ge=1, le=256, description='Number of processes for handlers with executor="process".'
    )
    claim_limit: Count = Field(default=1_000, ge=1, le=10_000, description="Maximum number of jobs claimed at once.")
    heartbeat_interval: Span = Field(default=timedelta(seconds=5), description="Interval of a worker's heartbeats.")
    dead_after: Span = Field(default=timedelta(seconds=10), description="Silence after which other workers take its jobs.")
    wedged_after: Span = Field(
        default=timedelta(minutes=5),
        description="How long a process whose event loop makes no progress keeps partitions, which have no visibility timeout.",
    )
    poll_interval: Span = Field(default=timedelta(seconds=1), description="Interval at which an idle worker polls.")
    maintenance_interval: Span = Field(
        default=timedelta(seconds=1), description="Interval at which a worker looks for lost jobs."
    )
    handover_grace: Span = Field(
        default=timedelta(seconds=10), description="Time for running handlers of pools when their slot moves to another worker."
    )
    shutdown_grace: Span = Field(default=timedelta(seconds=30), description="Time for running handlers at shutdown.")
    autoscale_interval: Span = Field(default=timedelta(seconds=5), description="Interval at which --autoscale measures the load.")
    autoscale_settle: Span = Field(default=timedelta(seconds=15), description="Pause of --autoscale after each step.")
    autoscale_cooldown: Span = Field(
        default=timedelta(seconds=60), description="How long fewer workers must suffice before --autoscale removes one."
    )
    keep: Annotated[InstanceOf[Keep] | Span | None, NoDecode, BeforeValidator(_kept)] = Field(
        default=timedelta(days=30),
        description="How long finished jobs are kept whose type does not say it; none: for ever. By outcome:"
        ' `{"succeeded": "P3D", "failed": "P90D"}`.',
    )
    keep_history: Span | None = Field(
        default=timedelta(days=365),
        description="How long the database keeps what lakes bring back: rollups, worker use, failures, runs; none: for ever.",
    )

    @model_validator(mode="after")
    def _beats_in_time(self) -> Self:
        if self.heartbeat_interval >= self.dead_after:
            raise ValueError(
                f"heartbeat_interval ({self.heartbeat_interval.total_seconds():g} s) must be shorter than dead_after"
                f" ({self.dead_after.total_seconds():g} s), best half of it"
            )
        return self
