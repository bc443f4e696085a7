"""The dashboard in a real browser: each page with data and without, live, by keys, in the dark, on a phone."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest

from penstock import Penstock
from penstock.testing import TemporaryDatabases
from tests.browser.dashboard_pages import FORMS, JOBS, PAGES, chromium, fill, log_in, run
from tests.debian import missing
from tests.http.http_server import TOKEN, Served, serving

pytestmark = pytest.mark.skipif(bool(missing("chromium")), reason=missing("chromium"))
PHONE = {"width": 375, "height": 740}
WIDE = {"width": 1400, "height": 900}
# Of an installed package: it is never part of this repository.
AXE = (files("axe_playwright_python") / "axe.min.js").read_text("utf-8")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def shop(databases: TemporaryDatabases) -> Iterator[Served]:
    with databases.database() as url:
        fill(url)
        with serving(url, PENSTOCK_HTTP_DASHBOARD_MASKED="iban") as served:
            yield served


@pytest.fixture(scope="module")
def empty(databases: TemporaryDatabases) -> Iterator[Served]:
    with databases.database() as url, serving(url) as served:
        yield served


class Watched:
    """A page, and what its console said."""

    def __init__(self, context: Any) -> None:
        self.page = context.new_page()
        self.wrong: list[str] = []
        self.page.on("console", lambda message: self.wrong.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))


@pytest.fixture
def admin(browser: Any, shop: Served) -> Iterator[Any]:
    context = browser.new_context()
    watched = Watched(context)
    log_in(watched.page, shop.base_url, "admin", TOKEN)
    yield watched.page
    context.close()
    assert watched.wrong == []


def test_each_page_shows_its_data(admin: Any, shop: Served) -> None:
    for name, path in PAGES.items():
        admin.goto(f"{shop.base_url}/{path}")
        assert admin.locator("h1").count() == 1, name
        if name not in ("workers", "history", "audit"):
            assert admin.locator("main .empty").count() == 0, name


def test_each_page_without_data_says_what_to_do(browser: Any, empty: Served) -> None:
    context = browser.new_context()
    watched = Watched(context)
    # The audit is not among them: it has this login.
    log_in(watched.page, empty.base_url, "admin", TOKEN)
    for path in (
        "",
        "jobs",
        "failures",
        "types",
        "pools",
        "streams",
        "topics",
        "workflows",
        "workers",
        "schedules",
        "operations",
        "history",
    ):
        watched.page.goto(f"{empty.base_url}/{path}")
        assert watched.page.locator("main .empty").count() == 1, path
    context.close()
    assert watched.wrong == []


def test_an_open_page_changes_without_a_reload_and_keeps_what_the_reader_does(admin: Any, shop: Served) -> None:
    admin.goto(f"{shop.base_url}/jobs?status=unfinished&type=invoices")
    admin.evaluate("window.mark = 1")
    first = admin.locator("tbody input[type=checkbox]").first
    first.check()
    admin.fill("input[name=key]", "half-typed")

    async def enqueue() -> None:
        async with Penstock(shop.database_url) as app:
            await app.enqueue_many("invoices", [{"customer": "came-later"}])

    run(enqueue())
    admin.wait_for_selector("text=came-later", timeout=60_000)
    assert admin.evaluate("window.mark") == 1
    assert admin.locator("tbody input[type=checkbox]:checked").count() == 1
    assert admin.input_value("input[name=key]") == "half-typed"
    assert admin.inner_text("[data-count]") == "1"


def test_selected_jobs_are_cancelled_after_a_question(admin: Any, shop: Served) -> None:
    admin.goto(f"{shop.base_url}/jobs?status=unfinished&type=mails")
    cancel = admin.locator("button[value=cancel]")
    assert cancel.is_disabled()
    admin.locator("tbody input[type=checkbox]").nth(0).check()
    admin.locator("tbody input[type=checkbox]").nth(1).check()
    admin.once("dialog", lambda dialog: dialog.dismiss())
    cancel.click()
    assert admin.locator(".done").count() == 0
    admin.once("dialog", lambda dialog: dialog.accept())
    cancel.click()
    admin.wait_for_selector(".done:has-text('2 of 2 jobs cancelled')")


def test_a_list_of_a_thousand_is_read_by_pages(admin: Any, shop: Served) -> None:
    admin.goto(f"{shop.base_url}/jobs?status=succeeded&type=invoices")
    seen: set[str] = set()
    while True:
        seen |= set(admin.eval_on_selector_all("tbody tr", "rows => rows.map(row => row.dataset.row)"))
        following = admin.locator("a[rel=next]")
        if not following.count():
            break
        with admin.expect_navigation():
            following.click()
    assert len(seen) == JOBS - JOBS // 10


def test_the_keyboard_leads_everywhere(admin: Any, shop: Served) -> None:
    admin.goto(f"{shop.base_url}/")
    admin.keyboard.press("g")
    with admin.expect_navigation():
        admin.keyboard.press("j")
    assert admin.url == f"{shop.base_url}/jobs"
    admin.keyboard.press("/")
    assert admin.evaluate("document.activeElement.name") == "status"
    admin.evaluate("document.activeElement.blur()")
    admin.keyboard.press("j")
    admin.keyboard.press("j")
    assert admin.locator("tr.current").count() == 1
    admin.keyboard.press("x")
    assert admin.inner_text("[data-count]") == "1"
    with admin.expect_navigation():
        admin.keyboard.press("Enter")
    assert "/jobs/" in admin.url
    admin.keyboard.press("?")
    assert admin.locator("dialog#keys").is_visible()
    admin.keyboard.press("Escape")


def test_light_and_dark_follow_the_system_and_the_button(browser: Any, shop: Served) -> None:
    context = browser.new_context(color_scheme="dark")
    page = context.new_page()
    log_in(page, shop.base_url, "admin", TOKEN)

    def brightness() -> int:
        return int(page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]"))

    assert brightness() < 50
    page.click("#theme")
    assert brightness() > 200
    page.reload()
    assert brightness() > 200, "the choice is kept"
    context.close()


@pytest.mark.parametrize(
    ("scheme", "viewport"),
    [
        pytest.param("light", PHONE, id="light, a phone"),
        pytest.param("dark", WIDE, id="dark, wide", marks=pytest.mark.soak),
    ],
)
def test_axe_finds_nothing_serious_and_no_page_is_wider_than_its_window(
    browser: Any, shop: Served, scheme: str, viewport: dict[str, int]
) -> None:
    context = browser.new_context(viewport=viewport, color_scheme=scheme)
    page = context.new_page()
    log_in(page, shop.base_url, "admin", TOKEN)
    found = []
    for path in (*PAGES.values(), *FORMS):
        page.goto(f"{shop.base_url}/{path}")
        found += [(path, *one) for one in serious(page)]
        if (width := page.evaluate("document.documentElement.scrollWidth")) > viewport["width"]:
            found.append((path, "it is wider than the window", width))
    context.close()
    assert found == []


def test_axe_finds_what_is_wrong(browser: Any) -> None:
    """A page as none of ours should be, so that the test above can fail."""
    context = browser.new_context()
    page = context.new_page()
    page.set_content('<title>x</title><main><input><p style="color: #bbb; background: #fff">pale</p></main>')
    assert {rule for rule, *_ in serious(page)} >= {"color-contrast", "label", "html-has-lang"}
    context.close()


def serious(page: Any) -> list[tuple[str, str]]:
    """What axe calls serious or critical on a page: the rule, and the elements."""
    page.evaluate(AXE)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        (one["id"], node["html"][:200])
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_graph_of_a_run_is_read_and_followed_by_the_keyboard(browser: Any, shop: Served, scheme: str) -> None:
    context = browser.new_context(color_scheme=scheme)
    watched = Watched(context)
    page = watched.page
    log_in(page, shop.base_url, "admin", TOKEN)
    page.goto(f"{shop.base_url}/workflows/nightly-1")
    graph = page.locator("svg.graph")
    assert graph.locator("g.step").count() == 5
    # What assistive technology is told: a group with a name and a description, and a link with words for each step.
    group = page.get_by_role("group", name="Steps of nightly-1")
    assert group.get_by_role("link").count() == 5
    assert "5 steps: " in page.locator("#graph-description").text_content()
    link = group.get_by_role("link", name="images, of the type resize: running, 5 of 12 jobs, 2 failed")
    box, name = graph.locator("g.running .box").first, graph.locator("g.running .name").first
    assert colour(box) != colour(name), "the text is seen on its box"
    assert graph.locator("g.running .failed").first.bounding_box()["width"] > 0
    before = stroke(box)
    page.locator("main").focus()
    for _ in range(60):
        page.keyboard.press("Tab")
        if link.evaluate("link => link === document.activeElement"):
            break
    assert stroke(box) != before, "the focus is seen"
    with page.expect_navigation():
        page.keyboard.press("Enter")
    assert page.inner_text("h1").startswith("nightly-1")
    assert serious(page) == []
    context.close()
    assert watched.wrong == [], "nothing breaks the policy of the page"


def colour(shape: Any) -> str:
    return str(shape.evaluate("shape => getComputedStyle(shape).fill"))


def stroke(shape: Any) -> str:
    return str(shape.evaluate("shape => getComputedStyle(shape).stroke + getComputedStyle(shape).strokeWidth"))


class Clicks:
    """Counts the clicks of a reader who starts at the overview."""

    def __init__(self, page: Any, base_url: str) -> None:
        self.page = page
        self.number = 0
        page.goto(f"{base_url}/")

    def click(self, wanted: Any) -> None:
        """Click on a selector or a locator."""
        self.number += 1
        (self.page.locator(wanted) if isinstance(wanted, str) else wanted).first.click()

    def follow(self, wanted: Any) -> None:
        """Click on a link, and wait until the page that it leads to is there: a click alone returns before."""
        with self.page.expect_navigation():
            self.click(wanted)

    def confirm(self, wanted: Any) -> None:
        """Click on a button that asks whether to go on, and on the answer, which is a click too."""
        self.page.once("dialog", lambda dialog: dialog.accept())
        self.click(wanted)
        self.number += 1


def test_why_a_job_failed_is_two_clicks_away_and_to_run_it_again_the_third(admin: Any, shop: Served) -> None:
    reader = Clicks(admin, shop.base_url)
    reader.follow("text=jobs of invoices failed in the last hour")
    reader.follow("td.id a")
    assert "Traceback" in admin.inner_text("main")
    assert reader.number == 2
    reader.click("button:has-text('Replay')")
    admin.wait_for_selector(".done:has-text('this is the new job')")
    assert reader.number == 3


def test_the_tenant_that_fills_the_queue_is_one_click_away_and_its_jobs_two(admin: Any, shop: Served) -> None:
    reader = Clicks(admin, shop.base_url)
    reader.follow("text=jobs of tenants wait")
    assert admin.locator("tbody tr").first.get_attribute("data-row") == "acme"
    assert reader.number == 1
    reader.follow("a:text-is('acme')")
    assert admin.locator("tbody tr").count() == 20
    assert reader.number == 2


def test_the_group_that_stands_before_a_poison_event_is_one_click_away_and_to_skip_it_three(admin: Any, shop: Served) -> None:
    reader = Clicks(admin, shop.base_url)
    reader.follow("text=are quarantined for the group billing")
    assert "has no price" in admin.inner_text("main"), "the group says at what it fails"
    assert reader.number == 1
    reader.confirm("button:has-text('Skip this event')")
    admin.wait_for_selector(".done:has-text('billing goes on behind offset')")
    assert reader.number == 3


def test_a_reader_sees_no_button_of_a_change_and_no_masked_field(browser: Any, shop: Served) -> None:
    context = browser.new_context()
    page = context.new_page()
    log_in(page, shop.base_url, "reader", "reader-password")
    for name, path in PAGES.items():
        page.goto(f"{shop.base_url}/{path}")
        assert page.locator("main form[method=post]").count() == 0, name
    page.goto(f"{shop.base_url}/jobs?status=failed")
    assert "DE42" not in page.content() and "•••" in page.content()
    context.close()


def test_a_user_of_one_type_sees_this_one(browser: Any, shop: Served) -> None:
    context = browser.new_context()
    page = context.new_page()
    log_in(page, shop.base_url, "billing", "billing-password")
    page.goto(f"{shop.base_url}/types")
    assert page.eval_on_selector_all("tbody tr", "rows => rows.map(row => row.dataset.row)") == ["invoices"]
    assert page.locator("nav >> text=Health").count() == 0
    page.goto(f"{shop.base_url}/types/mails")
    assert page.inner_text("h1") == "There is no job type mails"
    context.close()


def test_a_logout_ends_the_session_in_other_tabs(browser: Any, shop: Served) -> None:
    context = browser.new_context()
    first, second = context.new_page(), context.new_page()
    log_in(first, shop.base_url, "admin", TOKEN)
    second.goto(f"{shop.base_url}/types")
    first.click("text=Log out")
    first.wait_for_selector("text=Password or token")
    second.wait_for_url("**/login?**", timeout=60_000)
    context.close()


def test_pages_work_without_scripts(browser: Any, shop: Served) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    log_in(page, shop.base_url, "admin", TOKEN)
    page.goto(f"{shop.base_url}/jobs?status=failed")
    with page.expect_navigation():
        page.locator("td.id a").first.click()
    assert page.locator("h2 >> text=Timeline").count() == 1
    context.close()


def test_the_page_of_another_site_cannot_send_a_form(browser: Any, shop: Served) -> None:
    context = browser.new_context()
    page = context.new_page()
    log_in(page, shop.base_url, "admin", TOKEN)
    page.goto("about:blank")
    page.set_content(f'<form id="evil" method="post" action="{shop.base_url}/types/mails/pause"></form>')
    with page.expect_navigation() as answered:
        page.evaluate("document.getElementById('evil').submit()")
    assert answered.value.status in (303, 403)
    page.goto(f"{shop.base_url}/types/mails")
    assert "Paused" not in page.inner_text("main")
    context.close()


def test_a_morph_keeps_rows_by_their_keys(admin: Any, shop: Served) -> None:
    """Random tables: after the morph the page is what was wanted, and a row that stayed is the same element."""
    admin.goto(f"{shop.base_url}/login")
    seed = admin.evaluate(
        """async () => {
          const { morph } = await import(document.querySelector("script").src);
          let seed = Math.floor(Math.random() * 2 ** 31), state = seed;
          const next = most => (state = (state * 1103515245 + 12345) % 2 ** 31) % most;
          const table = () => {
            const keys = [...Array(12).keys()].filter(() => next(2)).sort(() => next(3) - 1);
            const row = k => `<tr data-row="${k}"><td>${next(4)}</td>${next(2) ? "<td>x</td>" : ""}</tr>`;
            return `<table><tbody>${keys.map(row).join("")}</tbody></table>`
              + (next(2) ? "<p>more</p>text" : "");
          };
          for (let round = 0; round < 300; round++) {
            const [from, to] = [document.createElement("main"), document.createElement("main")];
            from.innerHTML = table(); to.innerHTML = table();
            const rows = new Map([...from.querySelectorAll("tr")].map(row => [row.dataset.row, row]));
            const wanted = to.innerHTML;
            morph(from, to);
            if (from.innerHTML !== wanted) return `seed ${seed}, round ${round}: ${from.innerHTML} is not ${wanted}`;
          }
          return "";
        }"""
    )
    assert seed == ""
