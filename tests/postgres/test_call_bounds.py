"""What one call may ask for is bounded: each array and each limit of every function that a role may call, by the catalogue."""

from __future__ import annotations

from itertools import product
from typing import Any, TypeAlias
from uuid import uuid4

import asyncpg
import pytest

from penstock import NewJob, Penstock
from penstock.jobs import http_queries as http
from penstock.jobs import queries as jobs
from penstock.topics import queries as topics
from tests.postgres.sql_roles import ACCESSES, prepare

Sql: TypeAlias = "asyncpg.Connection[Any]"
# Parameters that say how much a call does or returns.
LIMITS = {"p_limit", "p_bytes", "p_every", "p_days", "p_depth", "p_workers"}
# Names of things that are there, so that a call gets as far as its bounds.
PRESENT = {
    "p_name": "'pool'", "p_names": "'{pool}'", "p_stream": "'events'", "p_group": "'g'", "p_topic": "'topic'",
    "p_client_id": "'c'", "p_writer": "'w'", "p_epoch": "1", "p_rows": "1", "p_target": "'job pool'",
    "p_lake": "'lake'", "p_relation": "'queued_jobs'", "p_worker": "'w'", "p_holder": "'w'",
    "p_member": "'m'", "p_channel": "'penstock_c'", "p_role": "'read'", "p_width": "2", "p_since": "0",
    "p_last": "1", "p_keep": "'1 day'", "p_id": "'w'", "p_format": "'json'", "p_host": "'h'", "p_pid": "1",
    "p_session": "penstock.new_id()", "p_batch": "1", "p_files": "'[]'", "p_secret_hash": "'x'",
    "p_message": "'x'",
}  # fmt: skip
OF_FUNCTION = {
    ("set_targets", "p_group"): "'pool'",
    ("quarantine_keys", "p_group"): "'pool'",
    ("take", "p_group"): "'pool'",
    ("release", "p_group"): "'pool'",
    ("start_fleet", "p_name"): "'fleet'",
    ("start_fleet", "p_target"): "'app:app'",
    ("page_of_jobs", "p_since"): "null",
    ("search_waiting", "p_since"): "null",
    ("search_finished", "p_since"): "null",
    ("recent_failures", "p_since"): "null",
    ("failure_groups", "p_since"): "null",
    ("history_of", "p_since"): "now() - interval '1 hour'",
    ("history_of", "p_until"): "now()",
    ("read_chunks", "p_id"): "null",
    ("preview_operation", "p_kind"): "'cancel'",
    ("preview_operation", "p_filter"): '\'{"name": "pool"}\'',
    ("put_jobs", "p_ids"): "array[penstock.new_id()]",
    ("publish_many", "p_data"): "array['1'::jsonb]",
}
# As many as no call admits, and as few as each has to.
MANY = 1_000_001


@pytest.fixture
async def there(app: Penstock, sql: Sql) -> Sql:
    await prepare(sql)
    await sql.execute(
        """
        select penstock.declare_pool('pool', '{"slots": 4}', '{}');
        select penstock.create_stream('events', 2);
        select penstock.create_stream('events.dead', 1);
        select penstock.declare_consumer_group('events', 'g');
        select penstock.declare_topic('topic', '{}');
        select penstock.subscribe('topic', 'c');
        select penstock.publish('topic', '1');
        select penstock.open_lake('lake', 'file:///lake');
        select penstock.join_group('pool', 'm', penstock.new_id(), '10 s', '{}');
        """
    )
    return sql


async def calls(sql: Sql) -> list[tuple[str, list[tuple[str, str, bool]]]]:
    """The functions that some role may call: name, and each parameter with its type and whether it has a default."""
    rows = await sql.fetch(
        """
        select proname, proargnames[1:pronargs] as names, pronargdefaults as defaults,
            array(
                select format_type(type, null) from unnest(proargtypes) with ordinality as given (type, place) order by place
            ) as types
        from pg_proc
        where pronamespace = 'penstock'::regnamespace
            and exists (select from unnest($1::text[]) as access where has_function_privilege('test_' || access, oid, 'execute'))
        order by proname
        """,
        ACCESSES,
    )
    found = []
    for row in rows:
        required = len(row["types"]) - row["defaults"]
        parameters = zip(row["names"] or [], row["types"], strict=True)
        found.append((row["proname"], [(name, kind, place >= required) for place, (name, kind) in enumerate(parameters)]))
    return found


