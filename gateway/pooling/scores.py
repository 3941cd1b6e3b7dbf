"""APIs for scores: rerank in Cohere's, Jina's and TEI's forms, vLLM's /score and /classify, TEI's /predict.

A cross-encoder reads query and document together; of a model of vectors a score is the cosine of the two, and of one whose
tokens alone have vectors what each of the query's has in common with the nearest of the document's, added up.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, StrictBool, StrictStr, field_validator, model_validator

from common.errors import InvalidRequestError
from common.messages import MAX_POOLED_INPUTS
from gateway.http.api import fields
from gateway.http.fields import MAX_TOKEN_IDS, StrictFields, Whole
from gateway.http.problem import Json
from gateway.pooling.apis import Asking, Longest, Priority, Side, written
from gateway.pooling.service import Rows, Wish
from gateway.pooling.texts import Fitting, PooledText
from gateway.pooling.vectors import InputFields, Texts, cut, floats, usage
from modelfiles.pooling import CLASSIFY, EMBED, MAXSIM, Pooling

_SCORED: Json = fields({"index": {"type": "integer"}, "score": {"type": "number"}})
Text = Annotated[StrictStr, Field(min_length=1)]
Instruction = Annotated[StrictStr, Field(max_length=4096)]
Count = Annotated[Whole, Field(ge=1, le=MAX_TOKEN_IDS)]


async def scored(
    asking: Asking, wish: Wish, pairs: Sequence[tuple[str, str]], *, prompts: Mapping[str, str] | None = None
) -> tuple[list[float], Rows]:
    """The score of each pair, as the wish says, whose inputs and work are set here.

    `prompts`: before a vector's `query` and `document`; None: the model's of these names.

    Raises as `Answering.answer`, and InvalidRequestError if the model has several labels.
    """
    found = asking.answering.find(wish.model)
    if found.pooling.labels:
        if len(found.pooling.labels) > 1:
            raise InvalidRequestError(
                f"the model {found.name!r} has {len(found.pooling.labels)} labels, and a score needs one: ask it at /classify",
                param="model",
            )
        if wish.fitting.instruction and not found.tokenizer.takes_instruction:
            raise InvalidRequestError(f"instruction: the model {found.name!r} takes none", param="instruction")
        rows = await asking.rows(replace(wish, inputs=list(pairs), work=CLASSIFY))
        return [floats(values)[0] for values in rows.values], rows
    if wish.fitting.instruction:
        raise InvalidRequestError(
            f"instruction: the model {found.name!r} makes vectors, and its prompts have names", param="instruction"
        )
    if not found.pooling.modes:
        rows = await asking.rows(
            replace(wish, inputs=list(pairs), work=MAXSIM, fitting=replace(wish.fitting, sides_are_apart=True))
        )
        return [floats(values)[0] for values in rows.values], rows
    sides = [list(dict.fromkeys(side)) for side in zip(*pairs, strict=True)]
    whole = replace(wish.fitting, document=None)

    def fitted(kind: str, fitting: Fitting) -> Fitting:
        return _of_side(found.pooling, fitting, kind) if prompts is None else replace(fitting, prompt=prompts[kind])

    asked = [
        replace(wish, inputs=side, work=EMBED, fitting=fitted(kind, fitting))
        for side, kind, fitting in zip(sides, ("query", "document"), (whole, wish.fitting), strict=True)
    ]
    of_queries, of_documents = [await asking.rows(one) for one in asked]

    def compared() -> list[float]:
        queries = dict(zip(sides[0], map(_unit, of_queries.values), strict=True))
        documents = dict(zip(sides[1], map(_unit, of_documents.values), strict=True))
        return [sum(map(float.__mul__, queries[one], documents[two])) for one, two in pairs]

    both = replace(of_queries, tokens=[*of_queries.tokens, *of_documents.tokens])
    return await asyncio.to_thread(compared), both


def _of_side(pooling: Pooling, fitting: Fitting, kind: str) -> Fitting:
    return replace(fitting, prompt=pooling.prompts.texts.get(kind, ""), adapter=pooling.adapter_of(kind))


def _unit(values: bytes) -> array[float]:
    numbers = array("d", floats(values))
    length = math.sqrt(sum(one * one for one in numbers)) or 1.0
    return array("d", [one / length for one in numbers])


class RerankRequest(StrictFields):
    """Body of POST /rerank, /v1/rerank and /v2/rerank: `documents` in Cohere's and Jina's form, `texts` in TEI's."""

    model: StrictStr = ""
    query: Text
    documents: Annotated[list[Any], Field(min_length=1, max_length=MAX_POOLED_INPUTS)] | None = None
    texts: Texts | None = None
    top_n: Annotated[Whole, Field(ge=1)] | None = None
    max_tokens_per_doc: Count | None = None
    truncate_prompt_tokens: Longest | None = None
    return_documents: StrictBool | None = None
    return_text: StrictBool = False
    raw_scores: StrictBool = False
    instruction: Instruction = ""  # the one in a template of pairs
    truncate: StrictBool | None = None
    truncation_direction: Side = "right"
    priority: Priority = 0

    @field_validator("documents")
    @classmethod
    def _documents(cls, given: list[Any] | None) -> list[str] | None:
        if given is None:
            return None
        found = [one.get("text") if isinstance(one, dict) else one for one in given]
        texts = [one for one in found if isinstance(one, str) and one]
        if len(texts) < len(found):
            raise ValueError("must be texts, or objects with a text")
        return texts

    @model_validator(mode="after")
    def _one_of_both(self) -> RerankRequest:
        if (self.documents is None) == (self.texts is None):
            raise ValueError("documents: give documents, or texts in TEI's form")
        return self

    @property
    def is_tei(self) -> bool:
        return self.texts is not None

    @property
    def fitting(self) -> Fitting:
        longest, document = self.truncate_prompt_tokens, self.max_tokens_per_doc
        is_cut = self.truncate if self.is_tei or longest is document is None else True
        fitted = cut(bool(is_cut), from_left=self.truncation_direction == "left", longest=longest)
        return replace(fitted, instruction=self.instruction, document=document)


