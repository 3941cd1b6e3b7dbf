"""Conversion of requests and answers between Protocol Buffers and the HTTP endpoint's bodies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from common.errors import InvalidRequestError
from gateway.dialects.kserve.rows import RowTensor
from gateway.dialects.kserve.tensors import BOOL, BYTES, Tensor, check_datatype, text_of, values_of_raw
from gateway.http.problem import Json
from gateway.rpc.messages import MESSAGES

FINAL = "triton_final_response"  # a streamed response's parameter
_CONTENTS = {
    BOOL: "bool_contents", BYTES: "bytes_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "INT64": "int64_contents",
    "UINT64": "uint64_contents", **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
}  # fmt: skip


def body_of(request: Any) -> bytes:
    """An `InferRequest` message as the JSON body of HTTP's infer. Raises InvalidRequestError."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidRequestError(
            f"raw_input_contents: has {len(raw)} entries for {len(request.inputs)} inputs: give all inputs there, or none",
            param="raw_input_contents",
        )
    inputs = [_input(one, raw[at] if raw else None) for at, one in enumerate(request.inputs)]
    outputs = [{"name": one.name, "parameters": _parameters(one.parameters)} for one in request.outputs]
    return msgspec.json.encode(
        {
            "model": request.model_name,
            "version": request.model_version or None,
            "id": request.id or None,
            "parameters": _parameters(request.parameters),
            "inputs": inputs,
            "outputs": outputs,
        }
    )


def _input(tensor: Any, raw: bytes | None) -> Json:
    try:
        data = _values(tensor) if raw is None else values_of_raw(tensor.datatype, tensor.shape, raw)
    except ValueError as error:
        raise InvalidRequestError(f"inputs: {tensor.name[:100]}: {error}", param="inputs") from None
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "datatype": tensor.datatype,
        "parameters": _parameters(tensor.parameters),
        "data": data,
    }


def _values(tensor: Any) -> list[Any]:
    """The values of `contents` in its datatype's field. Raises ValueError."""
    field = _CONTENTS.get(check_datatype(tensor.datatype))
    if field is None:
        raise ValueError(f"contents: have no {tensor.datatype}: send raw_input_contents")
    values = getattr(tensor.contents, field)
    return [text_of(value) for value in values] if tensor.datatype == BYTES else list(values)


def _parameters(parameters: Mapping[str, Any]) -> Json:
    found: Json = {}
    for name, value in parameters.items():
        kind = value.WhichOneof("parameter_choice")
        found[name] = None if kind is None else getattr(value, kind)
    return found


def response_of(head: Mapping[str, str], tensors: Iterable[Tensor | RowTensor], *, is_final: bool | None = None) -> Any:
    """An `InferResponse` message, its tensors as bytes. `is_final`: for a stream, set on the last."""
    response = MESSAGES["InferResponse"](**head)
    for tensor in tensors:
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        response.raw_output_contents.append(tensor.raw)
    if is_final is not None:
        response.parameters[FINAL].bool_param = is_final
    return response
