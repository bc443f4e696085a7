"""What the models of bodies share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(ge=0, le=2_678_400, allow_inf_nan=False)]
Word = Annotated[str, Field(min_length=1, max_length=255)]
ID = "job_282227eb-3c76-4ef7-af7e-25dff933077f"
AT = "2026-01-11T18:26:26Z"


class Model(BaseModel):
    """A body of one of Penstock's own routes: unknown fields are mistakes."""

    # Strict: true is not the number 1, nor "1".
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)
