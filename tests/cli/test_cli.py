"""The command line, run as a person runs it: another process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import penstock

APP = """
from penstock import Job, Penstock
app = Penstock()

@app.job("square", keep_result=True)
async def square(job: Job[int]) -> int:
    return job.data ** 2
"""


def test_a_tour_of_the_streams(url: str) -> None:
    assert "created: orders, 4 partitions" in penstock(url, "streams", "create", "orders", "--partitions", "4").stdout
    where = json.loads(penstock(url, "streams", "append", "orders", '{"n": 1}', "--key", "acme", "--json").stdout)
    assert where["offset"] == 0
    lines = "\n".join(json.dumps({"data": {"n": n}, "key": str(n)}) for n in range(20))
    assert penstock(url, "streams", "append", "orders", "-f", "-", stdin=lines).stdout.strip() == "20 appended"
    tailed = penstock(url, "streams", "tail", "orders", "--from", "earliest", "-n", "21", "--json").stdout.splitlines()
    assert len(tailed) == 21
    assert {"n": 1} in [json.loads(line)["data"] for line in tailed]
    assert json.loads(penstock(url, "streams", "list", "--json").stdout)[0]["events"] == 21
    assert "no consumer groups" in penstock(url, "streams", "groups", "orders").stdout
    psql(url, "select penstock.declare_consumer_group('orders', 'billing')")
    assert json.loads(penstock(url, "streams", "groups", "orders", "--json").stdout)[0]["lag"] == 21
    assert "paused: 4" in penstock(url, "streams", "pause", "orders", "billing", "--reason", "lunch").stdout
    assert "lunch" in penstock(url, "streams", "lag", "orders").stdout
    assert "resumed: 4" in penstock(url, "streams", "resume", "orders", "billing").stdout
    penstock(url, "streams", "reset", "orders", "billing", "--to", "latest")
    assert sum(lag["lag"] for lag in json.loads(penstock(url, "streams", "lag", "orders", "billing", "--json").stdout)) == 0
    penstock(url, "streams", "reset", "orders", "billing", "--to", "earliest")
    assert "paused: 4" in penstock(url, "streams", "pause", "orders", "billing", "--reason", "lunch").stdout
    assert "8 partitions" in penstock(url, "streams", "grow", "orders", "8").stdout
    for command in ("groups", "lag"):
        assert "4 new partitions wait for partition 0, which is paused" in penstock(url, "streams", command, "orders").stdout
    assert json.loads(penstock(url, "streams", "groups", "orders", "--json").stdout)[0]["waiting"] == 4
    assert "Aborted" in penstock(url, "streams", "drop", "orders", stdin="n\n").stderr
    assert "dropped: orders" in penstock(url, "streams", "drop", "orders", "--yes").stdout
    assert "no such stream" in penstock(url, "streams", "drop", "orders", "--yes").stderr
    missing = penstock(url, "streams", "append", "nothing", "1")
    assert missing.returncode == 1
    assert "no such stream" in missing.stderr


def psql(url: str, statement: str) -> None:
    import psycopg

    with psycopg.connect(url) as connection:
        connection.execute(statement)


def test_a_job_is_shown_with_its_own_options_and_its_log(url: str) -> None:
    penstock(url, "types", "create", "ship")
    penstock(url, "types", "create", "other")
    own = "--max-attempts", "1", "--time-limit", "90s", "--json"
    id = json.loads(penstock(url, "enqueue", "ship", "1", *own).stdout)["id"]
    lines = '{"data": 2, "max_attempts": 2, "time_limit": "2m"}\n{"data": 3}\n'
    assert penstock(url, "enqueue", "ship", "-f", "-", stdin=lines).stdout == "2 queued\n"
    assert "not a span of time" in penstock(url, "enqueue", "ship", "-f", "-", stdin='{"time_limit": "soon"}').stderr
    once = "--unique", "u", "--unique-for", "1h"
    assert "queued" in penstock(url, "enqueue", "other", "1", *once).stdout
    psql(url, "select penstock.cancel(id) from penstock.queued_jobs where name = 'other'")
    assert "coalesced" in penstock(url, "enqueue", "other", "2", *once).stdout
    psql(url, "select penstock.append_log(array[id], array[lease], array['half done']) from penstock.claim('w', '{ship}', 1)")
    shown = penstock(url, "jobs", "show", id).stdout
    assert "1 of 1" in shown and "90 s" in shown and "(1)  half done" in shown
    stored = {job["data"]: job for job in json.loads(penstock(url, "jobs", "list", "--json").stdout)}
    assert [(stored[n]["max_attempts"], stored[n]["time_limit"]) for n in (1, 2, 3)] == [(1, 90.0), (2, 120.0), (5, None)]


def test_a_tour_of_the_commands(url: str) -> None:
    assert "nothing to do" in penstock(url, "migrate").stdout
    assert "created: ship" in penstock(url, "types", "create", "ship", "-s", "max_attempts=3").stdout
    one = json.loads(penstock(url, "enqueue", "ship", '{"n": 1}', "--key", "acme", "--json").stdout)
    lines = "\n".join(json.dumps({"data": {"n": n}, "unique": str(n % 5)}) for n in range(20))
    assert penstock(url, "enqueue", "ship", "-f", "-", stdin=lines).stdout.strip() == "5 queued, 15 coalesced"
    assert json.loads(penstock(url, "stats", "--json").stdout)[0]["ready"] == 6
    assert [job["id"] for job in json.loads(penstock(url, "jobs", "list", "--key", "acme", "--json").stdout)] == [one["id"]]
    assert '{"n":1}' in penstock(url, "jobs", "show", one["id"]).stdout
    assert "cancelled" in penstock(url, "jobs", "cancel", one["id"]).stdout
    assert "replayed as" in penstock(url, "jobs", "replay", "job_" + one["id"]).stdout
    assert "paused: ship" in penstock(url, "pause", "ship").stdout
    assert "ship" in penstock(url, "types").stdout
    assert "changed: ship" in penstock(url, "types", "change", "ship", "-s", "visibility_timeout=90 seconds").stdout
    assert "resumed: ship" in penstock(url, "resume", "ship").stdout
    assert "nothing to drop" in penstock(url, "prune", "--keep", "7d").stdout


def test_a_tour_of_the_topics(url: str) -> None:
    assert "no topics yet" in penstock(url, "topics").stdout
    assert "created: news" in penstock(url, "topics", "create", "news", "--catch-up", "2").stdout
    assert "queue news_bob" in penstock(url, "topics", "subscribe", "news", "bob", "--filter", '{"n": 1}', "--ttl", "5m").stdout
    assert "was subscribed: bob" in penstock(url, "topics", "subscribe", "news", "bob", "--filter", '{"n": 1}').stdout
    assert "to 1 subscribers" in penstock(url, "topics", "publish", "news", '{"n": 1}').stdout
    assert json.loads(penstock(url, "topics", "publish", "news", '{"n": 2}', "--json").stdout)["receivers"] == 0
    waited = penstock(url, "topics", "publish", "news", '{"n": 1}', "--wait", "1s")
    assert "queued" in waited.stdout
    assert waited.returncode == 1
    assert [m["seq"] for m in json.loads(penstock(url, "topics", "read", "news", "--since", "1", "--json").stdout)] == [2, 3]
    assert "with 1 earlier" in penstock(url, "topics", "subscribe", "news", "eve", "--since", "2").stdout
    assert "news_eve" in penstock(url, "topics", "subscribers", "news").stdout
    assert "unsubscribed: bob" in penstock(url, "topics", "unsubscribe", "news", "bob", "--drop").stdout
    assert json.loads(penstock(url, "topics", "--json").stdout)[0]["subscribers"] == 1
    assert penstock(url, "topics", "read", "news", "--since", "9").returncode == 1
    lines = '{"data": {"n": 1}, "id": "0190b7a0-0000-7000-8000-000000000001"}\n\n{"data": 2, "run_after": "+5m"}\n'
    assert penstock(url, "topics", "publish", "news", "-f", "-", stdin=lines).stdout.strip() == "2 published"
    penstock(url, "topics", "publish", "news", '{"n": 1}', "--key", "acme")
    penstock(url, "topics", "publish", "news", "-f", "-", stdin='{"data": 3, "key": "bolt"}')
    keys = [job["key"] for job in json.loads(penstock(url, "jobs", "list", "--type", "news_eve", "--json").stdout)]
    assert keys[:2] == ["bolt", "acme"]
    refused = penstock(url, "topics", "publish", "news", "-f", "-", stdin='{"data": 1}\n{"dat": 2}\n')
    assert "line 2 has the field 'dat'" in refused.stderr
    assert refused.returncode == 1
    assert "not a Gearman server" in penstock(url, "gearman", "--server", "host:port").stderr
    # A misspelled name makes no topic.
    for words in (["publish", "nwes", "{}"], ["publish", "nwes", "-f", "-"], ["subscribe", "nwes", "bob"], ["read", "nwes"]):
        refused = penstock(url, "topics", *words, stdin='{"data": 1}\n')
        assert "no such topic: nwes" in refused.stderr
        assert refused.returncode == 1
    assert [topic["name"] for topic in json.loads(penstock(url, "topics", "--json").stdout)] == ["news"]


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_worker_works_until_it_is_told_to_stop(url: str, tmp_path: Path, processes: str) -> None:
    (tmp_path / "shop.py").write_text(APP)
    worker = subprocess.Popen(
        [sys.executable, "-m", "penstock", "worker", "shop:app", "--processes", processes],
        env={**os.environ, "PENSTOCK_DATABASE_URL": url},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert worker.stdout is not None
        for line in worker.stdout:
            if "worker_started" in line:
                break
        script = (
            "import asyncio\nfrom shop import app, square\n"
            "async def main():\n"
            "    async with app:\n"
            "        print((await app.wait((await square.enqueue(7)).id)).result)\n"
            "asyncio.run(main())"
        )
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PENSTOCK_DATABASE_URL": url}, cwd=tmp_path,
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.stdout.strip().endswith("49"), done.stderr
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(30) == 0
    finally:
        worker.kill()
        worker.communicate()


def test_workers_end_with_their_supervisor(url: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP)
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "penstock", "worker", "shop:app", "--processes", "2"],
        env={**os.environ, "PENSTOCK_DATABASE_URL": url}, cwd=tmp_path, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert supervisor.stdout is not None
    started = (line for line in supervisor.stdout if "worker_started" in line)
    next(started), next(started)
    supervisor.kill()
    # The workers hold the other end of the pipe: it ends when the last of them has.
    assert supervisor.stdout.read().count("worker_stopped") == 2
    supervisor.wait()


STUBBORN = """
import asyncio, time
from penstock import Job, Penstock
app = Penstock()

