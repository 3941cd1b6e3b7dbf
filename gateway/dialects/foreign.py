"""Fields of other APIs that a dialect knows, and how each is treated.

They mean one of ours, or change nothing here and are named in the answer's headers, or would change the answer and are refused
with the remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, ModelWrapValidatorHandler, ValidationInfo, model_validator

from gateway.http.fields import Reading, StrictFields, described

Json = dict[str, Any]
EMPTY: tuple[Any, ...] = (False, "", [], {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """The treatment of a field. Without `means` it is ignored, or refused unless its value is one of `off`."""

    says: str  # our field, the reason for ignoring it, or the remedy
    means: Callable[[Any], Mapping[str, Any]] | None = None  # our fields; raises ValueError
    is_refused: bool = False
    off: tuple[Any, ...] = ()  # values equal to the field's absence
    schema: Mapping[str, Any] = field(default_factory=dict)

    @property
    def described(self) -> Json:
        """Its JSON schema."""
        absent = [*self.off, *_twins(self.off)]
        if self.is_refused:
            return {"enum": [None, *absent], "description": self.fate}
        schema: Json = {"anyOf": [self.schema, {"enum": absent}]} if self.schema and absent else dict(self.schema)
        return schema | {"description": self.fate}

    @property
    def fate(self) -> str:
        """For docs."""
        if self.means is not None:
            return f"as {self.says}"
        return f"refused: {self.says}" if self.is_refused else f"ignored: {self.says}"


def _twins(values: Iterable[Any]) -> list[Any]:
    """0 and 1 beside false and true, and vice versa: Python compares them as equal."""
    return [int(one) if one is False or one is True else bool(one) for one in values if one in (0, 1)]


def translated(
    body: Mapping[str, Any], foreign: Mapping[str, Foreign], unknown: Collection[str] = ()
) -> tuple[Json, tuple[str, ...]]:
    """A body in our fields, and the names of its ignored ones, `unknown` ones included. Our own fields take precedence.

    Raises ValueError that begins with a field's name.
    """
    ours: Json = {}
    meant: list[Mapping[str, Any]] = []
    ignored: list[str] = []
    for name, value in body.items():
        fate = foreign.get(name)
        if fate is None and name not in unknown:
            ours[name] = value
        elif value is None or (fate is not None and value in fate.off):
            continue
        elif fate is None or (fate.means is None and not fate.is_refused):
            ignored.append(name)
        elif fate.means is not None:
            meant.append(_meant(name, value, fate.means))
        else:
            raise ValueError(f"{name}: {fate.says}")
    for fields in meant:
        for name, value in fields.items():
            _join(ours, name, value)
    return ours, tuple(ignored)


def _meant(name: str, value: Any, means: Callable[[Any], Mapping[str, Any]]) -> Mapping[str, Any]:
    try:
        return means(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _join(ours: Json, name: str, value: Any) -> None:
    said = ours.get(name)
    if said is None:
        ours[name] = value
    elif isinstance(said, dict) and isinstance(value, dict):
        ours[name] = value | said


# -- entries of a table ------------------------------------------------------------------------------------------------


def as_ours(
    says: str,
    *fields: str,
    schema: Json,
    means: Callable[[Any], Mapping[str, Any]] | None = None,
    off: tuple[Any, ...] = (),
) -> dict[str, Foreign]:
    written = says if "`" in says else f"`{says}`"
    return dict.fromkeys(fields, Foreign(says=written, means=means or _same(says), off=off, schema=schema))


def ignored(why: str, *fields: str) -> dict[str, Foreign]:
    return dict.fromkeys(fields, Foreign(says=why))


def refused(remedy: str, *fields: str, off: tuple[Any, ...] = EMPTY) -> dict[str, Foreign]:
    return dict.fromkeys(fields, Foreign(says=remedy, is_refused=True, off=off))


def _same(name: str) -> Callable[[Any], Json]:
    return lambda value: {name: value}


# -- bodies with such fields ------------------------------------------------------------------------------------------


def _described(schema: Json, model: type[TranslatedFields]) -> None:
    """See `described`; `foreign` fields as well."""
    described(schema, model)
    schema["properties"] |= {name: one.described for name, one in model.foreign.items()}


class TranslatedFields(StrictFields):
    """A body whose `foreign` fields become ours before validation."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=_described)
    foreign: ClassVar[Mapping[str, Foreign]] = {}

    @model_validator(mode="wrap")
    @classmethod
    def _translated(cls, body: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        ignores = isinstance(info.context, Reading) and info.context.ignores_unknown
        if not isinstance(body, dict) or (not ignores and cls.foreign.keys().isdisjoint(body)):
            return handler(body)
        known = cls.model_fields.keys() | cls.unsupported.keys() | cls.inert
        ours, unread = translated(body, cls.foreign, body.keys() - known if ignores else ())
        made = handler(ours)
        made._ignored = unread
        return made
