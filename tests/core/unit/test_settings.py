"""Settings: which source wins, and what is refused at start."""

from __future__ import annotations

from datetime import timedelta

import pytest
from pydantic import ValidationError

from penstock import InvalidInput, Penstock, Settings


def test_the_variable_with_our_name_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://generic/x")
    assert _url(Settings()) == "postgresql://generic/x"
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", "postgresql://ours/x")
    assert _url(Settings()) == "postgresql://ours/x"
    assert _url(Settings(database_url="postgresql://given/x")) == "postgresql://given/x"
    assert _url(Penstock("postgresql://given/x").settings) == "postgresql://given/x"
    assert Penstock(data_dir="here").settings.database_url is None


def test_a_heartbeat_comes_before_the_worker_is_declared_dead() -> None:
    with pytest.raises(ValidationError, match="must be shorter than dead_after"):
        Settings(heartbeat_interval=timedelta(seconds=10), dead_after=timedelta(seconds=10))


def test_settings_of_a_wrong_type_are_refused_without_being_shown() -> None:
    with pytest.raises(InvalidInput, match="settings must be Settings, not of type dict") as refused:
        Penstock(settings={"database_url": "postgresql://ada:s3cret@localhost/shop"})  # type: ignore[arg-type]
    assert "s3cret" not in str(refused.value)


def _url(settings: Settings) -> str | None:
    return settings.database_url.get_secret_value() if settings.database_url else None
