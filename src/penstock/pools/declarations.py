"""Declares pools: a part of `Penstock`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar, overload

from typing_extensions import Unpack

from penstock.core.checks import check_names
from penstock.core.keys import PayloadForm
from penstock.groups.assignors import KeyAssign
from penstock.jobs.declarations import JobDeclarations, JobOptions, options_of
from penstock.jobs.job_type import JobType
from penstock.jobs.options import PoolOptions, RateLimit
from penstock.pools.checks import check_pool
from penstock.pools.pool import Pool
from penstock.pools.pull_worker import MakePulling

T = TypeVar("T")


class PoolSettings(JobOptions, total=False):
    """Options of a pool and of its jobs: see `PoolOptions` and `Options` for what they mean."""

    slots: int
    assignor: Literal["sticky", "jump"]
    on_retry: Literal["block", "skip"]
    key_concurrency: int
    key_rate: RateLimit | None
    weights: Mapping[str, int] | None
    prefetch_per_key: int
    key_max_waiting: int | None


class PoolDeclarations(JobDeclarations):
    """Declares pools."""

    # Makes pull workers. `Penstock` sets it, since pools must not import workers.
    make_pulling: MakePulling

    @overload
    def pool(
        self,
        name: str,
        payload: type[T],
        *,
        key: str | Callable[[T], str | None] | None = ...,
        assign: KeyAssign | None = ...,
        **options: Unpack[PoolSettings],
    ) -> Pool[T]: ...
    @overload
    def pool(
        self,
        name: str,
        payload: PayloadForm = ...,
        *,
        key: str | Callable[[Any], str | None] | None = ...,
        assign: KeyAssign | None = ...,
        **options: Unpack[PoolSettings],
    ) -> Pool[Any]: ...
    @overload
    def pool(
        self,
        name: str,
        payload: object,
        *,
        key: str | Callable[[T], str | None] | None = ...,
        assign: KeyAssign | None = ...,
        **options: Unpack[PoolSettings],
    ) -> Pool[Any]: ...
    def pool(
        self,
        name: str,
        payload: Any = Any,
        *,
        key: str | Callable[[Any], str | None] | None = None,
        assign: KeyAssign | None = None,
        **options: Unpack[PoolSettings],
    ) -> Pool[Any]:
        """Declare a pool: jobs of one key run in order, one at a time, on the worker that owns the key.

        Args:
            name: Name of the pool and of its job type.
            payload: Payload type; taken from the handler's annotation when there is one.
            key: Name of a field of the payload, or a function of it, that gives a job its key, unless a call gives one.
            assign: A rule of your own, `assign(key, workers) -> index`; workers come oldest first, with ids and metadata.
                None: the assignor places slots.
            options: Options of the pool (`PoolOptions`), and how its jobs are delivered, retried and limited (`Options`).

        Raises:
            InvalidInput: An option does not exist or is not valid.
        """
        what = f"pool {name}"
        check_names(what, options, [*PoolSettings.__annotations__, "key", "assign"])
        of_jobs = {option: value for option, value in options.items() if option in JobOptions.__annotations__}
        of_pool: dict[str, Any] = {option: value for option, value in options.items() if option not in of_jobs}
        if of_pool.get("weights", {}) is None:
            del of_pool["weights"]
        pool_options = PoolOptions(**of_pool)
        check_pool(name, pool_options, assign)
        if assign is not None:
            pool_options = replace(pool_options, assignor="custom")
        declared: JobType[Any] = self.add_type(JobType(self.context, name, payload, options_of(what, of_jobs), key))
        pool: Pool[Any] = Pool(declared, pool_options, assign, self.make_pulling)
        declared.declarer = pool
        return pool
