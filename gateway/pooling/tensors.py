"""KServe's infer of models that pool, before that of models that generate: texts in, one FP32 row of each out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar

import msgspec
from fastapi import Request, Response
from pydantic import Field, PrivateAttr, StrictBool, StrictStr, model_validator

from common.errors import InvalidRequestError
from common.tracing import Attributes
from gateway.dialects.kserve.binary import BINARY, HEADER, SIZE, unpacked
from gateway.dialects.kserve.generate import check_version
from gateway.dialects.kserve.infer import BINARY_DATA, InferInput, InferOutput
from gateway.dialects.kserve.outputs import VERSION
from gateway.dialects.kserve.rows import EMBEDDING, FLOATS, PAIR, SCORES, RowTensor
from gateway.dialects.kserve.tensors import BYTES, values_of
from gateway.http.api import ref
from gateway.http.application import Handler
from gateway.http.body import BodyLimits, checked, read_body
from gateway.http.exchange import RequestScope, fields_of, request_scope
from gateway.http.fields import StrictFields, parse_body
from gateway.http.problem import Content, Json
from gateway.pooling.apis import Asking, Side, written
from gateway.pooling.routes import Path, PoolingRoutes
from gateway.pooling.service import Rows, Wish
from gateway.pooling.texts import PooledText
from gateway.pooling.vectors import Dimensions, Prompted, cut, numbers
from modelfiles.pooling import CLASSIFY, EMBED

_OFF: Mapping[str, Any] = {"priority": 0, "timeout": 0, "sequence_id": 0}  # clients send what changes nothing


class PooledParameters(StrictFields):
    """`parameters` of a request."""

    binary_data_output: StrictBool = False
    dimensions: Dimensions | None = None
    prompt_name: Prompted | None = None
    truncate: StrictBool = False
    truncation_direction: Side = "right"
    raw_scores: StrictBool = False

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if name not in _OFF or value != _OFF[name]}


class PooledInferRequest(StrictFields):
    """Body of POST /v2/models/{model}/infer, for a model of vectors or scores."""

    model: StrictStr
    version: StrictStr | None = None
    id: Annotated[StrictStr, Field(max_length=256)] | None = None
    parameters: PooledParameters = Field(default_factory=PooledParameters)
    inputs: Annotated[list[InferInput], Field(min_length=1, max_length=1)]
    outputs: Annotated[list[InferOutput], Field(max_length=1)] = Field(default_factory=list)
    _texts: list[PooledText] = PrivateAttr(default_factory=list)

    @model_validator(mode="after")
    def _read(self) -> PooledInferRequest:
        try:
            self._texts = texts_of(self.inputs[0])
        except ValueError as error:
            raise ValueError(f"inputs: {self.inputs[0].name[:100]}: {error}") from None
        return self

    @property
    def texts(self) -> list[PooledText]:
        return self._texts

    @property
    def is_binary(self) -> bool:
        """True if the rows are sent as bytes."""
        usual = self.parameters.binary_data_output
        return self.outputs[0].parameters.get(BINARY_DATA, usual) is True if self.outputs else usual


def texts_of(tensor: InferInput) -> list[PooledText]:
    """Texts of a shape [n] or [n, 1], pairs of [n, 2]. Raises ValueError."""
    if tensor.datatype != BYTES:
        raise ValueError(f"datatype: must be {BYTES}, texts in UTF-8")
    shape = tensor.shape
    if len(shape) not in (1, 2) or not all(shape) or (len(shape) == 2 and shape[1] > PAIR):
        raise ValueError("shape: must be [n] or [n, 1] for n texts, [n, 2] for pairs of them")
    values = values_of(BYTES, shape, tensor.data)
    if not all(values):
        raise ValueError("data: no text may be empty")
    if shape[1:] != [PAIR]:
        return list(values)
    return [(values[at], values[at + 1]) for at in range(0, len(values), PAIR)]


class PooledInfer:
    """A row of each text or pair: its vector, or its scores by label."""

    body = PooledInferRequest
    described: ClassVar[Json] = ref("InferAnswer")

    async def answer(self, body: PooledInferRequest, asking: Asking) -> Content:
        """Raises as `Answering.answer`."""
        name, rows = await self.rows(body, asking)
        found: Content = await written(rows, lambda: _content(body, name, rows))
        return found

    async def rows(self, body: PooledInferRequest, asking: Asking) -> tuple[str, Rows]:
        """The output's name and its rows. Raises as `Answering.answer`."""
        check_version(body.model, body.version)
        given, pooling = body.parameters, asking.answering.find(body.model).pooling
        name = SCORES if pooling.labels else EMBEDDING
        if body.outputs and body.outputs[0].name != name:
            raise InvalidRequestError(f"outputs: {body.outputs[0].name[:100]!r} is none: {name} is", param="outputs")
        if name == EMBEDDING and any(isinstance(text, tuple) for text in body.texts):
            raise InvalidRequestError("inputs: shape: a vector is of one text: send [n] or [n, 1]", param="inputs")
        fitting = cut(given.truncate, from_left=given.truncation_direction == "left")
        if name == EMBEDDING:
            fitting = asking.prompted(body.model, EMBED, fitting, given.prompt_name)
        elif given.prompt_name is not None or given.dimensions is not None:
            raise InvalidRequestError(
                "parameters: this model makes scores, which have no prompt_name and no dimensions"
            )
        rows = await asking.rows(
            Wish(
                model=body.model,
                inputs=body.texts,
                work=CLASSIFY if name == SCORES else EMBED,
                name="inputs",
                dimensions=given.dimensions or 0,
                is_raw=given.raw_scores,
                fitting=fitting,
            )
        )
        return name, rows


