"""An API of models that pool: a path's body, and the answer to it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import AfterValidator, Field, StrictInt

from common.errors import InvalidRequestError
from gateway.http.exchange import RequestScope
from gateway.http.fields import MAX_TOKEN_IDS, StrictFields
from gateway.http.problem import Json
from gateway.pooling.service import Answering, Rows, Wish
from gateway.pooling.texts import Fitting
from modelfiles.pooling import Prompts

SHORT_BYTES = 1 << 16  # rows of fewer bytes are written on the loop


def _leaves_some(tokens: int) -> int:
    if not tokens:
        raise ValueError("must be -1 (the model's length) or at least 1")
    return tokens


Priority = Annotated[StrictInt, Field(ge=-100, le=100)]
Longest = Annotated[StrictInt, Field(ge=-1, le=MAX_TOKEN_IDS), AfterValidator(_leaves_some)]  # -1: the model's
Side = Annotated[Literal["left", "right", "Left", "Right"], AfterValidator(str.lower)]  # TEI's
Body = TypeVar("Body", bound=StrictFields, contravariant=True)


@dataclass(slots=True)
class Asking:
    """One request: asks for rows, and keeps the headers of the answer."""

    answering: Answering
    scope: RequestScope
    headers: dict[str, str] = field(default_factory=dict)
    used: Counter[str] = field(default_factory=Counter)  # tokens, by model
    questions: int = 0

    async def rows(self, wish: Wish) -> Rows:
        """Raises as `Answering.answer`."""
        index, self.questions = self.questions, self.questions + 1
        rows = await self.answering.answer(wish, self.scope, index=index)
        self.headers |= rows.headers
        self.used[rows.model] += rows.num_tokens
        return rows

    def prompted(
        self, model: str, work: str, fitting: Fitting, name: str | None, field_: str = "prompt_name"
    ) -> Fitting:
        """With the text that the model's files want before its inputs. Raises InvalidRequestError, ModelNotFoundError."""
        pooling = self.answering.find(model, work).pooling
        prompts, named = pooling.prompts, name or pooling.prompts.default
        adapter = pooling.adapter_of(named)
        return replace(fitting, prompt=prompt_of(prompts, name, field_), side=named, adapter=adapter)


def prompt_of(prompts: Prompts, name: str | None, field_: str) -> str:
    """A prompt by its name; the default one without a name. Raises InvalidRequestError."""
    if name is None:
        return prompts.texts.get(prompts.default, "")
    if name not in prompts.texts:
        known = ", ".join(prompts.texts) or "none"
        raise InvalidRequestError(f"{field_}: {name!r:.100} is no prompt of this model: {known}", param=field_)
    return prompts.texts[name]


class Api(Protocol[Body]):
    """A path's body and its answer."""

    @property
    def body(self) -> type[Any]: ...

    @property
    def described(self) -> Mapping[str, Any]:
        """The JSON schema of an answer."""
        ...

    async def answer(self, body: Body, asking: Asking) -> Any:
        """Return the answer as JSON. Raises as `Answering.answer`."""
        ...


async def written(rows: Rows, told: Callable[[], Any]) -> Any:
    """An answer made of rows, in a thread if they are long."""
    if rows.num_bytes <= SHORT_BYTES:
        return told()
    return await asyncio.to_thread(told)


LIST_OF_NUMBERS: Json = {"type": "array", "items": {"type": "number"}}
