"""The dashboard as an ASGI application: which page a path is, who asks, and the answer.

It stands at `/` of `penstock server`, behind the middleware of the server, and can be mounted in any other application. All
links are relative, so that it works at any path and behind proxies that strip one. Every request passes the same checks in
one place (`_answer`): the site it comes from, the session, the role, the job types.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from pathlib import Path as FilePath
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

from markupsafe import Markup
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.types import Message, Receive, Scope, Send

from penstock.app import Penstock
from penstock.core.logs import get_logger
from penstock.errors import RETRY, PenstockError
from penstock.http import audit
from penstock.http.auth import Authenticator, Principal, Role
from penstock.http.dashboard.live import LiveAnswer, Looked, events, version_of
from penstock.http.dashboard.pages import NAVIGATION
from penstock.http.dashboard.pages.overview import as_old_as, seen_by
from penstock.http.dashboard.poller import Poller
from penstock.http.dashboard.rendering import render
from penstock.http.dashboard.request import DashboardRequest, base_of, split_address
from penstock.http.dashboard.sessions import Sessions
from penstock.http.dashboard.targets import TARGETS, find
from penstock.http.dashboard.view import Action, Page, Shown, View
from penstock.http.errors import ApiError, from_penstock, server_error
from penstock.http.masking import Masking, Rule
from penstock.http.origin import Origins, page_policy, with_security
from penstock.http.paths import with_escapes
from penstock.http.settings import HttpSettings
from penstock.postgres.translation import lacks_rights
from penstock.worker.overview import Overview

log = get_logger("penstock.dashboard")
_POLICY = page_policy(script="'self'", style="'self'", img="'self'", connect="'self'", forms="'self'")
_STATIC = FilePath(__file__).parent / "static"
_FILES = {"dashboard.css": "text/css", "dashboard.js": "text/javascript", "icon.svg": "image/svg+xml"}
# The address of a file changes with its content, so that browsers may keep it.
_STAMP = hashlib.sha256(b"".join((_STATIC / name).read_bytes() for name in sorted(_FILES))).hexdigest()[:12]
_KEPT = "public, max-age=31536000, immutable"
_DONE = "penstock_done"
_THEME = "penstock_theme"
_MOST_LIVE = 500
_MOST_LIVE_OF_USER = 50
_LONGEST_LIVE = timedelta(hours=1)
_RENDERED_AGAIN_S = 60.0
_LIVE_ELSEWHERE = timedelta(seconds=10)
Identify = Callable[[Request], Awaitable[Principal | None]]


class Dashboard:
    """The pages and actions for one application.

    Args:
        app: The application.
        authenticator: Gives what checks passwords and tokens; called when the first request needs it.
        settings: Settings of the dashboard.
        origins: Which pages may send forms.
        stopping: Set when the server stops; None: it does not say, so that live connections are short.
        identify: Says who asks, from the request, in an application with a login of its own; None: there is a login page.
        bare: Whether nothing else adds the security headers.
    """

    def __init__(
        self,
        app: Penstock,
        authenticator: Callable[[], Awaitable[Authenticator]],
        settings: HttpSettings,
        *,
        origins: Origins | None = None,
        stopping: asyncio.Event | None = None,
        identify: Identify | None = None,
        bare: bool = True,
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._settings = settings
        self._origins = origins or Origins(settings.allowed_hosts, settings.trusted_origins)
        self._stopping = stopping or asyncio.Event()
        self._live_lasts = _LONGEST_LIVE if stopping is not None else _LIVE_ELSEWHERE
        self._identify = identify
        self._bare = bare
        self._poller = Poller(app)
        self._rules = tuple(Rule.of(rule) for rule in settings.dashboard_masked)
        self._unmasked = Role[settings.dashboard_unmasked_role.upper()]
        self._live: Counter[str] = Counter()

        async def authorizer() -> Any:
            return (await authenticator()).authorizer

        self._sessions = Sessions(app.database, authorizer, settings.dashboard_session)

    @staticmethod
    def serves(path: str) -> str | None:
        """The template of the path, with its parameters in braces, when it is one of the dashboard's."""
        return next((target.template for target in TARGETS if target.pattern.match(path)), None)

    async def close(self) -> None:
        """Close its connection to the database."""
        await self._poller.close()

    async def overview(self, user: Principal) -> Overview:
        """What the overview shows a user, from the same readings: of the time of the oldest, and with what made it old."""
        view = self._view(user, "/", {}, {})
        found = await seen_by(view)
        return as_old_as(view.readings, found)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            return
        scope = with_escapes(scope)
        request = DashboardRequest(scope, receive)
        try:
            answer = await self._answer(request)
        except ClientDisconnect:
            return
        except PenstockError as error:
            answer = self._problem(request, from_penstock(error), error)
        except Exception:
            log.exception("dashboard_failed", path=request.path)
            answer = self._problem(request, server_error(), None)
        await answer(scope, receive, self._secured(send) if self._bare else send)

    # -- one request

    async def _answer(self, request: DashboardRequest) -> Response:
        if self._bare:
            self._origins.check_host(request.header("host"))
        target, parameters = request.target
        if target is None:
            raise ApiError(404, "not_found", "There is no such page", in_body=True)
        if request.method not in ("GET", "HEAD", "POST"):
            raise ApiError(405, "method_not_allowed", "Method not allowed", in_body=True, headers={"Allow": "GET, HEAD, POST"})
        if target.template == "/static/{file}":
            return _file(parameters["file"])
        posted = request.method == "POST"
        if posted:
            origin, site, host = (request.header(name) for name in ("origin", "sec-fetch-site", "host"))
            self._origins.check_site(origin, site, host, request.path)
        reads, writes = target.page is not None or target.template == "/live", target.action is not None
        if reads if posted else writes:
            raise ApiError(405, "method_not_allowed", "Method not allowed", in_body=True)
        if target.template == "/login" and self._identify is None:
            return await (self._log_in(request) if posted else self._login_page(request))
        if target.template == "/logout":
            return await self._log_out(request) if posted else _redirect(request, "")
        user = await self._user(request)
        if user is None:
            if target.template == "/live" or self._identify is not None:
                raise ApiError(401, "unauthorized", "You are not logged in, or no longer", in_body=True)
            return _redirect(request, f"login?next={quote(request.relative, safe='')}" if not posted else "login")
        if request.call is not None:
            request.call.principal = user
        if target.template == "/live":
            return await self._live_answer(request, user)
        _admit(user, target.page or target.action)
        if target.action is not None:
            return await self._act(request, user, target.action, parameters)
        if target.page is None:
            # The page of a login, in an application with a login of its own.
            raise ApiError(404, "not_found", "There is no such page", in_body=True)
        view = self._view(user, request.path, parameters, request.query)
        shown = await target.page.show(view)
        return self._page(request, user, shown, self._content(shown, view))

    async def _act(self, request: DashboardRequest, user: Principal, action: Action, parameters: Mapping[str, str]) -> Response:
        view = self._view(user, request.path, parameters, request.query, await request.form())
        done = await action.act(view)
        answer = _redirect(request, done.to)
        _set_cookie(answer, request, _DONE, quote(done.message[:1000]), max_age=30, path=request.top)
        return answer

    async def _live_answer(self, request: DashboardRequest, user: Principal) -> Response:
        if self._live.total() >= _MOST_LIVE or self._live[user.name] >= _MOST_LIVE_OF_USER:
            raise ApiError(503, "service_unavailable", "Too many pages are open", in_body=True, headers={"Retry-After": "5"})
        address = split_address(request.query.get("page", ""))
        target, parameters = (None, {}) if address is None else find(address[0])
        if address is None or target is None or target.page is None:
            raise ApiError(404, "not_found", "There is no such page", in_body=True)
        page, path = target.page, address[0]
        query = dict(reversed(parse_qsl(address[1], keep_blank_values=True)))

        content, rendered_at = "", -math.inf
        before: View | None = None

        async def look() -> Looked:
            nonlocal content, rendered_at, before
            now = await self._user(request)
            if now is None or now != user:
                raise ApiError(401, "unauthorized", "The session has ended", in_body=True)
            _admit(now, page)
            # What depends on the time alone changes within minutes.
            old = time.monotonic() - rendered_at > _RENDERED_AGAIN_S
            view = before
            if view is None or old or await view.is_due():
                view = self._view(now, path, parameters, query)
                shown = await page.show(view)
                if before is None or view.state != before.state or old:
                    content, rendered_at = self._content(shown, view), time.monotonic()
                before = view
            oldest = min((reading.at for reading in view.readings), default=None)
            return Looked(content, view.due_in_s, oldest, any(reading.problem for reading in view.readings))

        self._live[user.name] += 1

        def closed() -> None:
            self._live -= Counter([user.name])

        frames = events(look, request.query.get("seen", ""), self._stopping, self._live_lasts.total_seconds())
        return LiveAnswer(frames, closed)

    # -- who asks

    async def _user(self, request: DashboardRequest) -> Principal | None:
        if self._identify is not None:
            return await self._identify(request.request)
        if token := request.cookies.get(request.session_cookie):
            return await self._sessions.user(token)
        if (header := request.header("authorization")) and header.split(b" ")[0].lower() in (b"basic", b"bearer"):
            return await (await self._authenticator()).enter(header, request.client, request.path)
        return None

    async def _login_page(self, request: DashboardRequest, problem: str = "", status: int = 200) -> Response:
        if token := request.query.get("token"):
            opened = await self._sessions.use_link(token)
            if opened is None:
                problem, status = "This link was used already, or is too old. Log in with the token that the server printed.", 403
            else:
                await self._note("admin", "log in", {"client": request.client, "by": "link"})
                return self._logged_in(request, opened, "")
        if not problem and await self._user(request) is not None:
            return _redirect(request, "")
        content = render("login.html", base=request.base, problem=problem, next=request.query.get("next", ""))
        shown = Shown("Log in", "login.html")
        return self._page(request, None, shown, content, status)

    async def _log_in(self, request: DashboardRequest) -> Response:
        form = await request.form()
        name, secret = (next(iter(form.get(field, ())), "") for field in ("user", "secret"))
        first, dot, rest = secret.partition(".")
        try:
            if dot and not name:
                # A token, NAME.SECRET.
                opened = await self._open_session(request, first, rest)
            else:
                try:
                    opened = await self._open_session(request, name, secret)
                except ApiError as error:
                    # A token needs no user, but many fill in both; a password may begin with the name too.
                    if error.status != 403 or not (dot and first == name):
                        raise
                    opened = await self._open_session(request, name, rest)
        except ApiError as error:
            if error.status >= 500:
                raise
            log.info("login_refused", client=request.client, reason=error.id)
            if error.status != 429:
                await self._note_refused_login(request, name or first, error.id)
            words = error.message if error.status == 429 else "This user and password, or token, are not known."
            return await self._login_page(request, f"{words} {error.hint or ''}".strip() if error.status == 429 else words, 403)
        wanted = next(iter(form.get("next", ())), "")
        address = split_address(wanted)
        target = None if address is None else find(address[0])[0]
        to = wanted.lstrip("/") if target is not None and target.page is not None else ""
        return self._logged_in(request, opened, to)

    async def _open_session(self, request: DashboardRequest, name: str, secret: str) -> str:
        header = b"Basic " + base64.b64encode(f"{name}:{secret}".encode())
        authenticator = await self._authenticator()
        recalled = await self._sessions.recall(name)
        # Who was let in a moment ago may be removed since, or have another password.
        principal = await authenticator.enter(header, request.client, request.path, fresh=True)
        opened = await self._sessions.open(principal, recalled)
        await self._note(principal.name, "log in", {"client": request.client})
        return opened

    async def _note(self, user: str, action: str, told: Mapping[str, str], error: str | None = None) -> None:
        """Note in the audit what is no change, and done."""
        database = await self._app.database()
        await audit.end_change(database, await audit.begin_change(database, user, action, told), None if error else 1, error)

    async def _note_refused_login(self, request: DashboardRequest, name: str, reason: str) -> None:
        # Anything may have been typed as a name that no user has, such as a password.
        known = await self._sessions.recall(name) if len(name) <= 64 else None
        await self._note("unknown" if known is None else name, "log in", {"client": request.client}, f"refused: {reason}")

    def _logged_in(self, request: DashboardRequest, token: str, to: str) -> Response:
        answer = _redirect(request, to)
        _set_cookie(answer, request, request.session_cookie, token, max_age=int(self._sessions.lasts.total_seconds()))
        return answer

    async def _log_out(self, request: DashboardRequest) -> Response:
        if token := request.cookies.get(request.session_cookie):
            user = await self._sessions.user(token)
            await self._sessions.close(token)
            if user is not None:
                await self._note(user.name, "log out", {"client": request.client})
        answer = _redirect(request, "login")
        _set_cookie(answer, request, request.session_cookie, "", max_age=0)
        return answer

    # -- what is shown

    def _view(
        self, user: Principal, path: str, parameters: Mapping[str, str], query: Mapping[str, str], form: Any = None
    ) -> View:
        masking = Masking(() if user.role >= self._unmasked else self._rules)
        return View(self._app, self._poller, user, masking, path, parameters, query, form)

    def _content(self, shown: Shown, view: View) -> str:
        oldest = min(view.readings, key=lambda reading: reading.at, default=None)
        problem = next((reading.problem for reading in view.readings if reading.problem), None)
        return render(
            shown.template, base=base_of(view.path), title=shown.title, user=view.user, may=view.may, query=view.query,
            words=view.masking.text, read_at=oldest, problem=problem, **shown.values,
        )  # fmt: skip

    def _page(self, request: DashboardRequest, user: Principal | None, shown: Shown, content: str, status: int = 200) -> Response:
        done = unquote(request.cookies.get(_DONE, "")) if user is not None else ""
        here = "/" + (request.path.strip("/").split("/")[0])
        seen = [entry for entry in NAVIGATION if user is not None and (user.types is None or not entry.all_types)]
        text = self._layout(
            request, shown.title, content, user=user, done=done, navigation=seen, here=here, page=request.relative,
            live=user is not None and status == 200, version_of_content=version_of(content),
        )  # fmt: skip
        answer = HTMLResponse(text, status, {"content-security-policy": _POLICY, "cache-control": "no-store"})
        if done:
            _set_cookie(answer, request, _DONE, "", max_age=0, path=request.top)
        return answer

    def _problem(self, request: DashboardRequest, answer: ApiError, error: PenstockError | None) -> Response:
        if error is not None and (answer.status >= 500 or lacks_rights(error)):
            log.warning("dashboard_failed", path=request.path, error=error)
        headers = {"cache-control": "no-store", **answer.headers}
        # A browser asks for a password by itself when it is told to.
        headers.pop("WWW-Authenticate", None)
        content = render("problem.html", base=request.base, title=answer.message, detail=answer.hint, status=answer.status)
        text = self._layout(request, answer.message, content, retry=answer.status in RETRY)
        return HTMLResponse(text, answer.status, {"content-security-policy": _POLICY, **headers})

    def _layout(self, request: DashboardRequest, title: str, content: str, **given: Any) -> str:
        """A whole page around a content that was rendered."""
        otherwise: dict[str, Any] = {
            "user": None, "done": "", "navigation": [], "here": "", "page": "", "live": False, "version_of_content": "",
            "retry": False,
        }  # fmt: skip
        return render(
            "layout.html", base=request.base, title=title, content=Markup(content), stamp=_STAMP,  # noqa: S704 - it was escaped
            theme=request.cookies.get(_THEME, ""), name=self._settings.homepage_title, own_login=self._identify is None,
            **(otherwise | given),
        )  # fmt: skip

    def _secured(self, send: Send) -> Send:
        async def secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *with_security(message["headers"])]}
            await send(message)

        return secured


