"""APIs for vectors: OpenAI's, Cohere's, vLLM's /pooling and TEI's."""

from __future__ import annotations

import base64
import time
import uuid
from array import array
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field, StrictBool, StrictStr, ValidationInfo, field_validator

from common.errors import InvalidRequestError
from common.messages import MAX_POOLED_INPUTS
from gateway.http.api import fields, ref
from gateway.http.fields import MAX_TOKEN_IDS, StrictFields, Whole, ids_read
from gateway.http.problem import Json
from gateway.pooling.apis import LIST_OF_NUMBERS, Asking, Longest, Priority, Side, written
from gateway.pooling.service import Rows, Wish
from gateway.pooling.texts import Fitting, PooledText
from modelfiles.pooling import CLASSIFY_TOKENS, EACH, EMBED, TOKENS
from modelfiles.scoring import EACH_STEP

TEXT_SCHEMA = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}}
INPUT_SCHEMA: Json = {
    "anyOf": [
        TEXT_SCHEMA,
        _IDS,
        *({"type": "array", "minItems": 1, "maxItems": MAX_POOLED_INPUTS, "items": one} for one in (TEXT_SCHEMA, _IDS)),
    ]
}
Label = Annotated[StrictStr, Field(max_length=1024)]
Prompted = Annotated[StrictStr, Field(max_length=256)]
Dimensions = Annotated[Whole, Field(ge=1, lt=2**31)]
Texts = Annotated[list[Annotated[StrictStr, Field(min_length=1)]], Field(min_length=1, max_length=MAX_POOLED_INPUTS)]
_json = msgspec.json.Encoder()
_INTEGER: Json = {"type": "integer"}
SCHEMAS: dict[str, Json] = {
    "PoolingUsage": fields({"prompt_tokens": _INTEGER, "total_tokens": _INTEGER}),
    "Embedding": fields(
        {
            "object": {"const": "embedding"},
            "index": _INTEGER,
            "embedding": {"anyOf": [LIST_OF_NUMBERS, {"type": "string", "contentEncoding": "base64"}]},
        }
    ),
    "EmbeddingList": fields(
        {
            "object": {"const": "list"},
            "data": {"type": "array", "items": ref("Embedding")},
            "model": {"type": "string"},
            "usage": ref("PoolingUsage"),
        }
    ),
}


class InputFields(StrictFields):
    """Fields of OpenAI's form: `input`, and how long texts are cut."""

    many: ClassVar[Mapping[str, int]] = {"input": MAX_TOKEN_IDS}
    lists_of_ids: ClassVar[tuple[str, ...]] = ("input",)
    inert: ClassVar[frozenset[str]] = frozenset({"request_id", "embed_dtype", "endianness"})
    schemas: ClassVar[dict[str, dict[str, Any]]] = {"input": INPUT_SCHEMA}

    model: StrictStr  # "": the only one
    input: Any  # a validator makes it a list
    user: Label | None = None
    truncate_prompt_tokens: Longest | None = None  # vLLM's
    truncation_side: Literal["left", "right"] | None = None
    priority: Priority = 0

    @field_validator("input")
    @classmethod
    def _list_of_inputs(cls, given: Any, info: ValidationInfo) -> list[PooledText]:
        return inputs_of(given if (read := ids_read(info)) is None else read)

    @property
    def fitting(self) -> Fitting:
        return Fitting(longest=self.truncate_prompt_tokens, from_left=self.truncation_side == "left")


class EmbeddingsRequest(InputFields):
    """Body of POST /v1/embeddings."""

    unsupported: ClassVar[dict[str, str]] = {"messages": "send the texts as input"}

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Dimensions | None = None
    # A text before each input, by its name in the model's files; others call it by the input's type.
    prompt_name: Prompted | None = None
    input_type: Prompted | None = None
    task: Prompted | None = None  # Jina's


class Embeddings:
    """OpenAI's vectors."""

    body = EmbeddingsRequest
    described = ref("EmbeddingList")

    async def answer(self, body: EmbeddingsRequest, asking: Asking) -> Any:
        said = {"prompt_name": body.prompt_name, "input_type": body.input_type, "task": body.task}
        field_ = next((name for name, value in said.items() if value), "prompt_name")
        fitting = asking.prompted(body.model, EMBED, body.fitting, said[field_] or None, field_)
        rows = await asking.rows(
            Wish(
                model=body.model,
                inputs=body.input,
                dimensions=body.dimensions or 0,
                fitting=fitting,
                priority=body.priority,
            )
        )
        form = in_base64 if body.encoding_format == "base64" else numbers

        def told() -> Json:
            data = [
                {"object": "embedding", "index": index, "embedding": form(values)}
                for index, values in enumerate(rows.values)
            ]
            return {"object": "list", "data": data, "model": body.model, "usage": usage(rows)}

        return await written(rows, told)


