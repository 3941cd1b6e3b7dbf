"""A router's reader of KV events, written from their documented form alone: `python kv_event_reader.py PUB REPLAY TOPIC`.

It prints a line of JSON for each batch that it takes in order: its number, and the blocks that it knows then by tier, each as the
tokens of its prompt so far. Of the first batches that come it drops every third, and asks again as soon as it sees the gap.
"""

from __future__ import annotations

import json
import struct
import sys
from typing import Any

import zmq

DROPPING = 12  # batches


def unpacked(data: bytes, at: int = 0) -> tuple[Any, int]:
    """The value of MessagePack that begins there, and where the next one does."""
    kind = data[at]
    at += 1
    if kind < 0x80:
        return kind, at
    if kind < 0x90 or kind in (0xDE, 0xDF):
        count, at = (kind & 15, at) if kind < 0x90 else number(data, at, 2 << (kind - 0xDE))
        found = {}
        for _ in range(count):
            key, at = unpacked(data, at)
            found[key], at = unpacked(data, at)
        return found, at
    if kind < 0xA0 or kind in (0xDC, 0xDD):
        count, at = (kind & 15, at) if kind < 0xA0 else number(data, at, 2 << (kind - 0xDC))
        items = []
        for _ in range(count):
            item, at = unpacked(data, at)
            items.append(item)
        return items, at
    if kind < 0xC0 or kind in (0xD9, 0xDA, 0xDB):
        count, at = (kind & 31, at) if kind < 0xC0 else number(data, at, 1 << (kind - 0xD9))
        return data[at : at + count].decode(), at + count
    if kind in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[kind], at
    if kind == 0xCB:
        return struct.unpack_from(">d", data, at)[0], at + 8
    if 0xCC <= kind <= 0xCF:
        return number(data, at, 1 << (kind - 0xCC))
    raise ValueError(f"kind {kind:#x} is in no batch")


def number(data: bytes, at: int, size: int) -> tuple[int, int]:
    return int.from_bytes(data[at : at + size], "big"), at + size


class Picture:
    """Blocks by tier and name, with the tokens from the prompt's beginning to theirs."""

    def __init__(self) -> None:
        self.tiers: dict[str, set[int]] = {}
        self.tokens: dict[int, list[int]] = {}

    def take(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "AllBlocksCleared":
                self.tiers.clear()
            case "BlockRemoved":
                self.tiers.get(event["medium"], set()).difference_update(event["block_hashes"])
            case "BlockStored":
                parent, size = event["parent_block_hash"], event["block_size"]
                before = [] if parent is None else self.tokens[parent]
                for at, name in enumerate(event["block_hashes"]):
                    before = self.tokens[name] = before + event["token_ids"][at * size : (at + 1) * size]
                    self.tiers.setdefault(event["medium"], set()).add(name)

    def shown(self) -> dict[str, list[list[int]]]:
        return {tier: sorted(self.tokens[name] for name in names) for tier, names in self.tiers.items()}


def missed(context: zmq.Context[Any], replay: str, first: int) -> dict[int, bytes]:
    """All batches from this number on that the publisher still has."""
    asking = context.socket(zmq.DEALER)
    asking.connect(replay)
    asking.send_multipart([b"", first.to_bytes(8, "big")])
    found: dict[int, bytes] = {}
    while True:
        empty, _, told, payload = asking.recv_multipart()
        assert empty == b""
        at = int.from_bytes(told, "big", signed=True)
        if at == -1:
            assert payload == b""
            asking.close(linger=0)
            return found
        found[at] = payload


def main(pub: str, replay: str, topic: str) -> None:
    context: zmq.Context[Any] = zmq.Context()
    hearing = context.socket(zmq.SUB)
    hearing.subscribe(topic.encode())
    hearing.connect(pub)
    picture, last, come, batches = Picture(), -1, 0, missed(context, replay, 0)
    while True:
        if gone := [at for at in range(last + 1, max(batches, default=last)) if at not in batches]:
            batches |= missed(context, replay, gone[0])
        while last + 1 in batches:
            last += 1
            _, events, rank = unpacked(batches.pop(last))[0]
            for event in events:
                picture.take(event)
            print(json.dumps({"batch": last, "rank": rank, "tiers": picture.shown()}), flush=True)
        said, told, payload = hearing.recv_multipart()
        assert said == topic.encode()
        come += 1
        if (at := int.from_bytes(told, "big")) > last and (come % 3 or come > DROPPING):
            batches[at] = payload


if __name__ == "__main__":
    main(*sys.argv[1:])
