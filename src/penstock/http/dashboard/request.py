"""What the dashboard asks of a request."""

from __future__ import annotations

from urllib.parse import parse_qs, parse_qsl, quote, urlsplit

from starlette.requests import Request, cookie_parser
from starlette.types import Receive, Scope

from penstock.http.dashboard.targets import find
from penstock.http.errors import ApiError
from penstock.http.paths import escaped

_LARGEST_FORM = 2 << 20
_MOST_FIELDS = 2_000


def base_of(path: str) -> str:
    """The relative path from a page to the root of the dashboard."""
    return "../" * path.lstrip("/").count("/") or "./"


def split_address(address: str) -> tuple[str, str] | None:
    """Path and query of an address relative to the dashboard, as `relative` gives it; None: it is outside the dashboard."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return None
    return None if parts.scheme or parts.netloc else (escaped(f"/{parts.path.lstrip('/')}"), parts.query)


class DashboardRequest:
    """A request to the dashboard.

    Args:
        scope: Of the request.
        receive: Of the request.

    Attributes:
        path: Path relative to the dashboard, with a slash before it.
        top: The path of the dashboard, as far as this application knows it.
        base: The relative path from the page to the root of the dashboard.
        query: The query, with the first value of each parameter.
        call: The call of the server; None in another application.
        target: What answers the path, and its parameters.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.request = Request(scope, receive)
        self._scope = scope
        root = scope.get("root_path", "").rstrip("/")
        whole: str = scope["path"]
        self.path = whole[len(root) :] if root and whole.startswith(f"{root}/") else whole
        self.top = f"{root}/" if root and whole.startswith(f"{root}/") else "/"
        self.method: str = scope["method"]
        self.base = base_of(self.path)
        self.query = dict(reversed(parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)))
        self.call = scope.get("call")
        self.target = find(self.path, posted=self.method == "POST")

    @property
    def relative(self) -> str:
        """Path and query relative to the dashboard."""
        query = self._scope.get("query_string", b"").decode("latin-1")
        # A slash within a segment, and the percent sign, are escaped in the path already.
        return quote(self.path.lstrip("/"), safe="/%") + (f"?{query}" if query else "")

    @property
    def client(self) -> str:
        """Address of the client."""
        if self.call is not None:
            return str(self.call.client)
        return self._scope["client"][0] if self._scope.get("client") else ""

    @property
    def cookies(self) -> dict[str, str]:
        """The cookies."""
        # Pair by pair: the parser of the standard library drops all that is behind a cookie that it cannot read.
        return cookie_parser(b";".join(self._values("cookie")).decode("latin-1"))

    @property
    def session_cookie(self) -> str:
        """Name of the cookie of the session: cookies do not tell the ports of a host apart."""
        port = self.header("host").rpartition(b":")[2]
        name = f"penstock_session_{port.decode()}" if port.isdigit() else "penstock_session"
        # With this prefix no page without TLS can set it. (`__Host-` needs the path /, and a dashboard may be below one.)
        return f"__Secure-{name}" if self.encrypted else name

    @property
    def encrypted(self) -> bool:
        """Whether the browser speaks TLS, to this server or to its proxy."""
        return self._scope.get("scheme") == "https" or self.header("x-forwarded-proto") == b"https"

    def header(self, name: str) -> bytes:
        """The values of a header, with commas."""
        return b",".join(self._values(name))

    def _values(self, name: str) -> list[bytes]:
        wanted = name.encode()
        return [value for key, value in self._scope["headers"] if key == wanted]

    async def form(self) -> dict[str, list[str]]:
        """The fields of a form. Raises `ApiError`."""
        body = b""
        async for chunk in self.request.stream():
            body += chunk
            if len(body) > _LARGEST_FORM:
                raise ApiError(413, "entity_too_large", "The form is too large")
        try:
            return parse_qs(body.decode(), keep_blank_values=True, max_num_fields=_MOST_FIELDS)
        except ValueError:
            raise ApiError(400, "invalid_request", "The form cannot be read") from None
