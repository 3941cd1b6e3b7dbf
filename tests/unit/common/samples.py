"""Values of messages in which every field says something."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, get_args

import msgspec
from msgspec import UnsetType

from common import messages

VALUES: dict[Any, Any] = {int: 7, float: 1.5, str: "decode-0", bytes: b"\x01\x02\x03\x04", bool: True}


def sample(kind: Any, *, nth_word: int = 1) -> Any:
    """A value of a type in which every field says something. Where only some words mean something today, it is one of them."""
    kind = getattr(kind, "__origin__", kind) if hasattr(kind, "__metadata__") else kind  # a number with bounds
    if kind in VALUES:
        return VALUES[kind]
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return list(kind)[nth_word % len(kind)]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        types = {field.name: field.type for field in msgspec.structs.fields(kind)}
        today = msgspec.structs.fields(getattr(messages, kind.__name__))
        types |= {field.name: field.type for field in today if field.name in types and has_words(field.type)}
        values = {name: sample(type_, nth_word=nth_word) for name, type_ in types.items()}
        return kind(**values | ({"v": messages.PROTOCOL_VERSION} if "v" in values else {}))
    inner = [sample(one, nth_word=nth_word) for one in get_args(kind) if one not in (type(None), UnsetType, ...)]
    origin = getattr(kind, "__origin__", None)
    return origin(inner) if origin in (list, tuple, frozenset) else dict([inner]) if origin is dict else inner[0]  # type: ignore[list-item]


def has_words(kind: Any) -> bool:
    return any(isinstance(one, type) and issubclass(one, StrEnum) for one in (kind, *get_args(kind)))
