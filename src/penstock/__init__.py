"""Background work on PostgreSQL: jobs, retries, limits, and workers, with the database as the only thing to run."""

from penstock._version import __version__
from penstock.app import Penstock
from penstock.consuming.batch import Batch, Events
from penstock.consuming.delivery import Halted
from penstock.consuming.failure import OnFailure
from penstock.declaring import JobType
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
)
from penstock.event import Appended, Event, NewEvent, Position, Retention, StreamOptions
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
    Why,
)
from penstock.message import Message, NewMessage, Published, ReceiverOutcome, Subscribed, Subscriber, TopicCounts
from penstock.pools import Pool
from penstock.producer import Producer
from penstock.puller import PoolWorker, PulledJob
from penstock.schedule import Tick
from penstock.settings import Settings
from penstock.streams import Stream
from penstock.topics import Topic
from penstock.worker.standing import Standing

__all__ = [
    "Admission",
    "Appended",
    "Backoff",
    "Batch",
    "Conflict",
    "DatabaseUnavailable",
    "Delivery",
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
    "JobRecord",
    "JobType",
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
    "SchemaMismatch",
    "Settings",
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
]
