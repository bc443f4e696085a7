"""The dashboard within other applications, under a prefix, with their login or its own; and alone."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount

from penstock import Penstock
from penstock.http import HttpSettings, Principal, Role, create_dashboard
from penstock.testing import TemporaryDatabases
from tests.http.dashboard_browser import Reader, links_of
from tests.http.http_server import TOKEN, serving

SETTINGS = HttpSettings(token=TOKEN)


@pytest.fixture
async def other(url: str) -> AsyncIterator[Penstock]:
    """An application that is not open."""
    app = Penstock(url)
    yield app
    await app.close()


def client_of(web: object, base: str = "http://test") -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=web), base_url=base, follow_redirects=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["fastapi", "starlette"])
async def test_it_works_under_a_prefix(other: Penstock, kind: str) -> None:
    dashboard = create_dashboard(other, settings=SETTINGS)
    if kind == "fastapi":
        web = FastAPI()
        web.mount("/ops/penstock", dashboard)
    else:
        web = Starlette(routes=[Mount("/ops/penstock", dashboard)])  # type: ignore[assignment]
    async with client_of(web) as client:
        asked = await client.get("/ops/penstock")
        assert asked.url.path == "/ops/penstock/login"
        entered = await client.post("/ops/penstock/login", data={"user": "admin", "secret": TOKEN})
        assert entered.url.path == "/ops/penstock/" and "What is wrong" in entered.text
        for link in links_of(entered):
            assert link.startswith("http://test/ops/penstock/"), link
            assert (await client.get(link)).status_code == 200, link
        assert entered.headers["x-frame-options"] == "DENY"
        assert {cookie.path for cookie in client.cookies.jar} == {"/ops/penstock"}


async def test_it_works_behind_a_proxy_that_strips_a_prefix(other: Penstock) -> None:
    """The application sees no prefix, the browser does: what it gets has to be relative."""
    async with client_of(create_dashboard(other, settings=SETTINGS)) as client:
        answer = await client.get("/", follow_redirects=False)
        assert answer.headers["location"].startswith("./login")
        entered = await client.post("/login", data={"user": "admin", "secret": TOKEN}, follow_redirects=False)
        assert entered.headers["location"] == "./" and "Path=" not in entered.headers["set-cookie"]
        page = await client.get("/types/absent/enqueue")
        assert 'href="../../static/dashboard.css' in page.text


async def test_an_application_with_a_login_of_its_own_says_who_asks(other: Penstock) -> None:
    async def who(request: Request) -> Principal | None:
        name = request.headers.get("x-user")
        return None if name is None else Principal(name, Role.READ)

    async with client_of(create_dashboard(other, settings=SETTINGS, identify=who)) as client:
        page = await client.get("/", headers={"X-User": "ann"})
        assert "ann" in page.text and "Log out" not in page.text
        refused = await client.post("/types/x/pause", headers={"X-User": "ann"})
        assert refused.status_code == 403 and "this needs admin" in refused.text
        stranger = await client.get("/", follow_redirects=False)
        assert stranger.status_code == 401 and "You are not logged in" in stranger.text
        assert (await client.get("/login")).status_code == 401
        assert (await client.get("/login", headers={"X-User": "ann"})).status_code == 404
        assert (await client.post("/login", headers={"X-User": "ann"})).status_code == 404


async def test_it_answers_to_the_hosts_of_its_settings_alone(other: Penstock) -> None:
    web = create_dashboard(other, settings=HttpSettings(token=TOKEN, allowed_hosts=("ops.example.com",)))
    async with client_of(web, "http://evil.example") as stranger, client_of(web, "http://ops.example.com") as client:
        assert (await stranger.get("/login")).status_code == 421
        assert (await client.get("/login")).status_code == 200


async def test_its_own_login_refuses_what_the_authorizer_refuses(other: Penstock) -> None:
    async with client_of(create_dashboard(other, settings=SETTINGS)) as client:
        assert (await client.post("/login", data={"user": "admin", "secret": "wrong"})).status_code == 403


def test_the_command_serves_the_dashboard_alone(databases: TemporaryDatabases) -> None:
    with databases.database() as url, serving(url, command=["dashboard"]) as served, Reader(served.base_url + "/") as reading:
        assert "What is wrong" in reading.log_in("admin", TOKEN).text
        for path in ("v1/jobs", "metrics", "docs", "home"):
            assert reading.get(path, auth=("admin", TOKEN)).status_code == 404, path
        assert reading.get("healthz").text == "ok\n"
        for name in ("a%2Fb", "a%25b"):
            assert "What is wrong" not in (page := reading.get(f"types/{name}").text) and "There is no job type" in page
