"""The stored history of a request: the items before it, and the decision to store its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.dialects.responses.items import Item


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """`before` precedes the request's `own` items, whose references are resolved.

    `responses` are the ids of the kept responses that it goes on from, the oldest first; `num_bytes` is what is kept of them.
    `conversation` is the id of the conversation that gets the items of the request and its answer.
    """

    tenant: str = ""
    before: Sequence[Item] = ()
    own: Sequence[Item] = ()
    stores: bool = False
    responses: tuple[str, ...] = ()
    conversation: str = ""
    num_bytes: int = 0


NOT_KEPT = History()  # without a store
