"""The server's pages in a real browser, and pages of other sites that try to use the server."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.debian import find, missing
from tests.http.http_server import TOKEN, Served

pytestmark = pytest.mark.skipif(bool(missing("chromium")), reason=missing("chromium"))

TYPE = {"name": "shop", "delivery_strategy": "at_least_once", "attempts": 3, "concurrency": 5}
FORMS = """<!doctype html><meta charset="utf-8">
<form id="pause" method="post" action="{at}/v1/jobs/shop/pause"></form>
<form id="enqueue" method="post" action="{at}/v1/jobs/shop/batch" enctype="text/plain">
<input name='{{"data": {{"n' value='": 1}}}}'></form>
<script>
const tried = [
  () => fetch("{at}/v1/jobs/shop/pause", {{method: "POST", mode: "no-cors", credentials: "include"}}),
  () => fetch("{at}/jobber/queue", {{
    method: "POST", mode: "no-cors", credentials: "include", body: '{{"type": "evil", "payload": 1}}'
  }}),
  () => new Promise(done => {{
    const socket = new WebSocket("{socket}/v1/topics/news/deliveries?client_id=evil&stay=true");
    socket.onopen = () => done("open"); socket.onerror = () => done("refused");
  }}),
  () => new Promise(done => {{
    const source = new EventSource("{at}/v1/topics/news/deliveries?client_id=evil&stay=true", {{withCredentials: true}});
    source.onopen = () => done("open"); source.onerror = () => {{ source.close(); done("refused"); }};
  }}),
];
window.results = Promise.all(tried.map(one => one().then(String, String)));
</script>"""


@contextmanager
def site(page: str) -> Iterator[str]:
    """Another site with one page."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = page.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        # Another site for the browser, also by its name.
        yield f"http://localhost:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # The tests may run as root, for whom Chromium's sandbox refuses to run.
        browser = playwright.chromium.launch(executable_path=find("chromium"), args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


def test_a_page_of_another_site_changes_nothing(served: Served, browser) -> None:  # type: ignore[no-untyped-def]
    with served.client() as client:
        client.post("/v1/jobs", json=TYPE)
        client.post("/v1/topics", json={"name": "news"})
    context = browser.new_context(http_credentials={"username": "admin", "password": TOKEN, "send": "always"})
    # The browser has the password of the server, as after a visit.
    page = context.new_page()
    assert page.goto(served.base_url + "/home").status == 200
    with site(FORMS.format(at=served.base_url, socket=served.base_url.replace("http", "ws"))) as evil:
        for form in ("pause", "enqueue"):
            page.goto(evil)
            with page.expect_navigation() as answered:
                page.evaluate(f"document.getElementById('{form}').submit()")
            assert answered.value.status == 403
            assert '"cross_site"' in answered.value.text()
        page.goto(evil)
        assert page.evaluate("window.results")[2:] == ["refused", "refused"]
    context.close()
    with served.client() as client:
        assert client.get("/v1/jobs/shop?details=true").json()["paused_at"] is None
        assert client.get("/v1/jobs/evil").status_code == 404
        assert client.get("/v1/queued-jobs?name=shop").json() == []
        assert client.get("/v1/topics/news/subscribers").json() == []


def test_the_viewer_shows_the_api_and_makes_a_request(served: Served, browser) -> None:  # type: ignore[no-untyped-def]
    with served.client() as client:
        client.post("/v1/jobs", json=TYPE)
    context = browser.new_context()
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(served.base_url + "/docs")
    page.wait_for_selector(".opblock", timeout=60_000)
    assert page.inner_text(".info .title").startswith("Penstock")
    assert page.locator(".opblock").count() > 60
    page.click(".btn.authorize")
    basic = page.locator(".auth-container", has_text="basic")
    basic.locator("input[name=username]").fill("admin")
    basic.locator("input[name=password]").fill(TOKEN)
    basic.locator("button[type=submit]").click()
    page.click(".btn-done")
    operation = page.locator(".opblock-get", has=page.locator('[data-path="/v1/jobs/{name}"]'))
    operation.locator(".opblock-summary-control").click()
    operation.locator(".try-out__btn").click()
    operation.locator("tr[data-param-name=name] input").fill("shop")
    operation.locator("button.execute").click()
    answer = operation.locator(".live-responses-table .response")
    answer.wait_for(timeout=30_000)
    assert answer.locator(".response-col_status").first.inner_text().startswith("200")
    assert '"at_least_once"' in answer.inner_text()
    context.close()
    assert wrong == []


def test_the_home_page_breaks_no_rule_of_its_own_policy(served: Served, browser) -> None:  # type: ignore[no-untyped-def]
    context = browser.new_context(http_credentials={"username": "admin", "password": TOKEN, "send": "always"})
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.goto(served.base_url + "/home")
    assert page.inner_text("h1") == "Penstock"
    context.close()
    assert [one for one in wrong if "favicon" not in one and "404" not in one] == []
