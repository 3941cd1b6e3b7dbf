"""Methods of the gRPC service as a client calls them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from gateway.rpc.messages import MESSAGES
from gateway.rpc.service import SERVICE

TIMEOUT_S = 60.0


def whole(channel: Any, method: str, response: str) -> Any:
    """A method that answers a message with one; `response` names the answer's kind."""
    return channel.unary_unary(
        f"/{SERVICE}/{method}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=MESSAGES[response].FromString,
    )


def streaming(channel: Any) -> Any:
    """The method of streams."""
    return channel.stream_stream(
        f"/{SERVICE}/ModelStreamInfer",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=MESSAGES["StreamedResponse"].FromString,
    )


@asynccontextmanager
async def calling(port: int, streams: bool) -> AsyncIterator[Callable[[Any], Awaitable[Any]]]:
    """Sends a request, as a call of its own or as a stream of one; returns the response, or the text of its error."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

        async def infer(request: Any) -> Any:
            if streams:
                call = streaming(channel)(iter([request]), timeout=TIMEOUT_S)
                [response] = [each async for each in call]
                return response.error_message or response.infer_response
            try:
                return await whole(channel, "ModelInfer", "InferResponse")(request, timeout=TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                return error.details()

        yield infer
