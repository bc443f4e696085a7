"""Background work on PostgreSQL: jobs, retries, limits, and workers, with the database as the only thing to run."""

from penstock._version import __version__
from penstock.app import JobType, Penstock
from penstock.errors import (
    Conflict,
    DatabaseUnavailable,
    EmbeddedServerError,
    Fail,
    InvalidInput,
    JobFailed,
    NotFound,
    PenstockError,
    Retry,
    SchemaMismatch,
)
from penstock.handler import Job
from penstock.job import (
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
)
from penstock.message import Message, Published, ReceiverOutcome, Subscribed, Subscriber, TopicCounts
from penstock.pools import Pool
from penstock.puller import PoolWorker, PulledJob
from penstock.settings import Settings
from penstock.topics import Topic
from penstock.worker.standing import Standing

__all__ = [
    "Admission",
    "Backoff",
    "Conflict",
    "DatabaseUnavailable",
    "Delivery",
    "EmbeddedServerError",
    "Enqueued",
    "Fail",
    "InvalidInput",
    "Job",
    "JobCounts",
    "JobFailed",
    "JobRecord",
    "JobType",
    "Message",
    "NewJob",
    "NotFound",
    "Options",
    "Penstock",
    "PenstockError",
    "Pool",
    "PoolOptions",
    "PoolWorker",
    "Published",
    "PulledJob",
    "RateLimit",
    "ReceiverOutcome",
    "Retry",
    "SchemaMismatch",
    "Settings",
    "Standing",
    "Status",
    "Subscribed",
    "Subscriber",
    "Topic",
    "TopicCounts",
    "__version__",
]
