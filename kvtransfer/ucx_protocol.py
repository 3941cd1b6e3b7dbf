"""What the two ends of a UCX link say to each other.

    writer                                          receiver
      ◀──────────────────────── peer info (16 bytes: a tag, its checksum) ──  stream
      ── hello: magic, the token of the receiver's `Region`, tag for answers ─▶
      ◀──────────────────────── welcome: magic, tag of headers, bytes of a slot
      ── header: lease, generation, pieces; the destination blocks (u32 each) ▶  tagged messages from here on
      ── piece, piece, … ──────────────────────────────────────────────────▶
      ◀───────────────────────────────────────────────── answer (8 bytes) ──

The peer info comes first because the release before this one begins so (`ucx_before`): who answers it with peer info instead
of a hello is of that release. A `Region` names its listener's protocol, `PROTOCOL`; that release's have no name.
"""

from __future__ import annotations

import struct

from ucxx._lib_async.utils import hash64bits

PROTOCOL = "2"
MAGIC = b"BATON-2\0"
PEER_INFO = struct.Struct("<QQ")  # tag, checksum
HELLO = struct.Struct("<8s16sQ32x")  # magic, token, tag of the answers
WELCOME = struct.Struct("<8sQQ8x")  # magic, tag of the headers (the pieces' is the next), bytes of a slot
HEADER = struct.Struct("<QQIIB39x")  # lease, generation, number of blocks (probe: of pieces), blocks in a piece, kind
WRITE, PROBE = 1, 2
TAKEN, DROPPED = 1, 2
ANSWER = struct.Struct("<Q")

CONNECT_TIMEOUT_S = 5.0
RUN_TIMEOUT_S = 10.0  # from a run's header to its end


def peer_info(tag: int) -> bytes:
    """Return the binding's own greeting for a tag."""
    return PEER_INFO.pack(tag, hash64bits(tag))


def tag_in(info: bytes | bytearray) -> int | None:
    """Return the tag of a greeting, None if it is none."""
    tag, checksum = PEER_INFO.unpack(info)
    return int(tag) if checksum == hash64bits(tag) else None
