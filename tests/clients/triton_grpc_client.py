"""tritonclient over gRPC: what the server tells of itself, infer whole, and streams."""

from __future__ import annotations

import asyncio
import json
import os
import queue
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy
from cases import MODEL, case, run
from tritonclient import grpc
from tritonclient.grpc import aio
from tritonclient.utils import InferenceServerException

ADDRESS = os.environ["GRPC_ADDRESS"]
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
WAIT_S = 60
client = grpc.InferenceServerClient(ADDRESS)


def tensor(name: str, value: Any, datatype: str) -> grpc.InferInput:
    made = grpc.InferInput(name, [1], datatype)
    made.set_data_from_numpy(numpy.array([value], dtype=object if datatype == "BYTES" else bool))
    return made


def inputs(*, stream: bool = False) -> list[grpc.InferInput]:
    return [
        tensor("text_input", QUESTION, "BYTES"),
        tensor("stream", stream, "BOOL"),
        tensor("exclude_input_in_output", True, "BOOL"),
        tensor("sampling_parameters", json.dumps({"temperature": "0", "max_tokens": "40"}), "BYTES"),
    ]


def text_of(result: grpc.InferResult) -> str:
    return result.as_numpy("text_output")[0].decode()


@case("live, ready, model ready")
def ready() -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert client.is_model_ready(MODEL, "1")


@case("metadata, config, statistics, repository index")
def objects() -> None:
    assert client.get_server_metadata().name == "baton"
    assert client.get_model_metadata(MODEL, as_json=True)["inputs"][0]["name"] == "text_input"
    config = client.get_model_config(MODEL, as_json=True)["config"]
    assert (config["backend"], config["input"][0]["data_type"]) == ("baton", "TYPE_STRING"), config
    assert config["model_transaction_policy"]["decoupled"]
    assert client.get_inference_statistics(MODEL).model_stats[0].name == MODEL
    assert MODEL in [one.name for one in client.get_model_repository_index().models]


@case("infer, whole")
def whole() -> None:
    wanted = [grpc.InferRequestedOutput(name) for name in ("text_output", "finish_reason", "num_output_tokens")]
    result = client.infer(MODEL, inputs(), request_id="mine", outputs=wanted, parameters={"min_tokens": 1})
    assert "Paris" in text_of(result), text_of(result)
    assert result.get_response().id == "mine"
    assert result.as_numpy("finish_reason")[0] in (b"stop", b"length")
    assert result.as_numpy("num_output_tokens")[0] > 0


@case("stream_infer: two requests on one stream, in pieces")
def streamed() -> None:
    told: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(callback=lambda result, error: told.put((result, error)))
    for name in ("one", "two"):
        client.async_stream_infer(MODEL, inputs(stream=True), request_id=name, enable_empty_final_response=True)
    texts, ended = {"one": [], "two": []}, set()
    while len(ended) < 2:
        result, error = told.get(timeout=WAIT_S)
        assert error is None, error
        response = result.get_response()
        if response.parameters["triton_final_response"].bool_param:
            ended.add(response.id)
        else:
            texts[response.id].append(text_of(result))
    client.stop_stream()
    assert all(len(parts) > 1 and "Paris" in "".join(parts) for parts in texts.values()), texts


@case("stream_infer: an error is told, the stream goes on")
def stream_error() -> None:
    told: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(callback=lambda result, error: told.put((result, error)))
    client.async_stream_infer(MODEL, [tensor("text", "a", "BYTES")])
    _, error = told.get(timeout=WAIT_S)
    assert "text_input" in error.message(), error
    client.async_stream_infer(MODEL, inputs())
    result, error = told.get(timeout=WAIT_S)
    client.stop_stream()
    assert error is None, error
    assert "Paris" in text_of(result)


@case("stream_infer, asyncio")
async def streamed_in_asyncio() -> None:
    async def asked() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": MODEL, "inputs": inputs(stream=True)}

    async with aio.InferenceServerClient(ADDRESS) as many:
        parts = [text_of(result) async for result, error in many.stream_infer(asked()) if error is None]
        assert "Paris" in "".join(parts), parts
        answers = await asyncio.gather(*(many.infer(MODEL, inputs()) for _ in range(3)))
        assert all("Paris" in text_of(one) for one in answers)


def refusal(ask: Callable[[], Any]) -> str:
    """What the client's exception says: its status and its text."""
    try:
        ask()
    except InferenceServerException as error:
        return f"{error.status()} {error.message()}"
    raise AssertionError("was not refused")


@case("errors as exceptions with their status and text")
def errors() -> None:
    assert "NOT_FOUND" in refusal(lambda: client.get_model_metadata("no-such-model"))
    assert "text_input" in refusal(lambda: client.infer(MODEL, [tensor("text", "a", "BYTES")]))
    assert "worker" in refusal(lambda: client.load_model(MODEL))
    assert "shared memory" in refusal(client.get_system_shared_memory_status)
    assert "UNIMPLEMENTED" in refusal(lambda: client.update_log_settings({"log_verbose_level": 1}))


run()
