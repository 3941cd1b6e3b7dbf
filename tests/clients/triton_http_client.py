"""tritonclient over HTTP: what the server tells of itself, infer by bytes and by JSON, and the generate extension."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import numpy
from cases import BASE_URL, MODEL, case, run
from tritonclient import http
from tritonclient.utils import InferenceServerException

HOST = urlsplit(BASE_URL).netloc
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
client = http.InferenceServerClient(HOST)


def tensor(name: str, value: Any, datatype: str, *, binary: bool = True) -> http.InferInput:
    made = http.InferInput(name, [1], datatype)
    made.set_data_from_numpy(numpy.array([value], dtype=object if datatype == "BYTES" else bool), binary_data=binary)
    return made


def inputs(*, binary: bool = True) -> list[http.InferInput]:
    return [
        tensor("text_input", QUESTION, "BYTES", binary=binary),
        tensor("exclude_input_in_output", True, "BOOL", binary=binary),
        tensor("sampling_parameters", json.dumps({"temperature": "0", "max_tokens": "40"}), "BYTES", binary=binary),
    ]


def text_of(result: http.InferResult) -> str:
    return result.as_numpy("text_output")[0].decode()


@case("live, ready, model ready")
def ready() -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert client.is_model_ready(MODEL, "1")
    assert not client.is_model_ready("no-such-model")


@case("metadata, config, statistics, repository index")
def objects() -> None:
    assert client.get_server_metadata()["name"] == "baton"
    assert client.get_model_metadata(MODEL)["inputs"][0]["name"] == "text_input"
    assert client.get_model_config(MODEL)["input"][0]["data_type"] == "TYPE_STRING"
    assert client.get_inference_statistics(MODEL)["model_stats"][0]["name"] == MODEL
    assert client.get_inference_statistics()["model_stats"]
    assert MODEL in [one["name"] for one in client.get_model_repository_index()]


@case("infer, tensors as bytes (its default)")
def by_bytes() -> None:
    result = client.infer(MODEL, inputs(), request_id="mine")
    assert "Paris" in text_of(result), text_of(result)
    assert result.get_response()["id"] == "mine"


@case("infer, tensors as JSON, packed by gzip")
def by_json() -> None:
    wanted = [http.InferRequestedOutput("text_output", binary_data=False)]
    result = client.infer(MODEL, inputs(binary=False), outputs=wanted, request_compression_algorithm="gzip")
    assert "Paris" in str(result.as_numpy("text_output")[0])


@case("infer, outputs by name")
def outputs() -> None:
    wanted = [http.InferRequestedOutput(name) for name in ("text_output", "finish_reason", "num_output_tokens")]
    result = client.infer(MODEL, inputs(), outputs=wanted, parameters={"max_tokens": 40})
    assert result.as_numpy("finish_reason")[0] in (b"stop", b"length")
    assert result.as_numpy("num_output_tokens")[0] > 0


@case("async_infer")
def at_once() -> None:
    with http.InferenceServerClient(HOST, concurrency=3) as many:
        asked = [many.async_infer(MODEL, inputs()) for _ in range(3)]
        assert all("Paris" in text_of(one.get_result()) for one in asked)


def refusal(ask: Callable[[], Any]) -> str:
    """What the client's exception says."""
    try:
        ask()
    except InferenceServerException as error:
        return str(error.message())
    raise AssertionError("was not refused")


@case("errors as exceptions with their text")
def errors() -> None:
    assert "no-such-model" in refusal(lambda: client.get_model_metadata("no-such-model"))
    assert "text_input" in refusal(lambda: client.infer(MODEL, [tensor("text", "a", "BYTES")]))
    assert "worker" in refusal(lambda: client.load_model(MODEL))
    assert "shared memory" in refusal(client.get_system_shared_memory_status)
    assert "logs" in refusal(lambda: client.update_log_settings({"log_verbose_level": 1}))


def post(path: str, body: dict[str, Any]) -> str:
    url = f"http://{HOST}/v2/models/{MODEL}/{path}"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


GENERATE = {"text_input": QUESTION, "parameters": {"temperature": 0, "max_tokens": 40, "exclude_input_in_output": True}}


@case("generate (urllib)")
def generate() -> None:
    assert "Paris" in json.loads(post("generate", GENERATE))["text_output"]


@case("generate_stream (urllib)")
def generate_stream() -> None:
    told = [json.loads(line.removeprefix("data: ")) for line in post("generate_stream", GENERATE).splitlines() if line]
    assert len(told) > 1
    assert "Paris" in "".join(one["text_output"] for one in told)


run()
