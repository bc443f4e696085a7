"""Every option of every declaration and every argument of every call, with some forty values of each kind.

A value of the wrong kind or out of range is refused by an `InvalidInput` that names the option and the value. What has the right
kind is accepted, or refused by an error of Penstock. No error of Python or of the driver gets through, and nothing is accepted in
silence.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

import pytest

from penstock import (
    Backoff,
    Batch,
    InvalidInput,
    Job,
    Keep,
    NewEvent,
    NewJob,
    NewMessage,
    OnFailure,
    Penstock,
    RateLimit,
    Retention,
)
from penstock.errors import PenstockError
from penstock.settings import Settings

SECOND = timedelta(seconds=1)
WAITS = 3.0
"""How long a call may wait, in seconds: those that wait for something are given up, which is no fault."""
VALUES: dict[str, Any] = {
    "None": None,
    "True": True,
    "False": False,
    "zero": 0,
    "one": 1,
    "minus one": -1,
    "2**31": 2**31,
    "2**63": 2**63,
    "10**30": 10**30,
    "1.0": 1.0,
    "1.5": 1.5,
    "-0.5": -0.5,
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "empty": "",
    "x": "x",
    "1 as text": "1",
    "blank": " ",
    "U+0000": "a\x00b",
    "surrogate": "\ud800",
    "long": "x" * 5_000,
    "bytes": b"x",
    "list": [],
    "list of 1": [1],
    "dict": {},
    "dict of 1": {1: 1},
    "dict of text": {"a": "a"},
    "set": {1},
    "tuple": (1,),
    "object": object(),
    "Decimal": Decimal(1),
    "no time": timedelta(0),
    "minus 1 s": timedelta(seconds=-1),
    "5 s": timedelta(seconds=5),
    "longest": timedelta.max,
    "naive": datetime(2030, 1, 1),
    "aware": datetime(2030, 1, 1, tzinfo=UTC),
    "date": date(2030, 1, 1),
    "uuid": UUID(int=1),
    "a type": int,
    "lambda": lambda x: x,
    "RateLimit": RateLimit(1, SECOND),
    "Keep": Keep(SECOND, SECOND),
    "Backoff": Backoff(),
}

TEXT = {"x", "1 as text", "blank", "empty", "long"}
NAME = {"x", "1 as text"}
OPTION = {"None"}
FLAG = {"True", "False"}
COUNT = {"one"}
MANY = {"list", "list of 1", "set", "tuple"}
SPAN = {"5 s"}
SPAN_OR_NONE = {"no time", "5 s"}
MOMENT = {"no time", "minus 1 s", "5 s", "aware"}
# What is JSON, or has a form in JSON.
JSON = {
    "None",
    "True",
    "False",
    "zero",
    "one",
    "minus one",
    "2**31",
    "2**63",
    "1.0",
    "1.5",
    "-0.5",
    "empty",
    "x",
    "1 as text",
    "blank",
    "long",
    "list",
    "list of 1",
    "dict",
    "dict of text",
    "tuple",
    "naive",
    "aware",
    "date",
    "uuid",
}
# What JSON in SQL can say of an option. The function checks the rest.
IN_SQL = {
    "None",
    "True",
    "False",
    "zero",
    "one",
    "minus one",
    "2**31",
    "1.0",
    "1.5",
    "-0.5",
    "no time",
    "minus 1 s",
    "5 s",
    "longest",
}
IN_SQL |= TEXT | {"dict", "dict of text"}


class Case(NamedTuple):
    """An argument: what its errors call it, the values of the right kind, and a call with a value for it."""

    what: str
    right: set[str]
    call: Callable[[Any, Any], Any]


async def handler(job: Job[dict[str, Any]]) -> None: ...


async def batch_handler(jobs: list[Job[dict[str, Any]]]) -> None: ...


async def consumer(batch: Batch[Any]) -> None: ...


async def tick() -> None: ...


Options: TypeAlias = dict[str, set[str]]
OF_JOBS: Options = {
    "delivery": set(),
    "max_attempts": COUNT | OPTION,
    "concurrency": COUNT | OPTION | {"zero"},
    "visibility_timeout": SPAN,
    "time_limit": SPAN | OPTION,
    "backoff": {"Backoff"} | OPTION,
    "rate_limit": {"RateLimit"} | OPTION,
    "keep": {"Keep"} | SPAN | OPTION,
    "keep_result": FLAG,
    "encrypted": FLAG,
    "executor": set(),
    "linger": SPAN_OR_NONE | {"longest"},
    "max_batch_size": COUNT | OPTION,
    "batch_by_key": FLAG,
    "key": {"None", "x", "1 as text", "blank", "long", "lambda", "a type", "U+0000", "surrogate"},
}
OF_BACKOFFS: Options = {
    "base": SPAN_OR_NONE,
    "factor": {"one", "1.0", "1.5"},
    "cap": SPAN_OR_NONE,
    "jitter": {"zero", "one", "1.0"},
}
OF_KEEPS: Options = {"succeeded": SPAN | OPTION, "failed": SPAN | OPTION}
OF_RATES: Options = {"limit": COUNT, "period": SPAN}
OF_POOLS: Options = {
    "slots": COUNT,
    "assignor": set(),
    "on_retry": set(),
    "key_concurrency": COUNT,
    "key_rate": {"RateLimit"} | OPTION,
    "weights": {"dict"} | OPTION,
    "prefetch_per_key": COUNT,
    "key": OF_JOBS["key"],
    "assign": {"lambda", "a type"} | OPTION,
    "name": NAME,
    "max_attempts": COUNT | OPTION,
}
OF_STREAMS: Options = {
    "name": NAME,
    "partitions": COUNT,
    "key": OF_JOBS["key"],
    "keep": SPAN,
    "key_optional": FLAG,
    "format": set(),
    "compact": FLAG,
    "compression": OPTION,
    "segment_age": SPAN | OPTION,
    "segment_bytes": COUNT | {"2**31"},
    "segment_events": COUNT | OPTION | {"2**31"},
    "max_event_bytes": COUNT,
    "tombstone_age": SPAN_OR_NONE,
}
OF_RETENTION: Options = {
    "age": SPAN | OPTION,
    "bytes": COUNT | OPTION | {"2**31"},
    "events": COUNT | OPTION | {"2**31"},
    "unread": FLAG,
}
OF_CONSUMERS: Options = {
    "group": NAME,
    "max_batch_size": COUNT | OPTION,
    "linger": SPAN_OR_NONE | {"longest"},
    "on_failure": set(),
    "start": set(),
    "auto_offset_reset": set(),
    "prefetch": COUNT | OPTION,
    "concurrency": COUNT | OPTION,
    "grace": SPAN_OR_NONE | OPTION | {"longest"},
    "middleware": {"list"},
}
OF_FAILURES: Options = {"max_attempts": COUNT | OPTION, "then": set(), "backoff": {"Backoff"}}
OF_SUBSCRIBERS: Options = {
    "client_id": NAME,
    "filter": JSON,
    "ttl": SPAN | OPTION,
    "executor": set(),
    "max_attempts": COUNT | OPTION,
    "time_limit": SPAN | OPTION,
}
OF_SCHEDULES: Options = {
    "name": NAME | OPTION,
    "missed": set(),
    "as_job": FLAG | OPTION,
    "per_worker": FLAG,
    "max_attempts": COUNT | OPTION,
}
# Text is what comes from the environment, where everything is text.
NUMBERS = {"one", "1 as text"}
SPANS = {"one", "1.0", "1.5", "1 as text", "5 s", "2**31", "Decimal"}
OF_SETTINGS: Options = {
    name: {
        "pool_size": NUMBERS,
        "concurrency": NUMBERS,
        "threads": NUMBERS,
        "processes_for_handlers": NUMBERS,
        "claim_limit": NUMBERS,
        "statement_cache": FLAG | OPTION | {"1 as text"},
        "database_password": OPTION | {"lambda"},
        "traces": FLAG | OPTION | {"1 as text"},
        "otel_metrics": FLAG | OPTION | {"1 as text"},
        "keep": SPANS | OPTION | {"Keep"},
        "keep_history": SPANS | OPTION,
        "heartbeat_interval": SPANS,
        "rates": FLAG | OPTION | {"1 as text"},
        "code_version": TEXT | OPTION,
        "data_dir": TEXT | {"U+0000", "surrogate"},
        "keys": {"list", "tuple"} | TEXT | {"U+0000", "surrogate", "list of 1"},
    }.get(name, SPANS)
    for name in Settings.model_fields
    if "url" not in name
}


def cases(prefix: str, options: Options, declare: Callable[[Penstock, dict[str, Any]], object]) -> dict[str, Case]:
    """A case for each option of a declaration."""
    return {
        f"{prefix}: {name}": Case(
            {"client_id": "client id", "weights": "weight"}.get(name, name),
            right,
            lambda app, value, name=name: declare(app, {name: value}),
        )  # type: ignore[misc]
        for name, right in options.items()
    }


FUNCTION = {"lambda"}
DECLARATIONS: dict[str, Case] = {
    **cases("job", OF_JOBS, lambda app, given: app.job("j", **given)(handler)),
    **cases(
        "job in batches",
        {"linger": SPAN_OR_NONE | {"longest"}, "batch_by_key": FLAG, "max_batch_size": COUNT | OPTION},
        lambda app, given: app.job("j", **{"max_batch_size": 5, **given})(batch_handler),
    ),
    "job: handler": Case("not a function", FUNCTION, lambda app, value: app.job("j")(value)),
    "job: name": Case("name", NAME | FUNCTION | OPTION | {"a type"}, lambda app, value: app.job(value)),
    "job type: name": Case("name", NAME, lambda app, value: app.job_type(value)),
    "job type: payload": Case("payload", {"None", "a type"}, lambda app, value: app.job_type("j", value)),
    **cases("backoff", OF_BACKOFFS, lambda app, given: app.job("j", backoff=Backoff(**given))(handler)),
    **cases("keep", OF_KEEPS, lambda app, given: app.job("j", keep=Keep(**given))(handler)),
    **cases("rate", OF_RATES, lambda app, given: app.job("j", rate_limit=RateLimit(**{"limit": 1, "period": SECOND, **given}))),
    **cases("pool", OF_POOLS, lambda app, given: app.pool(**{"name": "p", **given})),
    **cases(
        "key rate", OF_RATES, lambda app, given: app.pool("p", key_rate=RateLimit(**{"limit": 1, "period": SECOND, **given}))
    ),
    "pool: weight": Case("weight", COUNT, lambda app, value: app.pool("p", weights={"acme": value})),
    "pool: payload": Case("payload", {"None", "a type"}, lambda app, value: app.pool("p", value)),
    "pool: handler": Case("not a function", FUNCTION | OPTION, lambda app, value: app.pool("p").job(value)),
    "pool: standing": Case("standing", FUNCTION | OPTION | {"a type"}, lambda app, value: app.pool("p").standing(value)),
    **cases("stream", OF_STREAMS, lambda app, given: app.stream(**{"name": "s", **given})),
    "stream: payload": Case("payload", {"None", "a type"}, lambda app, value: app.stream("s", value)),
    **cases(
        "retention",
        {f"keep_{name}": right for name, right in OF_RETENTION.items()},
        lambda app, given: app.stream("s", keep=Retention(**{k.removeprefix("keep_"): v for k, v in given.items()})),
    ),
    **cases("consumer", OF_CONSUMERS, lambda app, given: app.stream("s").consumer(**{"group": "g", **given})(consumer)),
    "consumer: handler": Case("not a function", FUNCTION, lambda app, value: app.stream("s").consumer(group="g")(value)),
    **cases("failures", OF_FAILURES, lambda app, given: OnFailure(**given)),
    "topic: name": Case("invalid topic", NAME, lambda app, value: app.topic(value)),
    "topic: payload": Case("payload", {"None", "a type"}, lambda app, value: app.topic("t", value)),
    "topic: catch_up": Case("catch_up", COUNT | OPTION | {"zero"}, lambda app, value: app.topic("t", catch_up=value)),
    **cases("subscriber", OF_SUBSCRIBERS, lambda app, given: app.topic("t").subscriber(**{"client_id": "c", **given})(handler)),
    **cases("timer", {"every": SPAN, **OF_SCHEDULES}, lambda app, given: app.timer(**{"every": SECOND, **given})(tick)),
    **cases(
        "cron",
        {"expression": set(), "tz": set(), **OF_SCHEDULES},
        lambda app, given: app.cron(**{"expression": "0 0 * * *", **given})(tick),
    ),
    "cron: handler": Case("not a function", FUNCTION, lambda app, value: app.cron("0 0 * * *", name="n")(value)),
    "middleware": Case("middleware", FUNCTION | {"a type"}, lambda app, value: app.middleware(value)),
    "lifespan": Case("lifespan", FUNCTION | {"a type"}, lambda app, value: app.lifespan(value)),
    **cases("settings", OF_SETTINGS, lambda app, given: Settings.read(**given)),
    "application: data_dir": Case("data_dir", TEXT - {"empty"} | OPTION, lambda app, value: Penstock(data_dir=value)),
    "application: settings": Case("settings", OPTION, lambda app, value: Penstock(settings=value)),
    "application: keys": Case("key", {"None", "list"}, lambda app, value: Penstock(keys=value)),
}

ID = "00000000-0000-7000-8000-000000000001"
ID_OF = {"uuid"}
ENQUEUE: Options = {
    "id": ID_OF | OPTION,
    "key": TEXT | OPTION,
    "priority": {"zero", "one", "minus one"},
    "run_after": MOMENT | OPTION,
    "expires_at": MOMENT | OPTION,
    "unique": TEXT | OPTION,
    "max_attempts": COUNT | OPTION,
    "time_limit": SPAN | OPTION,
    "connection": OPTION,
}
NAMES_IN_ERRORS = {"id": "job id", "new_id": "job id", "job_id": "job id"}


def calls(prefix: str, options: Options, call: Callable[[Any, dict[str, Any]], object]) -> dict[str, Case]:
    """A case for each argument of a call."""
    return {
        f"{prefix}: {name}": Case(NAMES_IN_ERRORS.get(name, name), right, lambda on, value, name=name: call(on, {name: value}))  # type: ignore[misc]
        for name, right in options.items()
    }


async def opened(consumption: Any) -> None:
    async with consumption:
        pass


async def one(reader: Any) -> None:
    async with reader:
        await anext(reader, None)


SHORT = timedelta(milliseconds=1)
JOBS: dict[str, Case] = {
    **calls("enqueue", ENQUEUE, lambda on, given: on.app.enqueue("plain", {}, **given)),
    **calls("options", ENQUEUE, lambda on, given: on.plain.options(**given).enqueue({})),
    "enqueue: type": Case("type", TEXT, lambda on, value: on.app.enqueue(value, {})),
    "enqueue: data": Case("payload", JSON, lambda on, value: on.app.enqueue("plain", value)),
    "enqueue_many: new": Case("new jobs", MANY, lambda on, value: on.app.enqueue_many("plain", value)),
    "NewJob: data": Case("payload", JSON, lambda on, value: on.plain.enqueue_many([NewJob(value)])),
    "find: id": Case("job id", ID_OF, lambda on, value: on.app.find(value)),
    "wait: timeout": Case("timeout", SPAN_OR_NONE | {"longest"}, lambda on, value: on.app.wait(ID, timeout=value)),
    **calls(
        "find_many",
        {"name": TEXT | OPTION, "status": OPTION, "key": TEXT | OPTION, "reason": TEXT | OPTION, "limit": COUNT},
        lambda on, given: on.app.find_many(**given),
    ),
    "why: id": Case("job id", ID_OF, lambda on, value: on.app.why(value)),
    "cancel: id": Case("job id", ID_OF, lambda on, value: on.app.cancel(value)),
    **calls(
        "replay", {"id": ID_OF, "new_id": ID_OF | OPTION, "force": FLAG}, lambda on, given: on.app.replay(**{"id": ID, **given})
    ),
    "replay: data": Case("payload", JSON, lambda on, value: on.app.replay(ID, data=value)),
    "create_job_type: name": Case("name", NAME, lambda on, value: on.app.create_job_type(value)),
    "create_job_type: max_attempts": Case(
        "max_attempts", IN_SQL, lambda on, value: on.app.create_job_type("n", max_attempts=value)
    ),
    "change_job_type: name": Case("name", NAME, lambda on, value: on.app.change_job_type(value)),
    "change_job_type: concurrency": Case(
        "concurrency", IN_SQL, lambda on, value: on.app.change_job_type("changed", concurrency=value)
    ),
    "pause: name": Case("name", NAME, lambda on, value: on.app.pause(value)),
    "resume: name": Case("name", NAME, lambda on, value: on.app.resume(value)),
    "scale_advice: wait": Case("wait", SPAN, lambda on, value: on.app.scale_advice(wait=value)),
    "scale_advice: over": Case("over", SPAN, lambda on, value: on.app.scale_advice(over=value)),
    "prune: keep": Case("keep", SPAN_OR_NONE | OPTION, lambda on, value: on.app.prune(value)),
    "open: timeout": Case("timeout", SPAN_OR_NONE | {"longest"}, lambda on, value: on.app.open(timeout=value)),
    "worker: names": Case("name", TEXT, lambda on, value: on.app.worker(value)),
    **calls(
        "schedule_runs",
        {"name": TEXT, "status": OPTION, "limit": COUNT},
        lambda on, given: on.app.schedule_runs(**{"name": "tick", **given}),
    ),
    "run_schedule: name": Case("name", TEXT, lambda on, value: on.app.run_schedule(value)),
    "drop_job_type: name": Case("name", NAME, lambda on, value: on.app.drop_job_type(value)),
    "drop_job_type: force": Case("force", FLAG, lambda on, value: on.app.drop_job_type("nothing", force=value)),
    "drop_pool: name": Case("name", NAME, lambda on, value: on.app.drop_pool(value)),
    "drop_pool: force": Case("force", FLAG, lambda on, value: on.app.drop_pool("nothing", force=value)),
    "drop_schedule: name": Case("name", TEXT, lambda on, value: on.app.drop_schedule(value)),
}
PAGE: Options = {"after": TEXT | OPTION, "limit": COUNT}
POOLS: dict[str, Case] = {
    "find_pool: name": Case("name", TEXT, lambda on, value: on.app.find_pool(value)),
    "create_pool: name": Case("name", NAME, lambda on, value: on.app.create_pool(value)),
    "create_pool: slots": Case("slots", IN_SQL, lambda on, value: on.app.create_pool("other", slots=value)),
    "create_pool: convert": Case("convert", FLAG, lambda on, value: on.app.create_pool("other", convert=value)),
    **calls(
        "enqueue",
        {name: right for name, right in {**ENQUEUE, "key": TEXT | OPTION}.items() if name != "priority"},
        lambda on, given: on.pool.enqueue(**{"key": "a", "data": {}, **given}),
    ),
    "enqueue_many: new": Case("new jobs", MANY, lambda on, value: on.pool.enqueue_many(value)),
    "enqueue_many: key": Case("key", TEXT | OPTION, lambda on, value: on.pool.enqueue_many([(value, 1)])),
    **calls(
        "start",
        {"key": TEXT, "replace": FLAG, "timeout": SPAN_OR_NONE | {"None", "longest"}},
        lambda on, given: on.pool.start(**{"key": "k", **given}),
    ),
    "start: data": Case("payload", JSON, lambda on, value: on.pool.start("k", value)),
    "stop: key": Case("key", TEXT, lambda on, value: on.pool.stop(value)),
    "notify: key": Case("key", TEXT, lambda on, value: on.pool.notify(value, 1)),
    "notify: message": Case("message", JSON, lambda on, value: on.pool.notify("k", value)),
    "reconcile: wanted": Case("wanted", {"dict", "dict of text"}, lambda on, value: on.pool.reconcile(value)),
    "reconcile: payload": Case("payload", JSON, lambda on, value: on.pool.reconcile({"a": value})),
    "slot_of: key": Case("key", TEXT, lambda on, value: on.pool.slot_of(value)),
    **calls(
        "worker",
        {"prefetch": COUNT, "metadata": {"None", "dict", "dict of text"}},
        lambda on, given: on.pool.worker(**given),
    ),
    "worker: id": Case("id of a worker", NAME | OPTION, lambda on, value: on.pool.worker(value)),
    "worker: metadata inside": Case("metadata", JSON, lambda on, value: on.pool.worker(metadata={"a": [value]})),
    "resize: slots": Case("slots", COUNT, lambda on, value: on.pool.resize(value)),
    "drain: worker": Case("worker", TEXT, lambda on, value: on.pool.drain(value)),
    "undrain: worker": Case("worker", TEXT, lambda on, value: on.pool.undrain(value)),
    "state: key": Case("key", TEXT, lambda on, value: on.pool.state(value)),
    "pause_key: key": Case("key", TEXT, lambda on, value: on.pool.pause_key(value)),
    "resume_key: key": Case("key", TEXT, lambda on, value: on.pool.resume_key(value)),
    "release_key: key": Case("key", TEXT, lambda on, value: on.pool.release_key(value)),
    "set_weight: key": Case("key", TEXT, lambda on, value: on.pool.set_weight(value, 1)),
    "set_weight: weight": Case("weight", COUNT, lambda on, value: on.pool.set_weight("a", value)),
    **calls("paused_keys", PAGE, lambda on, given: on.pool.paused_keys(**given)),
    **calls("quarantined_keys", PAGE, lambda on, given: on.pool.quarantined_keys(**given)),
    **calls("list", {**PAGE, "key": TEXT | OPTION}, lambda on, given: on.pool.list(**given)),
}
PARTITIONS = MANY | OPTION
STREAMS: dict[str, Case] = {
    "find_stream: name": Case("name", TEXT, lambda on, value: on.app.find_stream(value)),
    "create_stream: name": Case("name", NAME, lambda on, value: on.app.create_stream(value)),
    "create_stream: partitions": Case("partitions", COUNT, lambda on, value: on.app.create_stream("n", value)),
    "create_stream: keep_age": Case("keep_age", IN_SQL, lambda on, value: on.app.create_stream("m", 1, keep_age=value)),
    "change: keep_age": Case("keep_age", IN_SQL, lambda on, value: on.stream.change(keep_age=value)),
    "drop_stream: name": Case("name", TEXT, lambda on, value: on.app.drop_stream(value)),
    "append: data": Case("payload", JSON, lambda on, value: on.stream.append(value)),
    **calls(
        "append",
        {"key": TEXT | OPTION, "headers": {"None", "dict", "dict of text"}, "time": {"None", "aware"}, "connection": OPTION},
        lambda on, given: on.stream.append(1, **given),
    ),
    "append: headers inside": Case("headers", JSON, lambda on, value: on.stream.append(1, headers={"a": [value]})),
    "append_many: events": Case("events", MANY, lambda on, value: on.stream.append_many(value)),
    "NewEvent: key": Case("key", TEXT | OPTION, lambda on, value: on.stream.append_many([NewEvent(1, key=value)])),
    "load: items": Case("items", MANY, lambda on, value: on.stream.load(value)),
    "producer: id": Case("id", TEXT - {"empty"} | OPTION, lambda on, value: on.stream.producer(value)),
    "producer: sequence": Case(
        "sequence", {"None", "zero", "one", "2**31"}, lambda on, value: on.stream.producer("p", sequence=value)
    ),
    "read: partition": Case("partition", {"zero", "one"}, lambda on, value: on.stream.read(value)),
    "read: offset": Case("offset", {"zero", "one", "2**31"}, lambda on, value: on.stream.read(0, value)),
    "read: limit": Case("limit", COUNT, lambda on, value: on.stream.read(0, limit=value)),
    "tail: start": Case(
        "start", {"aware", "dict", "dict of 1", "dict of text"}, lambda on, value: one(on.stream.tail(value, idle_timeout=SHORT))
    ),
    **calls(
        "tail",
        {"partitions": PARTITIONS, "auto_offset_reset": set(), "idle_timeout": SPAN | OPTION | {"longest"}},
        lambda on, given: one(on.stream.tail("earliest", **{"idle_timeout": SHORT, **given})),
    ),
    **calls(
        "consume",
        {
            "group": NAME,
            "max_batch_size": COUNT,
            "linger": SPAN_OR_NONE | {"longest"},
            "start": set(),
            "auto_offset_reset": set(),
            "idle_timeout": SPAN | OPTION | {"longest"},
        },
        lambda on, given: opened(on.stream.consume(**{"group": "other", **given})),
    ),
    "consume: id": Case("id of a member", NAME | OPTION, lambda on, value: opened(on.stream.consume("other", id=value))),
    "lag: group": Case("group", TEXT | OPTION, lambda on, value: on.stream.lag(value)),
    "held_back: group": Case("group", TEXT | OPTION, lambda on, value: on.stream.held_back(value)),
    "seek: group": Case("group", TEXT, lambda on, value: on.stream.seek(value, "earliest")),
    "seek: to": Case("position", {"aware", "dict", "dict of 1", "dict of text"}, lambda on, value: on.stream.seek("g", value)),
    **calls(
        "pause",
        {"group": TEXT, "partitions": PARTITIONS, "reason": TEXT | OPTION},
        lambda on, given: on.stream.pause(**{"group": "g", **given}),
    ),
    **calls("resume", {"group": TEXT, "partitions": PARTITIONS}, lambda on, given: on.stream.resume(**{"group": "g", **given})),
    "drop_group: group": Case("group", TEXT, lambda on, value: on.stream.drop_group(value)),
    "replay_dead: offsets": Case(
        "offsets", {"None", "dict", "dict of 1"}, lambda on, value: on.stream.replay_dead(offsets=value)
    ),
    "replay_dead: limit": Case("limit", COUNT, lambda on, value: on.stream.replay_dead(limit=value)),
    "grow: partitions": Case("partitions", COUNT, lambda on, value: on.stream.grow(value)),
    "drop_stream: force": Case("force", FLAG, lambda on, value: on.app.drop_stream("nothing", force=value)),
}
MESSAGE: Options = {
    "id": ID_OF | OPTION,
    "unique": TEXT | OPTION,
    "run_after": MOMENT | OPTION,
    "expires_at": MOMENT | OPTION,
    "connection": OPTION,
}
TOPICS: dict[str, Case] = {
    "find_topic: name": Case("name", TEXT, lambda on, value: on.app.find_topic(value)),
    "publish: data": Case("payload", JSON, lambda on, value: on.topic.publish(value)),
    **calls(
        "publish",
        {**MESSAGE, "background": FLAG, "timeout": SPAN_OR_NONE | {"longest"}},
        lambda on, given: on.topic.publish(1, **given),
    ),
    **calls(
        "NewMessage",
        {name: right for name, right in MESSAGE.items() if name != "connection"},
        lambda on, given: on.topic.publish_many([NewMessage(1, **given)]),
    ),
    "publish_many: messages": Case("messages", MANY, lambda on, value: on.topic.publish_many(value)),
    "publish_many: ids": Case("ids", MANY | OPTION, lambda on, value: on.topic.publish_many([1], ids=value)),
    **calls(
        "subscribe",
        {"filter": JSON, "ttl": SPAN | OPTION, "since": {"None", "zero", "one", "2**31"}},
        lambda on, given: on.topic.subscribe("c", **given),
    ),
    "subscribe: client_id": Case("client id", NAME, lambda on, value: on.topic.subscribe(value)),
    "unsubscribe: client_id": Case("client_id", TEXT, lambda on, value: on.topic.unsubscribe(value)),
    "unsubscribe: drop": Case("drop", FLAG, lambda on, value: on.topic.unsubscribe("nobody", drop=value)),
    "renew: client_id": Case("client_id", TEXT, lambda on, value: on.topic.renew(value)),
    "read: since": Case("since", {"None", "zero", "one", "2**31"}, lambda on, value: on.topic.read(value)),
    "read: limit": Case("limit", COUNT, lambda on, value: on.topic.read(limit=value)),
    "sequence_of: job_id": Case("job id", ID_OF, lambda on, value: on.topic.sequence_of(value)),
}


async def fault(case: Case, on: Any, name: str, value: Any) -> str | None:
    """What is wrong with the answer to one value; None: nothing."""
    try:
        found = case.call(on, value)
        if inspect.isawaitable(found):
            async with asyncio.timeout(WAITS):
                await found
    except InvalidInput as error:
        if name in case.right or (case.what in error.message and shows(error.message, value)):
            return None
        return f"{name}: {error.message[:150]!r} does not name {case.what} and {value!r:.40}"
    except (PenstockError, TimeoutError) as error:
        return None if name in case.right else f"{name}: {type(error).__name__} instead of InvalidInput: {error}"
    except Exception as error:
        return f"{name}: {type(error).__name__}: {error}"
    return None if name in case.right else f"{name}: accepted"


def shows(message: str, value: Any) -> bool:
    """Whether a message has the value, or the part of it that is wrong."""
    parts = (
        next(iter(value.items())) if isinstance(value, dict) and value else value if isinstance(value, (list, tuple, set)) else ()
    )
    return any(f"{shown!r:.25}" in message or f"{shown!s:.25}" in message for shown in (value, *parts)) or (
        "JSON" in message or "U+0000" in message
    )


@pytest.fixture(scope="module")
def undeclared() -> Penstock:
    """An application that is never opened. A test of its declarations forgets them."""
    return Penstock("postgresql://nowhere/none")


@pytest.mark.parametrize("case", DECLARATIONS)
async def test_an_option_of_a_declaration_is_refused_by_name_and_value(undeclared: Penstock, case: str) -> None:
    faults = []
    for name, value in VALUES.items():
        found = await fault(DECLARATIONS[case], undeclared, name, value)
        # No error shows a key or a password; those given as settings may have one.
        hidden = case.endswith((": keys", ": database_password", "application: settings"))
        if found is not None and not (hidden and "does not name" in found):
            faults.append(found)
        for declared in (undeclared.types, undeclared.topics, undeclared.streams, undeclared.consumers, undeclared.schedules):
            declared.clear()
    assert not faults, "\n".join(faults)


class Objects:
    """What calls are made on."""

    def __init__(self, app: Penstock) -> None:
        self.app = app
        self.plain = app.job_type("plain")
        self.changed = app.job_type("changed")
        self.pool = app.pool("pool")
        self.stream = app.stream("stream", partitions=2)
        self.topic = app.topic("topic")


@pytest.mark.parametrize("table", [JOBS, POOLS, STREAMS, TOPICS], ids=["jobs", "pools", "streams", "topics"])
async def test_an_argument_of_a_call_is_refused_by_name_and_value(app: Penstock, table: dict[str, Case]) -> None:
    on = Objects(app)
    await app.declare()
    await app.enqueue("plain", {}, id=ID)
    await opened(on.stream.consume("g"))
    faults = [
        f"{case}, {found}"
        for case, of in table.items()
        for name, value in VALUES.items()
        if (found := await fault(of, on, name, value))
    ]
    assert not faults, "\n".join(faults)