class PoolingRequest(InputFields):
    """Body of POST /pooling, vLLM's: what the model makes, as it is."""

    task: Literal["embed", "token_embed", "classify", "token_classify"] | None = None
    encoding_format: Literal["float"] = "float"
    dimensions: Dimensions | None = None
    use_activation: StrictBool | None = None
    normalize: StrictBool | None = None
    prompt_name: Prompted | None = None


class Pooled:
    """vLLM's rows of any kind."""

    body = PoolingRequest
    described: ClassVar[Json] = fields({"data": {"type": "array", "items": {"type": "object"}}})

    async def answer(self, body: PoolingRequest, asking: Asking) -> Any:
        work, fitting = body.task or asking.answering.find(body.model).pooling.works[0], body.fitting
        if body.prompt_name is not None:
            fitting = asking.prompted(body.model, work, fitting, body.prompt_name)
        rows = await asking.rows(
            Wish(
                model=body.model,
                inputs=body.input,
                work=work,
                dimensions=body.dimensions or 0,
                is_raw=False in (body.use_activation, body.normalize),
                fitting=fitting,
                priority=body.priority,
            )
        )
        if work == CLASSIFY_TOKENS and asking.answering.find(body.model).pooling.labels and b"" in rows.values:
            raise InvalidRequestError(
                f"input: {rows.values.index(b'')} has no {EACH_STEP}, behind which this model scores a step",
                param="input",
            )

        def told() -> Json:
            shown = (lists(values, rows.width) if work in EACH else numbers(values) for values in rows.values)
            data = [{"object": "pooling", "index": at, "data": each} for at, each in enumerate(shown)]
            head = {"id": f"pool-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
            return {**head, "model": body.model, "data": data, "usage": usage(rows)}

        return await written(rows, told)


class CohereEmbedRequest(StrictFields):
    """Body of POST /v1/embed and /v2/embed, Cohere's."""

    unsupported: ClassVar[dict[str, str]] = {"images": "only text is read", "inputs": "send texts"}

    model: StrictStr
    texts: Texts
    input_type: Prompted | None = None
    embedding_types: Annotated[list[Literal["float", "base64"]], Field(max_length=2)] | None = None
    output_dimension: Dimensions | None = None
    max_tokens: Annotated[Whole, Field(ge=1, le=MAX_TOKEN_IDS)] | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    priority: Priority = 0


class CohereEmbed:
    """Cohere's vectors: a prompt by the input's type, where the model has one of that name."""

    body = CohereEmbedRequest

    def __init__(self, *, version: int) -> None:
        """`version`: of the API. The first one has a plain list of vectors, unless types of these are asked for."""
        self._version = version
        vectors = {"type": "object"} if version > 1 else {"type": ["array", "object"]}
        self.described: Json = fields({"id": {"type": "string"}, "embeddings": vectors, "texts": {"type": "array"}})

    async def answer(self, body: CohereEmbedRequest, asking: Asking) -> Any:
        fitting = cut(body.truncate != "NONE", from_left=body.truncate == "START", longest=body.max_tokens)
        pooling = asking.answering.find(body.model, EMBED).pooling
        prompts, kind = pooling.prompts.texts, (body.input_type or "").removeprefix("search_")
        fitting.prompt = prompts.get(body.input_type or "", prompts.get(kind, ""))
        fitting.adapter = pooling.adapter_of(body.input_type or "") or pooling.adapter_of(kind)
        dimensions = body.output_dimension or 0
        rows = await asking.rows(
            Wish(
                model=body.model,
                inputs=body.texts,
                name="texts",
                dimensions=dimensions,
                fitting=fitting,
                priority=body.priority,
            )
        )
        forms = {"float": numbers, "base64": in_base64}

        def told() -> Json:
            vectors = {kind: [forms[kind](one) for one in rows.values] for kind in body.embedding_types or ["float"]}
            meta = {"api_version": {"version": str(self._version)}, "billed_units": {"input_tokens": rows.num_tokens}}
            is_plain = self._version == 1 and body.embedding_types is None
            head = {"id": str(uuid.uuid4()), "response_type": f"embeddings_{'floats' if is_plain else 'by_type'}"}
            return {**head, "embeddings": vectors["float"] if is_plain else vectors, "texts": body.texts, "meta": meta}

        return await written(rows, told)


class TeiInputs(StrictFields):
    """TEI's inputs, and how long ones are cut."""

    many: ClassVar[Mapping[str, int]] = {"inputs": MAX_TOKEN_IDS}
    lists_of_ids: ClassVar[tuple[str, ...]] = ("inputs",)
    schemas: ClassVar[dict[str, dict[str, Any]]] = {"inputs": INPUT_SCHEMA}

    model: StrictStr = ""
    inputs: Any  # as `input` of OpenAI's
    truncate: StrictBool = False
    truncation_direction: Side = "right"
    prompt_name: Prompted | None = None

    @field_validator("inputs")
    @classmethod
    def _list_of_inputs(cls, given: Any, info: ValidationInfo) -> list[PooledText]:
        return inputs_of(given if (read := ids_read(info)) is None else read)


class TeiEmbedRequest(TeiInputs):
    """Body of POST /embed and /embed_all, TEI's."""

    normalize: StrictBool = True
    dimensions: Dimensions | None = None


class TeiEmbed:
    """TEI's vectors, or those of each token."""

    body = TeiEmbedRequest

    def __init__(self, work: str) -> None:
        self._work = work
        self.described: Json = {"type": "array", "items": {"type": "array"}}

    async def answer(self, body: TeiEmbedRequest, asking: Asking) -> Any:
        fitting = cut(body.truncate, from_left=body.truncation_direction == "left")
        fitting = asking.prompted(body.model, self._work, fitting, body.prompt_name)
        is_each = self._work == TOKENS
        pooling = asking.answering.find(body.model, self._work).pooling
        rows = await asking.rows(
            Wish(
                model=body.model,
                inputs=body.inputs,
                name="inputs",
                work=self._work,
                dimensions=0 if is_each else body.dimensions or (pooling.size if body.normalize else 0),
                is_raw=(is_each and not pooling.compares_tokens) or not body.normalize,
                fitting=fitting,
            )
        )

        def told() -> list[Any]:
            return [lists(one, rows.width) if is_each else numbers(one) for one in rows.values]

        return await written(rows, told)


def cut(is_wanted: bool, *, from_left: bool = False, longest: int | None = None) -> Fitting:
    """Long texts lose an end, or are refused."""
    return Fitting(longest=(-1 if longest is None else longest) if is_wanted else None, from_left=from_left)


def inputs_of(given: Any) -> list[PooledText]:
    """A text or tokens, or a list of either. Raises ValueError."""
    if is_token_ids(given):
        return [given]
    inputs = given if isinstance(given, list) else [given]
    if not inputs or any(one in ("", []) for one in inputs):
        raise ValueError("must not be empty")
    if len(inputs) > MAX_POOLED_INPUTS:
        raise ValueError(f"at most {MAX_POOLED_INPUTS} inputs are allowed")
    if not all(isinstance(one, str) for one in inputs) and not all(map(is_token_ids, inputs)):
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of lists of token ids")
    return inputs


def is_token_ids(value: Any) -> bool:
    """Check token ids in C. `type`, because true is not a token id."""
    return isinstance(value, list) and set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 2**32


def usage(rows: Rows) -> Json:
    return {"prompt_tokens": rows.num_tokens, "total_tokens": rows.num_tokens}


def in_base64(values: bytes) -> msgspec.Raw:
    """A row as a JSON string."""
    return msgspec.Raw(b'"%b"' % base64.b64encode(values))


def numbers(values: bytes) -> msgspec.Raw:
    """A row as a JSON list: encoded by itself, for one call that encoded all rows would hold the event loop."""
    return msgspec.Raw(_json.encode(floats(values)))


def floats(values: bytes) -> list[float]:
    """Numbers of little-endian float32."""
    found = array("f")
    found.frombytes(values)
    return found.tolist()


def lists(values: bytes, width: int) -> Sequence[msgspec.Raw]:
    """Rows as JSON lists."""
    return [numbers(values[at : at + 4 * width]) for at in range(0, len(values), 4 * width)]
