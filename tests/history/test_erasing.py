"""Erasure in lakes, without a JVM: no file below the lake has anything of the person, and all rows of the neighbour are there."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote
from uuid import uuid4

import asyncpg
import pyarrow as pa
import pytest

from penstock import Conflict, Erasure, Penstock
from penstock.history import erasing, lake_queries
from penstock.history.lake import Lake
from penstock.history.lake_queries import LakeFile
from penstock.operations import queries
from penstock.operations.vacuuming import vacuum_erased
from penstock.postgres.database import Database
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
PERSON, NEIGHBOUR = "anna-7f3c91", "bert-20aa55"
BY = {"key": Erasure(key=PERSON), "field": Erasure(field="customer.id", value=PERSON)}
DAY = date(2026, 3, 1)
AT = datetime(2026, 3, 1, tzinfo=UTC)


class Killed(Exception):
    """Instead of a kill, where the process has to live on."""


def id_of(n: int) -> str:
    return f"00000000-0000-7000-8000-{n:012}"


def key_of(n: int) -> str:
    return PERSON if n % 5 == 0 else NEIGHBOUR


def written(lake: Lake, kind: str, batch: int, numbers: list[int]) -> LakeFile:
    """A file of a lake, of jobs or attempts with these numbers."""
    who = [key_of(n) for n in numbers]
    columns = {"id": pa.array([id_of(n) for n in numbers]), "key": pa.array(who)}
    if kind == "jobs":
        columns["data"] = pa.array([json.dumps({"n": n, "customer": {"id": key_of(n)}, "at": "x"[: n % 2]}) for n in numbers])
    else:
        columns["error_message"] = pa.array([f"{one} has moved" for one in who])
    columns["finished_at"] = pa.array([AT] * len(numbers), pa.timestamp("us", tz="UTC"))
    path = f"{kind}/day={DAY}/type=mail/b{batch:09}-0.parquet"
    return LakeFile(kind, DAY, "mail", path, len(numbers), lake.write(path, pa.table(columns)))


@dataclass
class Filled:
    """A lake with files of two batches, and what crashes and Delta tables leave beside them."""

    lake: Lake
    database: Database
    sql: Sql

    async def commit(self, batch: int, numbers: list[int], erasures: int | None = None) -> None:
        files = [written(self.lake, kind, batch, numbers) for kind in ("jobs", "attempts")]
        rollups = [
            {
                "name": "mail", "minute": AT.isoformat(), "succeeded": len(numbers), "failed": 0, "expired": 0, "cancelled": 0,
                "retries": 0, "delay_s": 0, "run_s": 0, "hot_keys": {PERSON: 2, NEIGHBOUR: 8},
            }
        ]  # fmt: skip
        failures = [
            {
                "signature": "s", "name": "mail", "day": DAY.isoformat(), "kind": "ValueError", "message": "x",
                "sample": f"{PERSON} has moved", "sample_id": id_of(0), "failures": 1,
                "first_at": AT.isoformat(), "last_at": AT.isoformat(),
            }
        ]  # fmt: skip
        if erasures is None:
            erasures = (await lake_queries.lakes(self.database))[0].erasures
        await lake_queries.commit_batch(self.database, "main", batch, "", len(numbers), files, rollups, [], failures, erasures)

    async def rows(self, kind: str) -> list[tuple[str, str]]:
        """Ids and keys of all rows of a kind that readers see."""
        paths = [file.path for file in await lake_queries.files(self.database, "main", kind)]
        return sorted((row["id"], row["key"]) for row in self.lake.table(paths, ["id", "key"]).to_pylist())

    def with_person(self) -> list[str]:
        """Files below the lake with bytes of the person, packed or not."""
        import pyarrow.parquet

        root = Path(unquote(self.lake.uri.removeprefix("file://")))
        found = []
        for path in sorted(path for path in root.rglob("*") if path.is_file()):
            content = path.read_bytes()
            if path.suffix == ".parquet":
                content += repr(pyarrow.parquet.read_table(path).to_pylist()).encode()
            if PERSON.encode() in content:
                found.append(str(path.relative_to(root)))
        return found


@pytest.fixture
async def filled(app: Penstock, sql: Sql, tmp_path: Path) -> Filled:
    found = Filled(Lake("main", str(tmp_path / "a lake")), await app.database(), sql)
    await lake_queries.open_lake(found.database, "main", found.lake.uri)
    for batch in (0, 1):
        await found.commit(batch, list(range(batch * 20, batch * 20 + 20)))
    await erasing.follow(found.database, found.lake)
    # A batch that crashed, and one that is staged.
    written(found.lake, "jobs", 7, [0, 1])
    found.lake.write("_staging/2/jobs/day=2026-03-01/type=mail/part-0.parquet", pa.table({"key": [PERSON]}))
    return found


async def started(app: Penstock, erasure: Erasure) -> Any:
    """An erasure that waits for lakes."""
    operation = await app.operations.erase(erasure)
    database = await app.database()

    async def waits() -> bool:
        await queries.advance(database)
        return (await app.operations.find(operation.id)).phase == "lake"

    await eventually(waits, "the phase lake")
    assert await queries.advance(database) is None
    return operation.id


@pytest.mark.parametrize("by", ["key", "field"])
async def test_no_file_of_the_lake_has_the_person_and_readers_have_the_neighbour(app: Penstock, filled: Filled, by: str) -> None:
    import deltalake

    assert len(filled.with_person()) >= 6
    id = await started(app, BY[by])
    assert await erasing.erase_from_lakes(filled.database) == 8
    assert filled.with_person() == []
    kept = [(id_of(n), NEIGHBOUR) for n in range(40) if n % 5]
    for kind in ("jobs", "attempts"):
        assert await filled.rows(kind) == kept
        table = deltalake.DeltaTable(f"{filled.lake.uri}/{kind}").to_pyarrow_table()
        assert sorted(zip(table["id"].to_pylist(), table["key"].to_pylist(), strict=True)) == kept
    (record,) = await lake_queries.lakes(filled.database)
    assert (record.jobs, record.batch) == (32, 1)
    assert await filled.sql.fetchval("select hot_keys::text from penstock.rollups") == f'{{"{NEIGHBOUR}": 8}}'
    assert await filled.sql.fetchval("select sample from penstock.failure_signatures") == "erased"
    await queries.advance(filled.database)
    await vacuum_erased(filled.database)
    ended = await app.operations.find(id)
    assert (ended.state, ended.counts) == ("finished", {"lake": 8})


@pytest.mark.parametrize(
    "step", ["attempts written", "attempts replaced", "jobs written", "jobs replaced", "delta", "fenced", "others removed"]
)
async def test_an_erasure_that_ends_at_any_step_is_repeated(app: Penstock, filled: Filled, step: str) -> None:
    def kill(done: str) -> None:
        if done == step:
            raise Killed(step)

    # Of payloads alone the ids of the attempts are known, which an interruption must not forget.
    await started(app, BY["field"])
    with pytest.raises(Killed):
        await erasing.erase_from_lakes(filled.database, after_step=kill)
    await erasing.erase_from_lakes(filled.database)
    assert filled.with_person() == []
    for kind in ("jobs", "attempts"):
        assert await filled.rows(kind) == [(id_of(n), NEIGHBOUR) for n in range(40) if n % 5]
    assert await lake_queries.erasures(filled.database) == []


async def test_runs_lose_their_names_in_the_lake_and_in_the_history_and_stay_counted(app: Penstock, filled: Filled) -> None:
    sql = filled.sql
    await sql.execute("select penstock.create_job_type('step')")
    names = [f"import-{PERSON}", f"import-{NEIGHBOUR}", f"import-{PERSON[:-1]}x"]
    for name in names:
        await sql.execute("""select penstock.start_workflow('import', $1, '[{"name": "a", "type": "step"}]')""", name)
    await sql.execute("select penstock.cancel(job) from penstock.graph_steps")
    while await sql.fetchval("select penstock.resolve_workflows()"):
        pass
    # The first batch has these runs, and the next one has them again, as if the lake had none of them yet.
    until = await sql.fetchval("select pg_current_snapshot()::text")
    runs = await lake_queries.ended_runs(filled.database, "", until)
    runs = [*runs, replace(runs[0], id=uuid4(), name="again", retry_of=names[0])]
    columns = {"name": [run.name for run in runs], "retry_of": [run.retry_of for run in runs]}
    path = f"runs/day={DAY}/type=import/b000000002-0.parquet"
    file = LakeFile("runs", DAY, "import", path, len(runs), filled.lake.write(path, pa.table(columns)))
    await lake_queries.commit_batch(filled.database, "main", 2, until, 0, [file], [], [], [], 0, runs=runs)
    await started(app, Erasure(key=PERSON))
    await erasing.erase_from_lakes(filled.database)
    assert filled.with_person() == []
    (file,) = await lake_queries.files(filled.database, "main", "runs")
    kept = [("erased", None), (names[1], None), (names[2], None), ("again", "erased")]
    table = filled.lake.table([file.path], ["name", "retry_of"])
    assert [(row["name"], row["retry_of"]) for row in table.to_pylist()] == kept
    stored = await lake_queries.runs(filled.database, "main")
    assert {(run.name, run.retry_of) for run in stored} == set(kept)
    found = await lake_queries.ended_runs(filled.database, "", await sql.fetchval("select pg_current_snapshot()::text"))
    assert {run.name for run in found} == {"erased", *names[1:]}, "a further lake does not get the name either"


async def test_a_batch_that_was_read_before_is_refused_and_one_that_came_meanwhile_is_erased(
    app: Penstock, filled: Filled, url: str
) -> None:
    await started(app, BY["key"])
    came = []

    async def another_batch() -> None:
        async with Penstock(url) as other:
            await Filled(filled.lake, await other.database(), filled.sql).commit(2, list(range(40, 60)), 0)

    def meanwhile(step: str) -> None:
        # All files of the two batches have been looked at.
        if step == "delta" and not came:
            came.append(step)
            thread = threading.Thread(target=lambda: asyncio.run(another_batch()))
            thread.start()
            thread.join()

    assert await erasing.erase_from_lakes(filled.database, after_step=meanwhile) == 12
    assert came
    with pytest.raises(Conflict, match="jobs were erased from the lake main while its batch 3 was under way"):
        await filled.commit(3, list(range(60, 80)), erasures=0)
    assert (await lake_queries.lakes(filled.database))[0].batch == 2
    assert await filled.rows("jobs") == [(id_of(n), NEIGHBOUR) for n in range(60) if n % 5]


async def test_a_fence_after_another_batch_is_refused(app: Penstock, filled: Filled) -> None:
    with pytest.raises(Conflict, match="another batch"):
        await lake_queries.fence_lake(filled.database, "main", 0, {"key": PERSON}, [])
    assert (await lake_queries.lakes(filled.database))[0].erasures == 0


async def test_one_job_is_erased_by_its_id(app: Penstock, filled: Filled) -> None:
    await started(app, Erasure(job=id_of(3)))
    assert await erasing.erase_from_lakes(filled.database) == 1
    for kind in ("jobs", "attempts"):
        assert [id for id, _ in await filled.rows(kind)] == [id_of(n) for n in range(40) if n != 3]


async def test_a_process_that_does_not_reach_the_files_erases_nothing(app: Penstock, filled: Filled, tmp_path: Path) -> None:
    await started(app, BY["key"])
    (tmp_path / "a lake").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError):
        await erasing.erase_from_lakes(filled.database)
    assert len(await lake_queries.erasures(filled.database)) == 1


async def test_a_lake_that_is_dropped_is_not_waited_for(app: Penstock, filled: Filled) -> None:
    id = await started(app, BY["key"])
    await filled.sql.execute("select penstock.drop_lake('main')")
    await queries.advance(filled.database)
    await vacuum_erased(filled.database)
    assert (await app.operations.find(id)).state == "finished"


VALUES: list[tuple[str, str, str, bool]] = [
    ('{"a": {"b": "x"}}', "a.b", "x", True),
    ('{"a": {"b": 5}}', "a.b", "5", True),
    ('{"a": {"b": 5.50}}', "a.b", "5.50", True),
    ('{"a": true}', "a", "true", True),
    ('{"a": [{"b": "x"}]}', "a.0.b", "x", True),
    ('{"a": [{"b": "x"}]}', "a.-1.b", "x", True),
    ('{"a": [{"b": "x"}]}', "a.1.b", "x", False),
    ('{"a": null}', "a", "null", False),
    ('{"a": "é\\"\\\\\\n"}', "a", 'é"\\\n', True),
    ('"x"', "a", "x", False),
    ("[1, 2]", "1", "2", True),
]


@pytest.mark.parametrize(("data", "field", "value", "expected"), VALUES)
async def test_the_lake_and_the_database_agree_on_the_value_of_a_field(
    app: Penstock, filled: Filled, data: str, field: str, value: str, expected: bool
) -> None:
    query = "select penstock.is_erased_by(jsonb_build_object('field', $1::text, 'value', $2::text), null, $3::text::jsonb, null)"
    assert await filled.sql.fetchval(query, field, value, data) is expected
    stored = await filled.sql.fetchval("select $1::text::jsonb::text", data)
    path = f"jobs/day={DAY}/type=mail/b000000002-0.parquet"
    table = pa.table({"id": [id_of(99)], "key": pa.array([None], pa.string()), "data": [stored]})
    file = LakeFile("jobs", DAY, "mail", path, 1, filled.lake.write(path, table))
    await lake_queries.commit_batch(filled.database, "main", 2, "", 1, [file], [], [], [], 0)
    await started(app, Erasure(field=field, value=value))
    assert await erasing.erase_from_lakes(filled.database) == int(expected)
