"""Freezes today's messages as a schema: `python -m tests.unit.common.freeze > tests/unit/common/messages_of_VERSION.json`.

Done once with each release, so the next one's tests know what a process of this release writes and reads. Enums are frozen
as the text that they are on the wire.
"""

from __future__ import annotations

import json
import types
from enum import Enum
from typing import Any, Union, get_args, get_origin

import msgspec

from common import messages

DECODERS = (
    "to_worker_decoder",
    "to_gateway_decoder",
    "worker_reply_decoder",
    "gateway_reply_decoder",
    "frame_decoder",
    "job_decoder",
    "worker_state_decoder",
    "planner_state_decoder",
    "gateway_state_decoder",
)


def freeze() -> dict[str, Any]:
    """Decoders with the kinds that they take, and every struct with its tag and fields."""
    kinds = {name: get_args(getattr(messages, name).type) or (getattr(messages, name).type,) for name in DECODERS}
    found: dict[str, dict[str, Any]] = {}
    for kind in (kind for several in kinds.values() for kind in several):
        _describe(kind, found)
    decoders = {name: [kind.__name__ for kind in several] for name, several in kinds.items()}
    return {"decoders": decoders, "messages": dict(sorted(found.items()))}


def _describe(kind: type[msgspec.Struct], found: dict[str, dict[str, Any]]) -> None:
    if kind.__name__ in found:
        return
    found[kind.__name__] = described = {"tag": kind.__struct_config__.tag, "required": {}, "optional": {}}
    for field in msgspec.structs.fields(kind):
        described["required" if field.required else "optional"][field.name] = _name(field.type, found)


def _name(kind: Any, found: dict[str, dict[str, Any]]) -> str:
    if get_origin(kind) in (Union, types.UnionType):
        known = [one for one in get_args(kind) if one not in (type(None), msgspec.UnsetType)]
        (only,) = known
        return _name(only, found) + (" | None" if type(None) in get_args(kind) else "")
    if get_origin(kind) in (list, tuple):
        return f"list[{_name(get_args(kind)[0], found)}]"
    if get_origin(kind) is dict:
        key, value = get_args(kind)
        return f"dict[{_name(key, found)}, {_name(value, found)}]"
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        _describe(kind, found)
    elif isinstance(kind, type) and issubclass(kind, Enum):
        return "str"
    return str(kind.__name__)


if __name__ == "__main__":
    print(json.dumps(freeze(), indent=1))
