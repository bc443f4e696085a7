"""The dashboard as a browser without JavaScript uses it: a client that keeps cookies, follows links and sends forms."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urljoin

import httpx

from tests.plain_http import NO_CERTIFICATES


class Reader:
    """One browser.

    Args:
        base_url: Address of the dashboard, with a slash at its end.
        transport: Of an application in this process; None: over the network.
    """

    def __init__(self, base_url: str, transport: Any = None) -> None:
        self.client = httpx.Client(
            base_url=base_url, timeout=60, follow_redirects=True, transport=transport, verify=NO_CERTIFICATES
        )

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def log_in(self, user: str, secret: str) -> httpx.Response:
        """Log in by the form."""
        return self.client.post("login", data={"user": user, "secret": secret, "next": ""})

    def get(self, path: str, **options: Any) -> httpx.Response:
        """A page."""
        return self.client.get(path, **options)

    def post(self, path: str, **fields: Any) -> httpx.Response:
        """Send a form, and follow to the page that it leads to."""
        return self.client.post(path, data=fields, headers={"Sec-Fetch-Site": "same-origin"})


def text_of(page: str) -> str:
    """The words of a page, without its tags."""
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


def links_of(answer: httpx.Response) -> set[str]:
    """The addresses that a page links to."""
    return {urljoin(str(answer.url), link.replace("&amp;", "&")) for link in re.findall(r'href="([^"#]+)"', answer.text)}
