"""The message in which `baton up` asks the nursery for a worker. It imports nothing that workers need."""

from __future__ import annotations

import msgspec

MAX_BYTES = 64 << 10


class Birth(msgspec.Struct, frozen=True):
    """A worker to fork; the reply is its pid."""

    service: str  # prefill, decode or worker
    variables: dict[str, str]  # added to the nursery's own
    log_file: str
    has_twins: bool = False  # other workers have the same settings
