"""The settings of a Django project that concern Penstock: `PENSTOCK = {"APP": "shop.jobs:app", "DATABASE": "default"}`."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from penstock.app import Penstock, load

_KNOWN = {"APP", "DATABASE"}


def _settings() -> dict[str, Any]:
    given = dict(getattr(settings, "PENSTOCK", {}))
    if unknown := given.keys() - _KNOWN:
        raise ImproperlyConfigured(f"PENSTOCK has no setting {', '.join(sorted(unknown))}; it has {', '.join(sorted(_KNOWN))}")
    return given


def find_app() -> Penstock:
    """The application that `PENSTOCK["APP"]` names. Raises `ImproperlyConfigured` when it names none."""
    target = _settings().get("APP")
    if not target:
        raise ImproperlyConfigured('name the application in the settings: PENSTOCK = {"APP": "shop.jobs:app"}')
    return load(str(target))


def alias() -> str:
    """The alias in `DATABASES` of the database whose transactions `enqueue` joins."""
    return str(_settings().get("DATABASE", "default"))


def database_url(using: str = "default") -> str:
    """The URL of a database of Django, for `Penstock(database_url())`, so that both use the same one.

    Args:
        using: Its alias in `DATABASES`.

    Raises:
        ImproperlyConfigured: It is not on PostgreSQL.
    """
    database = settings.DATABASES[using]
    if "postgresql" not in database["ENGINE"]:
        raise ImproperlyConfigured(f"the database {using} is not on PostgreSQL but on {database['ENGINE']}")
    user = quote(database.get("USER") or "", safe="")
    password = quote(database.get("PASSWORD") or "", safe="")
    credentials = (f"{user}:{password}@" if password else f"{user}@") if user else ""
    host, port = str(database.get("HOST") or ""), str(database.get("PORT") or "")
    # A folder is that of a socket, which a URL names in its query.
    socket = {"host": host, **({"port": port} if port else {})} if host.startswith("/") else {}
    place = "" if socket else host + (f":{port}" if port else "")
    return f"postgresql://{credentials}{place}/{quote(database['NAME'])}" + (f"?{urlencode(socket)}" if socket else "")
