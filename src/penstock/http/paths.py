"""Paths and methods as the routes see them.

ASGI gives the path decoded, so that a slash within a key (`acme%2Fmessages`) looks like one between parts. `with_escapes` keeps
`%2F`, and therefore `%25`, as they were sent; the convertors of the routes' parameters decode them by `plain`. So every key has
exactly one path, whatever it holds: one segment, percent-encoded.
"""

from __future__ import annotations

from urllib.parse import unquote

from starlette.types import Scope

_HEAD = "penstock.head"


def with_escapes(scope: Scope) -> Scope:
    """The scope with a path in which slashes within segments, and the percent sign, are still encoded."""
    raw: bytes = scope.get("raw_path") or b""
    if b"%" not in raw:
        return scope
    upper = raw.upper()
    if b"%2F" not in upper and b"%25" not in upper:
        return scope
    return {**scope, "path": escaped(raw.decode("ascii", "replace"))}


def escaped(path: str) -> str:
    """A percent-encoded path decoded, apart from slashes within segments and the percent sign."""
    return "/".join(unquote(segment).replace("%", "%25").replace("/", "%2F") for segment in path.split("/"))


def plain(value: str) -> str:
    """A parameter of a path as it is meant."""
    return value.replace("%2F", "/").replace("%25", "%") if "%" in value else value


def as_get(scope: Scope) -> Scope:
    """The scope of a HEAD as that of the GET whose headers it wants; the server sends no body for it."""
    return {**scope, "method": "GET", _HEAD: True} if scope["method"] == "HEAD" else scope


def is_head(scope: Scope) -> bool:
    """Whether only the headers of an answer are wanted."""
    return bool(scope.get(_HEAD))
