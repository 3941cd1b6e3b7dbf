"""Tokens on their way to the gateway, and the gateway's messages about a stream."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from common.messages.base import PROTOCOL_VERSION, AttemptMessage
from common.words import Finish


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Natural logarithms of the model's distribution before temperature and penalties."""

    logprob: float
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class PromptLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Logprobs of N prompt tokens, each given the tokens before it, packed little-endian, with the K most likely ones."""

    logprobs: bytes  # [N] float32
    ranks: bytes  # [N] uint32; 1: no token was likelier
    top_ids: bytes  # [N, K] uint32
    top_logprobs: bytes  # [N, K] float32

    @property
    def count(self) -> int:
        return len(self.ranks) // 4

    def first(self, count: int) -> PromptLogprobs:
        """Return the logprobs of the first `count` tokens."""
        width = len(self.top_ids) // max(1, self.count)
        return PromptLogprobs(
            logprobs=self.logprobs[: 4 * count],
            ranks=self.ranks[: 4 * count],
            top_ids=self.top_ids[: width * count],
            top_logprobs=self.top_logprobs[: width * count],
        )

    def then(self, more: PromptLogprobs) -> PromptLogprobs:
        """Return the logprobs of these tokens and of the ones after them."""
        return PromptLogprobs(
            logprobs=self.logprobs + more.logprobs,
            ranks=self.ranks + more.ranks,
            top_ids=self.top_ids + more.top_ids,
            top_logprobs=self.top_logprobs + more.top_logprobs,
        )


class Tokens(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """New tokens of one sequence. `position` counts generated tokens of the whole request from 0, across attempts."""

    request_id: str
    attempt: int
    position: int
    token_ids: bytes
    finish: Finish = Finish.NONE
    logprobs: list[TokenLogprobs] = []
    cached_tokens: int = -1  # with a prefill worker's first token: prompt tokens from its cache
    queue_ms: float = 0.0  # with the first token: claimed -> first chunk started
    prefill_ms: float = 0.0  # with the first token: first chunk started -> token sampled
    waits: dict[str, float] = {}  # with the first token: parts of `queue_ms` by the reason for waiting
    traceparent: str | UnsetType = UNSET  # only with the worker's first token of an attempt
    prompt_logprobs: PromptLogprobs | None = None  # with the first token
    drafted: int = 0  # tokens that the sender verified of this attempt so far
    accepted: int = 0  # part of drafted


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag="frame"):
    """Worker -> gateway, one way: the new tokens of one step for all of that gateway's sequences."""

    v: int = PROTOCOL_VERSION
    worker: str
    incarnation: int
    tokens: list[Tokens]


class Resend(AttemptMessage, frozen=True, kw_only=True, tag="resend"):
    """Gateway -> worker, request (`Ack`): send the tokens from `position` on again.

    `Ack.known` says whether the worker still works on the attempt.
    Also decode -> prefill worker: no token is asked for, and `Ack.known` says whether the attempt may still write into `worker`.
    """

    position: int
    worker: str = ""  # the decode worker that asks, about its lease


class Received(AttemptMessage, frozen=True, kw_only=True, tag="received"):
    """Gateway -> worker, one way: every token up to the final one arrived; the worker may forget the stream."""

    gateway: str = ""  # as in `Cancel`
    is_call: bool = False  # the answer ended by a tool call, see `Keep.call_ttl_s`


class Cancel(AttemptMessage, frozen=True, kw_only=True, tag="cancel"):
    """Gateway -> prefill and decode worker, request (`Ack`): stop attempts up to `attempt`, and leave a tombstone.

    Also prefill -> decode worker, one way, when `Reserve` had no answer and the attempt no longer needs it.
    """

    reason: str = "client"
    worker: str = ""  # the prefill worker that asks: then its own lease alone
    gateway: str = ""  # the gateway that asks: then its own requests alone


ANYBODY_THERE = Resend(request_id="", attempt=0, position=0)  # about no request: any answer shows that the worker lives
