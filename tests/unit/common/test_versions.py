"""Processes of two versions on one bus: the messages of the last release, frozen in a file (`freeze.py`), beside today's."""

from __future__ import annotations

import copy
import json
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from msgspec import UNSET

from common import messages, words
from common.errors import ForeignVersionError, MalformedMessageError
from common.messages import decode, encode
from tests.unit.common.samples import VALUES, sample

FIRST = json.loads((Path(__file__).parent / "messages_of_0_1_0.json").read_text())
SIMPLE: dict[str, type] = {kind.__name__: kind for kind in (int, float, str, bytes, bool)}
NO_REQUEST = (messages.SetRoles, messages.Drain, messages.Dial)
MOST_WORDS = max(len(kind) for kind in vars(words).values() if isinstance(kind, type) and issubclass(kind, StrEnum))


class Schema:
    """The structs and decoders that a frozen schema describes."""

    def __init__(self, frozen: dict[str, Any]) -> None:
        self._messages = frozen["messages"]
        self.kinds = {name: [self.struct(kind) for kind in kinds] for name, kinds in frozen["decoders"].items()}
        self.decoders = {name: msgspec.msgpack.Decoder(_union(kinds)) for name, kinds in self.kinds.items()}

    @cache  # noqa: B019 - as short-lived as the test session
    def struct(self, name: str) -> type[msgspec.Struct]:
        described = self._messages[name]
        required = [(field, self._type(kind)) for field, kind in described["required"].items()]
        optional = [(field, self._type(kind), None) for field, kind in described["optional"].items()]
        return msgspec.defstruct(name, [*required, *optional], kw_only=True, frozen=True, tag=described["tag"])

    def _type(self, text: str) -> Any:
        if text.endswith(" | None"):
            return self._type(text.removesuffix(" | None")) | None
        if text.startswith("list["):
            return list[self._type(text[5:-1])]  # type: ignore[misc]
        if text.startswith("dict["):
            key, value = text[5:-1].split(", ")
            return dict[SIMPLE[key], self._type(value)]  # type: ignore[misc]
        return SIMPLE.get(text) or self.struct(text)


def _union(kinds: list[type[msgspec.Struct]]) -> Any:
    union: Any = kinds[0]
    for kind in kinds[1:]:
        union |= kind
    return union


def common_part(value: Any, known: Any) -> Any:
    """`value` without the fields that `known` lacks, all the way down."""
    if isinstance(value, dict) and isinstance(known, dict):
        return {name: common_part(value[name], known[name]) for name in known if name in value}
    if isinstance(value, list | tuple) and isinstance(known, list | tuple):
        return [common_part(one, other) for one, other in zip(value, known, strict=True)]
    return value


def told(value: Any) -> Any:
    """Every field, also one that is left out on the wire because it has its default. (None and unset: the same.)"""
    if isinstance(value, msgspec.Struct):
        fields = {name: told(getattr(value, name)) for name in value.__struct_fields__}
        return {name: found for name, found in fields.items() if found is not None and found is not msgspec.UNSET}
    if isinstance(value, list | tuple):
        return [told(one) for one in value]
    return {key: told(one) for key, one in value.items()} if isinstance(value, dict) else value


def check(schema: Schema, decoder: str, kind: str) -> None:
    """A message of this kind means the same to both versions, whoever wrote it. Raises what a decoder raises, or `assert`."""
    old_kind, today = schema.struct(kind), getattr(messages, decoder)
    for nth_word in range(MOST_WORDS):
        old = sample(old_kind, nth_word=nth_word)
        read_today = decode(today, encode(old))
        assert type(read_today).__name__ == kind
        assert common_part(told(read_today), told(old)) == told(old)
        new = sample(getattr(messages, kind), nth_word=nth_word)
        read_then = schema.decoders[decoder].decode(encode(new))
        assert type(read_then) is old_kind
        assert common_part(told(new), told(read_then)) == told(read_then)


first = Schema(FIRST)
CASES = [(decoder, kind.__name__) for decoder, kinds in first.kinds.items() for kind in kinds]


@pytest.mark.parametrize(("decoder", "kind"), CASES)
def test_each_message_of_the_first_release_means_the_same_today(decoder: str, kind: str) -> None:
    check(first, decoder, kind)


@pytest.mark.parametrize(("decoder", "kind"), CASES)
def test_what_the_first_release_may_leave_out_has_a_default_today(decoder: str, kind: str) -> None:
    required = {
        field.name: sample(field.type) for field in msgspec.structs.fields(first.struct(kind)) if field.required
    }
    tag = FIRST["messages"][kind]["tag"]
    message = decode(getattr(messages, decoder), msgspec.msgpack.encode(required | {"type": tag}))
    assert type(message).__name__ == kind


