"""The settings of own connections, as URLs and statements have them."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import pytest

from penstock.postgres.pinned import PINNED, pinned_url, set_statements, settings_of


@pytest.mark.parametrize(
    "query", ["", "host=/run/postgresql&password=a+b%26", "options=-c%20work_mem%3D4MB&sslmode=require", "options=-c%20geqo=off"]
)
def test_a_pinned_url_has_the_settings_and_everything_that_it_had(query: str) -> None:
    parts = urlsplit(pinned_url(f"postgresql://ada:p%40ss@db:6432/shop?{query}"))
    assert (parts.netloc, parts.path) == ("ada:p%40ss@db:6432", "/shop")
    options = parse_qs(parts.query)["options"][0]
    assert "-c default_transaction_isolation=read\\ committed -c" in options
    assert [name for name in PINNED if f"-c {name}=" not in options] == ["transaction_timeout"]
    for each in query.split("&"):
        if each.startswith("options="):
            assert options.startswith(parse_qs(each)["options"][0])
        else:
            assert each in parts.query


def test_a_server_is_given_no_setting_that_it_does_not_know() -> None:
    assert PINNED.keys() - settings_of(15).keys() == {"transaction_timeout"}
    assert settings_of(17) == PINNED
    assert "transaction_timeout" not in set_statements(15, "local")
    assert set_statements(18, "local").startswith("set local default_transaction_isolation = 'read committed'; set local ")