def _call(function: str, parameters: list[tuple[str, str, bool]], tried: str, value: str) -> str:
    given = []
    for name, kind, optional in parameters:
        if name == tried:
            given.append(f"{name} => {value}")
        elif (function, name) in OF_FUNCTION:
            given.append(f"{name} => {OF_FUNCTION[function, name]}")
        elif name in PRESENT and not (name == "p_names" and kind != "text[]") and kind not in ("uuid", "jsonb[]"):
            given.append(f"{name} => {PRESENT[name]}")
        elif not optional:
            given.append(f"{name} => null::{kind}")
    return f"select * from penstock.{function}({', '.join(given)})"


async def _refusal(sql: Sql, call: str) -> str | None:
    """What is wrong with the refusal of a call; None: it is as it should be."""
    transaction = sql.transaction()
    await transaction.start()
    try:
        await sql.execute("set local statement_timeout = '20s'")
        await sql.fetch(call)
    except asyncpg.PostgresError as error:
        said = f"{error.sqlstate}: {error.message} ({error.hint})"  # type: ignore[attr-defined]
        if error.sqlstate not in ("PS400", "PS413"):
            return said
        # Where another array of the call has the number of elements, and is bounded itself, its length is the bound.
        bounds = (
            "at most",
            "between",
            " to ",
            "differ in length",
            "not as many ids",
            "an offset for each",
            "two offsets for each",
        )
        return None if any(words in said for words in bounds) else said
    else:
        return "not refused"
    finally:
        await transaction.rollback()


async def test_every_array_of_a_call_is_bounded(there: Sql) -> None:
    wrong = []
    tried = 0
    for function, parameters in await calls(there):
        for name, kind, _ in parameters:
            if kind.endswith("[]"):
                tried += 1
                # Each array alone, and with elements that are there to be counted only.
                call = _call(function, parameters, name, f"array_fill(null::{kind[:-2]}, array[{MANY}])")
                if refusal := await _refusal(there, call):
                    wrong.append(f"{function}({name}): {refusal}")
    assert not wrong, "\n".join(wrong)
    assert tried > 100, "the catalogue was not read"


# One element of each kind, for arrays of another shape.
ELEMENTS = {
    "text": "'pool'", "uuid": "penstock.new_id()", "jsonb": "'{}'", "json": "'{}'", "bytea": "'x'", "interval": "'1 s'",
    "timestamp with time zone": "now()", "xid8": "'1'",
}  # fmt: skip


@pytest.mark.parametrize("shape", ["array[1], array[0]", "array[1], array[7]", "array[2, 2]"])
async def test_an_array_of_another_shape_is_refused_or_taken(there: Sql, shape: str) -> None:
    """Elements that belong together are looked up by their place in some functions, and by their number in others."""
    wrong = []
    tried = 0
    for function, parameters in await calls(there):
        arrays = [name for name, kind, _ in parameters if kind.endswith("[]")]
        for odd in arrays:
            given = []
            for name, kind, optional in parameters:
                if name in arrays:
                    element = f"{ELEMENTS.get(kind[:-2], '1')}::{kind[:-2]}"
                    given.append(f"{name} => array_fill({element}, {shape if name == odd else 'array[1]'})")
                elif (function, name) in OF_FUNCTION:
                    given.append(f"{name} => {OF_FUNCTION[function, name]}")
                elif name in PRESENT and kind != "uuid":
                    given.append(f"{name} => {PRESENT[name]}")
                elif not optional:
                    given.append(f"{name} => null::{kind}")
            tried += 1
            call = f"select * from penstock.{function}({', '.join(given)})"
            state = await _state(there, call)
            if not (state is None or state.startswith("PS")):
                wrong.append(f"{call}: {state}")
    assert not wrong, "\n".join(wrong)
    assert tried > 100, "the catalogue was not read"


