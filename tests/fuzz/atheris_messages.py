"""Mutated messages for every decoder, by libFuzzer: `python -m tests.fuzz.atheris_messages -runs=1000000` (see `make fuzz`).

The decoders are C, which isn't instrumented: what guides the mutations is only the path through our own code. So they begin
from a valid message of each kind, which the input changes.
"""

from __future__ import annotations

import sys
from collections import Counter

import atheris
import msgspec
from hypothesis import find

with atheris.instrument_imports():
    from common.errors import MalformedMessageError
    from common.messages import decode

from tests.fuzz.messages import DECODERS, kinds_of, values_of

VALID = [
    (decoder, msgspec.msgpack.encode(find(values_of(kind), lambda _: True)))
    for decoder in DECODERS.values()
    for kind in kinds_of(decoder)
]
OUTCOMES: Counter[str] = Counter()


@atheris.instrument_func
def take(data: bytes) -> None:
    """Change one valid message at places and by bytes that `data` says, and decode it."""
    source = atheris.FuzzedDataProvider(data)
    decoder, valid = VALID[source.ConsumeIntInRange(0, len(VALID) - 1)]
    raw = bytearray(valid)
    for _ in range(source.ConsumeIntInRange(0, 4)):
        at = source.ConsumeIntInRange(0, len(raw))
        raw[at : at + source.ConsumeIntInRange(0, 4)] = source.ConsumeBytes(source.ConsumeIntInRange(0, 8))
    try:
        decode(decoder, bytes(raw))
        OUTCOMES["accepted"] += 1
    except MalformedMessageError:
        OUTCOMES["malformed"] += 1


if __name__ == "__main__":
    atheris.Setup(sys.argv, take)
    atheris.Fuzz()
