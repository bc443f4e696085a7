"""What a browser may do with this server, and what the server tells browsers.

A browser sends the password that it keeps for a site along with requests that pages of other sites make. So a request that may
change something is refused when its headers say that another site made it, whatever its content type: `Sec-Fetch-Site`, which
no page can forge, decides when it is there; `Origin` otherwise, which must be the host that was called. What sends neither is no
browser: `curl -d` sends the content type of a form, and stays welcome. (The algorithm is Go's `CrossOriginProtection`.)

A page of an attacker whose name was made to resolve to this server is of the same origin for the browser; `allowed_hosts`
refuses the names that are not the server's.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.types import Scope

from penstock.http.errors import ApiError

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
CONTENT_POLICY = b"content-security-policy"
CACHE_CONTROL = b"cache-control"
# An answer that is no page needs nothing of a browser's; pages have a policy of their own.
_POLICY = (CONTENT_POLICY, b"default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
_NO_STORE = (CACHE_CONTROL, b"no-store")
SECURITY = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
]
PLAIN = [*SECURITY, _POLICY, _NO_STORE]
"""The headers of every answer that is no page and that no cache may keep."""


def page_policy(*, forms: str = "'none'", **sources: str) -> str:
    """The content security policy of a page: nothing but what `sources` names, and never within a frame.

    Args:
        forms: Where its forms may be sent.
        sources: For a kind of content, such as `script` or `frame`, where it may come from.
    """
    parts = ["default-src 'none'", *(f"{kind}-src {where}" for kind, where in sources.items())]
    return "; ".join([*parts, "base-uri 'none'", f"form-action {forms}", "frame-ancestors 'none'"])


def with_security(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The security headers for an answer that has these headers already: its own policy and caching stay."""
    given = {name for name, _ in headers}
    added = SECURITY if CONTENT_POLICY in given else [*SECURITY, _POLICY]
    return added if CACHE_CONTROL in given else [*added, _NO_STORE]


def lacks_one_host(scope: Scope, host: bytes) -> bool:
    """Whether a request has several Host headers, which `host` joins by commas, or as one of HTTP/1.1 none (RFC 9112, 3.2)."""
    if host:
        return b"," in host
    return scope.get("http_version") == "1.1" and all(name != b"host" for name, _ in scope["headers"])


class Origins:
    """Which hosts and which origins are the server's own.

    Args:
        hosts: Names that the server answers to, `*.example.com` for all below; none: any.
        trusted: Origins of other sites whose pages may call the server, such as `https://ops.example.com`.
    """

    def __init__(self, hosts: tuple[str, ...] = (), trusted: tuple[str, ...] = ()) -> None:
        self._exact = frozenset(host.lower() for host in hosts if not host.startswith("*."))
        self._below = tuple(host[1:].lower() for host in hosts if host.startswith("*."))
        self._trusted = frozenset(origin.lower().rstrip("/") for origin in trusted)
        self.any_host = not hosts

    def check_host(self, host: bytes) -> None:
        """Raise a 421 when the request is for another server."""
        if self.any_host:
            return
        name = host.decode("latin-1").lower()
        bare = name.rpartition(":")[0] if name.rpartition(":")[2].isdigit() and not name.endswith("]") else name
        if name in self._exact or bare in self._exact or (self._below and bare.endswith(self._below)):
            return
        raise ApiError(
            421,
            "unknown_host",
            f"This server does not answer to the host {name[:200]!r}",
            detail="Call it by one of its names; PENSTOCK_HTTP_ALLOWED_HOSTS lists them",
            in_body=True,
        )

    def check_site(self, origin: bytes, site: bytes, host: bytes, instance: str) -> None:
        """Raise a 403 when a page of another site made the request."""
        if not origin and not site:
            return
        named = origin.decode("latin-1").lower()
        if named and named in self._trusted:
            return
        if site:
            # "none": typed into the address bar, or a bookmark.
            if site in (b"same-origin", b"none"):
                return
        elif _netloc(named) == host.decode("latin-1").lower():
            return
        raise ApiError(
            403,
            "cross_site",
            "The page that makes this request is of another site",
            detail="PENSTOCK_HTTP_TRUSTED_ORIGINS names the sites whose pages may call this server",
            instance=instance,
            in_body=True,
        )


def _netloc(origin: str) -> str | None:
    """Host and port of an origin; None when it is none, such as `null`."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None
