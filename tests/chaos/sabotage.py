"""The guarantees that can be removed from a running system, and the promise that each removal breaks.

An edit replaces a part of a function in the database, found by a regular expression; a sabotage of the worker is one of
`broken_worker`. The workload is the ordinary one, or the one with long jobs and suspensions; its faults have to provide an
occasion for the violation.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import asyncpg

from penstock import Penstock


@dataclass(frozen=True)
class Edit:
    """Replace the match of a regular expression in a function. No match is an error."""

    function: str
    old: str
    new: str = ""


@dataclass(frozen=True)
class Sabotage:
    """One removed guarantee.

    Attributes:
        expected: A regular expression for the violation: the broken promise, and how it is broken.
        edits: Edits of functions in the database.
        statements: Further statements to execute there.
        worker: Name of the sabotage of the workers.
        long: Whether only jobs and suspensions that last until other workers have taken over show the violation.
    """

    expected: str
    edits: tuple[Edit, ...] = ()
    statements: tuple[str, ...] = ()
    worker: str = ""
    long: bool = False

    async def apply(self, connection: asyncpg.Connection[Any]) -> None:
        """Edit the functions and execute the statements.

        Raises:
            AssertionError: An edit finds nothing in its function.
        """
        for edit in self.edits:
            source = await connection.fetchval(
                "select pg_get_functiondef(oid) from pg_proc where proname = $1 and pronamespace = 'penstock'::regnamespace",
                edit.function,
            )
            assert source is not None, f"there is no function penstock.{edit.function}"
            broken, times = re.subn(edit.old, edit.new, source)
            assert times > 0, f"penstock.{edit.function} has nothing like {edit.old}"
            await connection.execute(broken)
        for statement in self.statements:
            await connection.execute(statement)

    @property
    def prepare(self) -> Callable[[Penstock], Awaitable[None]]:
        """Remove the guarantee from a database."""

        async def take_out(app: Penstock) -> None:
            connection = await (await app.database()).connect()
            try:
                await self.apply(connection)
            finally:
                await connection.close()

        return take_out


_ATTEMPTS = r"and job\.attempt = given\.(given_)?attempt"
_LEASE = r"and job\.lease = given\.(given_)?lease"
# The heartbeat offers only slots without an owner, which is a second line of defence behind the check of `take`.
_OTHERS = "and slots.owner is distinct from p_member"
_TAKE = (Edit("take", r"and slots\.owner is null", _OTHERS), Edit("member_heartbeat", r"and slots\.owner is null", _OTHERS))
# That a worker without notifications continues is not the violation that is expected.
_NOT_DEAF = "P4(?!.* ran on on )"
# Nor is it expected that a run of a few seconds leaves jobs undone.
_NOT_LATE = "(P4|P7)(?!.* were never )"

QUEUE = {
    "settle without its fence": Sabotage(
        "P4", (Edit("archive_succeeded", f"{_ATTEMPTS}|{_LEASE}"), Edit("end_attempts", f"{_ATTEMPTS}|{_LEASE}")), long=True
    ),
    "extend without its fence": Sabotage(
        _NOT_DEAF,
        (Edit("extend", r"and job\.attempt = given\.attempt\s+and \((?s:.*?)\n                \)"),),
        worker="deaf",
        long=True,
    ),
    # Both workers report success: the one that counts as dead does not stop either.
    "settle without the lease": Sabotage(
        _NOT_DEAF, (Edit("archive_succeeded", _LEASE), Edit("end_attempts", _LEASE)), worker="deaf", long=True
    ),
    "recovery of workers that live": Sabotage(
        "P4.*declared dead",
        (Edit("recover_dead_workers", r"penstock\.is_dead\([^)]*\)", "true"),),
    ),
    "lost work that nobody recovers": Sabotage(
        r"P9.* was without one for|P2.* is in-progress after the drain",
        (Edit("recover_dead_workers", r"ended_at is not null or penstock\.is_dead\([^)]*\)", "false"),),
    ),
    # The mark of begin_jobs is a second line of defence behind the worker's own fence.
    "start without its fence": Sabotage(
        "P3",
        (Edit("begin_jobs", r"update penstock\.queued_jobs(?s:.*)returning job\.id", "select unnest(p_ids)"),),
        worker="unfenced_start",
    ),
    "no heartbeat beside the loop": Sabotage("P4.*declared dead .* while it ran", worker="heartbeat_of_the_loop"),
    "no limit": Sabotage("P5", (Edit("admit", r"job_type\.concurrency - coalesce\(sum\(open_jobs\), 0\)", "p_limit"),)),
    "at most once is retried": Sabotage(
        "P3",
        (
            Edit(
                "end_attempts",
                r"type\.delivery_strategy = 'at_most_once' or locked\.attempt >= locked\.max_attempts",
                "type.delivery_strategy <> 'at_most_once' and locked.attempt >= locked.max_attempts",
            ),
        ),
    ),
    "success that is not archived": Sabotage(
        "P1",
        (
            Edit(
                "archive_succeeded",
                r"left join held as lease on lease\.id = settled\.lease",
                r"\g<0> where random() < 0.98",
            ),
        ),
    ),
    "claim of what runs": Sabotage("P4", (Edit("claim", r"and ready\.status = 'queued'"),)),
    "expiry before its time": Sabotage(
        "P2.*expired before its time", (Edit("expire", r"due\.expires_at <= moment", "due.expires_at is not null"),)
    ),
    # In a run without kills: a worker that has just started looks at everything.
    "watermarks that pass what commits late": Sabotage(
        r"P2.* is queued after the drain|P9.* was committed at", worker="hasty_watermarks", long=True
    ),
    "ids that are not looked for in the archive": Sabotage(
        r"P10: \S+ is there", (Edit("known_before", r"archived\.id = any \(p_ids\)", r"\g<0> and false"),)
    ),
    "unique keys that do not coalesce": Sabotage(
        "P10.*while",
        (Edit("enqueue_many", r"if p_unique_keys is not null then", "if false then"),),
        ("drop index penstock.queued_jobs_unique",),
    ),
}

POOLS = {
    "claim without an epoch, by members without a fence": Sabotage(
        "P6|P4",
        (Edit("still_owned", r"and slots\.epoch = given\.epoch"), Edit("still_owned", r"and slots\.owner = p_member")),
        worker="unfenced_member",
        long=True,
    ),
    "members without a fence": Sabotage("P6", worker="unfenced_member", long=True),
    "what was lost runs on": Sabotage("P6", worker="deaf", long=True),
    "settle without its fence": Sabotage(
        "P4.*(took effect|was settled|succeeded with|after it succeeded|was archived)",
        (Edit("archive_succeeded", f"{_ATTEMPTS}|{_LEASE}"), Edit("end_attempts", f"{_ATTEMPTS}|{_LEASE}")),
        worker="deaf",
        long=True,
    ),
    "revocation that no consumer heeds": Sabotage("P6", worker="revocation_ignored", long=True),
    "taking a slot that has an owner": Sabotage("P6|P4", _TAKE, long=True),
    "eviction of members that live": Sabotage(
        "P6|P4",
        (
            Edit("evict", r"seen_at \+ dead_after \* 0\.6 < moment", "true"),
            Edit("evict", r"penstock\.is_dead\([a-z_, ]+(moment|penstock\.clock\(\))\)", "true"),
        ),
    ),
    "busy keys": Sabotage(
        "P6",
        (
            Edit("choose_of_keys", r"bool_and\(job\.startable\) over \(order by job\.seq\)", "job.startable"),
            Edit("claim_keys", r"where ordered\.nth = ordered\.place", "where true"),
            Edit("walk_keys", r"\(job\.ready or", "(true or"),
        ),
    ),
    "keys from behind": Sabotage("P6", (Edit("choose_of_keys", r"order by each\.seq\s+limit", "order by each.seq desc limit"),)),
}
_COMMIT = (
    Edit("commit_offsets", r"and reached\.epoch = given\.epoch"),
    Edit("commit_offsets", r"and slot\.owner = p_member"),
    Edit("commit_offsets", r"and slot\.epoch = given\.epoch"),
    Edit("lock_offset", r"and epoch = p_epoch"),
)
# The offset of a group never moves back, and a transaction whose events begin before it is refused. Under any epoch each event
# is therefore written once. Only the epoch prevents the late transaction from being the one that counts.
_DONE_ALREADY = Edit("commit_exactly", r"p_first < reached", "false")

STREAMS = {
    "commit before handling": Sabotage("P7.*was committed before it was handled", worker="commit_before_handling"),
    "commit without an epoch": Sabotage("P4.*was committed under epoch", _COMMIT, long=True),
    "commit without an epoch, of what is done already": Sabotage(
        "P4.*was written [0-9]+ times", (*_COMMIT, _DONE_ALREADY), long=True
    ),
    "exactly once in two transactions": Sabotage("P4.*written.*by the group exact", worker="two_transactions"),
    "offsets with holes": Sabotage(
        "P7.*not dense",
        (
            Edit(
                "append_chunks",
                r"tail\.first_offset \+ tail\.events",
                "tail.first_offset + tail.events + (random() < 0.005)::integer",
            ),
        ),
    ),
    "producers that are not known again": Sabotage(
        "P10.*was appended", (Edit("last_batch", r"is_repeated := p_sequence <= last", "is_repeated := false"),)
    ),
    "members without a fence": Sabotage("P4.*was handled by", worker="unfenced_member", long=True),
    "what was lost is begun": Sabotage(r"P4.* began on .* after that had lost", worker="losses_forgotten", long=True),
    "revocation that no consumer heeds": Sabotage("P4.*was handled by", worker="revocation_ignored", long=True),
    "taking a partition that has an owner": Sabotage(_NOT_LATE, _TAKE, long=True),
}
