"""Which pages and actions there are, who sees and does what, and that every answer is safe."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.http.auth import Role
from penstock.http.dashboard.pages import ACTIONS, PAGES
from tests.http.dashboard_browser import Reader, links_of, text_of
from tests.http.dashboard_server import JOB, USERS, reader
from tests.http.http_server import Served

# Of each page: the role that sees it, and what a user of the types "mine" alone gets of "theirs": "none" is not found, "no" is
# refused, "own" a page on which nothing of theirs is.
PAGES_TABLE = """
read    /                                       own
read    /jobs                                   own
read    /jobs/{id}                              none
enqueue /jobs/{id}/edit                         none
read    /failures                               own
read    /types                                  own
read    /types/{name}                           none
enqueue /types/{name}/enqueue                   none
read    /pools                                  own
read    /pools/{name}                           none
read    /streams                                own
read    /streams/{name}                         none
read    /streams/{name}/events                  none
read    /streams/{name}/dead                    none
admin   /streams/{name}/groups/{group}/seek     none
read    /topics                                 own
read    /topics/{name}                          none
read    /topics/{name}/messages/{id}            none
read    /workflows                              no
read    /workflows/{id}                         no
read    /workers                                own
read    /schedules                              own
read    /schedules/{name}                       none
read    /operations                             own
enqueue /operations/new                         no
admin   /audit                                  no
read    /history                                own
read    /health                                 no
"""


ACTIONS_TABLE = """
enqueue /jobs/selected                          none
enqueue /jobs/{id}/replay                       none
enqueue /jobs/{id}/cancel                       none
enqueue /jobs/{id}/run-now                      none
enqueue /jobs/{id}/set-priority                 none
enqueue /jobs/{id}/signal                       none
enqueue /failures/mute                          none
enqueue /failures/unmute                        none
admin   /types/{name}/pause                     none
admin   /types/{name}/resume                    none
admin   /types/{name}/change                    none
enqueue /types/{name}/new                       none
admin   /pools/{name}/drain                     none
admin   /pools/{name}/undrain                   none
admin   /pools/{name}/key                       none
enqueue /pools/{name}/standing                  none
enqueue /streams/{name}/append                  none
admin   /streams/{name}/replay-dead             none
admin   /streams/{name}/groups/{group}/seek-to  none
admin   /streams/{name}/groups/{group}/skip     none
admin   /streams/{name}/groups/{group}/pause    none
admin   /streams/{name}/groups/{group}/resume   none
enqueue /topics/{name}/publish                  none
work    /topics/{name}/subscribe                none
work    /topics/{name}/unsubscribe              none
enqueue /workflows/{id}/cancel                  no
enqueue /workflows/{id}/retry                   no
admin   /workers/{id}/drain                     none
admin   /fleets/{name}/drain                    no
enqueue /schedules/{name}/run                   none
enqueue /operations/start                       no
enqueue /operations/{id}/stop                   none
"""


def table(text: str) -> dict[str, tuple[str, str]]:
    return {path: (role, theirs) for role, path, theirs in (line.split() for line in text.split("\n") if line)}


PAGES_OF, ACTIONS_OF = table(PAGES_TABLE), table(ACTIONS_TABLE)


def filled(path: str) -> str:
    """A path of theirs."""
    kind = path.split("/")[1].rstrip("s")
    name = {"stream": "theirs-stream", "pool": "theirs-pool", "topic": "theirs-topic"}.get(kind, "theirs")
    id = "worker-of-theirs" if kind == "worker" else JOB
    return path.format(name=name, id=id, group="theirs").lstrip("/")


def absent(path: str) -> str:
    return path.format(name="absent", id="0190b7a0-0000-7000-8000-0000000000ff", group="absent").lstrip("/")


FORMS: dict[str, dict[str, Any]] = {
    "/jobs/selected": {"id": JOB, "action": "replay"},
    "/jobs/{id}/set-priority": {"priority": "1"},
    "/jobs/{id}/signal": {"name": "approved"},
    "/failures/mute": {"type": "theirs", "signature": "0123456789abcdef"},
    "/failures/unmute": {"type": "theirs", "signature": "0123456789abcdef"},
    "/pools/{name}/key": {"key": "k", "action": "pause"},
    "/pools/{name}/standing": {"key": "k", "action": "start"},
    "/operations/start": {"kind": "replay", "type": "theirs"},
}


def test_every_page_and_action_is_in_the_tables() -> None:
    assert sorted(PAGES_OF) == sorted(f"/{page.path}" for page in PAGES)
    assert sorted(ACTIONS_OF) == sorted(f"/{action.path}" for action in ACTIONS)
    assert all(page.role.name.lower() == PAGES_OF[f"/{page.path}"][0] for page in PAGES)
    assert all(action.role.name.lower() == ACTIONS_OF[f"/{action.path}"][0] for action in ACTIONS)


@pytest.mark.parametrize("user", USERS)
def test_each_page_and_action_answers_the_roles_that_may_and_no_other(dashboard: Served, user: str) -> None:
    wrong = []
    with reader(dashboard, user) as reading:
        for posted, of in ((False, PAGES_OF), (True, ACTIONS_OF)):
            for path, (needed, _) in of.items():
                answer = reading.post(absent(path), **FORMS.get(path, {})) if posted else reading.get(absent(path))
                refused = answer.status_code == 403 and f"has the role {user}; this needs {needed}" in answer.text
                if refused is (Role[user.upper()] >= Role[needed.upper()]) or answer.status_code >= 500:
                    wrong.append((posted, path, answer.status_code, text_of(answer.text)[:200]))
    assert wrong == []


def test_without_a_login_every_page_leads_to_it(dashboard: Served) -> None:
    with Reader(dashboard.base_url + "/") as stranger:
        for path in PAGES_OF:
            answer = stranger.get(absent(path))
            assert answer.url.path == "/login", path
            assert "Password or token" in answer.text
        for path in ACTIONS_OF:
            assert stranger.post(absent(path)).url.path == "/login", path
        assert stranger.get("live", params={"page": "jobs"}).status_code == 401


def test_a_user_of_some_types_gets_nothing_of_the_others(dashboard: Served) -> None:
    expected = {"none": 404, "no": 403, "own": 200}
    wrong = []
    with reader(dashboard, "narrow") as reading:
        for path, (_, theirs) in PAGES_OF.items():
            answer = reading.get(filled(path), params={"type": "theirs", "kind": "replay"} if path == "/operations/new" else None)
            if answer.status_code != expected[theirs] or (theirs == "own" and "theirs" in answer.text):
                wrong.append((path, answer.status_code, text_of(answer.text)[:300]))
        for path, (_, theirs) in ACTIONS_OF.items():
            answer = reading.post(filled(path), **FORMS.get(path, {}))
            if answer.status_code != expected[theirs]:
                wrong.append((path, answer.status_code, text_of(answer.text)[:300]))
        assert "no order" in reading.get("failures").text
        assert "shared" in reading.get("workers").text
        assert reading.post("workers/shared/drain").status_code == 404
        for search in (
            "status=failed&type=theirs",
            f"id={JOB}",
            "status=unfinished&type=theirs",
            "field=data.customer = 'theirs'",
        ):
            assert "theirs-" not in text_of(reading.get(f"jobs?{search}").text).replace("theirs'", "")
            assert "worker-of-theirs" not in reading.get(f"jobs?{search}").text
            assert "no order 1 of theirs" not in reading.get(f"jobs?{search}").text
    assert wrong == []


def test_a_page_links_only_to_what_is_there(admin: Reader) -> None:
    """Follow every link, three steps deep."""
    seen: set[str] = set()
    ahead = {str(admin.client.base_url)}
    for _ in range(3):
        found: set[str] = set()
        for link in sorted(ahead - seen)[:150]:
            seen.add(link)
            answer = admin.get(link)
            assert answer.status_code == 200, (link, text_of(answer.text)[:300])
            if answer.headers["content-type"].startswith("text/html"):
                found |= {one for one in links_of(answer) if one.startswith(str(admin.client.base_url))}
        ahead = found
    assert len(seen) > 30


def test_no_address_is_an_error_of_the_server(admin: Reader) -> None:
    for path in ("audit?before=²", "streams/mine-stream/events?partition=²&offset=²", "live?page=//[", "login?next=//["):
        assert admin.get(path).status_code < 500, path
    for field in ("²", "9" * 5000):
        sought = admin.post("streams/mine-stream/groups/g/seek-to", partition=field, offset=field)
        assert sought.status_code < 500, field
    form = {"user": "admin", "secret": "admin-password", "next": "//["}
    assert admin.client.post("login", data=form).url.path == "/"


def test_a_form_of_another_site_is_refused(dashboard: Served, admin: Reader) -> None:
    for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "same-site"}):
        for path in [*ACTIONS_OF, "/login", "/logout"]:
            answer = admin.client.post(absent(path), headers=headers, follow_redirects=False)
            assert answer.status_code == 403 and "another site" in answer.text, path
    with reader(dashboard, "admin") as reading:
        assert "Log out" in reading.get("").text


def test_every_answer_has_a_policy_without_inline_code_and_is_never_framed(admin: Reader) -> None:
    for path in ("", "jobs", "login", "absent", "jobs/absent", "static/dashboard.js"):
        headers = admin.get(path).headers
        assert headers["x-frame-options"] == "DENY" and headers["x-content-type-options"] == "nosniff", path
        policy = headers["content-security-policy"]
        assert "frame-ancestors 'none'" in policy and "unsafe" not in policy and "default-src 'none'" in policy, path
