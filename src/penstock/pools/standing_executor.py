"""Runs standing jobs: one run of each key on the owner of the key, from `start` until `stop`.

A run begins and ends in the database under the epoch of its slot, so a key never has two runs. The next run, on any worker,
receives the `job.state` that the last one left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import orjson

from penstock.core.lending import borrowing
from penstock.core.logs import get_logger
from penstock.core.polling import wait_for_event
from penstock.core.serialization import Codec, dump_json
from penstock.core.user_code import message_of
from penstock.errors import Conflict, InvalidInput, KeyMissing, PenstockError, Unreadable
from penstock.groups.membership import Membership
from penstock.groups.trials import SUSPECT, Trials, trial_s
from penstock.pools import queries as pools
from penstock.pools.sealed_standing import SealedStanding
from penstock.pools.standing import Sides, Standing
from penstock.postgres.database import Database, in_parts
from penstock.settings import Settings

log = get_logger("penstock.standing")
_STOP_S = 2.0
_REFUSED_S = 0.2
_AGAIN_S = 1.0
_MOST_UNREAD = 1_000


class _Run:
    def __init__(self, job: pools.StandingJob, tried_with: int | None) -> None:
        self.job = job
        self.tried_with = tried_with
        self.stop = asyncio.Event()
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        self.full = False  # more messages may wait in the database
        self.task: asyncio.Task[None] | None = None
        self.stopping: asyncio.Task[None] | None = None
        self.late = False
        self.ended = False  # the database knows that it is over
        self.wait_s = 0.0  # before the key is looked at again


class StandingExecutor:
    """Runs the standing jobs in the slots that this process owns. A `SlotUser`.

    Args:
        database: Database of the pool.
        name: Name of the pool.
        member: Membership that owns the slots.
        handler: Handler, see `two_sides`.
        codec: Decodes payloads.
        settings: Intervals and grace periods.
        sealed: Encrypts and decrypts what is stored of them.
    """

    def __init__(
        self,
        database: Database,
        name: str,
        member: Membership,
        handler: Sides,
        codec: Codec[Any],
        settings: Settings,
        sealed: SealedStanding,
    ) -> None:
        self._database = database
        self._name = name
        self._member = member
        self._handler = handler
        self._codec = codec
        self._sealed = sealed
        self._interval = settings.heartbeat_interval.total_seconds()
        self._grace_s = settings.handover_grace.total_seconds()
        self._runs: dict[str, _Run] = {}
        # Lost runs that are still ending. This process may own their keys again before they have ended.
        self._ending: dict[str, asyncio.Task[None]] = {}
        # Runs that are over here and may not be in the database, such as one that was cancelled while that did not answer.
        self._unended: dict[str, _Run] = {}
        self._awake = asyncio.Event()
        # Runs whose start side has succeeded, which is not recorded yet.
        self._entered: list[_Run] = []
        self._trials = Trials.of(database)
        self._on_trial: list[_Run] = []

    def wake(self) -> None:
        """Reconcile now, since the standing jobs may have changed."""
        self._awake.set()

    def gained(self, slot: int, epoch: int) -> None:
        """See `SlotUser`."""
        self.wake()

    async def revoke(self, slot: int, epoch: int) -> bool:
        """See `SlotUser`: stop the runs of the slot, and write their state."""
        await self._stop([run for run in self._runs.values() if run.job.slot == slot])
        return True

    def lost(self, slot: int, epoch: int) -> None:
        """See `SlotUser`."""
        for key, run in list(self._runs.items()):
            if run.job.slot == slot:
                del self._runs[key]
                if run.task is not None and not run.task.done():
                    run.task.cancel("lost")
                    self._ending[key] = run.task
                    run.task.add_done_callback(partial(self._ended, key))

    def draining(self, slot: int) -> bool:
        """See `SlotUser`. Each key waits by itself: `_reconcile` does not start a key whose run is still ending."""
        return False

    def _ended(self, key: str, task: asyncio.Task[None]) -> None:
        if self._ending.get(key) is task:
            del self._ending[key]
        self.wake()

    def stop(self, grace_s: float) -> None:
        """Give runs this many seconds to stop, from now on."""
        self._grace_s = grace_s

    async def run(self) -> None:
        """Start and stop standing jobs until cancelled."""
        try:
            while True:
                self._awake.clear()
                wait = self._interval
                try:
                    wait = min(wait, await self._reconcile())
                except PenstockError as error:
                    log.warning("standing_jobs_unknown", pool=self._name, error=error)
                    wait = min(wait, _AGAIN_S)
                await wait_for_event(self._awake, wait)
        finally:
            self._trials.end(self, survived=False)
            tasks = [run.task for run in self._runs.values() if run.task is not None]
            stops = [run.stopping for run in self._runs.values() if run.stopping is not None]
            for task in [*tasks, *stops]:
                task.cancel("lost")
            await asyncio.gather(*tasks, *stops, *self._ending.values(), return_exceptions=True)

    async def _reconcile(self) -> float:
        owned = self._member.owned
        wanted = (
            {job.key: job for job in await pools.standing_of(self._database, self._name, self._member.id, owned)} if owned else {}
        )
        for key, run in self._runs.items():
            job = wanted.get(key)
            other = job is None or (job.version, job.slot, job.epoch) != (run.job.version, run.job.slot, run.job.epoch)
            if other and run.stopping is None:
                run.stopping = asyncio.create_task(self._stop([run]), name=f"penstock-stop-{key}")
        wait = self._interval
        suspects: list[pools.StandingJob] = []
        for key, job in wanted.items():
            if key in self._runs or key in self._ending or not self._member.may_work(job.slot):
                continue
            if job.start_in_s > 0:
                wait = min(wait, job.start_in_s)
                continue
            if job.crashes >= SUSPECT:
                suspects.append(job)
            else:
                self._start(job, None)
        self._end_the_unended(owned, wanted)
        if suspects or self._on_trial:
            wait = min(wait, await self._try(suspects))
        await self._deliver()
        if entered := self._entered:
            self._entered = []
            try:
                runs = [run.job for run in entered if self._runs.get(run.job.key) is run]
                await pools.enter_standing(self._database, self._name, self._member.id, runs)
            except PenstockError:
                self._entered += entered
                raise
        return wait

    def _end_the_unended(self, owned: Mapping[int, int], wanted: Collection[str]) -> None:
        """End the runs of keys that are no longer wanted. The next run of a key that is wanted ends the one before."""
        for key, run in list(self._unended.items()):
            if owned.get(run.job.slot) == run.job.epoch:
                if key not in wanted and key not in self._runs and key not in self._ending:
                    self._start(run.job, None)  # the database refuses this one, which then ends the one before
            elif owned:
                del self._unended[key]  # it ended with the slot

    def _start(self, job: pools.StandingJob, tried_with: int | None) -> _Run:
        self._unended.pop(job.key, None)
        run = self._runs[job.key] = _Run(job, tried_with)
        run.task = asyncio.create_task(self._attempt(run), name=f"penstock-standing-{job.key}")
        run.task.add_done_callback(partial(self._forget, run))
        return run

    async def _try(self, suspects: list[pools.StandingJob]) -> float:
        """Start standing jobs that may have crashed other workers, few at a time, those with the fewest crashes first.

        Returns the seconds until the next step.
        """
        if (left := self._trials.left_s(self)) is not None:
            alive = [run.job.key for run in self._on_trial if self._runs.get(run.job.key) is run]
            if left > 0 and alive:
                return left
            if alive:
                await pools.acquit_standing(self._database, self._name, self._member.id, alive)
            self._on_trial = []
            self._trials.end(self, survived=True)
        if not suspects:
            self._trials.none_left(self)
            return self._interval
        crashes = min(job.crashes for job in suspects)
        chosen = [job for job in suspects if job.crashes == crashes][: self._trials.begin(self, crashes)]
        if not chosen:
            return 1.0
        log.warning("standing_jobs_on_trial", pool=self._name, keys=[job.key for job in chosen[:10]], jobs=len(chosen))
        seconds = trial_s(crashes)
        self._trials.last(seconds)
        self._on_trial = [self._start(job, len(chosen)) for job in chosen]
        return seconds

    async def _deliver(self) -> None:
        # Further messages for a run that reads slowly stay in the database.
        receivers = {key: run for key, run in self._runs.items() if run.messages.qsize() < _MOST_UNREAD}
        if not receivers:
            return
        left = False
        for keys in in_parts(list(receivers)):
            taken = await pools.take_messages(self._database, self._name, self._member.id, keys, _MOST_UNREAD)
            for key, data in taken:
                try:
                    receivers[key].messages.put_nowait(orjson.loads(self._sealed.open_message(key, data)))
                except Unreadable as error:
                    self._say_missing(receivers[key], error)
                    log.error("message_unreadable", pool=self._name, key=key, error=error)
            left |= len(taken) == _MOST_UNREAD
        for run in self._runs.values():
            run.full = run.messages.qsize() >= _MOST_UNREAD
        if left:
            self.wake()

    async def _attempt(self, run: _Run) -> None:
        refused = False
        try:
            begun = await pools.begin_standing(self._database, self._name, self._member.id, run.job, run.tried_with)
            if begun is None:
                # The database has another state of the run, or the answer to an earlier begin or end was lost: end that run.
                refused = not await self._end(run, None, None)
            elif not self._member.may_work(run.job.slot):
                await self._end(run, None, None)
            else:
                with borrowing(f"standing jobs of {self._name}"):
                    state, error = await self._between(run, *begun)
                await self._end(run, state, error)
        except PenstockError as error:
            refused = True
            log.warning("standing_job_unknown", pool=self._name, key=run.job.key, error=error)
        if refused:
            run.wait_s = _REFUSED_S

    def _forget(self, run: _Run, task: asyncio.Task[None]) -> None:
        """A run is over, even if its task was cancelled before its first step: the key may run again."""
        if self._runs.get(run.job.key) is run:
            del self._runs[run.job.key]
        if not run.ended:
            self._unended[run.job.key] = run
        if run.wait_s > 0:
            asyncio.get_running_loop().call_later(run.wait_s, self.wake)
        else:
            self.wake()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("standing_job_failed_oddly", pool=self._name, key=run.job.key, exc_info=error)

    async def _end(self, run: _Run, state: str | None, error: dict[str, Any] | None) -> bool:
        """Record that the run has ended; retries until that is recorded or the slot is lost."""
        known = await self._database.retrying(
            lambda: pools.end_standing(self._database, self._name, self._member.id, run.job, state, error)
        )
        run.ended = True
        return known

    async def _between(self, run: _Run, data: str, state: str | None) -> tuple[str | None, dict[str, Any] | None]:
        """Run the handler from its start side to its stop side. Returns the state that it left and the error that ended it."""
        standing: Standing[Any] | None = None
        error: dict[str, Any] | None = None
        try:
            before = None if state is None else orjson.loads(self._sealed.open_state(run.job.key, state))
            payload = self._codec.load(self._sealed.open_payload(run.job.key, data))
            standing = Standing(
                run.job.key,
                payload,
                before,
                run.stop,
                run.messages,
                partial(self._save, run),
                lambda: self.wake() if run.full else None,
            )
            self.wake()  # there may be messages for it
            async with self._handler(standing) as entered:
                log.debug("standing_job_started", pool=self._name, key=run.job.key)
                self._entered.append(run)
                self.wake()
                stop = asyncio.create_task(run.stop.wait())
                ending = [entered] if isinstance(entered, asyncio.Task) else []
                try:
                    await asyncio.wait([stop, *ending], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    stop.cancel()
                if ending and entered.done() and not run.stop.is_set():
                    entered.result()
                    raise RuntimeError("the handler returned; a standing job runs until it is stopped")
        except asyncio.CancelledError as cancelled:
            if cancelled.args == ("lost",):
                raise
            error = self._sealed.error(run.job.key, {"type": "Cancelled", "message": "it did not stop within its time"})
        except BaseException as failure:
            if standing is None:
                self._say_missing(run, failure)
            # A handler that calls sys.exit() fails, instead of ending one worker after the other.
            error = self._failure(run, failure)
        left = None if standing is None else standing.state
        try:
            return (None if left is None else self._state_text(run, left)), error
        except InvalidInput as failure:
            return None, error or self._failure(run, failure)

    def _say_missing(self, run: _Run, failure: BaseException) -> None:
        if isinstance(failure, KeyMissing):
            self._member.lacks([(run.job.slot, failure.key_id)])

    def _failure(self, run: _Run, failure: BaseException) -> dict[str, Any]:
        name = type(failure).__qualname__
        log.warning("standing_job_failed", pool=self._name, key=run.job.key, error=name if self._sealed.encrypted else failure)
        return self._sealed.error(run.job.key, {"type": name, "message": message_of(failure)})

    def _state_text(self, run: _Run, state: Any) -> str:
        return self._sealed.state(run.job.key, dump_json(state, f"the state of {run.job.key}"))

    async def _save(self, run: _Run, state: Any) -> None:
        text = self._state_text(run, state)
        if not await pools.save_standing(self._database, self._name, self._member.id, run.job, text):
            raise Conflict(f"the standing job {run.job.key} no longer runs here", hint="Stop: it may be running elsewhere.")

    async def _stop(self, runs: list[_Run]) -> None:
        tasks = [run.task for run in runs if run.task is not None]
        for run in runs:
            run.stop.set()
        if not tasks:
            return
        await asyncio.wait(tasks, timeout=self._grace_s)
        for run in runs:
            # Cancel once: a second cancellation would interrupt the clean-up after the first.
            if run.task is not None and not run.task.done() and not run.late:
                run.late = True
                run.task.cancel("stop")
        _, stuck = await asyncio.wait(tasks, timeout=_STOP_S)
        for task in stuck:
            log.error("standing_job_does_not_stop", pool=self._name, task=task.get_name())
