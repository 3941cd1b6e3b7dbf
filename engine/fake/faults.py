"""Faults of the fake device: a prompt that begins with a certain token breaks its pass.

`exit:505,hang-decoding:506` ends the process on a prompt that begins with 505, and hangs a pass that decodes one with 506.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import torch

from engine.engine import Chunk

EXIT_CODE = 139  # as after a segmentation fault
HANG_S = 3600.0
DECODED_BEFORE_FAULT = 3  # generated tokens: a `-decoding` fault comes after the handoff


class FakeFaults:
    """Token -> fault; "" means none. Raises ValueError unless the text is a list of `kind:token`."""

    def __init__(self, text: str) -> None:
        self._kinds: dict[int, str] = {}
        for entry in filter(None, text.split(",")):
            kind, _, token = entry.partition(":")
            if kind.removesuffix("-decoding") not in _FAULTS or not token.isdigit():
                raise ValueError(f"{entry!r} is not kind:token with a kind of {', '.join(_FAULTS)}, or one -decoding")
            self._kinds[int(token)] = kind

    def strike(self, chunks: Sequence[Chunk]) -> None:
        """Cause the faults of these chunks: end or hang the process, or raise what a device raises."""
        for chunk in chunks:
            kind = self._kinds.get(chunk.sequence.token_ids[0])
            if kind is not None and _is_due(kind, chunk):
                _FAULTS[kind.removesuffix("-decoding")]()


def _is_due(kind: str, chunk: Chunk) -> bool:
    if kind.endswith("-decoding"):
        return chunk.decodes and chunk.sequence.num_generated >= DECODED_BEFORE_FAULT
    return chunk.start == 0


def _out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory (fake device)")


def _kernel_failure() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered (fake device)")


_FAULTS: dict[str, Callable[[], object]] = {
    "exit": lambda: os._exit(EXIT_CODE),
    "hang": lambda: time.sleep(HANG_S),
    "fail": _kernel_failure,
    "oom": _out_of_memory,
}
