"""Calls about workflows that cannot be right, in SQL: each is refused with what is wrong and what to do, and changes nothing."""

from __future__ import annotations

from typing import Any, TypeAlias

import asyncpg
import pytest

Sql: TypeAlias = "asyncpg.Connection[Any]"
LATER = "10000000-0000-0000-0000-000000000002"
NOBODY = "00000000-0000-0000-0000-000000000007"
SETUP = """
select penstock.create_job_type('step'), penstock.create_job_type('encrypted', '{"encrypted": true}'),
    penstock.declare_pool('keyed');
select penstock.enqueue('step', p_id => '10000000-0000-0000-0000-000000000001');
-- Groups: one that goes on, with one in it; one that has ended; one that is cancelled.
create temporary table made as
select penstock.open_group('import', 'step') as open, null::uuid as within, penstock.open_group('ended') as ended,
    penstock.open_group('cancelled') as cancelled, null::uuid as follows, null::uuid as behind;
update made set within = penstock.open_group('inner', p_parent => made.open);
update made set follows = (select then_job from penstock.job_groups where name = 'import');
update made set behind = penstock.enqueue('step', p_after => array[made.open]);
select penstock.enqueue('step', p_group => made.cancelled), penstock.seal_group(made.ended) from made;
select penstock.resolve_workflows();
select penstock.cancel_group(made.cancelled) from made;
"""
MANY = "array(select gen_random_uuid() from generate_series(1, 101))"
CALLS = [
    # after and when
    ("enqueue('step', p_when => 'finished')", "PS400", "when is given without after"),
    (f"enqueue('step', p_after => array['{NOBODY}'::uuid], p_when => 'failed')", "PS400", "succeeded or finished, not failed"),
    ("enqueue('step', p_after => '{}')", "PS400", "after must be an array of ids of jobs"),
    ("enqueue('step', p_after => array[null::uuid])", "PS400", "a null among its ids"),
    (f"enqueue('step', p_after => array['{NOBODY}'::uuid])", "PS400", f"does not exist: {NOBODY}"),
    (f"enqueue('step', p_id => '{NOBODY}', p_after => array['{NOBODY}'::uuid])", "PS400", "is to wait for itself"),
    (f"enqueue('step', p_after => {MANY})", "PS413", "101 jobs to wait for are too many"),
    ("enqueue('step', p_after => array[made.open], p_unique_key => 'u', p_unique_for => '1 hour')", "PS400", "exclude"),
    ("enqueue_json('step', '[{\"after\": \"pdf\"}]')", "PS400", "must be an array of ids of jobs"),
    ("enqueue_json('step', '[{\"after\": [\"pdf\"]}]')", "PS400", "must be an array of ids of jobs"),
    ("enqueue_json('step', '[{\"after\": [1]}]')", "PS400", "must be an array of ids of jobs"),
    (
        f"enqueue_json('step', '[{{\"id\": \"job_{NOBODY}\", \"after\": [\"{LATER}\"]}},"
        f" {{\"id\": \"job_{LATER}\", \"after\": [\"10000000-0000-0000-0000-000000000001\"]}}]')",
        "PS400", "comes behind it in the same call",
    ),
    ("enqueue('absent', p_after => array[made.open])", "PS404", "no such job type: absent"),
    ("enqueue('keyed', p_after => array[made.open])", "PS400", "key"),
    ("enqueue('encrypted', '1', p_after => array[made.open])", "PS400", "encrypted"),
    # Children
    (f"enqueue('step', p_group => '{NOBODY}')", "PS400", f"a job group that does not exist: {NOBODY}"),
    ("enqueue('step', p_group => '10000000-0000-0000-0000-000000000001')", "PS400", "a job group that does not exist"),
    ("enqueue('step', p_group => made.ended)", "PS409", "job group ended takes no more children"),
    ("enqueue('step', p_group => made.cancelled)", "PS409", "job group cancelled takes no more children"),
    ("enqueue_json('step', '[{\"group\": \"import\"}]')", "PS400", "group must be the id of a job group, not import"),
    ("enqueue_json('step', '[{\"group\": 7}]')", "PS400", "group must be the id of a job group, not 7"),
    # Cycles
    ("enqueue('step', p_group => made.open, p_after => array[made.open])", "PS400", "waits for this group or is the group"),
    ("enqueue('step', p_group => made.within, p_after => array[made.open])", "PS400", "waits for this group or is the group"),
    ("enqueue('step', p_group => made.open, p_after => array[made.follows])", "PS400", "waits for this group or is the group"),
    ("enqueue('step', p_group => made.within, p_after => array[made.behind])", "PS400", "waits for this group or is the group"),
    # Groups
    ("open_group(null)", "PS400", "invalid name of a job group: null"),
    ("open_group('')", "PS400", "invalid name of a job group: ''"),
    ("open_group('2026/11/22')", "PS400", "invalid name of a job group: '2026/11/22'"),
    ("open_group(E'a\\nb')", "PS400", "invalid name of a job group"),
    ("open_group(repeat('x', 256))", "PS400", "invalid name of a job group"),
    (f"open_group('{NOBODY}')", "PS400", f"invalid name of a job group: '{NOBODY}', which is an id, or begins with one"),
    (f"open_group('{NOBODY}.resize')", "PS400", "which is an id, or begins with one"),
    ("open_group('new', p_on_failure => 'stop')", "PS400", "must be cancel or continue, not stop"),
    ("open_group('new', p_on_failure => null)", "PS400", "must be cancel or continue, not null"),
    ("open_group('new', 'absent')", "PS404", "no such job type: absent"),
    ("open_group('new', 'keyed')", "PS400", "key"),
    ("open_group('new', 'encrypted', '1')", "PS400", "encrypted"),
    (f"open_group('new', p_parent => '{NOBODY}')", "PS404", f"no such job group: {NOBODY}"),
    ("open_group('new', p_parent => made.ended)", "PS409", "job group ended takes no more children"),
    ("open_group('new', p_parent => made.cancelled)", "PS409", "job group cancelled takes no more children"),
    ("open_group('import')", "PS409", "job group import was opened with another then"),
    ("open_group('import', 'step', '1')", "PS409", "job group import was opened with another then_data"),
    ("open_group('import', 'step', p_on_failure => 'continue')", "PS409", "opened with another on_failure"),
    ("open_group('inner')", "PS409", "job group inner was opened with another parent"),
    ("seal_group(null)", "PS404", "no such job group: null"),
    (f"seal_group('{NOBODY}')", "PS404", f"no such job group: {NOBODY}"),
    (f"cancel_group('{NOBODY}')", "PS404", f"no such job group: {NOBODY}"),
    (f"retry_workflow('{NOBODY}')", "PS404", f"no such run of a workflow: {NOBODY}"),
    ("retry_workflow(null)", "PS404", "no such run of a workflow: null"),
    ("group_list(0)", "PS400", "0"),
    ("group_list(1001)", "PS400", "1001"),
    ("resolve_workflows(0)", "PS400", "0"),
    # Filters
    ("start_operation('replay', '{\"workflow\": \"import\"}')", "PS400", "workflow is not the id of a job group"),
    ("preview_operation('cancel', '{\"workflow\": 7}')", "PS400", "invalid condition of a filter for cancel: workflow"),
]  # fmt: skip
STATE = """
select (select count(*) from penstock.queued_jobs), (select count(*) from penstock.waiting_jobs),
    (select count(*) from penstock.job_groups),
    (select count(*) from penstock.job_dependencies), (select count(*) from penstock.operations)
"""


async def test_bad_calls_are_refused_with_what_is_wrong_and_what_to_do(sql: Sql) -> None:
    await sql.execute(SETUP)
    before = await sql.fetchrow(STATE)
    wrong = []
    for call, sqlstate, message in CALLS:
        function, _, arguments = call.partition("(")
        try:
            await sql.fetch(f"select called.* from made cross join lateral penstock.{function}({arguments} as called")
        except asyncpg.PostgresError as error:
            if (error.sqlstate, message in str(error), bool(error.hint)) != (sqlstate, True, True):
                wrong.append((call, error.sqlstate, str(error), error.hint))
        else:
            wrong.append((call, "accepted"))
    assert wrong == [], "\n".join(map(repr, wrong))
    assert await sql.fetchrow(STATE) == before
    with pytest.raises(asyncpg.PostgresError, match="read committed"):
        async with sql.transaction(isolation="repeatable_read"):
            await sql.execute("select penstock.resolve_workflows()")
