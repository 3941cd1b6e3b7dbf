"""The message of `baton up` to the nursery of a worker. It imports nothing that workers need."""

from __future__ import annotations

import msgspec

MAX_BYTES = 64 << 10


class Birth(msgspec.Struct, frozen=True):
    """A worker to be; its pid is the answer."""

    service: str  # prefill, decode or worker
    variables: dict[str, str]  # besides those that the nursery has
    log_file: str
    has_twins: bool = False  # others come with the same settings
