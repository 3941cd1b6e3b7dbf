"""Validation of JSON bodies field by field. Unsupported values are refused by name.

`null` means absent. Where a rule concerns several fields, its ValueError's message begins with a field's name, which `parse_body`
makes the error's `param`.
"""

from __future__ import annotations

import difflib
import re
from codecs import BOM_UTF8
from collections.abc import Collection, Container, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PrivateAttr,
    StrictInt,
    StrictStr,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from common.errors import InvalidRequestError

MAX_VALUES = 100_000  # values in a body; a list or object counts as two
MAX_TOKEN_IDS = 1 << 20
MAX_LISTS = 1024  # lists of ids in a field
SLICE_BYTES = 1 << 16  # other threads run between slices
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]  # integers pass; "1" and true do not
TokenId = Annotated[StrictInt, Field(ge=0, lt=2**32)]
_COMMA = re.compile(rb"[ \t\r\n]*,[ \t\r\n]*")
_ids_of = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]]).decode


def ids_read(info: ValidationInfo) -> list[Any] | None:
    """This field's value, already checked by `parse_body`: ids, or lists of ids."""
    return info.context.ids.get(info.field_name or "") if isinstance(info.context, Reading) else None


def _read_before(value: Any, check: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    return check(value) if (ids := ids_read(info)) is None else ids


# Only the first error is reported: a million of them would take seconds and a gigabyte.
TokenIds = Annotated[list[TokenId], FailFast(), WrapValidator(_read_before)]


def _whole(value: Any) -> Any:
    """Convert whole floats: some clients send 5.0 for 5."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[StrictInt, BeforeValidator(_whole)]
Count = Annotated[Whole, Field(ge=0)]
MetadataKey = Annotated[StrictStr, Field(max_length=64)]
MetadataValue = Annotated[StrictStr, Field(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)]
_NULL: dict[str, Any] = {"type": "null"}
OFF: dict[str, Any] = {
    "enum": [None, False, [], {}],
    "description": "not supported: only an absent, null or empty value is accepted",
}
_INERT: dict[str, Any] = {"description": "accepted: changes nothing here"}


def described(schema: dict[str, Any], model: type[StrictFields]) -> None:
    """Add to a class's JSON schema what its validators check."""
    required = schema.get("required", [])
    for field, rule in schema["properties"].items():
        if field in model.schemas:
            schema["properties"][field] = model.schemas[field]
        elif field not in required and not _may_be_null(rule):
            schema["properties"][field] = {"anyOf": [rule, _NULL]}
    schema["properties"] |= dict.fromkeys(model.unsupported, OFF) | dict.fromkeys(model.inert, _INERT)


def _may_be_null(rule: dict[str, Any]) -> bool:
    return _NULL in rule.get("anyOf", []) or ("type" not in rule and "anyOf" not in rule and "$ref" not in rule)


class StrictFields(BaseModel):
    """A body that refuses unknown fields; null, inert, and unsupported fields that are off are dropped."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=described)
    unsupported: ClassVar[dict[str, str]] = {}  # known fields that are refused, and why
    inert: ClassVar[frozenset[str]] = frozenset()  # known fields that are ignored
    many: ClassVar[Mapping[str, int]] = {}  # fields with their own limit on entries
    schemas: ClassVar[dict[str, dict[str, Any]]] = {}  # JSON schemas of fields that are validated in code
    _ignored: tuple[str, ...] = PrivateAttr(default=())

    @property
    def ignored(self) -> tuple[str, ...]:
        """Ignored fields of the body that the client is told about."""
        return self._ignored

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        kept = {}
        for name, value in body.items():
            if name in cls.unsupported:
                if value is not None and value is not False and value != [] and value != {}:
                    raise ValueError(f"{name}: {cls.unsupported[name] or 'not supported yet'}")
            elif value is not None and name not in cls.inert:
                kept[name] = value
        return kept


class LenientFields(StrictFields):
    """A body that ignores unknown fields: histories carry fields of other servers and frameworks."""

    model_config = ConfigDict(extra="ignore", json_schema_extra=described)


IGNORED_HEADER = "x-baton-ignored-fields"
MAX_NAMED = 32
MAX_NAME_CHARS = 64
_NAMEABLE = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_NAME_CHARS}}}\Z")


def ignored_header(body: BaseModel, heeded: Collection[str] = ()) -> dict[str, str]:
    """The answer's header that lists ignored fields but the `heeded` ones; odd names, which clients choose, are only counted."""
    ignored = [name for name in getattr(body, "ignored", ()) if name not in heeded]
    named = [name for name in ignored if _NAMEABLE.match(name)][:MAX_NAMED]
    others = [f"and {len(ignored) - len(named)} more"] if len(ignored) > len(named) else []
    return {IGNORED_HEADER: ", ".join([*named, *others])} if ignored else {}


Body = TypeVar("Body", bound=BaseModel)


class Values(NamedTuple):
    """Upper bounds on the values in a JSON text: all but the first in each list or object follow a comma."""

    commas: int
    containers: int  # lists and objects

    @property
    def total(self) -> int:
        return self.commas + 2 * self.containers

    @classmethod
    def signs_in(cls, text: bytes) -> Values:
        """Count punctuation, including any in strings: an upper bound."""
        return cls(text.count(b","), text.count(b"[") + text.count(b"{"))

    @classmethod
    def counted(cls, text: bytes) -> Values:
        """Count values up to the first syntax error."""
        found = [cls.signs_in(part) for part in _outside_of_strings(text)]
        return cls(sum(one.commas for one in found), sum(one.containers for one in found))


def _outside_of_strings(text: bytes) -> Iterable[bytes]:
    """JSON text without its strings, in slices."""
    is_string, start = False, 0
    while start < len(text):
        part = text[start : start + SLICE_BYTES]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # the next character is escaped
            part = text[start : start + SLICE_BYTES + 1]
        pieces = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(pieces[is_string::2])
        is_string ^= len(pieces) % 2 == 0
        start += len(part)


@dataclass(slots=True)
class TextsLeft:
    """The number of values that JSON in a body's strings may still have."""

    count: int = MAX_VALUES

    def take(self, text: str) -> None:
        """Count the values in `text` before it is parsed. Raises ValueError."""
        raw = text.encode("utf-8", "surrogatepass")
        signs = Values.signs_in(raw).total
        self.count -= signs if signs <= self.count else Values.counted(raw).total
        if self.count < 0:
            raise ValueError(
                f"JSON in strings has more than {MAX_VALUES} values together (lists and objects count twice)"
            )


def check_values(raw: bytes, many: Mapping[str, int]) -> None:
    """Refuse a body that would take long to parse, before parsing it.

    `many`: see `StrictFields`. Raises InvalidRequestError with the field's name.
    """
    if Values.signs_in(raw).total <= MAX_VALUES:
        return
    whole = Values.counted(raw)
    if whole.total <= MAX_VALUES:
        return
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:  # not an object
        fields = {}
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    rest = whole.total
    for name in many.keys() & fields:
        commas = Values.counted(bytes(fields.pop(name))).commas
        if commas > many[name]:
            raise _too_many(name, f"more than {many[name]} entries")
        rest -= commas
    if rest > MAX_VALUES:
        largest = max(fields, key=lambda name: len(bytes(fields[name])), default="")
        is_alone = largest != "" and 2 * Values.counted(bytes(fields[largest])).total > MAX_VALUES
        told = f"more than {MAX_VALUES} values (lists and objects count twice)"
        raise _too_many(largest[:100] if is_alone else "", told)


def _too_many(field: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: has {what}" if field else f"the body has {what}", param=field or None)


@dataclass(frozen=True, slots=True)
class Reading:
    """The context shared by a body's validators."""

    texts: TextsLeft
    ignores_unknown: bool  # drops unknown fields
    ids: Mapping[str, list[Any]]  # long fields that are checked, and empty in the body


def _without_ids(raw: bytes, names: Set[str], lists: Container[str]) -> tuple[bytes, dict[str, list[Any]]]:
    """A body with `[]` in place of token ids (lists of them for `lists`), and the ids."""
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return raw, {}  # its validator reports the fault
    found = dict[str, list[Any]]()
    for name in names & fields.keys():
        text = bytes(fields[name])
        if ids := _token_ids(text) or (_lists_of_ids(text) if name in lists else []):
            found[name] = ids
    return (msgspec.json.encode(fields | dict.fromkeys(found, msgspec.Raw(b"[]"))), found) if found else (raw, {})


def _token_ids(text: bytes) -> list[int]:
    """Token ids of a JSON list, parsed in slices. Empty if something else is in it."""
    if not text.startswith(b"["):
        return []
    ids, start, end = list[int](), 1, len(text) - 1
    while start < end:
        comma = text.find(b",", start + SLICE_BYTES)
        stop = end if comma < 0 else comma
        try:
            ids += _ids_of(b"[%b]" % text[start:stop])
        except msgspec.MsgspecError:
            return []
        start = stop + 1
    return ids


def _lists_of_ids(text: bytes) -> list[list[int]]:
    """Token ids of a JSON list of lists. Empty if something else is in it, an empty list, or too many lists."""
    inner, found, start = text[1:-1].strip(), list[list[int]](), 0
    while len(found) < MAX_LISTS and inner.startswith(b"[", start):
        stop = inner.find(b"]", start) + 1
        ids = _token_ids(inner[start:stop])
        if not ids:
            return []
        found.append(ids)
        if stop == len(inner):
            return found
        comma = _COMMA.match(inner, stop)
        if comma is None:
            return []
        start = comma.end()
    return []


NOT_GIVEN: Mapping[str, str] = {}


def parse_body(
    raw: bytes, model: type[Body], *, given: Mapping[str, str] = NOT_GIVEN, ignores_unknown: bool = False
) -> Body:
    """Validate a JSON body, with the fields `given` by its path. Raises InvalidRequestError that names the first invalid one.

    Validators get a `Reading` as their context.
    """
    raw, many = raw.removeprefix(BOM_UTF8), getattr(model, "many", {})
    check_values(raw, many)
    raw = _with_given(raw, given) if given else raw
    lists = getattr(model, "lists_of_ids", ())
    raw, ids = _without_ids(raw, many.keys(), lists) if many and len(raw) > SLICE_BYTES else (raw, {})
    try:
        return model.model_validate_json(raw, context=Reading(TextsLeft(), ignores_unknown, ids))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = [str(part) for part in first["loc"]][getattr(model, "kind_depth", 0) :]
        if first["type"] == "extra_forbidden":
            raise _unknown(where, model) from None
        raise _invalid(first["type"], where, first["msg"]) from None


def _with_given(raw: bytes, given: Mapping[str, str]) -> bytes:
    """A body with the path's fields. Raises InvalidRequestError if the body contradicts them."""
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        said = {name: msgspec.json.decode(fields[name]) for name in given if name in fields}
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return raw  # its validator reports the fault
    for name, value in said.items():
        if value is not None and value != given[name]:
            raise InvalidRequestError(
                f"{name}: the path says {given[name][:100]!r}: leave it out, or say the same", param=name
            )
    return msgspec.json.encode(
        fields | {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in given.items()}
    )


def _unknown(where: list[str], model: type[BaseModel]) -> InvalidRequestError:
    is_short = len(where) == 1 and len(where[0]) <= MAX_NAME_CHARS
    nearest = difflib.get_close_matches(where[0], model.model_fields, 1) if is_short else []
    meant = f"did you mean {nearest[0]!r}?" if nearest else "remove it or check its spelling"
    return InvalidRequestError(f"unknown field {'.'.join(where)!r}: {meant}", param=where[0])


def _invalid(kind: str, where: list[str], message: str) -> InvalidRequestError:
    message = message.removeprefix("Value error, ")
    path = ".".join(where)
    if kind == "json_invalid":
        return InvalidRequestError(f"the body is not valid JSON: {message.removeprefix('Invalid JSON: ')}")
    if kind == "missing":
        return InvalidRequestError(f"{path}: this field is required", param=where[0])
    if where:
        return InvalidRequestError(f"{path}: {message}", param=where[0])
    param, separator, _ = message.partition(": ")  # a rule over several fields
    return InvalidRequestError(message, param=param if separator and param.isidentifier() else None)
