"""`speculation`: a request's word on drafts, in every dialect that can say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StrictBool, StrictInt

from common.words import MOST_DRAFTED


def _is_wish(said: Any) -> Any:
    if said is not None and not (isinstance(said, int) and 0 <= said <= MOST_DRAFTED):
        raise ValueError(f"true, false, or the most tokens to draft in a step, from 0 to {MOST_DRAFTED}, is needed")
    return said


# A union's own error would name the alternative that was tried first.
Drafted = Annotated[StrictBool | Annotated[StrictInt, Field(ge=0, le=MOST_DRAFTED)], BeforeValidator(_is_wish)]
# llama.cpp's field has no bound.
DRAFTED_SCHEMA: dict[str, Any] = {"type": ["integer", "null"], "minimum": 0}


def at_most_drafted(most: Any) -> Mapping[str, Any]:
    """Read llama.cpp's `speculative.n_max`."""
    return {"speculation": min(most, MOST_DRAFTED) if isinstance(most, int) else most}
