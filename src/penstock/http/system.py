"""What is not about jobs: health, metrics, the OpenAPI document and its viewer, the page with a frame."""

from __future__ import annotations

import base64
import hashlib
import html
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path as FilePath
from urllib.parse import urlsplit

from fastapi import Request, Response
from fastapi.responses import FileResponse, HTMLResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import Metric

from penstock._version import __version__
from penstock.core.records import to_json
from penstock.errors import DatabaseUnavailable, MissingExtra, PenstockError
from penstock.http.asked_metrics import AskedMetrics
from penstock.http.dashboard.dashboard import Dashboard
from penstock.http.errors import not_found
from penstock.http.origin import page_policy
from penstock.http.routing import OPEN, READ, CurrentService, Instance, User, raw_answer, router
from penstock.http.service import Service
from penstock.worker.exposition import database_families
from penstock.worker.overview import Overview

api = router("system")
_SHOWN = 100
_FILES = {"swagger-ui.css", "swagger-ui-bundle.js", "favicon.png"}
# Swagger UI sets style attributes; it needs no script but its own.
_POLICY = page_policy(script="'self'", style="'self' 'unsafe-inline'", img="'self' data:", connect="'self'")
_DOCS = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Penstock API</title>
<link rel="stylesheet" href="/docs/swagger-ui.css"><link rel="icon" href="/docs/favicon.png"></head>
<body><div id="swagger-ui"></div><script src="/docs/swagger-ui-bundle.js"></script><script src="/docs/start.js"></script></body>
</html>
"""
_START = 'SwaggerUIBundle({url: "/openapi.json", dom_id: "#swagger-ui", deepLinking: true, validatorUrl: null});\n'
_STYLE = "iframe { border: 0; width: 100%; height: 85vh }"
_STYLE_HASH = f"'sha256-{base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()}'"
# The files of a page change with the version of the server alone.
_CACHED = {"cache-control": "no-cache"}


@api.get("/healthz", dependencies=[OPEN], response_class=PlainTextResponse)
async def healthz() -> Response:
    """Whether the process answers."""
    return PlainTextResponse("ok\n")


@api.get("/readyz", dependencies=[OPEN], response_class=PlainTextResponse)
async def readyz(service: CurrentService) -> Response:
    """Whether the database answers too; 503 otherwise, and while the server stops."""
    try:
        if service.stopping.is_set():
            return PlainTextResponse("stopping\n", 503)
        await service.answering()
    except PenstockError:
        return PlainTextResponse("no database\n", 503)
    return PlainTextResponse("ready\n")


@api.get("/v1/overview", dependencies=[READ])
async def overview(service: CurrentService, user: User) -> Overview:
    """How everything is doing: what is wrong first, then how much waits, runs and finishes. `at` says of when that is."""
    found = await service.part(Dashboard).overview(user)
    return replace(found, types=found.types[:_SHOWN], lags=found.lags[:_SHOWN])


@api.get("/metrics", dependencies=[READ], response_class=PlainTextResponse)
async def metrics(service: CurrentService, user: User, path: Instance) -> Response:
    """Numbers for Prometheus."""
    user.require_all(path)
    text = service.metrics.exposition(await asked(service))
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def asked(service: Service) -> list[Metric]:
    """The metrics for which the database is asked, without most of their samples when it does not answer."""
    try:
        return await service.part(AskedMetrics).read()
    except DatabaseUnavailable:
        return service.metrics.asked(database=database_families(), up=False)


@api.get("/home", dependencies=[READ], response_class=HTMLResponse)
async def home(service: CurrentService) -> Response:
    """A page with a title, the version, and a frame with a dashboard of one's own."""
    settings = service.settings
    title, frame = html.escape(settings.homepage_title), html.escape(settings.homepage_iframe_url, quote=True)
    shown = f'<iframe src="{frame}" title="dashboard"></iframe>' if frame else ""
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head>\n'
        f'<body><h1>{title}</h1><h3>penstock version {__version__}</h3><p><a href="/docs">API</a></p>{shown}</body></html>\n'
    )
    policy = page_policy(style=_STYLE_HASH, frame=_source_of(settings.homepage_iframe_url))
    return HTMLResponse(page, headers={"content-security-policy": policy})


def _source_of(url: str) -> str:
    """Where the frame of the home page may come from."""
    parts = urlsplit(url)
    if not url:
        return "'none'"
    allowed = parts.scheme in ("http", "https") and parts.netloc and not set(parts.netloc) & set(" ;,'\"\r\n")
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if allowed else "'self'"


def _viewer() -> FilePath:
    """The folder with the files of Swagger UI 5; the package has them, what it does with them is not used."""
    found = find_spec("fastapi_offline")
    if found is None or found.origin is None:
        raise MissingExtra("the viewer of the OpenAPI document", "http", "fastapi-offline")
    return FilePath(found.origin).parent / "static"


@api.get("/docs", dependencies=[OPEN], response_class=HTMLResponse, include_in_schema=False)
async def docs() -> Response:
    """The viewer of the OpenAPI document. Everything it loads comes from this server."""
    return HTMLResponse(_DOCS, headers={"content-security-policy": _POLICY})


@api.get("/docs/{file}", dependencies=[OPEN], include_in_schema=False)
async def docs_file(file: str, path: Instance) -> Response:
    """A part of the viewer."""
    if file == "start.js":
        return Response(_START, media_type="text/javascript", headers=_CACHED)
    if file not in _FILES:
        raise not_found(path)
    return FileResponse(_viewer() / file, headers=_CACHED)


@api.get("/openapi.json", dependencies=[OPEN], include_in_schema=False)
async def openapi(request: Request) -> Response:
    """The OpenAPI document."""
    return raw_answer(to_json(request.app.openapi()))
