"""Steps of graphs, and references to their results in the payloads of later steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from penstock.errors import InvalidInput
from penstock.jobs.job_type import JobType


@dataclass(frozen=True, slots=True)
class ResultOf:
    """In a payload: what the job of another step returned. `Step.result` makes it. A worker reads it when it starts the job.

    Attributes:
        step: Name of the step.
    """

    step: str


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a graph, which `Workflow.add` makes.

    Attributes:
        name: Name of the step.
        type: Job type of the step.
        jobs: How many jobs it has; None: it is one job.
        after: Names of the steps after which it runs.
    """

    name: str
    type: JobType[Any]
    jobs: int | None
    after: tuple[str, ...]

    @property
    def result(self) -> ResultOf:
        """What the job of the step returns, for the payload of a later step: `nightly.add(publish, rows.result, after=rows)`.

        Raises:
            InvalidInput: The job type keeps no results, or the step has many jobs.
        """
        if self.jobs is not None:
            raise InvalidInput(f"step {self.name} has many jobs, and no result of its own", hint="Read what its jobs wrote.")
        if not self.type.declared.keep_result:
            raise InvalidInput(
                f"{self.type.name} keeps no results", hint=f'Declare it so: @app.job("{self.type.name}", keep_result=True)'
            )
        return ResultOf(self.name)


StepReference: TypeAlias = "Step | str"
"""A step of a graph, or its name."""
