"""Nobody lies in a simulated world: every message is said in its speaker's own name, and every one is believed."""

from __future__ import annotations

import msgspec

from common.messages import encode
from common.messages.arrivals import contradiction


def honest(subject: str, message: msgspec.Struct) -> bytes:
    """The message as it travels."""
    assert not contradiction(subject, message)
    return encode(message)


def believed(_: object, subject: str, why: str) -> None:
    """`Bus.refuse`."""
    raise AssertionError(f"an honest message on {subject} was refused: {why}")
