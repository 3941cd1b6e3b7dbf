"""Ollama's questions about models, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import StrictStr, model_validator

from common.errors import InvalidRequestError
from gateway.answers.start import Answers
from gateway.dialects.dialect import Asked
from gateway.dialects.foreign import Foreign, TranslatedFields, as_ours, ignored
from gateway.dialects.ollama import vectors
from gateway.dialects.ollama.models import shown


def _named(name: Any) -> dict[str, str]:
    """Check the model's name; `model` takes precedence. Raises ValueError."""
    if not isinstance(name, str):
        raise ValueError("must be a string")
    return {"model": name}


# The name used by older clients.
NAME = as_ours("model", "name", schema={"type": ["string", "null"]}, means=_named)


class NamedModel(TranslatedFields):
    """Fields of a request about a model."""

    foreign: ClassVar[Mapping[str, Foreign]] = NAME

    model: StrictStr = ""

    @model_validator(mode="after")
    def _is_named(self) -> Self:
        if "model" not in self.model_fields_set:
            raise ValueError("model: is missing")
        return self


class ShowRequest(NamedModel):
    """Body of POST /api/show."""

    foreign: ClassVar[Mapping[str, Foreign]] = {
        **NAME,
        **ignored("what is served is shown", "verbose", "system", "template", "options"),
    }


class AnyRequest(TranslatedFields):
    """Body of a request that is always refused, with 404 for an unknown model."""

    model: StrictStr = ""

    @model_validator(mode="before")
    @classmethod
    def _its_model(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        named = (body.get(name) for name in ("model", "name"))
        return {"model": next((name for name in named if isinstance(name, str)), "")}


class Show:
    body = ShowRequest

    async def answer(self, body: ShowRequest, answers: Answers, asked: Asked) -> Any:
        return vectors.shown(body.model, answers) or shown(answers.find(body.model), answers)


class Refused:
    """A refused operation with its reason; for unknown models 404 comes first."""

    body = AnyRequest

    def __init__(self, why: str) -> None:
        self._why = why

    async def answer(self, body: AnyRequest, answers: Answers, asked: Asked) -> Any:
        raise InvalidRequestError(f"{answers.find(body.model).asked_as}: {self._why}")
