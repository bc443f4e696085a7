"""The public names of the package, and the module that defines each.

`penstock` imports a name from its module when it is used first, so that `import penstock` is quick. The types of these names
(`__init__.pyi`) and the pages of the reference (`docs/reference`) are generated from this table: `make reference`.
"""

from __future__ import annotations

DEFINED_IN = {
    "Penstock": "penstock.app",
    "Settings": "penstock.settings",
    "Depends": "penstock.core.dependencies",
    "inject": "penstock.core.dependencies",
    "Lifespan": "penstock.core.hooks",
    # jobs
    "Job": "penstock.jobs.handler",
    "Jobs": "penstock.jobs.handler",
    "current_job": "penstock.jobs.handler",
    "JobType": "penstock.jobs.job_type",
    "JobOptions": "penstock.jobs.declarations",
    "Options": "penstock.jobs.models",
    "Delivery": "penstock.jobs.models",
    "Backoff": "penstock.jobs.models",
    "RateLimit": "penstock.jobs.models",
    "NewJob": "penstock.jobs.models",
    "NewJobOptions": "penstock.jobs.models",
    "Enqueued": "penstock.jobs.models",
    "Admission": "penstock.jobs.models",
    "JobRecord": "penstock.jobs.models",
    "Status": "penstock.jobs.models",
    "LogLine": "penstock.jobs.models",
    "JobCounts": "penstock.jobs.models",
    "HandlerRecord": "penstock.jobs.models",
    "Why": "penstock.jobs.models",
    # pools
    "Pool": "penstock.pools.pool",
    "PoolSettings": "penstock.pools.declarations",
    "PoolOptions": "penstock.jobs.models",
    "Standing": "penstock.pools.standing",
    "PoolWorker": "penstock.worker.receiver",
    "PulledJob": "penstock.worker.receiver",
    # streams
    "Stream": "penstock.streams.stream",
    "StreamOptions": "penstock.streams.models",
    "Retention": "penstock.streams.models",
    "NewEvent": "penstock.streams.models",
    "Event": "penstock.streams.models",
    "Position": "penstock.streams.models",
    "Appended": "penstock.streams.models",
    "Batch": "penstock.streams.consumer.batch",
    "Events": "penstock.streams.consumer.batch",
    "OnFailure": "penstock.streams.consumer.on_failure",
    "Halted": "penstock.streams.consumer.dispatcher",
    "Producer": "penstock.streams.producer",
    # topics
    "Topic": "penstock.topics.topic",
    "NewMessage": "penstock.topics.models",
    "Published": "penstock.topics.models",
    "ReceiverOutcome": "penstock.topics.models",
    "Message": "penstock.topics.models",
    "Subscribed": "penstock.topics.models",
    "Subscriber": "penstock.topics.models",
    "TopicCounts": "penstock.topics.models",
    # schedules
    "Schedule": "penstock.schedules.schedule",
    "Tick": "penstock.schedules.schedule",
    # errors
    "PenstockError": "penstock.errors",
    "InvalidInput": "penstock.errors",
    "Unreadable": "penstock.errors",
    "KeyMissing": "penstock.errors",
    "NotFound": "penstock.errors",
    "Conflict": "penstock.errors",
    "OffsetGone": "penstock.errors",
    "DatabaseUnavailable": "penstock.errors",
    "SchemaMismatch": "penstock.errors",
    "EmbeddedServerError": "penstock.errors",
    "MissingExtra": "penstock.errors",
    "JobFailed": "penstock.errors",
    "Retry": "penstock.errors",
    "Snooze": "penstock.errors",
    "Fail": "penstock.errors",
}