@app.job("stubborn")
async def stubborn(job: Job[int]) -> None:
    print("began", flush=True)
    await asyncio.sleep(3600)
"""


def test_a_second_signal_stops_at_once_and_hands_the_job_back(url: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(STUBBORN)
    worker = subprocess.Popen(
        [sys.executable, "-m", "penstock", "worker", "shop:app"],
        env={**os.environ, "PENSTOCK_DATABASE_URL": url, "PENSTOCK_SHUTDOWN_GRACE": "3600"},
        cwd=tmp_path, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert worker.stdout is not None
        lines = iter(worker.stdout)
        next(line for line in lines if "worker_started" in line)
        id = json.loads(penstock(url, "enqueue", "stubborn", "1", "--json").stdout)["id"]
        next(line for line in lines if "began" in line)
        worker.send_signal(signal.SIGTERM)
        next(line for line in lines if "worker_stopping" in line)
        assert json.loads(penstock(url, "jobs", "show", id, "--json").stdout)["status"] == "in-progress"
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
        assert json.loads(penstock(url, "jobs", "show", id, "--json").stdout)["status"] == "queued"
    finally:
        worker.kill()
        worker.communicate()


@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "message"),
    [
        (["enqueue", "none"], "", 1, "no such job type: none"),
        (["enqueue", "a b"], "", 1, "invalid job type name"),
        (["enqueue", "ship", "{broken"], "", 1, "is not JSON"),
        (["enqueue", "ship", "{}", "--id", "5"], "", 1, "invalid job id"),
        (["enqueue", "ship", "{}", "--priority", "1000"], "", 2, "priority"),
        (["enqueue", "ship", "{}", "--run-after", "soon"], "", 2, "not a time"),
        (["enqueue", "ship", "{}", "-f", "-"], "", 1, "not both"),
        (["enqueue", "ship", "-f", "/does/not/exist"], "", 1, "cannot read"),
        (["enqueue", "ship", "-f", "-"], "5\n", 1, "line 1"),
        (["enqueue", "ship", "-f", "-"], '{"dta": 1}\n', 1, "'dta'"),
        (["enqueue", "ship", "-f", "-"], '{"run_after": "soon"}\n', 1, "line 1"),
        (["enqueue", "ship", "-f", "-"], '{"priority": "high"}\n', 1, "line 1"),
        (["enqueue", "ship", "-f", "-"], '{"priority": 1.9}\n', 1, "not a whole number"),
        (["enqueue", "ship", "-f", "-", "--id", "0190b7a0-0000-7000-8000-000000000001"], "", 1, "cannot all have one id"),
        (["jobs", "show", "123"], "", 1, "invalid job id"),
        (["jobs", "show", "0190b7a0-0000-7000-8000-000000000001"], "", 1, "no such job"),
        (["jobs", "list", "--status", "done"], "", 1, "status must be waiting"),
        (["jobs", "list", "--type", "none"], "", 1, "no such job type: none"),
        (["history", "failures", "--name", "none"], "", 1, "there is no lake none"),
        (["history", "runs", "--name", "none"], "", 1, "there is no lake none"),
        (["bulk", "replay", "--where", "true", "--lake", "none"], "", 1, "there is no lake none"),
        (["history", "compact", "--name", "none"], "", 1, "there is no lake none"),
        (["--server", "localhost:9090", "stats"], "", 1, "begins with http:// or https://"),
        (["pause", "none"], "", 1, "no such job type"),
        (["types", "create", "x", "-s", "max_attempts"], "", 2, "NAME=VALUE"),
        (["types", "create", "x", "-s", "max_attempts=0"], "", 1, "max_attempts must be at least 1"),
        (["prune", "--keep", "long"], "", 2, "not a span"),
        (["worker", "no_such_module:app"], "", 1, "there is no module"),
        (["worker", "./shop.py"], "", 1, "there is no module ./shop.py Give MODULE:APP"),
        (["worker", ":app"], "", 1, "there is no module ':app' Give MODULE:APP"),
        (["worker", "json:app"], "", 1, "not a Penstock app"),
        (["grant", "nobody_there", "reader"], "", 1, "no such role"),
        (["revoke", "nobody_there"], "", 1, "no such role"),
        (["fly"], "", 2, "No such command"),
    ],
)
def test_bad_calls_say_what_is_wrong(url: str, arguments: list[str], stdin: str, code: int, message: str) -> None:
    done = penstock(url, *arguments, stdin=stdin)
    assert (done.returncode, message in done.stderr.replace("\n", " ")) == (code, True), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_library", "No module named 'no_such_library'"),
        ("from json import no_such_name", "cannot import name 'no_such_name'"),
        ("x = 1\ndef broken(", "was never closed"),
        ("x = 1\nno_such_name()", "name 'no_such_name' is not defined"),
    ],
)
def test_an_application_that_cannot_be_imported_says_where(url: str, tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "shop.py").write_text(source)
    done = penstock(url, "declare", "shop:app", cwd=tmp_path)
    said = " ".join(done.stderr.split())
    assert done.returncode == 1
    assert "shop cannot be imported" in said and message in said
    assert f"shop.py, line {source.count(chr(10)) + 1}" in said
    assert "Traceback" not in said


def test_what_else_goes_wrong_names_the_setting_that_shows_it(url: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("raise ValueError('s3cret')")
    done = penstock(url, "declare", "shop:app", cwd=tmp_path)
    assert done.returncode == 1
    assert "ValueError" in done.stderr and "PENSTOCK_LOG_PAYLOADS" in done.stderr and "s3cret" not in done.stderr


@pytest.mark.parametrize("start", ["nowhere", "+5m"])
def test_a_place_to_start_at_is_an_end_or_a_time(url: str, start: str) -> None:
    assert penstock(url, "streams", "create", "orders").returncode == 0
    for arguments in (("tail", "orders", "--from", start), ("reset", "orders", "billing", "--to", start)):
        done = penstock(url, "streams", *arguments)
        assert (done.returncode, "write earliest, latest, or a time" in " ".join(done.stderr.split())) == (2, True), done.stderr


def test_changes_can_be_printed_as_json(url: str) -> None:
    def said(*arguments: str, stdin: str = "") -> Any:
        done = penstock(url, *arguments, "--json", stdin=stdin)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert said("types", "create", "ship")["name"] == "ship"
    assert said("types", "change", "ship", "-s", "max_attempts=3")["options"]["max_attempts"] == 3
    kept = said("types", "change", "ship", "-s", "keep_failed=40 days")["options"]["keep"]
    assert (kept["succeeded"], kept["failed"]) == (None, 40 * 86_400.0)
    assert said("pause", "ship") == {"name": "ship", "paused": True}
    assert said("resume", "ship") == {"name": "ship", "paused": False}
    assert said("enqueue", "ship", "-f", "-", "--key", "acme", "--priority", "5", stdin='{"key": "own"}\n{}\n') == {"queued": 2}
    found = said("jobs", "list")
    assert {(job["key"], job["priority"]) for job in found} == {("own", 5), ("acme", 5)}
    assert said("jobs", "cancel", found[0]["id"]) == {"id": found[0]["id"], "status": "cancelled"}
    assert said("jobs", "replay", found[0]["id"])["outcome"] == "queued"
    refused = penstock(url, "types", "drop", "ship", "--yes")
    assert (refused.returncode, "jobs of ship wait" in refused.stderr) == (1, True), refused.stderr
    assert penstock(url, "types", "drop", "ship", "--force", stdin="n\n").returncode == 1
    assert said("types", "drop", "ship", "--yes", "--force") == {"name": "ship", "dropped": True}
    assert said("types", "list") == []
    assert said("pools", "create", "tenants")["name"] == "tenants"
    assert said("pools", "drop", "tenants", "--yes") == {"name": "tenants", "dropped": True}
    assert said("pools") == []


def test_jobs_beyond_what_python_can_hold_are_listed(url: str) -> None:
    import asyncio

    import asyncpg

    async def enqueue() -> None:
        connection = await asyncpg.connect(url)
        await connection.execute(
            "insert into penstock.jobs (name) values ('ship');"
            " select penstock.enqueue('ship', '{}');"
            " update penstock.queued_jobs set data = '{\"x\": 1e400}', expires_at = '20000-01-01'"
        )
        await connection.close()

    asyncio.run(enqueue())
    listed = penstock(url, "jobs", "list")
    assert (listed.returncode, "ship" in listed.stdout) == (0, True), listed.stderr
    printed = penstock(url, "jobs", "list", "--json")
    assert printed.returncode == 0, printed.stderr
    shown = json.loads(printed.stdout)
    assert shown[0]["expires_at"].startswith("9999-12-31")


@pytest.mark.parametrize("bad", ["mysql://x/y", "postgresql://h:port/x", "nonsense"])
def test_a_malformed_url_is_exit_code_1(bad: str) -> None:
    done = penstock(bad, "stats")
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr


def test_a_bad_setting_is_exit_code_1(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_POOL_SIZE", "many")
    done = penstock(url, "stats")
    assert (done.returncode, "Traceback" in done.stderr, "PENSTOCK_POOL_SIZE" in done.stderr) == (1, False, True), done.stderr


def test_no_database_is_exit_code_3() -> None:
    done = penstock("postgresql://u:s3cret@127.0.0.1:1/none", "stats")
    assert done.returncode == 3
    assert "s3cret" not in done.stderr + done.stdout


def test_a_tour_of_the_pools(url: str, tmp_path: Path) -> None:
    (tmp_path / "pooled.py").write_text(
        "from penstock import Job, Penstock\n"
        "app = Penstock()\n"
        "pool = app.pool('tenants', slots=8)\n"
        "@pool.job\n"
        "async def run(job: Job[int]) -> None: ...\n"
    )
    worker = subprocess.Popen(
        [sys.executable, "-m", "penstock", "worker", "pooled:app"],
        env={**os.environ, "PENSTOCK_DATABASE_URL": url},
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
    )
    try:
        shown: list[dict[str, object]] = []
        # A row without a worker stands for the slots without an owner.
        while not shown or shown[0]["worker"] is None or len(shown[0]["slots"]) != 8:  # type: ignore[arg-type]
            shown = json.loads(penstock(url, "pools", "show", "tenants", "--json").stdout or "[]")
        assert [row["name"] for row in json.loads(penstock(url, "pools", "--json").stdout)] == ["tenants"]
        id = str(shown[0]["worker"])
        assert f"draining {id}" in penstock(url, "pools", "drain", "tenants", id).stdout
        assert "takes part again" in penstock(url, "pools", "undrain", "tenants", id).stdout
        assert "has 16 slots" in penstock(url, "pools", "resize", "tenants", "16").stdout
        assert "tenants" in penstock(url, "scale", "advise").stdout
        assert "no such pool" in penstock(url, "pools", "show", "nothing").stderr
        assert "cannot have 4 slots" in penstock(url, "pools", "resize", "tenants", "4").stderr
        assert json.loads(penstock(url, "pools", "key", "tenants", "acme", "--json").stdout)["owner"] == id
        assert "3 jobs a turn" in penstock(url, "pools", "weight", "tenants", "acme", "3").stdout
        assert json.loads(penstock(url, "pools", "create", "others", "--slots", "4", "--json").stdout)["slots"] == 4
        assert "starting: acme" in penstock(url, "pools", "start", "others", "acme", '{"n": 1}').stdout
        assert "another payload" in penstock(url, "pools", "start", "others", "acme", "2").stderr
        assert "notified: acme" in penstock(url, "pools", "notify", "others", "acme", "1").stdout
        (job,) = json.loads(penstock(url, "pools", "standing", "others", "--json").stdout)
        assert (job["key"], job["data"], job["messages"], job["running_by"]) == ("acme", {"n": 1}, 1, None)
        assert "(not running: no worker owns its slot)" in penstock(url, "pools", "standing", "others").stdout
        assert "stopped: acme" in penstock(url, "pools", "stop", "others", "acme").stdout
        assert "no standing job" in penstock(url, "pools", "stop", "others", "acme").stderr
    finally:
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
