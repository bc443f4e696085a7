"""Background work on PostgreSQL: jobs, retries, limits, and workers, with the database as the only thing to run."""

from penstock._version import __version__
from penstock.app import Penstock
from penstock.core.dependencies import Depends, inject
from penstock.core.hooks import Lifespan
from penstock.errors import (
    Conflict,
    DatabaseUnavailable,
    EmbeddedServerError,
    Fail,
    InvalidInput,
    JobFailed,
    NotFound,
    OffsetGone,
    PenstockError,
    Retry,
    SchemaMismatch,
    Snooze,
)
from penstock.jobs.declarations import JobOptions
from penstock.jobs.handler import Job, Jobs, current_job
from penstock.jobs.job_type import JobType
from penstock.jobs.models import (
    Admission,
    Backoff,
    Delivery,
    Enqueued,
    JobCounts,
    JobRecord,
    NewJob,
    Options,
    PoolOptions,
    RateLimit,
    Status,
    Why,
)
from penstock.pools.pool import Pool
from penstock.pools.standing import Standing
from penstock.schedules.schedule import Schedule, Tick
from penstock.settings import Settings
from penstock.streams.consumer.batch import Batch, Events
from penstock.streams.consumer.dispatcher import Halted
from penstock.streams.consumer.on_failure import OnFailure
from penstock.streams.models import Appended, Event, NewEvent, Position, Retention, StreamOptions
from penstock.streams.producer import Producer
from penstock.streams.stream import Stream
from penstock.topics.models import Message, NewMessage, Published, ReceiverOutcome, Subscribed, Subscriber, TopicCounts
from penstock.topics.topic import Topic
from penstock.worker.receiver import PoolWorker, PulledJob

__all__ = [
    "Admission",
    "Appended",
    "Backoff",
    "Batch",
    "Conflict",
    "DatabaseUnavailable",
    "Delivery",
    "Depends",
    "EmbeddedServerError",
    "Enqueued",
    "Event",
    "Events",
    "Fail",
    "Halted",
    "InvalidInput",
    "Job",
    "JobCounts",
    "JobFailed",
    "JobOptions",
    "JobRecord",
    "JobType",
    "Jobs",
    "Lifespan",
    "Message",
    "NewEvent",
    "NewJob",
    "NewMessage",
    "NotFound",
    "OffsetGone",
    "OnFailure",
    "Options",
    "Penstock",
    "PenstockError",
    "Pool",
    "PoolOptions",
    "PoolWorker",
    "Position",
    "Producer",
    "Published",
    "PulledJob",
    "RateLimit",
    "ReceiverOutcome",
    "Retention",
    "Retry",
    "Schedule",
    "SchemaMismatch",
    "Settings",
    "Snooze",
    "Standing",
    "Status",
    "Stream",
    "StreamOptions",
    "Subscribed",
    "Subscriber",
    "Tick",
    "Topic",
    "TopicCounts",
    "Why",
    "__version__",
    "current_job",
    "inject",
]