def _content(body: PooledInferRequest, name: str, rows: Rows) -> Content:
    raw = b"".join(rows.values)
    about: Json = {"name": name, "datatype": FLOATS, "shape": [len(rows.values), rows.width]}
    about |= {"parameters": {SIZE: len(raw)}} if body.is_binary else {"data": numbers(raw)}
    text = msgspec.json.encode(_head(body) | {"outputs": [about]})
    if not body.is_binary:
        return Content(body=text)
    return Content(body=text + raw, media_type=BINARY, headers={HEADER: str(len(text))})


def _head(body: PooledInferRequest) -> dict[str, str]:
    return ({} if body.id is None else {"id": body.id}) | {"model_name": body.model, "model_version": VERSION}


INFER = "/v2/models/{model}/infer"
_INFER = PooledInfer()
_PATH = Path(_INFER, "kserve", error="KServeError")
_SPAN: Attributes = {"gen_ai.operation.name": _PATH.operation}


class PooledTensors:
    """Answers where a path's model pools."""

    def __init__(self, pooling: PoolingRoutes, limits: BodyLimits, pools: Callable[[str], bool]) -> None:
        """`pools(name)`: whether a model of that name pools."""
        self._pooling, self._limits, self.pools = pooling, limits, pools

    def before(self, other: Handler) -> Handler:
        """A handler that leaves models that generate to another one."""

        async def answer(request: Request) -> Response:
            named = str(request.path_params.get("model", ""))
            return await (self._answer if self.pools(named) else other)(request)

        return answer

    async def _answer(self, request: Request) -> Response:
        raw, headers = await read_body(request, self._limits), fields_of(request.scope)
        body = await checked(raw, partial(_read, headers=headers, given=request.path_params), self._limits)
        request_scope(request.scope).trace.answered = lambda: _SPAN
        return await self._pooling.answer(INFER, _PATH, request, body)

    async def told(
        self, body: PooledInferRequest, scope: RequestScope, path: str
    ) -> tuple[Mapping[str, str], RowTensor, Mapping[str, str]]:
        """For gRPC: the answer's head, its tensor, and its headers. `path`: the method in metrics. Raises ServingError."""
        scope.trace.answered = lambda: _SPAN
        (name, rows), asking = await self._pooling.counted(path, _PATH, body, scope, partial(_INFER.rows, body))
        tensor = RowTensor(name, [len(rows.values), rows.width], b"".join(rows.values))
        return _head(body), tensor, asking.headers


def pooled_request(raw: bytes) -> PooledInferRequest:
    """Read a body that names its model. Raises InvalidRequestError."""
    return parse_body(raw, PooledInferRequest)


def _read(raw: bytes, *, headers: Mapping[str, str], given: Mapping[str, str]) -> PooledInferRequest:
    """Raises InvalidRequestError."""
    return parse_body(unpacked(raw, headers), PooledInferRequest, given=given)
