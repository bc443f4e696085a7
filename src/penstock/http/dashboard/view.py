"""What a page of the dashboard is, and what it is given: one request of one user.

A page reads through `View.read` and returns what its template shows. It is rendered for a request, and again for as long as
the browser is connected, whenever a reading of it is due. So a page is live without doing anything for it. An action changes
something for a user who has its role, within `View.changing`, which writes the audit.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, TypeVarTuple
from urllib.parse import quote

from penstock.app import Penstock
from penstock.core.logs import get_logger
from penstock.errors import InvalidInput
from penstock.http import audit
from penstock.http.auth import Principal, Role
from penstock.http.dashboard.poller import KEPT_S, Kept, Poller, Reading
from penstock.http.errors import ApiError
from penstock.http.masking import Masking
from penstock.jobs.rates import Period, read_day, read_hour
from penstock.jobs.top import TopRecord, top_types
from penstock.postgres.database import Database

log = get_logger("penstock.dashboard")
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
_IDLE_S = 5.0
_RATES_KEPT_S = 30.0
ON_A_PAGE = 50
"""How many of a list a page shows."""
# The numbers of the database.
_LEAST, _MOST = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True)
class Shown:
    """What a page shows: the title, the template, and what the template is given."""

    title: str
    template: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Done:
    """What an action answers: where the browser goes on, relative to the dashboard, and what was done."""

    to: str
    message: str


@dataclass(frozen=True, slots=True)
class Section(Generic[T]):
    """A part of a list that is ordered by name.

    Attributes:
        rows: What the page shows.
        first: Whether it is the beginning.
        next: Behind which name the next part begins; None: this is the last one.
    """

    rows: list[T]
    first: bool
    next: str | None


@dataclass(frozen=True, slots=True)
class Sight:
    """What a user may see of jobs: what a reading depends on that is made for the user's eyes.

    Attributes:
        types: The job types that are open to the user; None: all.
        masking: What of payloads the user may not see.
    """

    types: frozenset[str] | None
    masking: Masking

    @property
    def names(self) -> list[str] | None:
        """The job types by name; None: all."""
        return None if self.types is None else sorted(self.types)


class View:
    """One request of one user.

    Args:
        app: The application.
        poller: Reads for all viewers.
        user: Who asks.
        masking: What of payloads the user may not see.
        path: The path of the page, relative to the dashboard.
        parameters: What the path of the page names.
        query: The query, with the first value of each parameter.
        form: The fields of a form, each with its values.
    """

    def __init__(
        self,
        app: Penstock,
        poller: Poller,
        user: Principal,
        masking: Masking,
        path: str,
        parameters: Mapping[str, str],
        query: Mapping[str, str],
        form: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.app = app
        self.user = user
        self.masking = masking
        self.path = path
        self.parameters = parameters
        self.query = query
        self._form = form or {}
        self._poller = poller
        self.readings: list[Reading[Any]] = []
        self._kept: list[Kept] = []
        self._idle_until = time.monotonic() + _IDLE_S

    @property
    def due_in_s(self) -> float:
        """In how many seconds the page is to be looked at again."""
        return self._poller.due_in_s(self._kept) if self._kept else max(self._idle_until - time.monotonic(), 0.0)

    async def is_due(self) -> bool:
        """Whether a reading of the page is due again."""
        return await self._poller.is_due(self._kept) if self._kept else time.monotonic() >= self._idle_until

    @property
    def state(self) -> tuple[object, ...]:
        """What changes when something that was read for the page does."""
        return tuple((reading.version, reading.problem) for reading in self.readings)

    @property
    def names(self) -> tuple[str, ...] | None:
        """The job types that the user may see; None: all."""
        return None if self.user.types is None else tuple(sorted(self.user.types))

    @property
    def sight(self) -> Sight:
        """What the user may see of jobs."""
        return Sight(self.user.types, self.masking)

    def may(self, role: str) -> bool:
        """Whether the user has this role."""
        return self.user.role >= Role[role.upper()]

    def require(self, name: str) -> None:
        """Raise `ApiError` 404 unless the job type, stream or topic is open to the user, as for one that there is not."""
        if not self.user.may(name):
            raise not_here(name)

    async def database(self) -> Database:
        """The database, to change something in it."""
        return await self.app.database()

    async def read(
        self,
        call: Callable[[Database, *Arguments], Awaitable[T]],
        *arguments: *Arguments,
        kept_s: float = KEPT_S,
        follows: bool = False,
        plain: bool = False,
    ) -> T:
        """What the poller reads: see `Poller.read`. Its time is shown on the page."""
        reading, kept = await self._poller.read(
            call, *arguments, kept_s=kept_s, follows=follows, plain=plain, user=self.user.name
        )
        self.readings.append(reading)
        self._kept.append(kept)
        return reading.value

    def section(self, all: Iterable[T], name: Callable[[T], str]) -> Section[T]:
        """The part of a list that begins behind the name that the query gives as `after`."""
        after = self.query.get("after", "")
        rows = sorted((row for row in all if name(row) > after), key=name)
        return Section(rows[:ON_A_PAGE], not after, name(rows[ON_A_PAGE - 1]) if rows[ON_A_PAGE:] else None)

    async def loads(self, names: Iterable[str]) -> dict[str, TopRecord]:
        """How much waits and runs of each of these job types, as far as there is any."""
        chosen = tuple(sorted(set(names)))
        found = await self.read(top_types, chosen, len(chosen), follows=True) if chosen else []
        return {load.name: load for load in found}

    async def periods(self, names: Sequence[str] | None) -> list[Period]:
        """The last hour and the last day of these job types together; None: of all. Processes write once a minute."""
        chosen = None if names is None else tuple(names)
        return [await self.read(call, chosen, kept_s=_RATES_KEPT_S) for call in (read_hour, read_day)]

    def text(self, name: str, default: str = "") -> str:
        """A field of the form, without blanks around it."""
        return next(iter(self._form.get(name, ())), default).strip()

    def raw_text(self, name: str) -> str | None:
        """A field of the form as it was sent; None: it was not."""
        return next(iter(self._form.get(name, ())), None)

    def texts(self, name: str) -> list[str]:
        """All values of a field of the form."""
        return list(self._form.get(name, ()))

    def number(self, name: str) -> int | None:
        """A number of the form, of at most 64 bits; None: the field is empty. Raises `InvalidInput`."""
        given = self.text(name)
        if not given:
            return None
        number = None
        with suppress(ValueError):
            number = int(given)
        if number is None or not _LEAST <= number <= _MOST:
            raise InvalidInput(f"{name} is not a whole number of 64 bits: {given[:100]!r}", hint="Write digits.")
        return number

    @asynccontextmanager
    async def changing(self, action: str, **filter: Any) -> AsyncIterator[Callable[[int], None]]:
        """Around a change: writes the audit before and after it. Gives what is called with the number of changed objects.

        Args:
            action: What is done.
            filter: To what: ids, names, conditions. No payload belongs here.
        """
        try:
            async with audit.changing(await self.database(), self.user.name, action, filter) as changed:
                yield changed.append
        finally:
            self._poller.changed()
        log.info("changed", user=self.user.name, action=action)


Show = Callable[[View], Awaitable[Shown]]
Act = Callable[[View], Awaitable[Done]]


@dataclass(frozen=True, slots=True)
class Page:
    """A page.

    Attributes:
        path: Path relative to the dashboard, with parameters such as `{id}`.
        show: What it shows.
        role: The role that sees it.
        all_types: Whether only users of all job types see it.
    """

    path: str
    show: Show
    role: Role = Role.READ
    all_types: bool = False


@dataclass(frozen=True, slots=True)
class Action:
    """A change.

    Attributes:
        path: Path of the form, relative to the dashboard.
        act: Makes the change.
        role: The role that may make it.
        all_types: Whether only users of all job types may make it.
    """

    path: str
    act: Act
    role: Role = Role.ADMIN
    all_types: bool = False


def whole_number(text: str) -> int | None:
    """What an address has where a number of the database belongs; None: it is none."""
    return int(text) if text.isdecimal() and len(text) < 19 else None


def segment(value: object) -> str:
    """A value as one segment of a path."""
    return quote(str(value), safe="")


def not_here(what: str) -> ApiError:
    """The answer to what there is not, or not for this user."""
    return ApiError(
        404,
        "not_found",
        f"There is no {what[:200]}",
        detail="It was dropped or pruned, or you have no access to it.",
        in_body=True,
    )