def _admit(user: Principal, target: Page | Action | None) -> None:
    """Raise `ApiError` 403 unless the user has the role and the access."""
    if target is None:
        return
    if user.role < target.role:
        has, wanted = user.role.name.lower(), target.role.name.lower()
        raise ApiError(403, "forbidden", f"User {user.name} has the role {has}; this needs {wanted}", in_body=True)
    if target.all_types:
        user.require_all(f"/{target.path}")


def _redirect(request: DashboardRequest, to: str) -> Response:
    return RedirectResponse(request.base + to, 303, {"cache-control": "no-store"})


def _set_cookie(
    answer: Response, request: DashboardRequest, name: str, value: str, *, max_age: int, path: str | None = None
) -> None:
    # Without a path a cookie is for the folder of the page, which is the dashboard's also behind a proxy that strips a prefix.
    secure = "; Secure" if request.encrypted else ""
    place = "" if path is None else f"; Path={path}"
    answer.headers.append("set-cookie", f"{name}={value}; Max-Age={max_age}; HttpOnly; SameSite=Lax{secure}{place}")


def _file(name: str) -> Response:
    if name not in _FILES:
        raise ApiError(404, "not_found", "There is no such file", in_body=True)
    return FileResponse(_STATIC / name, media_type=_FILES[name], headers={"cache-control": _KEPT})
