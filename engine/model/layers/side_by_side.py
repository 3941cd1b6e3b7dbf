"""Mamba-2 and attention in parallel: both read one norm of the stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.batch.batch import ForwardBatch
from engine.model.layers.attention import GroupedQueryAttention
from engine.model.layers.building import Surroundings, declare_branch
from engine.model.layers.mamba import Mamba
from engine.model.stream import Stream
from engine.spec.model import BranchSpec, SideBySideSpec


class SideBySide:
    def __init__(self, spec: SideBySideSpec, around: Surroundings) -> None:
        def half(branch: BranchSpec, *, is_read_again: bool = False) -> Surroundings:
            declared = declare_branch(
                branch, around.model, around.weights, under=around.under, is_read_again=is_read_again
            )
            return replace(around, branch=declared)

        self._mamba = Mamba(spec.mamba, half(spec.around_mamba, is_read_again=True))
        self._attention = GroupedQueryAttention(spec.attention, half(spec.around_attention))
        self._first_state = len(spec.attention.kept)

    def __call__(self, stream: Stream, batch: ForwardBatch, kept: Sequence[Any], *, is_last: bool) -> None:
        # Attention reads all rows, too: only after it some of them continue.
        self._mamba(stream, batch, kept[self._first_state :], is_last=False)
        self._attention(stream, batch, kept[: self._first_state], is_last=is_last)
