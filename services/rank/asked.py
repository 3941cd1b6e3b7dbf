"""The first words to a further rank, on its command line."""

from __future__ import annotations

import msgspec


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that a rank needs before its leader sends the engine's settings. `ps` shows them, so there are no secrets."""

    worker: str
    transport: str
    host: str  # at which peers reach the transport
    stages: int  # 1: processes are ranks alone; else each stage has as many
    on_gpu: bool  # the one with its number that the leader sees
    first: int = 0  # the number of the first process on its host
    here: int  # processes there
    model: str = ""  # on its host; "": where the leader has it
    drafter: str = ""  # the same of a draft head or model
    log_level: str
    log_format: str
