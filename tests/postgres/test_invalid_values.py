"""Values of SQL calls that PostgreSQL cannot convert: the calls refuse them in Penstock's words, without the payload."""

from __future__ import annotations

from typing import Any, TypeAlias

import asyncpg
import pytest

Sql: TypeAlias = "asyncpg.Connection[Any]"
SOME_ID = "01a21d16-1692-72fc-892a-b423dae146d0"
FILE = '[{"kind": "jobs", "day": "2026-11-22", "type": "ship", "path": "jobs/1.parquet", "rows": %s, "bytes": 9}]'
SWAP = "select penstock.swap_lake_files('lake', array[]::text[], 1, '%s')"
LOG = f"select penstock.append_log(array['{SOME_ID}'::uuid], array[1::bigint], array['half done'], array[%s::double precision])"
CALLS: list[tuple[str, str]] = [
    ("select penstock.search_waiting(p_after => '')", "invalid place in the search: "),
    ("select penstock.search_waiting(p_after => 'a|b')", "invalid place in the search: a|b"),
    ("select penstock.search_finished(p_after => '')", "invalid place in the search: "),
    (f"select penstock.search_finished(p_after => 'x|{SOME_ID}')", "invalid place in the search: x|"),
    (f"select penstock.search_finished(p_after => '{'9' * 30}|{SOME_ID}')", "invalid place in the search: 999"),
    (f"select penstock.search_finished(p_status => 'failed', p_after => '7|{SOME_ID}')", "invalid place in the search: 7|"),
    ("select penstock.routes_of(2147483647)", "invalid number of partitions: 2147483647"),
    ("select penstock.routes_of(0)", "invalid number of partitions: 0"),
    ("select penstock.keep_alive('w', null, null, null, 1e308)", "for which the event loop is blocked: 1e+308"),
    ("select penstock.keep_alive('w', null, null, null, 'NaN')", "for which the event loop is blocked: NaN"),
    *((LOG % age, "invalid age of a line: ") for age in ("'NaN'", "'Infinity'", "'-Infinity'", "-5", "1e300")),
    *(
        (call % time, "a time is out of range: ")
        for time in ("'infinity'", "'-infinity'", "'0009-01-01 BC'", "'10000-01-01'")
        for call in (
            "select penstock.ensure_archive(%s)",
            "select penstock.note_run('nightly', 'w', now(), %s, now(), null)",
            "select penstock.note_run('nightly', 'w', now(), now(), %s, null)",
            "select penstock.end_schedule('nightly', 'w', now(), now() + interval '1 day', %s)",
            "select penstock.end_schedule('nightly', 'w', now(), now() + interval '1 day', now(), %s)",
            "select penstock.enqueue('ship', p_run_after => %s)",
            "select penstock.enqueue('ship', p_expires_at => %s)",
            "select penstock.enqueue_many('ship', array['1'::jsonb], p_run_after => array[%s::timestamptz])",
            f"select penstock.put_jobs('ship', '{{1}}', array['{SOME_ID}'::uuid], p_expires_at => array[%s::timestamptz])",
            "select penstock.publish('news', p_run_after => %s)",
            "select penstock.publish_many('news', array['1'::jsonb], p_expires_at => array[%s::timestamptz])",
        )
    ),
    *(
        (call % age, "invalid time for which a schedule is held: ")
        for age in ("null", "'-1 s'", "'367 days'")
        for call in (
            "select penstock.take_schedule('nightly', '60', 'w', %s)",
            "select penstock.extend_schedule('nightly', 'w', now(), %s)",
        )
    ),
    *(
        (f"select penstock.declare_schedule('nightly', 'every', '60', '{time}')", "")
        for time in ("infinity", "-infinity", "0009-01-01 BC", "10000-01-01")
    ),
    *(
        (f"""select penstock.create_stream('s', 1, '{{"{option}": "{age}"}}')""", "")
        for option in ("keep_age", "segment_age", "tombstone_age")
        for age in ("infinity", "-infinity", "366001 days", "-5 seconds", "NaN")
    ),
    (SWAP % "{}", "files must be a JSON array"),
    (SWAP % "[1]", "invalid file: not an object: 1"),
    (SWAP % '[{"rows": null}]', "invalid file: "),
    (SWAP % (FILE % '"many"'), "invalid file: "),
    (SWAP % (FILE % "1e300"), "invalid file: "),
    (SWAP % (FILE % "1").replace("jobs", "jobz"), "invalid file: "),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), CALLS)
async def test_what_cannot_be_converted_or_shown_is_refused_with_a_hint(sql: Sql, call: str, message: str) -> None:
    await sql.execute("select penstock.create_job_type('ship'), penstock.declare_topic('news')")
    with pytest.raises(asyncpg.PostgresError) as refused:
        await sql.fetch(call)
    assert (refused.value.sqlstate, message in str(refused.value)) == ("PS400", True), str(refused.value)
    assert refused.value.hint  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("columns", "values", "message"),
    [
        ("data", "'secret'", "has data that is no JSON"),
        ("data, priority", "'secret', 101", "has data that is no JSON"),
        ("data, unique_key", "'secret', 'one'", "has data that is no JSON"),
        ("data, id", "'1', 'secret'", "has an id that is no UUID"),
    ],
)
async def test_a_job_that_was_staged_by_hand_and_cannot_be_read_is_refused_without_its_payload(
    sql: Sql, columns: str, values: str, message: str
) -> None:
    await sql.fetch("select penstock.create_job_type('ship')")
    part = await sql.fetchval("select penstock.parts_of(1, 'job ship') || '0'")
    await sql.execute(
        f"insert into penstock.staged_jobs (writer, part, place, name, {columns}) values ('w', $1, 7, 'ship', {values})", part
    )
    with pytest.raises(asyncpg.PostgresError, match=f"the job 7 of part .* that is staged for ship {message}") as refused:
        await sql.fetch("select * from penstock.commit_staged('w', 1, array[$1], 1, 'job ship')", part)
    assert refused.value.sqlstate == "PS400"
    assert "discard_staged" in refused.value.hint  # type: ignore[attr-defined]
    assert "secret" not in str(refused.value.as_dict())
    assert await sql.fetchval("select count(*) from penstock.queued_jobs") == 0


async def test_a_number_of_staged_rows_that_is_none_is_refused(sql: Sql) -> None:
    with pytest.raises(asyncpg.PostgresError, match="does not say how many rows") as refused:
        await sql.fetch(
            "select * from penstock.commit_staged('w', 1, array['0'], 1, 'job ship', p_named => '{\"ship\": {\"rows\": \"x\"}}')"
        )
    assert refused.value.sqlstate == "PS400"