BAD_DOCUMENTS = [
    "select penstock.note_handlers(null)",
    "select penstock.note_handlers('null')",
    "select penstock.note_handlers('{}')",
    "select penstock.note_handlers('[[]]')",
    "select penstock.declare_job_type('odd', null)",
    "select penstock.declare_job_type('pool', 'null')",
    "select penstock.declare_job_type('pool', '7')",
    "select penstock.wait_for_slots(null, 'm')",
    "select penstock.wait_for_slots(repeat('x', 3000000), 'm')",
    "select penstock.commit_staged(null, null, null, null, null)",
    "select penstock.commit_staged('w', 1, '{}', 1, 'job pool', p_named => 'null')",
    "select penstock.commit_staged_events('w', 1, '{}', 1, 'stream events', p_named => '7')",
    "select penstock.enqueue('pool', '{}', p_key => 'k', p_time_limit => 'infinity')",
    "select penstock.enqueue('pool', '{}', p_key => 'k', p_unique_key => 'u', p_unique_for => 'infinity')",
    f"select penstock.enqueue_many('pool', array['{{}}'::jsonb], '[0:0]={{{uuid4()}}}', '{{k}}', p_unique_keys => '{{u}}')",
    "select * from penstock.enqueue_many('pool', array['{}'::jsonb], p_keys => '[0:0]={k}', p_unique_keys => '{u}')",
    f"select penstock.settle_attempts('{{pool,pool}}', '[0:1]={{{uuid4()},{uuid4()}}}', '{{1,1}}', '{{succeeded,succeeded}}')",
    "select * from penstock.scan_events('events', null, array[0], array[0, 1], array[0], '{}', '[]')",
    "select penstock.declare_stream('events', 1, '7')",
    "select penstock.declare_stream('events', 1, '[]')",
    "select penstock.declare_stream('events', 1, null)",
    "select penstock.commit_staged('w', 1, '{}', null, 'job pool')",
    "select penstock.commit_staged_events('w', 1, '{}', null, 'stream events')",
    "select penstock.open_lake('main', null)",
    "select * from penstock.prune('170000000 years')",
    "select penstock.prune_messages('170000000 years')",
]


async def test_what_is_of_the_wrong_kind_is_refused_with_a_hint(there: Sql) -> None:
    wrong = []
    for call in BAD_DOCUMENTS:
        # Before PostgreSQL 17 there is no infinite interval: the text is none.
        no_interval = "'infinity'" in call and there.get_server_version().major < 17
        state, hint = await _answer(there, call)
        if not (state == "22007" if no_interval else state in ("PS400", "PS404") and hint):
            wrong.append(f"{call}: {state}, hint: {hint}")
    assert not wrong, "\n".join(wrong)


async def _answer(sql: Sql, call: str) -> tuple[str | None, str | None]:
    """The SQLSTATE by which a call is refused, None: it is taken; and its hint."""
    try:
        await sql.fetch(call)
    except asyncpg.PostgresError as error:
        return error.sqlstate, error.hint  # type: ignore[attr-defined]
    return None, None


async def _state(sql: Sql, call: str) -> str | None:
    """The SQLSTATE by which a call is refused, with its message; None: it is taken."""
    transaction = sql.transaction()
    await transaction.start()
    try:
        await sql.execute("set local statement_timeout = '20s'")
        await sql.fetch(call)
    except asyncpg.PostgresError as error:
        return f"{error.sqlstate} {error.args[0]}"  # type: ignore[attr-defined]
    finally:
        await transaction.rollback()
    return None


async def test_every_limit_of_a_call_is_bounded(there: Sql) -> None:
    wrong = []
    tried = 0
    for function, parameters in await calls(there):
        for name, kind, _ in parameters:
            if name in LIMITS and not kind.endswith("[]"):
                most = 2**31 - 1 if kind == "integer" else 2**63 - 1
                for value in ("-1", "0", f"null::{kind}", str(most)):
                    if value == str(most) and function in ("archive_counts", "archive_cuts"):
                        # They count, and hold nothing: Spark asks for all.
                        continue
                    tried += 1
                    if refusal := await _refusal(there, _call(function, parameters, name, value)):
                        wrong.append(f"{function}({name} => {value}): {refusal}")
    assert not wrong, "\n".join(wrong)
    assert tried > 60, "the catalogue was not read"


