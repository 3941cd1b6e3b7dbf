"""Pooling: whole texts in, vectors or scores out. Nothing is needed of earlier ones, so any worker may answer again."""

from __future__ import annotations

from typing import Annotated

import msgspec

from common.messages.base import PROTOCOL_VERSION

MAX_POOLED_INPUTS = 4096
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class Pool(msgspec.Struct, frozen=True, kw_only=True, tag="pool", omit_defaults=True):
    """Gateway -> worker, request: vectors or scores of these inputs. Answered by `Pooled`. Idempotent: nothing is kept."""

    v: int = PROTOCOL_VERSION
    request_id: str  # this piece's alone: `Cancel` names it
    remaining_ms: int
    inputs: Annotated[list[bytes], msgspec.Meta(min_length=1, max_length=MAX_POOLED_INPUTS)]  # packed tokens of each
    work: str = "embed"  # or "token_embed", a vector a token; "classify", scores; "token_classify", those of tokens
    seconds: Annotated[list[_Count], msgspec.Meta(max_length=MAX_POOLED_INPUTS)] = []  # second texts' beginnings
    skipped: _Count = 0  # first tokens of each input that no vector is pooled from
    dimensions: _Count = 0  # first ones of each vector, normalised again; 0: all
    adapter: str = ""  # the model's own, by its name
    salt: str = ""  # the tenant's: those with different ones share no prefixes
    is_raw: bool = False  # vectors of any length, scores without the model's activation
    traceparent: str | msgspec.UnsetType = msgspec.UNSET


class Pooled(msgspec.Struct, frozen=True, kw_only=True, tag="pooled", omit_defaults=True):
    """Worker -> gateway: the rows of all inputs in order, or the error's code and message."""

    v: int = PROTOCOL_VERSION
    values: bytes = b""  # [rows, width] float32, little-endian
    width: int = 0
    rows: list[int] = []  # rows of each input; []: one
    code: str = ""
    message: str = ""
    queue_ms: float = 0.0  # received -> its pass began
    compute_ms: float = 0.0  # its passes, whatever else was in them
    cached_tokens: int = 0  # found in a prefix that others have
