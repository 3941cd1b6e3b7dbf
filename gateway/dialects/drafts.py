"""`speculation`: a request's word on drafts, in every dialect that can say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt

from common.words import MOST_DRAFTED

Drafted = StrictBool | Annotated[StrictInt, Field(ge=0, le=MOST_DRAFTED)]
# llama.cpp's field has no bound.
DRAFTED_SCHEMA: dict[str, Any] = {"type": ["integer", "null"], "minimum": 0}


def most_drafted(said: bool | int | None) -> int:
    """The most drafted tokens of a pass: false is none, true or nothing (-1) what workers are set to."""
    return -1 if said is None or said is True else int(said)


def at_most_drafted(most: Any) -> Mapping[str, Any]:
    """Read llama.cpp's `speculative.n_max`."""
    return {"speculation": min(most, MOST_DRAFTED) if isinstance(most, int) else most}
