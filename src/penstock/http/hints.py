"""Advice of the SQL functions, as advice for HTTP: what to do is the same, how is not."""

from __future__ import annotations

import re

_NAME = r"E?'((?:[^']|'')*)'"
_CALLS: list[tuple[re.Pattern[str], str]] = [
    (re.compile(rf"select penstock\.drop_pool\({_NAME}\);"), r"DELETE /v1/pools/\1"),
    (re.compile(rf"select penstock\.drop_schedule\({_NAME}\);"), r"DELETE /v1/schedules/\1"),
    (
        re.compile(rf"select penstock\.start_operation\('purge', {_NAME}\);"),
        r'POST /v1/operations with {"kind": "purge", "filter": \1}',
    ),
    (re.compile(rf"select penstock\.drop_stream\({_NAME}, p_force => true\);"), r"DELETE /v1/streams/\1?force=true"),
    (re.compile(rf"select \* from penstock\.stream_bounds\({_NAME}\);"), r"GET /v1/streams/\1"),  # noqa: S608 - never run
    (re.compile(rf"select penstock\.change_job_type\({_NAME}, '(.*)'\);"), r"PATCH /v1/jobs/\1 with \2"),
    (re.compile(rf"select penstock\.create_job_type\({_NAME}\);"), r"POST /v1/jobs, with the name \1"),
    (re.compile(rf"select penstock\.declare_topic\({_NAME}\);"), r"POST /v1/topics, with the name \1"),
    (re.compile(rf"select penstock\.declare_pool\({_NAME}\);"), r"POST /v1/pools, with the name \1"),
    (re.compile(rf"select penstock\.convert_to_pool\({_NAME}\);"), r'POST /v1/pools, with the name \1 and "convert": true'),
    (re.compile(r"[Cc]hange it with penstock\.change_pool\."), "Change it with PATCH /v1/pools/{pool}."),
    (re.compile(rf"select penstock\.create_stream\({_NAME}\);"), r"POST /v1/streams, with the name \1"),
    (
        re.compile(rf"select penstock\.declare_consumer_group\({_NAME}, {_NAME}\);"),
        r"PUT /v1/streams/\1/groups/\2/members/{member} joins, and creates it",
    ),
    (re.compile(r"Say whose job it is: penstock\.enqueue\(.*\)\."), "Give a key: it says whose job it is."),
    (re.compile(r"[Cc]hange it with penstock\.change_job_type\."), "Change it with PATCH /v1/jobs/{name}."),
    (
        re.compile(r"[Cc]hange it with penstock\.change_stream or penstock\.grow_stream\."),
        "Change it with PATCH /v1/streams/{name}.",
    ),
    (re.compile(r"Read them with penstock\.read_topic, then"), "Read them with GET /v1/topics/{topic}/messages, then"),
    (re.compile(r"\bp_(since|force|key|replace)\b"), r"\1"),
    (re.compile(r"See: penstock workers"), "See GET /v1/workers."),
    (re.compile(r"(Retry the transaction|Roll back)\."), "Repeat the request."),
]
# What is left of SQL, or of Python, is no help to who speaks HTTP.
_FOREIGN = re.compile(
    r"\bselect\b.*\bfrom\b|\bselect penstock|\bpenstock\.[a-z_]+|\bp_[a-z_]+|::|\\d\b|\btransaction\b|\brole\b.*\bpassword\b"
    r"|\basync with\b|\bawait\b|\bapp\.[a-z_]+\("
)


def for_http(hint: str | None) -> str | None:
    """A hint as a client of HTTP can follow it; None when there is nothing that it could do."""
    if hint is None:
        return None
    for pattern, advice in _CALLS:
        hint = pattern.sub(advice, hint)
    return None if _FOREIGN.search(hint) else hint
