"""Admission of prompts that may find their prefix in host memory, too."""

from __future__ import annotations

from enum import Enum, auto

from engine.sequence import Sequence
from worker.context import KVCache
from worker.serving.allocation import admit_in_turn, needs


class Admission(Enum):
    """The outcome of an attempt to admit a prompt."""

    ADMITTED = auto()
    LOADING = auto()  # its prefix comes from host memory; it waits for no blocks
    NO_ROOM = auto()


def admit_prompt(cache: KVCache, sequence: Sequence, *, spare: int, ahead: int) -> Admission:
    """Admit a prompt in its turn, once the blocks that the host has of it are in the pool. See `admit`."""
    pool, turns, tier, num_tokens = cache.pool, cache.turns, cache.tier, len(sequence.token_ids)

    def has_room() -> bool:
        kept = spare + turns.kept_from(sequence)
        return pool.num_free - kept >= needs(pool, num_tokens=num_tokens, ahead=ahead, spare=kept)

    if tier is not None and tier.is_loading(sequence, has_room=has_room):
        return Admission.LOADING
    is_admitted = admit_in_turn(pool, turns, sequence, num_tokens=num_tokens, spare=spare, ahead=ahead)
    if tier is not None and tier.let_go(sequence) and not is_admitted:  # what was loaded stood in its own way
        is_admitted = admit_in_turn(pool, turns, sequence, num_tokens=num_tokens, spare=spare, ahead=ahead)
    return Admission.ADMITTED if is_admitted else Admission.NO_ROOM
