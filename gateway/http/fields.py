"""Checking JSON bodies field by field. What can't be honoured is refused by name.

`null` means absent. Where a rule concerns several fields, its ValueError's message begins with a field's name, which `parse_body`
makes the error's `param`.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)

from common.errors import InvalidRequestError

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]  # integers pass; "1" and true do not
TokenId = Annotated[StrictInt, Field(ge=0, lt=2**32)]


def _whole(value: Any) -> Any:
    """Some clients send 5.0 for 5."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[StrictInt, BeforeValidator(_whole), Field(ge=0)]
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
    """Refuses unknown fields; drops null ones, known or not, inert ones, and unsupported ones that are off."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=described)
    unsupported: ClassVar[dict[str, str]] = {}  # known fields that are refused, and why
    inert: ClassVar[frozenset[str]] = frozenset()  # known fields that change nothing here
    schemas: ClassVar[dict[str, dict[str, Any]]] = {}  # JSON schemas of fields that validators check in code

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


Body = TypeVar("Body", bound=BaseModel)


def parse_body(raw: bytes, model: type[Body]) -> Body:
    """Validate a JSON body. Raises InvalidRequestError that names the first wrong field."""
    try:
        return model.model_validate_json(raw.removeprefix(BOM_UTF8))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise _invalid(first["type"], [str(part) for part in first["loc"]], first["msg"]) from None


def _invalid(kind: str, where: list[str], message: str) -> InvalidRequestError:
    message = message.removeprefix("Value error, ")
    path = ".".join(where)
    if kind == "extra_forbidden":
        return InvalidRequestError(f"unknown field {path!r}: remove it or check its spelling", param=where[0])
    if kind == "json_invalid":
        return InvalidRequestError(f"the body is not valid JSON: {message.removeprefix('Invalid JSON: ')}")
    if kind == "missing":
        return InvalidRequestError(f"{path}: this field is required", param=where[0])
    if where:
        return InvalidRequestError(f"{path}: {message}", param=where[0])
    param, separator, _ = message.partition(": ")  # a rule over several fields
    return InvalidRequestError(message, param=param if separator and param.isidentifier() else None)
