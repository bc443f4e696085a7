"""The dashboard for other applications, and for a server of its own."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp

from penstock.app import Penstock
from penstock.http.auth import Authenticator, Authorizer
from penstock.http.authorizers import authorizer_of
from penstock.http.dashboard.dashboard import Dashboard, Identify
from penstock.http.settings import HttpSettings


def create_dashboard(
    app: Penstock | None = None,
    *,
    authorizer: Authorizer | None = None,
    identify: Identify | None = None,
    settings: HttpSettings | None = None,
) -> ASGIApp:
    """The dashboard as an ASGI application, to be mounted at any path.

        web = FastAPI(lifespan=lifespan(app))
        web.mount("/penstock", create_dashboard(app))

    Args:
        app: The jobs' app, which is opened with the first request unless it is open; None: one from the environment.
        authorizer: Decides which principal a client is; None: the user admin with the token of the settings, and the users in
            the database.
        identify: For an application with a login of its own: given a Starlette request, returns the `Principal` who asks, or
            None without a login. Then the dashboard has no login page.
        settings: None: from the environment.
    """
    penstock = app or Penstock()
    http_settings = settings or HttpSettings.read()
    made: list[Authenticator] = []
    making = asyncio.Lock()

    async def authenticator() -> Authenticator:
        async with making:
            if not made:
                made.append(Authenticator(authorizer or authorizer_of(http_settings, await penstock.database())))
        return made[0]

    return Dashboard(penstock, authenticator, http_settings, identify=identify)