@pytest.mark.parametrize("decoder", first.decoders)
def test_a_kind_that_came_later_is_refused_and_taken_for_no_other(decoder: str) -> None:
    """For a process of the last release it is malformed, counted, and changes nothing."""
    today = getattr(messages, decoder).type
    kinds = get_args(today) or (today,)
    later = [sample(kind) for kind in kinds if kind.__name__ not in FIRST["messages"]]
    if kinds[0].__struct_config__.tag is not None:
        later.append(msgspec.defstruct("NotYetThought", [("request_id", str)], tag="not yet thought of")("r"))
    for message in later:
        for readers in (first.decoders[decoder], getattr(messages, decoder)):
            if type(message).__name__ == "NotYetThought" or readers is first.decoders[decoder]:
                with pytest.raises(msgspec.ValidationError):
                    readers.decode(encode(message))


ABOUT_A_REQUEST = [
    *(kind for kind in get_args(messages.ToWorker) + get_args(messages.ToGateway) if kind not in NO_REQUEST),
    messages.Job,
    messages.Tokens,
]


@pytest.mark.parametrize("kind", ABOUT_A_REQUEST)
def test_every_message_about_a_request_has_its_trace(kind: type[msgspec.Struct]) -> None:
    assert sample(kind).traceparent == VALUES[str]


@pytest.mark.parametrize("kind", [kind for kind in ABOUT_A_REQUEST if kind not in (messages.Job, messages.Reserve)])
@pytest.mark.parametrize("knew", ["nothing of it", "an empty one"])  # the latter: `Handoff` of the releases before
def test_a_trace_is_on_the_wire_only_where_there_is_one(kind: type[msgspec.Struct], knew: str) -> None:
    """Beside releases whose messages had none: what is not traced is to the byte what they say, and what is they can read."""
    fields = [(field.name, field.type) for field in msgspec.structs.fields(kind) if field.name != "traceparent"]
    empty = [("traceparent", str, "")] if knew == "an empty one" else []
    tag = kind.__struct_config__.tag
    before = msgspec.defstruct(kind.__name__, [*fields, *empty], kw_only=True, frozen=True, tag=tag)
    values = {name: getattr(sample(kind), name) for name, _ in fields}
    today, then = msgspec.msgpack.Decoder(kind), msgspec.msgpack.Decoder(before)

    untraced = kind(**values)
    assert set(msgspec.msgpack.decode(encode(untraced))) == {*values, *(["type"] if tag else [])}
    assert then.decode(encode(untraced)) == before(**values)
    told = today.decode(encode(before(**values)))
    assert msgspec.structs.replace(told, traceparent=UNSET) == untraced
    assert not told.traceparent  # type: ignore[attr-defined]

    traced = msgspec.structs.replace(untraced, traceparent="00-a-b-01")
    assert today.decode(encode(traced)) == traced
    assert then.decode(encode(traced)) == before(**values, **({"traceparent": "00-a-b-01"} if empty else {}))


@pytest.mark.parametrize("change", ["gone", "renamed", "retyped", "retagged"])
def test_the_check_finds_a_change_that_is_none_of_adding(change: str) -> None:
    """Negative controls: the frozen schema is changed, which is as if today's had been."""
    frozen = copy.deepcopy(FIRST)
    claim = frozen["messages"]["Claim"]
    match change:
        case "gone":
            claim["required"]["fence"] = "int"
        case "renamed":
            claim["required"]["worker_id"] = claim["required"].pop("worker")
        case "retyped":
            claim["required"]["worker"] = "int"
        case "retagged":
            claim["tag"] = "claims"
    with pytest.raises((AssertionError, msgspec.ValidationError, MalformedMessageError)):
        check(Schema(frozen), "to_gateway_decoder", "Claim")


@pytest.mark.parametrize("version", [messages.MIN_PROTOCOL_VERSION - 1, messages.MAX_PROTOCOL_VERSION + 1])
def test_a_release_that_is_more_than_one_away_is_refused_with_the_remedy(version: int) -> None:
    for raw in (
        encode(messages.Received(v=version, request_id="r", attempt=1)),
        msgspec.msgpack.encode({"v": version}),
    ):
        with pytest.raises(ForeignVersionError, match=f"protocol version {version}: .* one release at a time"):
            decode(messages.to_worker_decoder, raw)


@pytest.mark.parametrize("version", range(messages.MIN_PROTOCOL_VERSION, messages.MAX_PROTOCOL_VERSION + 1))
def test_the_releases_before_and_after_are_understood(version: int) -> None:
    message = messages.Received(v=version, request_id="r", attempt=1)
    assert decode(messages.to_worker_decoder, encode(message)) == message
