"""One attempt in a request's timeline: its placement, its workers, its end."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from common.messages import Imported, Settle

WORKER_WAITS = ("room", "load", "grammar", "place", "prompts")  # as `worker.serving.turns.Wait`


@dataclass(slots=True, kw_only=True, eq=False)
class AttemptLine:
    """One attempt as the gateway knows it."""

    number: int
    began_at: float
    because: str  # end of the previous attempt; "" for the first
    prefill: str
    decode: list[str]  # candidates; []: the prefill worker decodes as well
    reason: str  # the placement's reason
    prompt_tokens: int = 0  # the prompt, and tokens that previous attempts generated
    promised_tokens: int = 0  # tokens cached there, by the prefix index
    cached_tokens: int | None = None  # tokens cached there, by the worker's first frame
    costs: dict[str, float] = field(default_factory=dict)  # figures compared by the placement
    traceparent: str = ""  # the attempt's span
    published_at: float | None = None
    claimed_at: float | None = None
    claimed_by: str = ""
    first_token_at: float | None = None
    num_tokens: int = 0
    worker_queue_ms: float | None = None  # claimed -> first chunk
    waits_ms: dict[str, float] = field(default_factory=dict)  # parts of that by reason, as far as the worker says
    prefill_ms: float | None = None
    settled: Settle | None = None
    imported: Imported | None = None
    imported_at: float | None = None
    ended_at: float | None = None
    outcome: str = ""  # "" while it runs, "ok", or why it was abandoned

    @property
    def decoder(self) -> str:
        """The worker that decodes, if known."""
        if self.imported is not None:
            return self.imported.worker
        return self.settled.decode_worker if self.settled is not None else ""

    def as_json(self, since: float) -> dict[str, Any]:
        """The attempt in `/debug/requests/{id}`, its instants in milliseconds `since` the request's receipt."""
        return {
            "attempt": self.number,
            "because": self.because,
            "placement": {
                "prefill": self.prefill,
                "decode": self.decode,
                "reason": self.reason,
                "costs": self.costs,
                "promised_tokens": self.promised_tokens,
            },
            "began_ms": ms_since(since, self.began_at),
            "published_ms": ms_since(since, self.published_at),
            "claimed_ms": ms_since(since, self.claimed_at),
            "claimed_by": self.claimed_by,
            "worker_queue_ms": rounded(self.worker_queue_ms),
            "waits_ms": {reason: rounded(ms) for reason, ms in self.waits_ms.items()},
            "prefill_ms": rounded(self.prefill_ms),
            "first_token_ms": ms_since(since, self.first_token_at),
            "tokens": self.num_tokens,
            "decoder": self.decoder,
            "transfer": self._transfer_json(since),
            "ended_ms": ms_since(since, self.ended_at),
            "outcome": self.outcome,
        }

    def _transfer_json(self, since: float) -> dict[str, Any] | None:
        """The transfer as seen from both ends; None if nothing moved, as far as known."""
        imported, settled = self.imported, self.settled
        if imported is None:
            return None
        return {
            "verified_ms": ms_since(since, self.imported_at),
            "transfer_ms": rounded(imported.transfer_ms),
            "blocks": imported.transferred_blocks,
            "bytes": imported.transferred_bytes,
            "reused_blocks": imported.reused_blocks,
            "push_ms": rounded(settled.push_ms) if settled else None,
            "late_push_ms": rounded(settled.late_push_ms) if settled else None,
            "handover_ms": rounded(settled.handover_ms) if settled else None,
        }


def ms_since(since: float, at: float | None) -> float | None:
    """Milliseconds from one instant to another; None if that is not known."""
    return None if at is None else rounded((at - since) * 1000)


def rounded(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else round(milliseconds, 3)


def finite_ms(seconds: float) -> float | None:
    """Milliseconds; None for a time without an end."""
    return None if math.isinf(seconds) else rounded(1000 * seconds)
