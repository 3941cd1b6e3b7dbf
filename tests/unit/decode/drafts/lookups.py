"""Sequences for tests of drafters, and a lookup by brute force."""

from __future__ import annotations

from common.messages import SamplingParams
from engine.sequence import Sequence


def sequence_of(token_ids: list[int], *, prompt: int | None = None, root: bytes = bytes(16)) -> Sequence:
    return Sequence(
        request_id="r",
        attempt=1,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids) if prompt is None else prompt,
        sampling=SamplingParams(max_tokens=100, temperature=0.0),
        hash_root=root,
    )


def occurrences(text: list[int], suffix: list[int], *, least: int, most: int) -> tuple[int, list[int]]:
    """The length of the longest suffix that occurs in `text` before another token, and the places behind it, newest first."""
    for length in range(min(most, len(suffix)), least - 1, -1):
        end = suffix[len(suffix) - length :]
        places = [place for place in range(len(text) - 1, length - 1, -1) if text[place - length : place] == end]
        if places:
            return length, places
    return 0, []
