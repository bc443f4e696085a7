"""How handlers take what they need: payloads, fields, the job, and dependencies."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any

import fastapi
import pytest
from pydantic import BaseModel, Field

from penstock import Depends, Event, InvalidInput, Job, NewJob, Penstock, Retry, Tick, current_job, inject
from penstock.testing import run_due_jobs


class Shipment(BaseModel):
    id: str
    weight: float = 1.0


@dataclass
class Label:
    text: str


async def test_a_model_or_a_dataclass_is_the_payload(app: Penstock) -> None:
    seen: list[Any] = []

    @app.job
    async def ship(shipment: Shipment) -> None:
        seen.append(shipment)

    @app.job
    def print_label(label: Label) -> None:
        seen.append(label)

    await ship.enqueue(Shipment(id="shp_1"))
    await ship.enqueue(shipment=Shipment(id="shp_2"))
    await print_label.enqueue(Label("fragile"))
    await run_due_jobs(app)
    assert sorted(map(str, seen)) == sorted(map(str, [Shipment(id="shp_1"), Shipment(id="shp_2"), Label("fragile")]))


async def test_parameters_are_the_fields_of_the_payload(app: Penstock, sql: Any) -> None:
    seen: list[tuple[str, int]] = []

    @app.job
    async def resize(path: str, width: int = 100) -> None:
        seen.append((path, width))

    @app.job
    def touch(path: str) -> None:
        seen.append((path, 0))

    @app.job
    async def tick() -> None:
        seen.append(("tick", 0))

    await resize.enqueue("a.png", 300)
    await resize.enqueue(path="b.png")
    await touch.enqueue(path="c")
    await tick.enqueue()
    stored = await sql.fetch("select data::text from penstock.queued_jobs order by seq")
    assert [row[0] for row in stored] == ['{"path": "a.png", "width": 300}', '{"path": "b.png"}', '{"path": "c"}', "{}"]
    await run_due_jobs(app)
    assert sorted(seen) == [("a.png", 300), ("b.png", 100), ("c", 0), ("tick", 0)]


async def test_options_of_one_job_come_before_its_arguments(app: Penstock) -> None:
    @app.job
    async def resize(path: str, width: int = 100) -> None: ...

    receipt = await resize.options(key="u1", priority=1, run_after=timedelta(hours=1), unique="a").enqueue("a.png")
    record = await app.find(receipt.id)
    assert (record.key, record.priority, record.data) == ("u1", 1, {"path": "a.png"})
    many = await resize.enqueue_many([resize.new("b.png"), resize.options(key="u2").new(path="c.png", width=3), {"path": "d"}])
    found = [await app.find(each.id) for each in many]
    assert [(each.key, each.data) for each in found] == [
        (None, {"path": "b.png"}),
        ("u2", {"path": "c.png", "width": 3}),
        (None, {"path": "d"}),
    ]
    blocking = await asyncio.to_thread(lambda: resize.sync.options(key="u3").enqueue("e.png"))
    assert (await app.find(blocking.id)).key == "u3"
    await asyncio.to_thread(app.sync.close)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "missing a required argument: 'path'"),
        (("a", 1, 2), {}, "too many positional arguments"),
        ((), {"path": "a", "widht": 3}, "unexpected keyword argument 'widht'"),
        (("a",), {"key": "u1"}, r"Options of a job come before: \.options\(key=\.\.\.\)\.enqueue"),
        (("a", "wide"), {}, "invalid payload for resize: width"),
    ],
)
async def test_arguments_that_do_not_fit_are_refused(
    app: Penstock, args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    @app.job
    async def resize(path: str, width: int = 100) -> None: ...

    with pytest.raises(InvalidInput, match=message):
        await resize.enqueue(*args, **kwargs)


async def test_a_field_that_the_handler_does_not_have_is_set_aside(app: Penstock, sql: Any) -> None:
    @app.job
    async def resize(path: str) -> None: ...

    await resize.declare()
    await sql.execute("""select penstock.enqueue('resize', '{"path": "a.png", "colour": "red"}')""")
    [record] = await run_due_jobs(app)
    assert record.status == "failed"
    assert "colour" in record.errors[-1]["message"]


async def test_a_key_is_a_field_or_a_function_of_the_payload(app: Penstock) -> None:
    @app.job(key="tenant")
    async def bill(tenant: str, amount: int) -> None: ...

    @app.job(key=lambda shipment: shipment.id[:3])
    async def ship(shipment: Shipment) -> None: ...

    bolts = app.pool("bolts", key="tenant")

    @bolts.job
    async def tighten(tenant: str, turns: int = 1) -> None: ...

    keys = [
        (await app.find((await job).id)).key
        for job in (
            bill.enqueue("acme", 3),
            bill.options(key="other").enqueue("acme", 3),
            ship.enqueue(Shipment(id="shp_1")),
            tighten.enqueue("acme"),
            tighten.options(key="globex").enqueue("acme"),
        )
    ]
    assert keys == ["acme", "other", "shp", "acme", "globex"]
    with pytest.raises(InvalidInput, match="no such field"):
        app.job("wrong", key="tennant")(bill.function)  # type: ignore[arg-type]


async def test_dependencies_are_made_for_one_call_and_cleaned_up_after_it(app: Penstock) -> None:
    events: list[Any] = []

    async def get_session() -> AsyncIterator[str]:
        events.append("open")
        try:
            yield "session"
        except ValueError:
            events.append("rollback")
            raise
        else:
            events.append("commit")

    def get_name(session: Annotated[str, Depends(get_session)], job: Job[Any]) -> Iterator[str]:
        events.append(threading.current_thread() is not threading.main_thread())
        yield f"{session} of {job.name}"
        events.append("closed")

    class Numbers:
        def __init__(self, session: Annotated[str, Depends(get_session)]) -> None:
            self.session = session

    @app.job
    async def good(
        path: str,
        session: Annotated[str, Depends(get_session)],
        name: Annotated[str, Depends(get_name)],
        numbers: Annotated[Numbers, Depends(Numbers)],
    ) -> None:
        events.append((path, session, name, numbers.session))

    @app.job(max_attempts=1)
    @inject(get_session)
    @inject(get_name)
    def bad(name: str, session: str, path: str) -> None:
        events.append((path, session, name))
        raise ValueError("no")

    await good.enqueue(path="a")  # type: ignore[call-arg]
    await run_due_jobs(app)
    assert events == ["open", True, ("a", "session", "session of good", "session"), "closed", "commit"]
    events.clear()
    await bad.enqueue("b")
    [record] = await run_due_jobs(app, "bad")
    assert events == [True, "open", ("b", "session", "session of bad"), "rollback"] or events == [
        "open", True, ("b", "session", "session of bad"), "rollback",
    ]  # fmt: skip
    assert record.status == "failed"
    assert record.data == {"path": "b"}
    # Called as the function that it is, it gets what it is given, and nothing is made for it.
    events.clear()
    await good("a", "s", "n", Numbers("m"))
    assert events == [("a", "s", "n", "m")]


async def test_a_clean_up_that_fails_fails_the_job(app: Penstock) -> None:
    async def get_session() -> AsyncIterator[str]:
        yield "session"
        raise RuntimeError("the commit failed")

    async def swallows() -> AsyncIterator[str]:
        with contextlib.suppress(KeyError):
            yield "it"

    @app.job(max_attempts=1)
    async def commits(job: Job[Any], session: Annotated[str, Depends(get_session)]) -> None: ...

    @app.job(max_attempts=1)
    async def raises(job: Job[Any], it: Annotated[str, Depends(swallows)]) -> None:
        raise KeyError("still an error")

    await commits.enqueue({})
    await raises.enqueue({})
    records = await run_due_jobs(app)
    assert sorted(record.errors[-1]["type"] for record in records) == ["KeyError", "RuntimeError"]


class Account(BaseModel):
    """Hidden by a class of the same name, in the test below."""


async def test_a_local_name_hides_that_of_the_module_in_annotations(app: Penstock) -> None:
    seen: list[Any] = []

    class Account(BaseModel):
        id: int

    def make_session() -> str:
        return "local"

    @app.job
    async def bill(job: Job[Account], session: Annotated[str, Depends(make_session)]) -> None:
        seen.append((job.data, session))

    await bill.enqueue(Account(id=1))
    await run_due_jobs(app)
    assert seen == [(Account(id=1), "local")]


async def test_a_dependency_is_overridden_in_a_test(app: Penstock) -> None:
    seen: list[str] = []

    def get_clock() -> str:
        raise AssertionError("the real one")

    @app.job
    async def work(job: Job[Any], clock: Annotated[str, Depends(get_clock)]) -> None:
        seen.append(clock)

    app.dependency_overrides[get_clock] = lambda: "noon"
    await work.enqueue({})
    await run_due_jobs(app)
    assert seen == ["noon"]


async def test_the_current_job_is_known_everywhere(app: Penstock) -> None:
    seen: list[tuple[str, int]] = []

    def note() -> None:
        seen.append((current_job().name, current_job().attempt))

    @app.job
    async def on_the_loop(path: str) -> None:
        note()

    @app.job
    def in_a_thread(path: str, job: Job[Any]) -> None:
        assert job is current_job()
        note()

    await on_the_loop.enqueue("a")
    await app.enqueue("in-a-thread", {"path": "b"})
    await run_due_jobs(app)
    assert sorted(seen) == [("in-a-thread", 1), ("on-the-loop", 1)]


async def needs_loop() -> int:
    return 1


def in_process(path: str, one: Annotated[int, Depends(needs_loop)]) -> None: ...


def test_wrong_handlers_are_refused_with_a_reason() -> None:
    app = Penstock("postgresql://nowhere/x")

    async def typed_and_more(job: Job[Shipment], path: str) -> None: ...
    async def variadic(*paths: str) -> None: ...
    def circle(it: Annotated[Any, Depends(lambda it: it)]) -> None: ...
    def two_jobs(a: Job[Any], b: Job[Any]) -> None: ...

    for handler, message in (
        (typed_and_more, "takes a Job with a payload, and path besides"),
        (variadic, "cannot be filled by name"),
        (circle, "the parameter it of the dependency .* cannot be filled"),
        (two_jobs, "takes 2 jobs"),
    ):
        with pytest.raises(InvalidInput, match=message):
            app.job("x")(handler)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="needs an event loop"):
        app.job("x", executor="process")(in_process)
    with pytest.raises(InvalidInput, match=r"no option retries \(it was given 3\)"):
        app.job("x", retries=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidInput, match="backoff of x must be a Backoff"):
        app.job("x", backoff=timedelta(seconds=3))(variadic)  # type: ignore[arg-type]


def make_session() -> str:
    return "session"


def as_a_default(job: Job[int], session: Any = Depends(make_session)) -> None: ...


def beside_fields(path: str, session: str = Depends(make_session)) -> None: ...  # type: ignore[assignment]


def of_fastapi(job: Job[int], session: Any = fastapi.Depends(make_session)) -> None: ...


def annotated_for_fastapi(path: str, session: Annotated[str, fastapi.Depends(make_session)]) -> None: ...


def field_as_a_default(width: int = Field(default=3, gt=2)) -> None: ...


def nested(job: Job[int], user: Annotated[str, Depends(as_a_default)]) -> None: ...


def of_a_tick(tick: Tick, session: Any = Depends(make_session)) -> None: ...


def of_an_event(event: Event[int], session: Any = Depends(make_session)) -> None: ...


@pytest.mark.parametrize(
    ("declare", "handler", "reason"),
    [
        (Penstock().job, as_a_default, r"session of as_a_default has Depends\(...\) as its default"),
        (Penstock().job, beside_fields, r"Depends\(...\) as its default"),
        (Penstock().job, of_fastapi, r"Depends\(...\) as its default"),
        (Penstock().job, annotated_for_fastapi, "from penstock import Depends"),
        (Penstock().job, field_as_a_default, r"FieldInfo\(...\) as its default"),
        (Penstock().job, nested, "session of as_a_default"),
        (Penstock().pool("p").job, as_a_default, r"Depends\(...\) as its default"),
        (Penstock().topic("t").subscriber("s"), beside_fields, r"Depends\(...\) as its default"),
        (Penstock().cron("* * * * *"), of_a_tick, r"Depends\(...\) as its default"),
        (Penstock().stream("s").consumer(group="g"), of_an_event, r"Depends\(...\) as its default"),
    ],
)
def test_what_fastapi_takes_as_a_default_is_refused(declare: Any, handler: Any, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        declare(handler)


async def test_a_handler_that_is_called_by_itself_too_takes_its_job_or_none(app: Penstock) -> None:
    seen: list[Any] = []

    def now(job: Job | None = None) -> str:
        return "by itself" if job is None else job.name

    @app.job
    async def resize(path: str, at: Annotated[str, Depends(now)], job: Job[Any] | None = None) -> None:
        seen.append((path, at, job and job.name))

    await resize("a.png", now())
    await app.enqueue(resize, {"path": "b.png"})
    await run_due_jobs(app)
    assert seen == [("a.png", "by itself", None), ("b.png", "resize", "resize")]


class Handlers:
    """Whose methods a process cannot find, apart from static ones."""

    def method(self, path: str) -> None: ...

    @staticmethod
    def static(path: str) -> None: ...


def test_a_process_imports_its_handler() -> None:
    app = Penstock()

    def local(path: str) -> None: ...

    for wrong in (local, lambda: None, Handlers().method, functools.partial(in_process, "a.png")):
        with pytest.raises(InvalidInput, match="cannot run in a process, which imports it by its name"):
            app.job("x", executor="process")(wrong)
    assert app.job("static", executor="process")(Handlers.static).kind == "process"


async def test_middleware_is_called_around_each_kind_of_handler(app: Penstock) -> None:
    seen: list[Any] = []

    @app.middleware
    async def outer(work: Any, call_next: Any) -> Any:
        try:
            result = await call_next(work)
        except ValueError as error:
            seen.append(("failed", work.name, str(error)))
            raise Retry("later", after=timedelta(0)) from error
        seen.append((work.name, result))
        return result

    @app.middleware
    async def inner(work: Any, call_next: Any) -> Any:
        seen.append("inner")
        return await call_next(work)

    @app.job(keep_result=True)
    async def asked(path: str) -> str:
        return path

    @app.job(keep_result=True)
    def plain(path: str) -> str:
        return path

    @app.job(max_attempts=2)
    async def fails(job: Job[Any]) -> None:
        if job.attempt == 1:
            raise ValueError("once")

    for type_ in (asked, plain):
        await type_.enqueue("a")
        await run_due_jobs(app)
    await fails.enqueue({})
    records = await run_due_jobs(app)
    assert seen[:4] == ["inner", ("asked", "a"), "inner", ("plain", "a")]
    assert seen[4:] == ["inner", ("failed", "fails", "once"), "inner", ("fails", None)]
    assert [record.status for record in records] == ["succeeded"]


async def test_a_lifespan_runs_around_the_handlers_and_gives_them_its_state(app: Penstock) -> None:
    seen: list[Any] = []

    @app.lifespan
    async def numbers() -> AsyncIterator[list[int]]:
        seen.append("start")
        yield [1, 2, 3]
        seen.append("stop")

    @app.job
    async def add(job: Job[Any], state: Annotated[list[int], Depends(numbers)]) -> None:
        seen.append(sum(state))

    @app.job
    def multiply(job: Job[Any], state: Annotated[list[int], Depends(numbers)]) -> None:
        seen.append(len(state))

    await add.enqueue({})
    await multiply.enqueue({})
    await run_due_jobs(app)
    assert (seen[0], sorted(seen[1:3]), seen[3]) == ("start", [3, 6], "stop")


async def test_new_jobs_and_payloads_mix(app: Penstock) -> None:
    @app.job
    async def ship(shipment: Shipment) -> None: ...

    receipts = await ship.enqueue_many([Shipment(id="a"), NewJob(Shipment(id="b"), key="k")])
    assert [(await app.find(each.id)).key for each in receipts] == [None, "k"]
