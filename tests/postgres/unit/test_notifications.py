"""Notifications: what is understood, and who is told."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from penstock.postgres.notifications import Kind, Notification, Notifications, parse


def functions() -> dict[str, str]:
    """The files of SQL functions, by name."""
    schema = files("penstock.postgres.schema") / "functions"
    return {f"{folder.name}/{path.name}": path.read_text() for folder in schema.iterdir() for path in folder.iterdir()}


def test_one_file_of_the_schema_sends_notifications() -> None:
    assert [name for name, text in functions().items() if "pg_notify" in text] == ["core/notifications.sql"]


def test_each_word_that_the_schema_sends_is_a_kind() -> None:
    sent: set[str] = set()
    for text in functions().values():
        sent.update(
            re.findall(r"penstock\.tell\([\w.]+, '([a-z]+)', ", text), re.findall(r"penstock\.tell_all\('([a-z]+)', ", text)
        )
        sent.update(re.findall(r"perform penstock\.tell_owner\([^;]*'([a-z]+)'\);", text))
        for call in re.findall(r"perform penstock\.wake\(([^;]*);", text):
            sent.update(re.findall(r"'([a-z]+) ?'(?: \|\| [\w.]+)?\s*\)$", call))
    # The migration sends `schema`; the listener itself says the last two.
    assert sent == {kind.value for kind in Kind} - {Kind.SCHEMA, Kind.CONNECTED, Kind.LISTENING}


@pytest.mark.parametrize(
    ("payload", "parsed"),
    [
        ("jobs", Notification(Kind.JOBS)),
        ("keys mail", Notification(Kind.KEYS, "mail")),
        ("settled a:1 b:2", Notification(Kind.SETTLED, "a:1 b:2")),
        ("scan a name with spaces", Notification(Kind.FULL_SCAN, "a name with spaces")),
        ("history", Notification(Kind.ARCHIVED)),
        ("what is this", None),
        ("connected", None),
        ("listening penstock", None),
    ],
)
def test_a_payload_is_parsed(payload: str, parsed: Notification | None) -> None:
    assert parse(payload) == parsed


def test_a_notification_comes_to_those_who_asked_for_its_kind_and_subject() -> None:
    told: list[str] = []
    notifications = Notifications()
    notifications.subscribe(lambda found: told.append(f"any {found.subject}"), Kind.KEYS)
    for pool in ("mail", "bills"):
        notifications.wake(lambda pool=pool: told.append(pool), Kind.KEYS, Kind.CONNECTED, subject=pool)  # type: ignore[misc]
    for sent, expected in [
        (Notification(Kind.KEYS, "mail"), ["any mail", "mail"]),
        (Notification(Kind.KEYS, "other"), ["any other"]),
        (Notification(Kind.SLOTS, "mail"), []),
        (Notification(Kind.CONNECTED), ["mail", "bills"]),
    ]:
        told.clear()
        notifications.dispatch(sent)
        assert told == expected, sent
