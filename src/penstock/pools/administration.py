"""What people and programs do with pools by their names, declared here or not: a part of `Penstock`."""

from __future__ import annotations

from typing import Any

from penstock.core.checks import check_flag, check_text
from penstock.jobs import type_queries
from penstock.jobs.checks import check_type_name
from penstock.jobs.job_type import JobType
from penstock.jobs.options import Options, PoolOptions
from penstock.pools import queries as pools
from penstock.pools import views as pool_views
from penstock.pools.declarations import PoolDeclarations
from penstock.pools.models import PoolDetails
from penstock.pools.pool import Pool
from penstock.postgres.database import Database


class _Found:
    """The declarer of a pool that was looked up by its name: it declares nothing."""

    works = False

    async def declare_type(self, database: Database, options: Options, *, again: bool) -> None:
        """See `Declarer`."""


class PoolAdministration(PoolDeclarations):
    """Finds, lists, creates and drops pools."""

    async def find_pool(self, name: str) -> Pool[Any]:
        """An existing pool, whether this application declares it or not. Raises `NotFound`.

        Args:
            name: Name of the pool.
        """
        check_text("name", name)
        declared = self.types.get(name)
        if declared is not None and isinstance(declared.declarer, Pool):
            return declared.declarer
        record = await pool_views.require(await self.context.database(), name)
        found: JobType[Any] = JobType(self.context, name)
        found.declarer = _Found()
        pool: Pool[Any] = Pool(found, PoolOptions(slots=record.slots, assignor=record.assignor), None, self.make_pulling)
        pool.found = True
        return pool

    async def list_pools(self) -> list[PoolDetails]:
        """All pools in the database, by name."""
        database = await self.context.database()
        counts = {count.name: count for count in await type_queries.counts(database)}
        return [pool.with_counts(counts.get(pool.name)) for pool in await pool_views.details(database)]

    async def create_pool(self, name: str, *, convert: bool = False, **options: Any) -> PoolDetails:
        """Create a pool in the database, options by their names in SQL. An existing pool does not change.

        Args:
            name: Name of the pool and of its job type.
            convert: Turn the plain job type of this name, with its jobs, into a pool.
            options: `slots`, `assignor`, `on_retry`, `key_concurrency`, ...; and those of its job type, such as `max_waiting`.

        Raises:
            Conflict: A plain job type has this name, and `convert` is not given.
            InvalidInput: An option is not valid.
        """
        check_type_name(name)
        check_flag("convert", convert)
        database = await self.context.database()
        of_pool = {option: value for option, value in options.items() if option in pools.OPTIONS}
        of_type = {option: value for option, value in options.items() if option not in pools.OPTIONS}
        await pools.create_pool(database, name, of_pool, of_type, convert=convert)
        return await (await self.find_pool(name)).details()

    async def drop_pool(self, name: str, *, force: bool = False) -> None:
        """Drop a pool with its job type, its keys and its standing jobs. What is archived of its jobs stays.

        See `drop_job_type`.

        Args:
            name: Name of the pool.
            force: Whether to drop it also while it has standing jobs, or up to 10,000 jobs wait, which are archived as cancelled
                with the reason `dropped`.

        Raises:
            NotFound: There is no such pool.
            Conflict: It has live workers or standing jobs, or jobs of it wait or run.
            DatabaseUnavailable: Another transaction has locked the type; try again.
        """
        check_type_name(name)
        check_flag("force", force)
        database = await self.context.database()
        await pools.drop_pool(database, name, force=force)
        database.declared.pop(("job", name), None)
