"""POST …/infer: tensors in, tensors out, as JSON or as bytes after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, StrictInt, StrictStr, ValidationInfo, field_validator, model_validator

from common.errors import InvalidRequestError
from common.tracing import Attributes
from gateway.answers.answer import Answer
from gateway.answers.ask import Ask
from gateway.dialects.dialect import Events
from gateway.dialects.kserve.binary import BINARY, HEADER, SIZE, packed
from gateway.dialects.kserve.generate import KServeBody, TextEvents, check_no_input, reading_of
from gateway.dialects.kserve.outputs import Outputs, head
from gateway.dialects.kserve.tensors import BYTES, check_datatype, values_of
from gateway.dialects.kserve.wish import INPUTS, STREAM, TEXT_INPUT, Wish, joined
from gateway.http.fields import StrictFields
from gateway.http.problem import Content
from gateway.http.streaming import EVENTS

MAX_INPUTS = 64
BINARY_DATA, ALL_BINARY = "binary_data", "binary_data_output"
_SHARED_MEMORY = ("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size")


class NoSharedMemory(StrictFields):
    """A tensor's name and parameters."""

    name: StrictStr
    parameters: Mapping[str, Any] = Field(default_factory=dict)

    @field_validator("parameters")
    @classmethod
    def _by_value(cls, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        if found := next((name for name in _SHARED_MEMORY if name in parameters), None):
            raise ValueError(f"{found}: there is no shared memory here: send data, and read it from the response")
        return parameters


class InferInput(NoSharedMemory):
    """An input tensor. Texts are BYTES of UTF-8."""

    shape: Annotated[list[StrictInt], Field(max_length=8)]
    datatype: StrictStr
    data: Any

    @property
    def value(self) -> Any:
        """The only element, or the list of several. Raises ValueError."""
        try:
            values = values_of(check_datatype(self.datatype), self.shape, self.data)
        except ValueError as error:
            raise ValueError(f"inputs: {self.name[:100]}: {error}") from None
        wanted = INPUTS.get(self.name)
        if wanted is not None and self.datatype != wanted:
            raise ValueError(f"inputs: {self.name}: datatype: must be {wanted}")
        if wanted is not None and len(values) != 1:
            raise ValueError(f"inputs: {self.name}: shape: one element is read: send a request for each prompt")
        return values[0] if len(values) == 1 else values

    @field_validator("parameters")
    @classmethod
    def _has_data(cls, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        if SIZE in parameters:
            raise ValueError(f"{SIZE}: only with the header inference-header-content-length")
        return parameters


class InferOutput(NoSharedMemory):
    """A requested output tensor."""

    @field_validator("parameters")
    @classmethod
    def _is_whole(cls, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        if parameters.get("classification"):
            raise ValueError("classification: a text has no classes")
        return parameters


class InferRequest(KServeBody):
    """Body of POST /v2/models/{model}/infer."""

    parameters: Mapping[str, Any] = Field(default_factory=dict)
    inputs: Annotated[list[InferInput], Field(min_length=1, max_length=MAX_INPUTS)]
    outputs: Annotated[list[InferOutput], Field(max_length=MAX_INPUTS)] = Field(default_factory=list)

    @model_validator(mode="after")
    def _read(self, info: ValidationInfo) -> InferRequest:
        named = joined(*({one.name: one.value} for one in self.inputs))
        text = named.pop(TEXT_INPUT, "")
        if not text:
            raise ValueError(f"inputs: {TEXT_INPUT} is missing or empty: send it as {BYTES} of shape [1]")
        parameters = {name: value for name, value in self.parameters.items() if name != ALL_BINARY}
        given, outputs = joined(named, parameters), [one.name for one in self.outputs]
        self._wish = Wish.of(self.model, text, given, outputs=outputs, reading=reading_of(info))
        self._ignored = self._wish.text.ignored
        return self

    @property
    def binary(self) -> frozenset[str]:
        """Outputs that are sent as bytes."""
        usual = self.parameters.get(ALL_BINARY) is True
        on = {one.name for one in self.outputs if one.parameters.get(BINARY_DATA, usual) is True}
        return frozenset(on if self.outputs else (self._wish.outputs if usual else ()))


class Infer:
    """One answer: whole, or piece by piece if the transport `streams` and the input `stream` asks for it."""

    body = InferRequest
    operation = "text_completion"
    stream_type = EVENTS
    is_batchable = False

    def __init__(self, *, streams: bool) -> None:
        self._streams = streams

    def ask(self, body: InferRequest) -> Ask:
        if body.wish.streams and not self._streams:
            raise InvalidRequestError(
                "stream: infer has one response: use generate_stream, or gRPC's ModelStreamInfer", param=STREAM
            )
        if body.wish.streams:
            check_no_input(body.wish)
        return body.ask(streams=body.wish.streams is True)

    def events(self, body: InferRequest, answer: Answer) -> Events:
        return TextEvents(body, answer)

    def describe(self, body: InferRequest) -> Attributes:
        return {**body.attributes, "gen_ai.request.stream": body.wish.streams is True}

    async def whole(self, body: InferRequest, answer: Answer) -> Any:
        outputs = Outputs(body.wish, answer, includes_input=body.wish.includes_input is not False)
        tensors = outputs.of(dict(enumerate(await answer.whole())))
        content, length = packed(head(answer, body.id), tensors, body.binary)
        if not body.binary:
            return Content(body=content)
        return Content(body=content, media_type=BINARY, headers={HEADER: str(length)})
