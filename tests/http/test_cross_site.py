"""What pages of other sites may not do, which hosts the server answers to, and what it tells browsers."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from penstock.http.origin import Origins
from penstock.http.proxies import Proxies, household
from penstock.testing import TemporaryDatabases
from tests.http.http_server import TOKEN, Served, free_port, serving

HEADERS = (
    "content-security-policy", "x-content-type-options", "x-frame-options", "referrer-policy",
    "cross-origin-resource-policy", "cross-origin-opener-policy", "cache-control",
)  # fmt: skip


@pytest.fixture(scope="module")
def strict(databases: TemporaryDatabases) -> Iterator[Served]:
    port = str(free_port())
    settings = {
        "PENSTOCK_HTTP_ALLOWED_HOSTS": f"jobs.example.com,*.internal,127.0.0.1:{port}",
        "PENSTOCK_HTTP_TRUSTED_ORIGINS": "https://ops.example.com",
        "PENSTOCK_HTTP_TRUSTED_PROXIES": "127.0.0.1",
        "HOMEPAGE_IFRAME_URL": "https://dash.example.com/board?id=1",
    }
    with databases.database() as url, serving(url, "--port", port, **settings) as served:
        yield served


FOREIGN = [
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "cross-site"},
]
OWN: list[dict[str, str]] = [
    {},
    {"Origin": "self"},
    {"Sec-Fetch-Site": "same-origin", "Origin": "self"},
    {"Sec-Fetch-Site": "none"},
    {"Origin": "https://ops.example.com", "Sec-Fetch-Site": "cross-site"},
]
UNSAFE = [
    ("PUT", "/v1/jobs/{type}/random_id", '{"data": 1}', 202),
    ("POST", "/v1/jobs/{type}/pause", "", 200),
    ("POST", "/v1/jobs/{type}/batch", "{}\n", 200),
    ("PATCH", "/v1/jobs/{type}", '{"concurrency": 3}', 200),
    ("POST", "/jobber/queue", '{"type": "t", "payload": 1}', 201),
    ("DELETE", "/v1/workers/nobody", "", 404),
]


@pytest.fixture
def own_type(strict: Served) -> str:
    name = f"t-{secrets.token_hex(4)}"
    body = {"name": name, "delivery_strategy": "at_least_once", "attempts": 3, "concurrency": 5}
    with strict.client() as client:
        assert client.post("/v1/jobs", json=body).status_code == 201
    return name


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", "application/json"])
@pytest.mark.parametrize(("method", "path", "body", "status"), UNSAFE)
def test_pages_of_other_sites_change_nothing(
    strict: Served, own_type: str, method: str, path: str, body: str, status: int, kind: str
) -> None:
    with strict.client() as client:
        own = f"http://{client.base_url.host}:{client.base_url.port}"
        for headers in FOREIGN:
            refused = client.request(method, path.format(type=own_type), content=body, headers=headers | {"Content-Type": kind})
            assert (refused.status_code, refused.json()["id"]) == (403, "cross_site"), (headers, refused.text)
        for headers in OWN:
            given = {name: own if value == "self" else value for name, value in headers.items()}
            done = client.request(method, path.format(type=own_type), content=body, headers=given | {"Content-Type": kind})
            assert done.status_code == status, (headers, done.text)
        # To look is safe, and the answer stays unreadable for the page.
        assert client.get("/v1/jobs", headers=FOREIGN[0]).status_code == 200


def test_receiving_a_topic_is_refused_to_other_sites_though_it_is_a_get(strict: Served) -> None:
    with strict.client() as client:
        client.post("/v1/topics", json={"name": "news"})
        refused = client.get("/v1/topics/news/deliveries", headers=FOREIGN[2])
        assert refused.json()["id"] == "cross_site"
        assert client.get("/v1/topics/news/subscribers").json() == []


def test_websockets_of_other_sites_are_refused_also_with_a_token(strict: Served) -> None:
    with strict.client() as client:
        client.post("/v1/topics", json={"name": "socket"})
    url = strict.base_url.replace("http", "ws") + "/v1/topics/socket/deliveries"
    import base64

    token = base64.urlsafe_b64encode(f"admin.{TOKEN}".encode()).decode().rstrip("=")
    for headers in FOREIGN:
        origin = headers.get("Origin")
        rest = {name: value for name, value in headers.items() if name != "Origin"}
        with pytest.raises(InvalidStatus) as refused:
            connect(url, origin=origin, additional_headers=rest, subprotocols=["penstock", f"penstock.bearer.{token}"])  # type: ignore[arg-type,list-item]
        assert refused.value.response.status_code == 403
        assert refused.value.response.headers["X-Content-Type-Options"] == "nosniff"
    for origin in (strict.base_url, "https://ops.example.com", None):
        with connect(url, origin=origin, subprotocols=["penstock", f"penstock.bearer.{token}"]) as socket:  # type: ignore[arg-type,list-item]
            assert '"subscribed"' in str(socket.recv(10))


def test_a_binary_frame_closes_the_connection_with_a_code(strict: Served) -> None:
    with strict.client() as client:
        client.post("/v1/topics", json={"name": "binary"})
    url = strict.base_url.replace("http", "ws") + "/v1/topics/binary/deliveries"
    import base64

    basic = base64.b64encode(f"admin:{TOKEN}".encode()).decode()
    with connect(url, additional_headers={"Authorization": f"Basic {basic}"}) as socket:
        socket.recv(10)
        socket.send(b"\x00\xff")
        with pytest.raises(Exception, match="1003"):
            socket.recv(10)
    log = strict.log.read_text()
    assert basic not in log and TOKEN not in log and "KeyError" not in log


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("jobs.example.com", 200), ("JOBS.example.com:9090", 200), ("a.internal", 200), ("internal", 421), ("evil.example", 421),
        ("jobs.example.com.evil.example", 421), ("127.0.0.1", 421), ("", 421),
    ],
)  # fmt: skip
def test_only_its_own_hosts_are_answered(strict: Served, host: str, status: int) -> None:
    with strict.client() as client:
        for method, path in (("GET", "/v1/jobs"), ("HEAD", "/docs"), ("PUT", "/v1/jobs/none/random_id")):
            given = client.request(method, path, headers={"Host": host}).status_code
            assert (given == 421) == (status == 421), (method, path, given)
        # A health check calls the server by its address.
        assert client.get("/healthz", headers={"Host": host}).status_code == 200


def test_a_second_host_admits_no_one(strict: Served) -> None:
    port = int(strict.base_url.rpartition(":")[2])
    key = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    upgrade = f"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n{key}"
    for path, more in (("/v1/jobs", ""), ("/v1/topics/t/deliveries", upgrade)):
        for hosts in (("evil.example", "jobs.example.com"), ("jobs.example.com", "evil.example")):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as there:
                given = "".join(f"Host: {host}\r\n" for host in hosts)
                there.sendall(f"GET {path} HTTP/1.1\r\n{given}{more}\r\n".encode())
                assert there.recv(1_000).split()[1] == b"400", (path, hosts)


@pytest.mark.parametrize("path", ["/healthz", "/v1/jobs", "/", "/v1/topics/t/deliveries"])
def test_a_request_of_http_1_1_without_host_is_refused(served: Served, path: str) -> None:
    port = int(served.base_url.rpartition(":")[2])
    answers = {}
    for version in ("1.1", "1.0"):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as there:
            there.sendall(f"GET {path} HTTP/{version}\r\nConnection: close\r\n\r\n".encode())
            answers[version] = there.recv(1_000).split()[1]
    assert (answers["1.1"], answers["1.0"] == b"400") == (b"400", False), answers


def test_every_answer_has_the_headers(strict: Served) -> None:
    with strict.client() as client, strict.client(auth=None) as stranger:
        answers = [
            client.get(path)
            for path in (
                "/",
                "/docs",
                "/docs/swagger-ui.css",
                "/healthz",
                "/readyz",
                "/metrics",
                "/v1/jobs",
                "/nothing",
                "/openapi.json",
            )
        ]
        answers += [
            stranger.get("/v1/jobs"),
            client.post("/v1/jobs", content=b"{"),
            client.put("/v1/jobs/no/random_id", json={"data": 1}),
        ]
        answers += [client.options("/v1/jobs"), client.get("/v1/jobs", headers={"Host": "evil.example"})]
        for answer in answers:
            missing = [name for name in HEADERS if name not in answer.headers]
            assert missing == [], (answer.url, answer.status_code)
            assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
            assert answer.headers.get_list("content-security-policy") == [answer.headers["content-security-policy"]]
        home = client.get("/home").headers["content-security-policy"]
        assert "frame-src https://dash.example.com;" in home and "unsafe-inline" not in home


def test_head_works_wherever_get_does(strict: Served) -> None:
    with strict.client() as client:
        client.post("/v1/streams", json={"name": "head"})
        client.post("/v1/topics", json={"name": "head"})
        paths = [
            "/",
            "/healthz",
            "/readyz",
            "/metrics",
            "/docs",
            "/docs/swagger-ui.css",
            "/openapi.json",
            "/v1/jobs",
            "/v1/stats",
        ]
        paths += ["/v1/queued-jobs", "/v1/workers", "/v1/pools", "/v1/streams", "/v1/topics", "/v1/streams/head/events"]
        for path in paths:
            got, head = client.get(path), client.head(path)
            assert (head.status_code, head.content) == (200, b""), (path, head.text)
            assert head.headers["content-type"] == got.headers["content-type"], path
        for path in ("/v1/streams/head/events/follow", "/v1/topics/head/deliveries?client_id=a&stay=true"):
            head = client.head(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-type"].startswith("text/event-stream")
        assert client.get("/v1/topics/head/subscribers").json() == []
        assert client.head("/v1/jobs/none").status_code == client.get("/v1/jobs/none").status_code == 404
        assert client.head("/v1/jobs/none/batch").status_code == 405
        assert "HEAD" in client.options("/v1/jobs").headers["allow"]


def test_a_key_has_one_path_whatever_it_holds(strict: Served) -> None:
    from urllib.parse import quote

    with strict.client() as client:
        client.post("/v1/pools", json={"name": "keys"})
        keys = ["acme", "acme/messages", "messages", "a/b", "100%", "%2F", "%252F", "a b", "ü/ß", "?x=1#y"]
        for key in keys:
            at = f"/v1/pools/keys/standing/{quote(key, safe='')}"
            assert client.put(at, json={"data": key}).json() == {"key": key, "outcome": "starting"}
            assert client.post(f"{at}/messages", json={"data": 1}).status_code == 202
            assert client.put(f"/v1/pools/keys/weights/{quote(key, safe='')}", json={"weight": 3}).status_code == 200
        for key in keys:
            at = f"/v1/pools/keys/standing/{quote(key, safe='')}"
            found = client.get(at).json()
            assert (found["key"], found["data"], found["messages"]) == (key, key, 1)
            assert client.get(f"/v1/pools/keys/keys/{quote(key, safe='')}").json()["key"] == key
        assert set(client.get("/v1/pools/keys/weights").json()["weights"]) == set(keys)
        for key in keys:
            assert client.delete(f"/v1/pools/keys/standing/{quote(key, safe='')}").status_code == 204
        assert client.get("/v1/pools/keys/standing").json() == []
        # Not the key "acme/messages".
        assert client.get("/v1/pools/keys/standing/acme/messages").status_code == 405
        assert client.put("/v1/pools/keys/standing/acme/messages", json={}).status_code == 405


@pytest.mark.parametrize("name", [".", ".."])
def test_names_that_urls_lose_are_refused(strict: Served, name: str) -> None:
    body = {"delivery_strategy": "at_least_once", "attempts": 3, "concurrency": 5}
    with strict.client() as client:
        client.post("/v1/topics", json={"name": "dots"})
        client.post("/v1/pools", json={"name": "dots"})
        for method, path, given in (
            ("POST", "/v1/jobs", body | {"name": name}),
            ("POST", "/jobber/queue", {"type": name, "payload": 1}),
            ("POST", "/v1/pools", {"name": name}),
            ("POST", "/v1/streams", {"name": name}),
            ("POST", "/v1/topics", {"name": name}),
            ("PUT", "/v1/pools/dots/standing", {"wanted": {name: {}}}),
        ):
            refused = client.request(method, path, json=given)
            assert refused.status_code == 400, (path, refused.text)


def test_the_client_behind_proxies() -> None:
    proxies = Proxies(("10.0.0.0/8", "::1"))
    table = {
        ("192.0.2.1", b"198.51.100.7"): "192.0.2.1",  # a client without a proxy cannot name its address
        ("10.0.0.1", b""): "10.0.0.1",
        ("10.0.0.1", b"198.51.100.7"): "198.51.100.7",
        ("10.0.0.1", b"6.6.6.6, 198.51.100.7, 10.1.1.1"): "198.51.100.7",
        ("10.0.0.1", b"nonsense, 10.1.1.1"): "10.1.1.1",
        ("::1", b"[2001:db8::1]:4711"): "2001:db8::1",
        ("::ffff:10.0.0.1", b"198.51.100.7:99"): "198.51.100.7",
    }
    assert {case: proxies.client(*case) for case in table} == table
    assert Proxies().client("10.0.0.1", b"1.2.3.4") == "10.0.0.1"
    assert household("2001:db8::1") == household("2001:db8::ffff:1") != household("2001:db8:0:1::1")
    assert household("::ffff:1.2.3.4") == "1.2.3.4"


def test_hosts_and_origins_without_settings() -> None:
    origins = Origins()
    origins.check_host(b"anything")
    origins.check_site(b"", b"", b"x", "/")
    with pytest.raises(Exception, match="another site"):
        origins.check_site(b"http://[broken", b"", b"x", "/")


def test_clients_behind_a_trusted_proxy_have_limits_of_their_own(strict: Served) -> None:
    def login(client: httpx.Client, address: str, secret: str) -> int:
        return client.get("/v1/stats", auth=("admin", secret), headers={"X-Forwarded-For": f"6.6.6.6, {address}"}).status_code

    with strict.client(auth=None) as client:
        for _ in range(10):
            assert login(client, "198.51.100.1", "guess") == 403
        assert login(client, "198.51.100.1", "guess") == 429
        assert login(client, "198.51.100.2", "guess") == 403