def _refusal_of_span(connection: Sql, span: str) -> str:
    """Before PostgreSQL 17 there is no infinite interval: the text is none."""
    return "22007" if span == "infinity" and connection.get_server_version().major < 17 else "PS400"


TAKE_A_SPAN = [
    "select penstock.job_rates('{}')",
    "select penstock.load_of_types('{}')",
    "select penstock.forget_keys('pool', '{}')",
    "select penstock.release_keys('pool', null, '{}')",
    "select penstock.register_worker('odd', '{{pool}}', p_dead_after => '{}')",
    "select penstock.join_group('pool', 'odd', penstock.new_id(), '{}')",
    "select penstock.subscribe('topic', 'odd', '{}')",
]


async def test_a_span_of_time_is_one_that_can_be_waited_for(there: Sql) -> None:
    calls_and_spans = product(TAKE_A_SPAN, ["infinity", "178000000 years", "-178000000 years", "9999 years"])
    answers = [(call, span, (await _answer(there, call.format(span)))[0]) for call, span in calls_and_spans]
    wrong = [answer for answer in answers if answer[2] != _refusal_of_span(there, answer[1])]
    assert not wrong, wrong


@pytest.mark.parametrize("span", ["infinity", "178000000 years", "367 days"])
async def test_a_failed_job_is_not_put_off_for_ever(there: Sql, span: str) -> None:
    await there.execute("select penstock.create_job_type('mail'); select penstock.enqueue('mail', '1')")
    job = await there.fetchrow("select * from penstock.claim('w', '{mail}', 1)")
    settle = """
        select * from penstock.settle($1, $2::smallint[], $3::bigint[], '{failed}', array['{}'::jsonb], array[$4::text::interval])
    """
    mine = [job["id"]], [job["attempt"]], [job["lease"]]
    with pytest.raises(asyncpg.PostgresError) as refused:
        await there.fetch(settle, *mine, span)
    assert refused.value.sqlstate == _refusal_of_span(there, span)  # type: ignore[attr-defined]
    assert (
        await there.fetchval(
            f"select outcome from ({settle}) as settled",
            *mine,
            "1 day",
        )
        == "retried"
    )


async def test_unreadable_jobs_are_looked_for_once_in_each_type(there: Sql) -> None:
    await there.execute("select penstock.create_job_type('mail')")
    await there.execute("select penstock.enqueue_many('mail', array_fill('1'::jsonb, array[2000]))")
    # Looking at the jobs again for each time that the type is named would be 20 million looks.
    await there.execute("set statement_timeout = '10s'")
    assert await there.fetchval("select penstock.quarantine_unreadable(array_fill('mail'::text, array[10000]))") == 0


async def test_more_than_one_call_may_ask_for_is_asked_for_in_parts(app: Penstock, there: Sql) -> None:
    await there.execute("select penstock.create_job_type('mail')")
    ids = [job.id for job in await app.enqueue_many("mail", [NewJob(n) for n in range(3)])]
    database = await app.database()
    asked = [*(uuid4() for _ in range(10_001)), *ids]
    assert set(await jobs.find(database, asked)) == set(ids)
    assert set(await http.attempts_of(database, asked)) == set(ids)
    assert await topics.messages_of(database, asked) == {}


@pytest.mark.parametrize(
    "given",
    [
        "p_dead_after => '100000 years'",
        "p_dead_after => '25 hours'",
        "p_concurrency => 1000001",
        "p_concurrency => -1",
        "p_concurrency => null",
        "p_metadata => to_jsonb(repeat('x', 70000))",
    ],
)
async def test_a_worker_says_what_others_can_live_with(there: Sql, given: str) -> None:
    with pytest.raises(asyncpg.PostgresError) as refused:
        await there.execute(f"select penstock.register_worker('odd', '{{pool}}', {given})")
    assert refused.value.sqlstate in ("PS400", "PS413")  # type: ignore[attr-defined]
    assert await there.fetchval("select penstock.recover()") == 0
