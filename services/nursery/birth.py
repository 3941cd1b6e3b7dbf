"""The messages between `baton up` and the nursery. They import nothing that workers need."""

from __future__ import annotations

import msgspec

MAX_BYTES = 64 << 10
# Begins an answer that is no pid, but the reason why the worker would refuse its model.
REFUSED = b"!"


class Birth(msgspec.Struct, frozen=True):
    """A worker to fork; the reply is its pid, or `REFUSED` and why it would not start."""

    service: str  # prefill, decode or worker
    variables: dict[str, str]  # added to the nursery's own
    log_file: str
    has_twins: bool = False  # other workers have the same settings
