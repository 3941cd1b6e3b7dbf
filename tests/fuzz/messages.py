"""Every decoder of the bus, and values that look like its messages."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, get_args

import msgspec
from hypothesis import strategies as st

from common import messages
from gateway.console import messages as console

DECODERS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    name: decoder
    for module in (messages, console)
    for name, decoder in vars(module).items()
    if isinstance(decoder, msgspec.msgpack.Decoder)
}


def kinds_of(decoder: msgspec.msgpack.Decoder[Any]) -> tuple[type[msgspec.Struct], ...]:
    return get_args(decoder.type) or (decoder.type,)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type, as a decoder would take them."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = {field.encode_name: values_of(field.type) for field in msgspec.structs.fields(kind)}
        if "v" in fields:  # any number at all is hardly ever a version that is understood
            known = range(messages.MIN_PROTOCOL_VERSION, messages.MAX_PROTOCOL_VERSION + 1)
            fields["v"] = st.sampled_from([*known] * 4 + [known[0] - 1, known[-1] + 1])
        tag = kind.__struct_config__.tag
        return st.fixed_dictionaries(fields | ({"type": st.just(tag)} if tag else {}))
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return st.sampled_from([*(word.value for word in kind), "new in 0.9"])
    simple = {
        int: st.integers(-(2**63), 2**64 - 1),
        float: st.floats(),
        str: st.text(max_size=12),
        bytes: st.binary(max_size=40),
        bool: st.booleans(),
        type(None): st.none(),
    }
    if kind in simple:
        return simple[kind]
    if bounds := [one for one in getattr(kind, "__metadata__", ()) if isinstance(one, msgspec.Meta)]:
        if bounds[0].max_length is not None:  # longer than any value below
            return values_of(kind.__origin__)
        return st.integers(
            -(2**63) if bounds[0].ge is None else bounds[0].ge, 2**63 if bounds[0].le is None else bounds[0].le
        )
    inner = [values_of(one) for one in get_args(kind) if one not in (Ellipsis, msgspec.UnsetType)]
    origin = getattr(kind, "__origin__", None)
    if origin in (list, tuple, frozenset):
        return st.lists(inner[0], max_size=3)
    if origin is dict:
        return st.dictionaries(inner[0], inner[1], max_size=3)
    return st.one_of(inner) if inner else anything


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=6) | st.binary()
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)


@st.composite
def raw_bytes(draw: st.DrawFn, decoder: msgspec.msgpack.Decoder[Any]) -> bytes:
    """Nearly a message: a valid one with wrong values, cut, flipped or with bytes between; or just bytes."""
    how = draw(st.sampled_from(["noise", "msgpack", "typed", "typed", "cut", "flip", "insert"]))
    if how == "noise":
        return draw(st.binary(max_size=200))
    if how == "msgpack":
        return msgspec.msgpack.encode(draw(anything))
    fields = draw(values_of(draw(st.sampled_from(kinds_of(decoder)))))
    if how != "typed" or draw(st.booleans()):
        wrong = draw(st.sampled_from(sorted(fields)))
        fields = fields | {wrong: draw(anything)} if draw(st.booleans()) else fields
    raw = msgspec.msgpack.encode(fields)
    at = draw(st.integers(0, max(0, len(raw) - 1)))
    match how:
        case "cut":
            return raw[:at]
        case "flip":
            return raw[:at] + bytes([raw[at] ^ draw(st.integers(1, 255))]) + raw[at + 1 :]
        case "insert":
            return raw[:at] + draw(st.binary(min_size=1, max_size=4)) + raw[at:]
    return raw
