"""Words on the wire: today's mean what they meant, and one that nobody here knows loses no message."""

from __future__ import annotations

from enum import StrEnum

import msgspec
import pytest

from common import words
from common.messages import HandoffReply, ReserveReply, decode, encode, worker_reply_decoder
from common.words import Refusal

KINDS = [kind for kind in vars(words).values() if isinstance(kind, type) and issubclass(kind, StrEnum) and len(kind)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_word_that_is_not_known_here_reads_as_other(kind: type[StrEnum]) -> None:
    decoder = msgspec.msgpack.Decoder(list[kind])  # type: ignore[valid-type]
    assert decoder.decode(msgspec.msgpack.encode(["new in 0.9", "", "other"]))[::2] == [kind("other")] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_word_is_written_as_the_plain_text_that_it_was(kind: type[StrEnum]) -> None:
    for word in kind:
        assert msgspec.msgpack.encode(word) == msgspec.msgpack.encode(word.value)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_text_is_malformed(kind: type[StrEnum]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(7), type=kind)


def test_a_newer_peers_refusal_is_a_refusal() -> None:
    raw = msgspec.msgpack.encode({"type": "reserve_reply", "granted": False, "reason": "too hot", "because": "summer"})
    assert decode(worker_reply_decoder, raw) == ReserveReply(granted=False, reason=Refusal.OTHER)


@pytest.mark.parametrize(
    ("said", "understood"),
    [("invalid: max_tokens must be at least 1", Refusal.INVALID), ("full", Refusal.FULL), ("stale", Refusal.STALE)],
)
def test_what_the_release_before_said_is_understood(said: str, understood: Refusal) -> None:
    """It wrote the detail behind the word."""
    raw = msgspec.msgpack.encode({"type": "reserve_reply", "granted": False, "reason": said})
    assert decode(worker_reply_decoder, raw) == ReserveReply(granted=False, reason=understood)


def test_the_release_before_reads_a_refusal_as_the_word_that_it_knows() -> None:
    said = ReserveReply(granted=False, reason=Refusal.INVALID, detail="max_tokens must be at least 1")
    assert msgspec.msgpack.decode(encode(said))["reason"] == "invalid"
    assert msgspec.msgpack.decode(encode(ReserveReply(granted=True)))["reason"] == ""
    assert msgspec.msgpack.decode(encode(HandoffReply(accepted=False, reason=Refusal.DIGEST)))["reason"] == "digest"
