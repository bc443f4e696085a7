"""Notifications: what the schema says with NOTIFY, as typed values, and who in this process is told.

The payload of a notification is the name of its kind, followed by a subject where the kind has one: `keys mail`. Every role that
may connect to the database can send any notification, so each is only a hint to look; one that is not understood is dropped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple, TypeAlias


class Kind(StrEnum):
    """What a notification says. The value is the word in the payload."""

    # Sent to one idle worker, member or reader, on its own channel.
    JOBS = "jobs"
    """Jobs have come that an idle worker waits for. No subject."""
    KEYS = "keys"
    """Jobs have come in slots of an idle member. Subject: the pool."""
    EVENTS = "events"
    """Events have come that a reader waits for. Subject: the number of the stream."""
    PLACE = "place"
    """A place of a concurrency or rate limit has come free for the one that waits longest. Subject: the job type."""

    # Sent to the worker or member that is concerned, on its own channel.
    CANCEL = "cancel"
    """A running job has been cancelled. Subject: the id of the job."""
    SETTLED = "settled"
    """Callbacks have settled attempts. Subject: `id:attempt` of each, with a space between."""
    SLOTS = "slots"
    """The slots of a member are to change. Subject: the group."""
    PAUSED = "paused"
    """A key of a pool was paused. Subject: the pool."""
    MOVED = "moved"
    """A consumer group was paused or resumed, or its offsets moved. Subject: the group."""
    STANDING = "standing"
    """Standing jobs have changed, or messages for them have come. Subject: the pool."""

    # Sent to every process, on the channel `penstock`.
    FULL_SCAN = "scan"
    """A job has come back below the watermarks. Subject: the job type."""
    TAKEN = "taken"
    """Another connection receives a topic under the client id of an earlier one. Subject: the queue."""
    SCHEDULE = "schedule"
    """A run in place was requested. Subject: the schedule."""
    WORKFLOWS = "workflows"
    """A job for which others wait has ended, or a job waits for one that runs. No subject."""
    SCHEMA = "schema"
    """A migration has changed the schema. No subject."""

    # Sent on a channel of its own, `penstock_archive`.
    ARCHIVED = "history"
    """Jobs have been archived, while a reader of the archive waits. No subject."""

    # Said by the listener of this process. What is sent under these names is dropped.
    CONNECTED = "connected"
    """Listening has begun, also after a break: something may have been missed. No subject."""
    LISTENING = "listening"
    """A channel that was added is listened on. Subject: the channel."""


_OWN = frozenset((Kind.CONNECTED, Kind.LISTENING))


class Notification(NamedTuple):
    """One notification."""

    kind: Kind
    subject: str = ""


def parse(payload: str) -> Notification | None:
    """The notification of a payload. None: it is not understood."""
    word, _, subject = payload.partition(" ")
    try:
        kind = Kind(word)
    except ValueError:
        return None
    return None if kind in _OWN else Notification(kind, subject)


Handler: TypeAlias = Callable[[Notification], None]


class Notifications:
    """Tells those in this process who asked for a kind of notification."""

    def __init__(self) -> None:
        self._handlers: defaultdict[tuple[Kind, str | None], list[Handler]] = defaultdict(list)

    def subscribe(self, handler: Handler, *kinds: Kind, subject: str | None = None) -> None:
        """Call `handler` with each notification of these kinds.

        Args:
            handler: Called on the event loop; it must not raise.
            kinds: Kinds of notifications.
            subject: Only those of this subject; `CONNECTED` has none, and comes whatever is given.
        """
        for kind in kinds:
            self._handlers[kind, None if kind is Kind.CONNECTED else subject].append(handler)

    def wake(self, waking: Callable[[], None], *kinds: Kind, subject: str | None = None) -> None:
        """Call `waking`, which takes no argument, for each notification of these kinds. See `subscribe`."""
        self.subscribe(lambda _: waking(), *kinds, subject=subject)

    def dispatch(self, notification: Notification) -> None:
        """Call the handlers of a notification."""
        for place in ((notification.kind, None), (notification.kind, notification.subject)):
            for handler in self._handlers.get(place, ()):
                handler(notification)
