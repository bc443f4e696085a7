"""Screenshots of the dashboard's pages, in light and dark, on a database with something to see: `make screenshots`."""

from __future__ import annotations

from pathlib import Path

from penstock.testing import TemporaryDatabases
from tests.browser.dashboard_pages import PAGES, chromium, fill, log_in
from tests.http.http_server import TOKEN, serving

FOLDER = Path(__file__).parents[1] / "docs" / "dashboard"
SIZE = {"width": 1200, "height": 800}


def main() -> None:
    """Take them all."""
    FOLDER.mkdir(exist_ok=True)
    with TemporaryDatabases() as databases, databases.database() as url:
        fill(url)
        with serving(url) as served, chromium() as browser:
            for scheme in ("light", "dark"):
                context = browser.new_context(viewport=SIZE, color_scheme=scheme)
                page = context.new_page()
                log_in(page, served.base_url, "admin", TOKEN)
                for name, path in PAGES.items():
                    if scheme == "light" or name == "overview":
                        page.goto(f"{served.base_url}/{path}")
                        page.screenshot(path=FOLDER / f"{name}{'' if scheme == 'light' else '-dark'}.png")
                context.close()


if __name__ == "__main__":
    main()