class Rerank:
    """Documents by their score for a query, the best first."""

    body = RerankRequest
    described: ClassVar[Json] = {
        "anyOf": [
            fields({"results": {"type": "array", "items": {"type": "object"}}}),
            {"type": "array", "items": _SCORED},
        ]
    }

    def __init__(self, *, shows: bool) -> None:
        """`shows`: documents are in the answer unless the body says otherwise."""
        self._shows = shows

    async def answer(self, body: RerankRequest, asking: Asking) -> Any:
        documents = body.documents or body.texts or []
        pairs = [(body.query, document) for document in documents]
        wish = Wish(
            model=body.model,
            name="texts" if body.is_tei else "documents",
            is_raw=body.raw_scores,
            fitting=body.fitting,
            priority=body.priority,
        )
        scores, rows = await scored(asking, wish, pairs)
        order = sorted(range(len(scores)), key=lambda at: -scores[at])[: body.top_n]
        if body.is_tei:
            return [
                {"index": at, "score": scores[at], **({"text": documents[at]} if body.return_text else {})}
                for at in order
            ]
        shows = self._shows if body.return_documents is None else body.return_documents
        results = [
            {"index": at, "relevance_score": scores[at], **({"document": {"text": documents[at]}} if shows else {})}
            for at in order
        ]
        meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
        return {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": body.model,
            "results": results,
            "usage": usage(rows),
            "meta": meta,
        }


class ScoreRequest(StrictFields):
    """Body of POST /score and /v1/score, vLLM's; one query or text is compared with all others."""

    model: StrictStr = ""
    queries: Text | Texts | None = None
    documents: Text | Texts | None = None
    text_1: Text | Texts | None = None
    text_2: Text | Texts | None = None
    data_1: Text | Texts | None = None
    data_2: Text | Texts | None = None
    truncate_prompt_tokens: Longest | None = None
    use_activation: StrictBool = True
    instruction: Instruction = ""
    encoding_format: Literal["float"] = "float"
    user: StrictStr | None = None
    priority: Priority = 0

    @model_validator(mode="after")
    def _both_sides(self) -> ScoreRequest:
        if sum(None not in pair for pair in self._named) != 1 or sum(pair != (None, None) for pair in self._named) != 1:
            raise ValueError("queries: give queries and documents, or text_1 and text_2")
        left, right = self.sides
        if len(left) not in (1, len(right)):
            raise ValueError(f"queries: one, or as many as the {len(right)} others, not {len(left)}")
        return self

    @property
    def _named(self) -> list[tuple[Any, Any]]:
        return [(self.queries, self.documents), (self.text_1, self.text_2), (self.data_1, self.data_2)]

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        left, right = next(pair for pair in self._named if None not in pair)
        return ([left] if isinstance(left, str) else left), ([right] if isinstance(right, str) else right)


