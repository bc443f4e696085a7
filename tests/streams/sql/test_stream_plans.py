"""The frequent statements of consumers use indexes, whatever the statistics say, and a commit is a HOT update."""

from __future__ import annotations

from typing import Any, TypeAlias

import asyncpg
import pytest

from tests.postgres.plans import explain, nodes, seq_scans

Sql: TypeAlias = "asyncpg.Connection[Any]"
PARTITIONS = 64
GROUPS = 30
WANTED = list(range(8))


@pytest.fixture(autouse=True)
async def stream(sql: Sql) -> None:
    await sql.execute("alter table penstock.group_offsets set (autovacuum_enabled = off)")
    await sql.execute("alter table penstock.slots set (autovacuum_enabled = off)")
    await sql.execute("select penstock.create_stream('log', 32)")
    await sql.execute("select penstock.grow_stream('log', $1)", PARTITIONS)


async def join(sql: Sql, first: int, last: int) -> None:
    """Consumer groups of one member each, which has all partitions."""
    for n in range(first, last):
        name = await sql.fetchval("select penstock.declare_consumer_group('log', $1)", f"g{n}")
        await sql.execute("select penstock.join_group($1, 'm', gen_random_uuid())", name)
    await sql.execute("update penstock.slots set owner = 'm', target = 'm', epoch = 1")


VARIABLES = {
    "consuming.stream": "(select id from penstock.streams where name = 'log')",
    "consuming.group_name": "'log/g7'::text",
    "p_group": "'g7'::text",
    "p_member": "'m'::text",
    "p_partitions": f"array{WANTED}",
    "p_epochs": f"array_fill(1::bigint, array[{len(WANTED)}])",
    "given.partition": "7",
    "given.epoch": "1::bigint",
    "given.revision": "0",
    "given.next_offset": "1::bigint",
    "into committed, paused": "",
}
STATEMENTS = [
    ("begin_partitions", "select int4range", "\n    );\nbegin", PARTITIONS),
    ("begin_partitions", "select owned.partition", "\n    loop", len(WANTED)),
    ("begin_partitions", "update penstock.group_offsets", ";\n        end if", 1),
    ("begin_partitions", "select\n            reached.partition", ";\n    end loop", 1),
    ("commit_offsets", "update penstock.group_offsets", ";\n        committed", 2),
]


@pytest.mark.parametrize("statistics", ["missing", "of a small table", "fresh"])
async def test_begin_and_commit_go_by_the_primary_keys(sql: Sql, statistics: str) -> None:
    analyze = "analyze penstock.group_offsets, penstock.slots, penstock.streams, penstock.stream_growths"
    await join(sql, 0, 1)
    if statistics == "of a small table":
        await sql.execute(analyze)
    await join(sql, 1, GROUPS)
    if statistics == "fresh":
        await sql.execute(analyze)
    await sql.execute("update penstock.group_offsets set epoch = 1 where partition = 7")
    for function, first, last, most in STATEMENTS:
        plan = await explain(sql, function, first, last, {**VARIABLES, "unfinished": "array[int4range(1, 2)]"})
        assert seq_scans(plan) == []
        used = {node["Index Name"]: node for node in nodes(plan) if "Index Name" in node}
        assert used.keys() <= {"group_offsets_pkey", "slots_pkey", "streams_pkey", "stream_growths_pkey"}
        for name in used.keys() & {"group_offsets_pkey", "slots_pkey"}:
            # One row at a time, however many partitions and groups there are.
            assert used[name]["Actual Rows"] <= 1
            assert used[name]["Actual Loops"] <= most, f"{first} looks into {name} too often"


async def test_commits_are_hot_updates(sql: Sql) -> None:
    await join(sql, 0, 3)
    commit = "select * from penstock.commit_offsets('log', 'g1', 'm', $1, $2, $3, $4)"
    await sql.fetch("select * from penstock.begin_partitions('log', 'g1', 'm', $1, $2)", WANTED, [1] * len(WANTED))
    await sql.execute("select pg_stat_force_next_flush()")
    counts = "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where relid = 'penstock.group_offsets'::regclass"
    before = await sql.fetchrow(counts)
    for offset in range(1, 51):
        rows = await sql.fetch(commit, WANTED, [1] * len(WANTED), [0] * len(WANTED), [offset] * len(WANTED))
        assert all(row["committed"] for row in rows)
    await sql.execute("select pg_stat_force_next_flush()")
    after = await sql.fetchrow(counts)
    assert after["n_tup_upd"] - before["n_tup_upd"] == 50 * len(WANTED)
    assert after["n_tup_hot_upd"] - before["n_tup_hot_upd"] >= 0.95 * 50 * len(WANTED)


@pytest.mark.parametrize("statistics", ["missing", "fresh"])
async def test_a_numbered_append_looks_its_producer_up_once_and_updates_it_hot(sql: Sql, statistics: str) -> None:
    await sql.execute("alter table penstock.stream_producers set (autovacuum_enabled = off)")
    append = "select * from penstock.append_many('log', array['1'::json], p_producer => 'p', p_sequence => $1)"
    await sql.fetch(append, 1)
    await sql.execute(
        """
        insert into penstock.stream_producers (stream, producer, role, sequence, partitions, first_offsets, counts, seen_at)
        select stream, name, 'role' || n, 1, '{}', '{}', '{}', now()
        from penstock.stream_producers, unnest(array['p', 'q', 'r']) as name, generate_series(1, 2000) as n
        """
    )
    if statistics == "fresh":
        await sql.execute("analyze penstock.stream_producers")
    counts = """
        select seq_scan, idx_scan, n_tup_ins, n_tup_upd, n_tup_hot_upd
        from pg_stat_user_tables
        where relid = 'penstock.stream_producers'::regclass
    """
    await sql.execute("select pg_stat_force_next_flush()")
    before = await sql.fetchrow(counts)
    for sequence in range(2, 52):
        assert len(await sql.fetch(append, sequence)) == 1
    await sql.execute("select pg_stat_force_next_flush()")
    after = await sql.fetchrow(counts)
    changed = {name: after[name] - before[name] for name in before.keys()}  # noqa: SIM118
    assert changed["n_tup_hot_upd"] >= 45
    # One look-up, and one update, each by the key.
    assert changed | {"n_tup_hot_upd": 50} == {
        "seq_scan": 0,
        "idx_scan": 100,
        "n_tup_ins": 0,
        "n_tup_upd": 50,
        "n_tup_hot_upd": 50,
    }
