"""The messages between the two ends of a UCX link.

    writer                                          receiver
      ◀──────────────── greeting (16 bytes that a writer reads and ignores) ─  stream
      ── hello: magic, the token of the receiver's `Region`, tag for answers ─▶
      ◀──────────────────────── welcome: magic, tag of headers, bytes of a slot
      ── header: lease, generation, pieces; u32s: runs, destination blocks ──▶  tagged messages from here on
      ── piece, piece, … ──────────────────────────────────────────────────▶
      ◀───────────────────────────────────────────────── answer (8 bytes) ──

A share of the blocks has its runs in the header, four numbers each: first lane in the block, lanes, how often, step. Its pieces
have the lanes of these alone. A `Region` names its listener's protocol, `PROTOCOL`, and says if it takes shares.
"""

from __future__ import annotations

import struct

PROTOCOL = "2"
MAGIC = b"BATON-2\0"
GREETING = bytes(16)
HELLO = struct.Struct("<8s16sQ32x")  # magic, token, tag of the answers
WELCOME = struct.Struct("<8sQQ8x")  # magic, tag of headers (pieces: the next), bytes of a slot
HEADER = struct.Struct("<QQIIBH37x")  # lease, generation, blocks (probe: pieces), blocks a piece, kind, runs
WRITE, PROBE, SHARE = 1, 2, 3
RUN_WORDS = 4
TAKEN, DROPPED = 1, 2
ANSWER = struct.Struct("<Q")

CONNECT_TIMEOUT_S = 5.0
RUN_TIMEOUT_S = 10.0  # from a run's header to its end
