"""A setting that is not valid is named, in one sentence, by what set it; its value is shown unless it is a secret."""

from __future__ import annotations

import pytest

from penstock.errors import InvalidInput
from penstock.http.settings import HttpSettings
from penstock.integrations.rickover.service import DownstreamSettings
from penstock.settings import FromEnvironment, Settings


@pytest.mark.parametrize(
    ("kind", "variable", "value", "shown"),
    [
        (HttpSettings, "PORT", "abc", True),
        (HttpSettings, "PENSTOCK_HTTP_PORT", "70000", True),
        (HttpSettings, "PENSTOCK_HTTP_TOKEN", "x", False),
        (HttpSettings, "PENSTOCK_HTTP_LOG_FORMAT", "xml", True),
        (HttpSettings, "PENSTOCK_HTTP_KEEP_ALIVE", "-1", True),
        (HttpSettings, "PENSTOCK_HTTP_TRUSTED_PROXIES", "10.0.0.0/40", False),
        (HttpSettings, "PENSTOCK_HTTP_ALLOWED_HOSTS", "https://a.example", False),
        (HttpSettings, "PENSTOCK_HTTP_TRUSTED_ORIGINS", "a.example", False),
        (HttpSettings, "ALLOW_UNENCRYPTED_PROXY_TRAFFIC", "perhaps", True),
        (Settings, "PENSTOCK_POOL_SIZE", "many", True),
        (Settings, "PENSTOCK_DEAD_AFTER", "soon", True),
        (DownstreamSettings, "HTTP_MAX_IDLE_CONNS", "none", True),
        (DownstreamSettings, "PENSTOCK_DOWNSTREAM_TIMEOUT_S", "x", True),
    ],
)
def test_the_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, kind: type[FromEnvironment], variable: str, value: str, shown: bool
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(InvalidInput) as refused:
        kind.read()
    assert variable in refused.value.message
    assert "\n" not in refused.value.message
    assert (repr(value) in refused.value.message) or not shown


def test_an_argument_is_named_as_such() -> None:
    with pytest.raises(InvalidInput, match="port 'abc' is not valid"):
        HttpSettings.read(port="abc")


def test_errors_hold_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HTTP_TOKEN", "short-s3cret")
    with pytest.raises(InvalidInput) as refused:
        HttpSettings.read()
    assert "s3cret" not in str(refused.value) and "16 characters" in str(refused.value)
    with pytest.raises(ValueError) as plain:
        HttpSettings()
    assert "s3cret" not in str(plain.value)


def test_settings_reach_the_processes_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    given = HttpSettings(allowed_hosts=("a.example", "*.b"), trusted_proxies="10.0.0.0/8, ::1", token="a-token-of-the-tests")  # type: ignore[arg-type]
    for name, value in given.as_environment().items():
        monkeypatch.setenv(name, value)
    assert HttpSettings.read() == given
