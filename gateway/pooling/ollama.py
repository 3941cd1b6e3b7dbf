"""Ollama's API for vectors. Models of vectors are listed by its dialect."""

from __future__ import annotations

import time
from typing import Annotated, Any, ClassVar

from pydantic import Field, PrivateAttr, StrictBool, StrictStr, field_validator, model_validator

from gateway.answers.ask import lasting_s
from gateway.http.api import fields
from gateway.http.fields import Number, StrictFields
from gateway.http.problem import Json
from gateway.pooling.apis import LIST_OF_NUMBERS, Asking, written
from gateway.pooling.service import Wish
from gateway.pooling.texts import Fitting, PooledText
from gateway.pooling.vectors import TEXT_SCHEMA, Dimensions, cut, inputs_of, numbers
from modelfiles.pooling import EMBED


class OllamaEmbedRequest(StrictFields):
    """Body of POST /api/embed and /api/embeddings, Ollama's."""

    schemas: ClassVar[dict[str, dict[str, Any]]] = {
        "input": {"anyOf": [TEXT_SCHEMA, {"type": "array", "items": TEXT_SCHEMA}]}
    }

    model: StrictStr
    input: Any = None
    prompt: StrictStr | None = None  # the older form's
    truncate: StrictBool = True
    dimensions: Dimensions | None = None
    options: Annotated[dict[str, Any], Field(max_length=64)] = Field(default_factory=dict)
    keep_alive: StrictStr | Number | None = None  # workers of vectors stay
    _longest: int | None = PrivateAttr(default=None)

    @field_validator("input")
    @classmethod
    def _texts(cls, given: Any) -> list[PooledText] | None:
        return None if given is None else inputs_of(given)

    @model_validator(mode="after")
    def _checked(self) -> OllamaEmbedRequest:
        try:
            _ = self.keep_alive is None or lasting_s(self.keep_alive)
        except ValueError as error:
            raise ValueError(f"keep_alive: {error}") from None
        longest = self.options.get("num_ctx")
        if longest is not None and (type(longest) is not int or longest < 1):
            raise ValueError("options.num_ctx: must be an integer of at least 1")
        self._longest = longest
        return self

    @property
    def ignored(self) -> tuple[str, ...]:
        kept = () if self.keep_alive is None else ("keep_alive",)
        return (*kept, *(f"options.{name}" for name in self.options if name != "num_ctx"))

    @property
    def fitting(self) -> Fitting:
        return cut(self.truncate, longest=self._longest)


class OllamaEmbed:
    """Ollama's vectors, of length 1; of one prompt in the older form."""

    body = OllamaEmbedRequest

    def __init__(self, *, is_single: bool) -> None:
        self._is_single = is_single
        self.described = fields({"embedding": LIST_OF_NUMBERS} if is_single else {"embeddings": {"type": "array"}})

    async def answer(self, body: OllamaEmbedRequest, asking: Asking) -> Any:
        began = time.monotonic_ns()
        given = body.input or ([body.prompt] if body.prompt else [])
        size = asking.answering.find(body.model, EMBED).pooling.size
        if not given:
            return {"embedding": []} if self._is_single else {"model": body.model, "embeddings": []}
        wish = Wish(model=body.model, inputs=given, dimensions=body.dimensions or size, fitting=body.fitting)
        rows = await asking.rows(wish)

        def told() -> Json:
            if self._is_single:
                return {"embedding": numbers(rows.values[0])}
            told_ns = {"total_duration": time.monotonic_ns() - began, "load_duration": 0}
            vectors = [numbers(one) for one in rows.values]
            return {"model": body.model, "embeddings": vectors, **told_ns, "prompt_eval_count": rows.num_tokens}

        return await written(rows, told)
