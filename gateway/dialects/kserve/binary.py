"""The binary tensor data extension: JSON followed by the tensors' bytes. A header has the JSON's length. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from common.errors import InvalidRequestError
from gateway.dialects.kserve.tensors import Tensor, values_of_raw
from gateway.http.fields import check_values
from gateway.http.problem import Json

HEADER = "inference-header-content-length"
BINARY = "application/octet-stream"
SIZE = "binary_data_size"  # a tensor's parameter


def unpacked(raw: bytes, headers: Mapping[str, str]) -> bytes:
    """A body as plain JSON: trailing bytes become their inputs' `data`. Raises InvalidRequestError."""
    length = headers.get(HEADER, "").strip()
    if not length:
        return raw
    if not (length.isascii() and length.isdigit() and len(length) < 12 and int(length) <= len(raw)):
        raise InvalidRequestError(f"the header {HEADER} is not the length of the JSON that the body begins with")
    head, rest = raw[: int(length)], memoryview(raw)[int(length) :]
    check_values(head, {})
    try:
        body = msgspec.json.decode(head)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the first {length} bytes of the body are not valid JSON: {error}") from None
    inputs = body.get("inputs") if isinstance(body, dict) else None
    for one in inputs if isinstance(inputs, list) else ():
        if isinstance(one, dict):
            rest = _filled(one, rest)
    if rest:
        raise InvalidRequestError(f"inputs: {len(rest)} bytes follow the last tensor, of which no {SIZE} tells")
    return msgspec.json.encode(body)


def _filled(tensor: Json, rest: memoryview) -> memoryview:
    """Give an input its `data`, if it is in the bytes; return the rest."""
    parameters = tensor.get("parameters")
    if not isinstance(parameters, dict) or SIZE not in parameters:
        return rest
    size, name = parameters.pop(SIZE), str(tensor.get("name"))[:100]
    shape, datatype = tensor.get("shape"), tensor.get("datatype")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(rest):
        raise InvalidRequestError(
            f"inputs: {name}: {SIZE} is not a number of bytes that follow the JSON", param="inputs"
        )
    if not isinstance(shape, list) or not all(type(one) is int for one in shape) or not isinstance(datatype, str):
        raise InvalidRequestError(f"inputs: {name}: needs a shape, a list of integers, and a datatype", param="inputs")
    try:
        tensor["data"] = values_of_raw(datatype, shape, bytes(rest[:size]))
    except ValueError as error:
        raise InvalidRequestError(f"inputs: {name}: {error}", param="inputs") from None
    return rest[size:]


def packed(head: Json, outputs: Sequence[Tensor], binary: Collection[str]) -> tuple[bytes, int]:
    """An answer with the outputs named in `binary` as bytes after its JSON, and the JSON's length."""
    told, parts = list[Any](), list[bytes]()
    for output in outputs:
        about: Json = {"name": output.name, "datatype": output.datatype, "shape": output.shape}
        if output.name in binary:
            parts.append(output.raw)
            told.append(about | {"parameters": {SIZE: len(parts[-1])}})
        else:
            told.append(about | {"data": output.values})
    text = msgspec.json.encode(head | {"outputs": told})
    return b"".join((text, *parts)), len(text)
