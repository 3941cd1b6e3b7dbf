"""TEI's /similarity: how alike sentences are to one, by a model of vectors."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr

from gateway.http.fields import StrictFields
from gateway.http.problem import Json
from gateway.pooling.apis import LIST_OF_NUMBERS, Asking, Side
from gateway.pooling.scores import Text, scored
from gateway.pooling.service import Wish
from gateway.pooling.vectors import Prompted, Texts, cut
from modelfiles.pooling import EMBED


class Sentences(BaseModel):
    """One sentence, and those that it is compared with."""

    model_config = ConfigDict(extra="forbid")

    source_sentence: Text
    sentences: Texts


class SimilarityParameters(StrictFields):
    """TEI's `parameters`."""

    truncate: StrictBool = False
    truncation_direction: Side = "right"
    prompt_name: Prompted | None = None


class SimilarityRequest(StrictFields):
    """Body of POST /similarity."""

    model: StrictStr = ""
    inputs: Sentences
    parameters: SimilarityParameters = Field(default_factory=SimilarityParameters)


class Similarity:
    """The cosine of each sentence and the source, in their order."""

    body = SimilarityRequest
    described: ClassVar[Json] = LIST_OF_NUMBERS

    async def answer(self, body: SimilarityRequest, asking: Asking) -> Any:
        given = body.parameters
        fitting = cut(given.truncate, from_left=given.truncation_direction == "left")
        model = asking.answering.find(body.model, EMBED).name
        fitting = asking.prompted(model, EMBED, fitting, given.prompt_name)
        pairs = [(body.inputs.source_sentence, sentence) for sentence in body.inputs.sentences]
        wish = Wish(model=model, name="inputs", fitting=fitting)
        return (await scored(asking, wish, pairs, prompts={"query": fitting.prompt, "document": fitting.prompt}))[0]