class Score:
    """A score of each pair."""

    body = ScoreRequest
    described: ClassVar[Json] = fields({"data": {"type": "array", "items": _SCORED}})

    async def answer(self, body: ScoreRequest, asking: Asking) -> Any:
        left, right = body.sides
        pairs = list(zip(left * len(right) if len(left) == 1 else left, right, strict=True))
        wish = Wish(
            model=body.model,
            name="documents",
            is_raw=not body.use_activation,
            fitting=Fitting(longest=body.truncate_prompt_tokens, instruction=body.instruction),
            priority=body.priority,
        )
        scores, rows = await scored(asking, wish, pairs)
        data = [{"index": at, "object": "score", "score": score} for at, score in enumerate(scores)]
        return {**_head("score", body.model), "data": data, "usage": usage(rows)}


class ClassifyRequest(InputFields):
    """Body of POST /classify and /v1/classify, vLLM's."""

    use_activation: StrictBool = True


class Classify:
    """The likeliest label of each text, and the scores of all."""

    body = ClassifyRequest
    described: ClassVar[Json] = fields({"data": {"type": "array", "items": {"type": "object"}}})

    async def answer(self, body: ClassifyRequest, asking: Asking) -> Any:
        labels = asking.answering.find(body.model, CLASSIFY).pooling.labels
        rows = await asking.rows(
            Wish(
                model=body.model,
                inputs=body.input,
                work=CLASSIFY,
                is_raw=not body.use_activation,
                fitting=body.fitting,
                priority=body.priority,
            )
        )

        def told() -> Json:
            data = [_classified(at, floats(values), labels) for at, values in enumerate(rows.values)]
            return {**_head("classify", body.model), "data": data, "usage": usage(rows)}

        return await written(rows, told)


class PredictParameters(StrictFields):
    """Hugging Face's `parameters` of a classification."""

    top_k: Count | None = None
    function_to_apply: Literal["none"] | None = None  # "none": scores without the model's activation


class PredictRequest(StrictFields):
    """Body of POST /predict, TEI's: a text, a pair, or a list of lists of one or two texts."""

    schemas: ClassVar[dict[str, dict[str, Any]]] = {
        "inputs": {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1}]}
    }

    model: StrictStr = ""
    inputs: Any
    raw_scores: StrictBool = False
    truncate: StrictBool = False
    truncation_direction: Side = "right"
    parameters: PredictParameters = Field(default_factory=PredictParameters)
    _given: list[PooledText] = PrivateAttr(default_factory=list)

    @property
    def is_batch(self) -> bool:
        return isinstance(self.inputs, list) and isinstance(self.inputs[0], list)

    @property
    def given(self) -> list[PooledText]:
        return self._given

    @model_validator(mode="after")
    def _some(self) -> PredictRequest:
        if not self.inputs or (isinstance(self.inputs, list) and len(self.inputs) > MAX_POOLED_INPUTS):
            raise ValueError(f"inputs: must be 1 to {MAX_POOLED_INPUTS} texts")
        self._given = [_text_or_pair(one) for one in (self.inputs if self.is_batch else [self.inputs])]
        return self


def _text_or_pair(given: Any) -> PooledText:
    """Raises ValueError."""
    texts = given if isinstance(given, list) else [given]
    if len(texts) not in (1, 2) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("inputs: must be a text, a pair of texts, or a list of lists of these; none is empty")
    return texts[0] if len(texts) == 1 else (texts[0], texts[1])


class Predict:
    """The scores of all labels, the likeliest first."""

    body = PredictRequest
    described: ClassVar[Json] = {"type": "array"}

    async def answer(self, body: PredictRequest, asking: Asking) -> Any:
        labels = asking.answering.find(body.model, CLASSIFY).pooling.labels
        fitting = cut(body.truncate, from_left=body.truncation_direction == "left")
        wish = Wish(
            model=body.model,
            inputs=body.given,
            work=CLASSIFY,
            name="inputs",
            is_raw=body.raw_scores or body.parameters.function_to_apply == "none",
            fitting=fitting,
        )
        rows = await asking.rows(wish)
        found = [_sorted(floats(values), labels)[: body.parameters.top_k] for values in rows.values]
        return found if body.is_batch else found[0]


def _head(kind: str, model: str) -> Json:
    return {"id": f"{kind}-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": model}


def _classified(at: int, scores: Sequence[float], labels: Sequence[str]) -> Json:
    best = max(range(len(scores)), key=lambda label: scores[label])
    return {"index": at, "label": labels[best], "probs": scores, "num_classes": len(labels)}


def _sorted(scores: Sequence[float], labels: Sequence[str]) -> list[Mapping[str, Any]]:
    return sorted(
        ({"label": label, "score": score} for label, score in zip(labels, scores, strict=True)),
        key=lambda one: -one["score"],
    )
