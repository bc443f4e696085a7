"""Declares pools: a part of `Penstock`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from typing_extensions import Unpack

from penstock.groups.assignors import KeyAssign
from penstock.jobs.declarations import JobDeclarations, JobOptions, options_of
from penstock.jobs.job_type import JobType
from penstock.jobs.models import PoolOptions, RateLimit
from penstock.pools.checks import check_pool
from penstock.pools.pool import Pool, WorkerFactory


class PoolDeclarations(JobDeclarations):
    """Declares pools."""

    # Makes pull workers. `Penstock` sets it, since pools must not import workers.
    pool_worker: WorkerFactory

    def pool(
        self,
        name: str,
        payload: Any = Any,
        *,
        slots: int = 256,
        assign: KeyAssign | None = None,
        assignor: Literal["sticky", "jump"] = "sticky",
        on_retry: Literal["block", "skip"] = "block",
        key_concurrency: int = 1,
        key_rate: RateLimit | None = None,
        weights: Mapping[str, int] | None = None,
        prefetch_per_key: int = 500,
        key: str | Callable[[Any], str | None] | None = None,
        **options: Unpack[JobOptions],
    ) -> Pool[Any]:
        """Declare a pool: jobs of one key run in order, one at a time, on the worker that owns the key.

        Args:
            name: Name of the pool and of its job type.
            payload: Payload type; taken from the handler's annotation when there is one.
            slots: Number of parts into which the keys are divided; the largest number of workers that the pool can keep busy. It
                can grow later.
            assign: A rule of your own, `assign(key, workers) -> index`; workers come oldest first, with ids and metadata.
                None: the assignor places slots.
            assignor: How slots are assigned to workers without such a rule; see `penstock.groups.assignors`.
            on_retry: "block": a job that waits for its retry blocks its key; "skip": later jobs of the key pass it.
            key_concurrency: The largest number of running jobs of one key; with more than 1 they have no order.
            key_rate: The largest number of starts of one key in a period.
            weights: Weights of keys that get more than one job in a turn.
            prefetch_per_key: See `PoolOptions`.
            key: Name of a field of the payload, or a function of it, that gives a job its key, unless a call gives one.
            options: How the jobs are delivered, retried and limited; see `Penstock.job`.

        Raises:
            InvalidInput: An option is not valid.
        """
        check_pool(name, slots, assign, assignor, on_retry, key_concurrency, key_rate, weights, prefetch_per_key)
        declared: JobType[Any] = self.add_type(JobType(self.context, name, payload, options_of(f"pool {name}", options), key))
        pool_options = PoolOptions(
            slots,
            "custom" if assign is not None else assignor,
            on_retry,
            key_concurrency,
            key_rate,
            weights or {},
            prefetch_per_key,
        )
        pool: Pool[Any] = Pool(declared, pool_options, assign, self.pool_worker)
        declared.declarer = pool
        return pool
