"""Pulls between workers: cached blocks that their receiver asks for, pushed by the peer that has them."""

from __future__ import annotations

import msgspec

from common.messages.base import WorkerMessage
from common.messages.handoff import Region


class PullBlocks(WorkerMessage, frozen=True, kw_only=True, tag="pull_blocks"):
    """Receiver -> lender, request: push a prefix's blocks into my pool. Answered by `PullReply`, with no write in flight."""

    lender_incarnation: int  # a successor under its name lends nothing
    lease_id: int
    generation: int
    digests: bytes  # hashes of the prefix's blocks, one after another
    first_block: int  # blocks of tokens that the receiver has
    destination_blocks: bytes  # packed u32: for the others, as `kvtransfer.plan` orders them
    region: Region
    remaining_ms: int


class PullReply(msgspec.Struct, frozen=True, kw_only=True, tag="pull_reply"):
    """The prefix's first `count` blocks are there with all that a token behind them reads; 0: nothing was pushed."""

    count: int = 0
    digests: bytes = b""  # packed little-endian u64, one for each pushed block, in order
    loading_ms: int = 0  # before the push, from host memory or files


class StopPull(WorkerMessage, frozen=True, kw_only=True, tag="stop_pull"):
    """Receiver -> lender, request (`Ack`): push no more under this lease. Known: no write is in flight or will follow."""

    lender_incarnation: int
    lease_id: int
    generation: int
