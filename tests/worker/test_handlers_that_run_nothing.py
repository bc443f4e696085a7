"""Handlers whose call runs nothing of their code: what returns a coroutine or a generator has not done the work."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from functools import partial, wraps
from typing import Annotated, Any

import pytest

from penstock import Depends, Event, InvalidInput, Job, JobFailed, NotFound, Penstock, Stream, Tick
from penstock.testing import run_due_jobs, run_job, running_worker
from tests.waiting import eventually


async def work() -> None: ...


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    """As one decorates plain functions: the call returns a coroutine when the function is async."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


@decorated
async def behind_a_decorator(job: Job[int]) -> None: ...


async def without_await(job: Job[int]) -> Any:
    return work()


def of_a_generator(job: Job[int]) -> Any:
    return (number for number in range(3))


@pytest.mark.parametrize("handler", [behind_a_decorator, without_await, of_a_generator])
async def test_a_job_whose_handler_ran_nothing_fails_for_good(app: Penstock, handler: Callable[..., Any]) -> None:
    odd = app.job("odd")(handler)
    receipt = await odd.enqueue(1)
    [record] = await run_due_jobs(app)
    assert (str(record.status), len(record.errors)) == ("failed", 1)
    assert "the handler of odd returned a" in record.errors[0]["message"]
    assert "of which nothing has run" in record.errors[0]["message"]
    with pytest.raises(JobFailed):
        await app.wait(receipt.id)
    with pytest.raises(InvalidInput, match="nothing has run"):
        await run_job(odd, 1)


async def test_the_jobs_of_a_batch_whose_outcomes_were_not_awaited_fail(app: Penstock) -> None:
    @app.job(max_batch_size=10)
    async def index(jobs: list[Job[int]]) -> list[Any]:
        return [work() if job.data else None for job in jobs]

    receipts = await index.enqueue_many([0, 1])
    await run_due_jobs(app)
    assert [str((await app.find(receipt.id)).status) for receipt in receipts] == ["succeeded", "failed"]


async def test_an_event_whose_handler_ran_nothing_is_not_done(app: Penstock) -> None:
    events = app.stream("events", int, partitions=1)

    @events.consumer(group="g", on_failure="dead-letter")
    async def handle(event: Event[int]) -> Any:
        return work()

    await events.append(1)
    async with running_worker(app, at_once=True):
        dead = app.stream("events.dead", int)
        await eventually(lambda: has_event(dead), "the dead letter")


async def has_event(stream: Stream[int]) -> bool:
    try:
        return any(bounds.next for bounds in (await stream.bounds()).values())
    except NotFound:
        return False


async def test_a_timer_in_place_whose_function_ran_nothing_fails(app: Penstock) -> None:
    @app.timer(every=timedelta(milliseconds=100), as_job=False)
    @decorated
    async def beat() -> None: ...

    async def failed() -> bool:
        schedules = await app.list_schedules()
        return any("nothing has run" in str(schedule.last_error) for schedule in schedules)

    async with running_worker(app, at_once=True):
        await eventually(failed, "the error of the run")


async def test_a_start_up_function_that_ran_nothing_ends_the_worker(app: Penstock) -> None:
    @app.on_startup
    @decorated
    async def warm_up() -> None: ...

    @app.job
    async def idle(job: Job[int]) -> None: ...

    with pytest.raises(InvalidInput, match="nothing has run"):
        await run_job(idle, 1)


def generator(job: Job[int]) -> Iterator[int]:
    yield 1


async def async_generator(job: Job[int]) -> AsyncIterator[int]:
    yield 1


def generator_of_ticks(tick: Tick) -> Iterator[int]:
    yield 1


def generator_of_events(event: Event[Any]) -> Iterator[int]:
    yield 1


def generator_without_parameters() -> Iterator[int]:
    yield 1


app_of_declarations = Penstock()


@pytest.mark.parametrize(
    ("declare", "function"),
    [
        (app_of_declarations.job("a"), generator),
        (app_of_declarations.job("b"), async_generator),
        (app_of_declarations.job("c"), partial(generator)),
        (app_of_declarations.pool("d").job, async_generator),
        (app_of_declarations.topic("e").subscriber("s"), generator),
        (app_of_declarations.stream("f").consumer(group="g"), generator_of_events),
        (app_of_declarations.cron("* * * * *"), generator_of_ticks),
        (app_of_declarations.timer(every=timedelta(seconds=1), as_job=False), generator_of_ticks),
        (app_of_declarations.on_startup, generator_without_parameters),
    ],
)
def test_a_handler_that_yields_is_refused_where_it_is_declared(declare: Callable[..., Any], function: Any) -> None:
    with pytest.raises(InvalidInput, match="yields"):
        declare(function)


class Mailer:
    """Handlers and dependencies can be objects."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    async def __call__(self, job: Job[int]) -> None:
        self.sent.append(job.data)

    async def tick(self, name: str, tick: Tick) -> None:
        self.sent.append(name)


async def test_objects_and_partials_are_called_as_their_code_is(app: Penstock) -> None:
    mailer, timed = Mailer(), Mailer()

    async def account(of: str) -> str:
        return of

    send = app.job("send")(mailer)

    @app.job(keep_result=True)
    async def bill(job: Job[int], account: Annotated[str, Depends(partial(account, "acme"))]) -> str:
        return account

    app.timer(every=timedelta(milliseconds=100), name="beat", as_job=False)(partial(timed.tick, "beat"))
    await send.enqueue(7)
    receipt = await bill.enqueue(1)
    async with running_worker(app, at_once=True):
        assert (await app.wait(receipt.id)).result == "acme"
        await eventually(lambda: mailer.sent == [7] and timed.sent, "the job and a time of the timer")
