"""What an application declares: a file for jobs, pools and topics, and one for streams and schedules."""

from penstock.declaring.jobs import JobDeclarations, JobType
from penstock.declaring.streams import StreamDeclarations

__all__ = ["JobDeclarations", "JobType", "StreamDeclarations"]
