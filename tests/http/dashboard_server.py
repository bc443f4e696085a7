"""The server of which the tests of the dashboard read pages: a user of each role, and something of others in every place."""

from __future__ import annotations

from uuid import UUID

from penstock import Penstock
from penstock.http.user_queries import add_user
from penstock.http.users import hash_secret
from tests.http.dashboard_browser import Reader
from tests.http.http_server import Served

USERS = ["read", "enqueue", "work", "admin"]


JOB = "0190b7a0-0000-7000-8000-000000000001"


async def prepare(url: str) -> None:
    async with Penstock(url) as app:
        database = await app.database()
        for role in USERS:
            await add_user(database, role, role, hash_secret(f"{role}-password"), None)
        await add_user(database, "narrow", "admin", hash_secret("narrow-password"), ["mine"])
        # One process that works for users who may not know of each other.
        await database.fetch(
            """
            insert into penstock.workers
                (id, host, pid, names, concurrency, metadata, halted, no_key, started_at, seen_at, dead_after, blocked_since,
                blocked_by)
            values (
                'shared', 'h', 1, array['mine'], 1,
                '{"consumers": ["mine-stream/a", "theirs-stream/a"], "schedules": ["theirs"]}',
                '{"theirs-stream/a": "of theirs"}', '{"theirs": "k"}', now(), now(), '1 day', now(), 'theirs 0190b7a0'
            )
            """
        )
        for name in ("mine", "theirs"):
            await app.create_job_type(name, max_attempts=1)
            await app.create_stream(f"{name}-stream", 1)
            await app.create_pool(f"{name}-pool", slots=4)
            await app.topic(f"{name}-topic").declare()
            await app.enqueue_many(name, [{"customer": name, "iban": "DE42", "n": n} for n in range(3)])
            await (await app.find_topic(f"{name}-topic")).subscribe(f"{name}-client")
            await (await app.find_topic(f"{name}-topic")).publish({"text": name})
            stream = await app.find_stream(f"{name}-stream")
            await stream.append({"text": name, "iban": "DE42"}, key=name)
        await app.create_job_type("secret", max_attempts=1)
        await database.fetch(
            """
            insert into penstock.archived_jobs
                (id, finished_at, created_at, run_after, started_at, status, attempt, max_attempts, priority, name, worker,
                signature, data, errors)
            select
                case when n = 1 and name = 'theirs' then $1::uuid else penstock.new_id() end, now() - n * interval '1 second',
                now() - interval '1 hour', now() - interval '1 hour', now() - interval '1 minute', 'failed', 1, 1, 0, name,
                'worker-of-' || name, substr(md5(name), 1, 16), jsonb_build_object('customer', name, 'iban', 'DE42', 'n', n),
                jsonb_build_array(jsonb_build_object(
                    'type', 'ValueError', 'message', 'no order ' || n || ' of ' || name, 'traceback', 'Traceback of ' || name,
                    'attempt', 1, 'started_at', now() - interval '1 minute', 'failed_at', now(), 'worker', 'worker-of-' || name
                ))
            from unnest(array['mine', 'theirs', 'secret']) as name, generate_series(1, 60) as n
            """,
            UUID(JOB),
        )


def reader(served: Served, user: str) -> Reader:
    reading = Reader(served.base_url + "/")
    answer = reading.log_in(user, f"{user}-password")
    assert answer.status_code == 200 and "Log out" in answer.text, answer.text
    return reading
