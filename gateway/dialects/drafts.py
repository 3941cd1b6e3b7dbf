"""`speculation`: a request's word on drafts, in every dialect that can say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt

from common.words import MOST_DRAFTED
from gateway.answers.ask import DraftWish

Drafted = StrictBool | Annotated[StrictInt, Field(ge=0, le=MOST_DRAFTED)]
# llama.cpp's field has no bound.
DRAFTED_SCHEMA: dict[str, Any] = {"type": ["integer", "null"], "minimum": 0}


def draft_wish(said: bool | int | None, prediction: str = "") -> DraftWish:
    """The wish for drafts: false is none, true or nothing (-1) what workers are set to."""
    return DraftWish(most=-1 if said is None or said is True else int(said), prediction=prediction)


def at_most_drafted(most: Any) -> Mapping[str, Any]:
    """Read llama.cpp's `speculative.n_max`."""
    return {"speculation": min(most, MOST_DRAFTED) if isinstance(most, int) else most}
