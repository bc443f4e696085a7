"""The HTTP API: Rickover's and Jobber's interfaces, workers without a driver, users and roles.

`penstock server` runs it, with the dashboard; `create_app` makes it for a server of one's own, and `create_dashboard` makes the
dashboard for another application. `Authorizer` is the place for one's own users.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from penstock.core.extras import needs
from penstock.errors import MissingExtra

if TYPE_CHECKING:
    from penstock.http.auth import Authorizer, Credentials, Principal, Refused, Role
    from penstock.http.dashboard.mounting import create_dashboard
    from penstock.http.server import create_app, serve
    from penstock.http.settings import HttpSettings

__all__ = ["Authorizer", "Credentials", "HttpSettings", "Principal", "Refused", "Role", "create_app", "create_dashboard", "serve"]

if find_spec("fastapi") is None:
    raise MissingExtra("the HTTP API", "http", "fastapi")

_DEFINED_IN = {
    "HttpSettings": "penstock.http.settings",
    "create_app": "penstock.http.server",
    "create_dashboard": "penstock.http.dashboard.mounting",
    "serve": "penstock.http.server",
}


def __getattr__(name: str) -> Any:
    # The import is late, so that a command about users does not load the server.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needs("http", "the HTTP API"):
        return getattr(import_module(_DEFINED_IN.get(name, "penstock.http.auth")), name)
