"""A client of the gRPC service, for answers of one request at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from gateway.rpc.messages import MESSAGES
from gateway.rpc.service import SERVICE

TIMEOUT_S = 60.0


@asynccontextmanager
async def calling(port: int, streams: bool) -> AsyncIterator[Callable[[Any], Awaitable[Any]]]:
    """Sends a request, as a call of its own or as a stream of one; returns the response, or the text of its error."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        whole = channel.unary_unary(
            f"/{SERVICE}/ModelInfer",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=MESSAGES["InferResponse"].FromString,
        )
        stream = channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=MESSAGES["StreamedResponse"].FromString,
        )

        async def infer(request: Any) -> Any:
            if streams:
                call = stream(iter([request]), timeout=TIMEOUT_S)
                [response] = [each async for each in call]
                return response.error_message or response.infer_response
            try:
                return await whole(request, timeout=TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                return error.details()

        yield infer
