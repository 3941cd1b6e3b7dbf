"""KServe's protocol over HTTP through the in-process gateway: tensors and generate in, a scripted text out."""

from __future__ import annotations

import json
import struct
from typing import Any

import httpx
import pytest

from common.errors import OverloadedError, UnavailableError, WorkerFailedError
from tests.unit.gateway.conftest import MODEL, TEXT, Gateway

PATH = f"/v2/models/{MODEL}"
PROMPT = "Say it: "
HEADER = "Inference-Header-Content-Length"


def texts(name: str, *values: str) -> dict[str, Any]:
    return {"name": name, "shape": [len(values)], "datatype": "BYTES", "data": list(values)}


def switch(name: str, *, on: bool) -> dict[str, Any]:
    return {"name": name, "shape": [1], "datatype": "BOOL", "data": [on]}


def output(**parameters: Any) -> dict[str, Any]:
    return {"name": "text_output", "parameters": parameters}


def infer_body(*inputs: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"inputs": [texts("text_input", PROMPT), *inputs], **fields}


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    return [json.loads(part.removeprefix("data: ")) for part in answer.text.split("\n\n") if part]


async def test_infer_answers_with_the_prompt_before_its_text_unless_told_otherwise(gateway: Gateway) -> None:
    answer = await gateway.http.post(f"{PATH}/infer", json=infer_body(id="mine"))
    output = {"name": "text_output", "datatype": "BYTES", "shape": [1], "data": [PROMPT + TEXT]}
    assert answer.json() == {"id": "mine", "model_name": MODEL, "model_version": "1", "outputs": [output]}
    assert answer.headers["content-type"] == "application/json"
    assert HEADER not in answer.headers
    without = infer_body(switch("exclude_input_in_output", on=True))
    answer = await gateway.http.post(f"{PATH}/versions/1/infer", json=without)
    assert answer.json()["outputs"][0]["data"] == [TEXT]
    assert gateway.script.running == {}


async def test_tensors_travel_as_bytes_behind_the_json_both_ways(gateway: Gateway) -> None:
    prompt = PROMPT.encode()
    raw = [struct.pack("<I", len(prompt)) + prompt, b"\x01", struct.pack("<i", 3)]
    about = [("text_input", "BYTES"), ("exclude_input_in_output", "BOOL"), ("max_tokens", "INT32")]
    inputs = [
        {"name": name, "shape": [1], "datatype": datatype, "parameters": {"binary_data_size": len(data)}}
        for (name, datatype), data in zip(about, raw, strict=True)
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    answer = await gateway.http.post(
        f"{PATH}/infer",
        content=head + b"".join(raw),
        headers={HEADER: str(len(head)), "content-type": "application/octet-stream"},
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/octet-stream"
    length = int(answer.headers[HEADER])
    told, data = json.loads(answer.content[:length]), answer.content[length:]
    assert told["outputs"] == [
        {"name": "text_output", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(data)}}
    ]
    assert TEXT.startswith(data[4:].decode())
    assert struct.unpack("<I", data[:4]) == (len(data) - 4,)
    assert gateway.script.submitted[-1].sampling.max_tokens == 3


async def test_outputs_are_chosen_by_switches_or_by_name(gateway: Gateway) -> None:
    num_tokens = len(gateway.tokenizer.encode(TEXT)) + 1
    asked = infer_body(switch("return_finish_reason", on=True), switch("return_num_output_tokens", on=True))
    answer = (await gateway.http.post(f"{PATH}/infer", json=asked)).json()
    assert {one["name"]: one["data"] for one in answer["outputs"]} == {
        "text_output": [PROMPT + TEXT], "finish_reason": ["stop"], "num_output_tokens": [num_tokens],
    }  # fmt: skip
    named = infer_body(
        outputs=[{"name": "num_input_tokens"}, {"name": "logprobs", "parameters": {"binary_data": True}}]
    )
    answer = await gateway.http.post(f"{PATH}/infer", json=named)
    told = json.loads(answer.content[: int(answer.headers[HEADER])])
    assert told["outputs"][0]["data"] == [len(gateway.tokenizer.encode(PROMPT))]
    assert told["outputs"][1]["parameters"]["binary_data_size"] > 0
    assert gateway.script.submitted[-1].sampling.logprobs == 0


# What is said -> what the workers are told.
SAMPLING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "numbers": ({"temperature": 0.5, "top_k": 7, "max_tokens": 5}, {"temperature": 0.5, "top_k": 7, "max_tokens": 5}),
    "texts": ({"temperature": "0.5", "max_tokens": "5", "ignore_eos": "true"}, {"temperature": 0.5, "max_tokens": 5}),
    "TensorRT-LLM": (
        {"stop_words": [""], "bad_words": "", "min_length": 2, "random_seed": 4},
        {"min_tokens": 2, "seed": 4},
    ),
    "Triton's off": ({"priority": 0, "timeout": 0, "sequence_id": 0, "beam_width": 1, "lora_name": ""}, {}),
}


@pytest.mark.parametrize("place", ["sampling_parameters", "inputs", "parameters", "generate", "beside text_input"])
@pytest.mark.parametrize("case", SAMPLING)
async def test_sampling_parameters_are_read_wherever_clients_put_them(gateway: Gateway, place: str, case: str) -> None:
    said, wanted = SAMPLING[case]
    if place == "sampling_parameters" and case == "Triton's off":
        said = {name: value for name, value in said.items() if name != "timeout"}  # in seconds there
    tensors = [
        texts(name, *(value if isinstance(value, list) else [value])) for name, value in said.items() if _is_text(value)
    ]
    tensors += [_number(name, value) for name, value in said.items() if not _is_text(value)]
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "sampling_parameters": ("infer", infer_body(texts("sampling_parameters", json.dumps(said)))),
        "inputs": ("infer", infer_body(*tensors)),
        "parameters": ("infer", infer_body(parameters=said)),
        "generate": ("generate", {"text_input": PROMPT, "parameters": said}),
        "beside text_input": ("generate", {"text_input": PROMPT, **said}),
    }
    path, body = bodies[place]
    answer = await gateway.http.post(f"{PATH}/{path}", json=body)
    assert answer.status_code == 200, answer.text
    sampling = gateway.script.submitted[-1].sampling
    assert {name: getattr(sampling, name) for name in wanted} == wanted


def _is_text(value: Any) -> bool:
    return isinstance(value, str | list)


def _number(name: str, value: Any) -> dict[str, Any]:
    datatype = "FP64" if isinstance(value, float) else "INT32"
    return {"name": name, "shape": [1, 1], "datatype": datatype, "data": [[value]]}


async def test_generate_answers_in_one_object(gateway: Gateway) -> None:
    body = {"text_input": PROMPT, "id": "7", "parameters": {"exclude_input_in_output": True, "stream": False}}
    answer = await gateway.http.post(f"{PATH}/generate", json=body)
    assert answer.json() == {"id": "7", "model_name": MODEL, "model_version": "1", "text_output": TEXT}
    two = await gateway.http.post(
        f"{PATH}/generate", json={"text_input": PROMPT, "n": 2, "return_num_input_tokens": True}
    )
    assert two.json()["text_output"] == [PROMPT + TEXT] * 2
    assert two.json()["num_input_tokens"] == len(gateway.tokenizer.encode(PROMPT))


async def test_generate_stream_is_events_of_what_is_new(gateway: Gateway) -> None:
    answer = await gateway.http.post(f"{PATH}/generate_stream", json={"text_input": PROMPT, "stream": True})
    told = events(answer)
    assert len(told) > 5
    assert all(one.keys() == {"model_name", "model_version", "text_output"} for one in told)
    assert "".join(one["text_output"] for one in told) == TEXT
    whole = await gateway.http.post(f"{PATH}/versions/1/generate_stream", json={"text_input": PROMPT, "stream": False})
    assert [one["text_output"] for one in events(whole)] == [PROMPT + TEXT]


async def test_a_stream_tells_the_other_outputs_with_each_event(gateway: Gateway) -> None:
    wanted = ("finish_reason", "cumulative_logprob", "logprobs", "num_output_tokens")
    body = {"text_input": PROMPT, "parameters": {"n": 2, **{f"return_{name}": True for name in wanted}}}
    told = events(await gateway.http.post(f"{PATH}/generate_stream", json=body))
    for index in (0, 1):
        assert "".join(one["text_output"][index] for one in told) == TEXT
        reasons = [one["finish_reason"][index] for one in told]
        assert reasons.count("stop") == 1
        assert set(reasons) == {"None", "stop"}
        assert sum(one["num_output_tokens"][index] for one in told) == len(gateway.tokenizer.encode(TEXT)) + 1
        scored = [entry for one in told for entry in json.loads(one["logprobs"][index])]
        total = sum(next(iter(entry.values()))["logprob"] for entry in scored)
        assert told[-1]["cumulative_logprob"][index] == pytest.approx(total)


async def test_an_error_in_a_stream_is_its_last_event(gateway: Gateway) -> None:
    gateway.script.fail, gateway.script.fail_after = WorkerFailedError("broke"), 3
    *parts, last = events(await gateway.http.post(f"{PATH}/generate_stream", json={"text_input": PROMPT}))
    assert last == {"error": "broke"}
    assert parts
    assert all("text_output" in one for one in parts)
    whole = await gateway.http.post(f"{PATH}/infer", json=infer_body())
    assert (whole.status_code, whole.json()) == (500, {"error": "broke"})


def no(field: str, *, at: str = "infer", status: int = 400, **body: Any) -> tuple[str, int, str, dict[str, Any]]:
    return at, status, field, body


WRONG: dict[str, tuple[str, int, str, dict[str, Any]]] = {
    "no text": no("inputs", inputs=[switch("stream", on=False)]),
    "an empty text": no("text_input", at="generate", text_input=""),
    "two texts": no("text_input", inputs=[texts("text_input", "a", "b")]),
    "another datatype": no("inputs: stream", inputs=[texts("text_input", "a"), texts("stream", "true")]),
    "an unknown datatype": no("BF16", inputs=[{"name": "text_input", "shape": [1], "datatype": "BF16", "data": ["a"]}]),
    "another shape": no("shape", inputs=[{**texts("text_input", "a"), "shape": [2]}]),
    "too deep": no("deeper", inputs=[{**texts("text_input", "a"), "data": [[["a"]]]}]),
    "numbers for texts": no("datatype BYTES", inputs=[{**texts("text_input", "a"), "data": [3]}]),
    "an unknown input": no("no_such", **infer_body(texts("no_such", "a"))),
    "an unknown output": no("outputs", **infer_body(outputs=[{"name": "logits"}])),
    "an unknown parameter": no("no_such", at="generate", text_input="a", parameters={"no_such": 1}),
    "said twice": no("max_tokens", at="generate", text_input="a", max_tokens=1, parameters={"max_tokens": 2}),
    "said twice in sampling": no("top_k", at="generate", text_input="a", top_k=1, sampling_parameters='{"top_k": 2}'),
    "no JSON": no("sampling_parameters", **infer_body(texts("sampling_parameters", "{"))),
    "no object": no("sampling_parameters", **infer_body(texts("sampling_parameters", "[1]"))),
    "another prompt": no("prompt", at="generate", text_input="a", prompt="b"),
    "out of range": no("temperature", at="generate", text_input="a", temperature="7"),
    "no number": no("temperature", at="generate", text_input="a", temperature="warm"),
    "no switch": no("stream", at="generate", text_input="a", stream="perhaps"),
    "a short time-out": no("microseconds", at="generate", text_input="a", timeout=30),
    "a priority": no("priority", at="generate", text_input="a", priority=1),
    "a sequence": no("sequence_id", **infer_body(parameters={"sequence_id": 4, "sequence_start": True})),
    "beams": no("beam_width", at="generate", text_input="a", beam_width=4),
    "an image": no("image", **infer_body(texts("image", "abc"))),
    "shared memory": no("shared_memory_region", **infer_body(outputs=[output(shared_memory_region="a")])),
    "classes": no("classification", **infer_body(outputs=[output(classification=2)])),
    "bytes without a header": no("binary_data_size", inputs=[texts("text_input", "a") | {"parameters": {"binary_data_size": 5}}]),
    "a stream of infer": no("generate_stream", **infer_body(switch("stream", on=True))),
    "a stream of generate": no("generate_stream", at="generate", text_input="a", stream=True),
    "a stream with the prompt": no("exclude_input", at="generate_stream", text_input="a", exclude_input_in_output=False),
    "another version": no("version", at="versions/2/infer", status=404, **infer_body()),
    "a model in the body": no("model", at="generate", text_input="a", model="other"),
    "a long text": no("text_input", at="generate", text_input="x" * 10_000),
    "many tokens": no("in the completion", at="generate", text_input="a", max_tokens=10_000),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
async def test_what_can_t_be_honoured_is_refused_by_name(gateway: Gateway, case: str) -> None:
    path, status, named, body = WRONG[case]
    answer = await gateway.http.post(f"{PATH}/{path}", json=body)
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"error"}
    assert named in answer.json()["error"]
    assert gateway.script.submitted == []


TRUNCATED = struct.pack("<I", 9) + b"abc"
BINARY: dict[str, tuple[bytes, str, str]] = {
    "no number": (b"", "some", HEADER.lower()),
    "more than there is": (b"", "9999", HEADER.lower()),
    "cut in an element": (TRUNCATED, "", "ends within an element"),
    "more elements": (2 * (struct.pack("<I", 1) + b"a"), "", "more elements"),
    "no UTF-8": (struct.pack("<I", 1) + b"\xff", "", "UTF-8"),
}


@pytest.mark.parametrize("case", BINARY)
async def test_bytes_that_are_no_tensor_are_refused(gateway: Gateway, case: str) -> None:
    data, length, named = BINARY[case]
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [tensor]}).encode()
    answer = await gateway.http.post(f"{PATH}/infer", content=head + data, headers={HEADER: length or str(len(head))})
    assert (answer.status_code, named in answer.json()["error"]) == (400, True), answer.text
    behind = await gateway.http.post(f"{PATH}/infer", content=head + data + b"more", headers={HEADER: str(len(head))})
    assert behind.status_code == 400


async def test_server_and_models_tell_of_themselves(gateway: Gateway) -> None:
    async def got(path: str) -> Any:
        answer = await gateway.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    assert await got("/v2/health/live") == {"live": True}
    assert await got("/v2/health/ready") == {"ready": True}
    assert (await got("/v2"))["name"] == "baton"
    for path in (PATH, f"{PATH}/versions/1"):
        assert await got(f"{path}/ready") == {"name": MODEL, "ready": True}
        metadata, config = await got(path), await got(f"{path}/config")
        assert (metadata["name"], metadata["versions"]) == (MODEL, ["1"])
        assert [one["name"] for one in metadata["inputs"]] == [one["name"] for one in config["input"]]
        assert metadata["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": [1]}
        assert config["input"][0] == {"name": "text_input", "data_type": "TYPE_STRING", "dims": [1], "optional": False}
        assert [one["name"] for one in (await got(f"{path}/stats"))["model_stats"]] == [MODEL]
    assert [one["name"] for one in (await got("/v2/models/stats"))["model_stats"]] == [MODEL]
    index = await gateway.http.post("/v2/repository/index", content=b"")
    assert index.json() == [{"name": MODEL, "version": "1", "state": "READY", "reason": ""}]


async def test_a_gateway_without_workers_is_not_ready(gateway: Gateway) -> None:
    gateway.script.not_ready_reason = "no worker yet"
    answer = await gateway.http.get("/v2/health/ready")
    assert (answer.status_code, answer.json()) == (503, {"error": "no worker yet"})
    assert (await gateway.http.get("/v2/health/live")).status_code == 200


REFUSED = (
    ("POST", f"/v2/repository/models/{MODEL}/load", "worker"),
    ("POST", f"/v2/repository/models/{MODEL}/unload", "worker"),
    ("GET", "/v2/systemsharedmemory/status", "shared memory"),
    ("POST", "/v2/cudasharedmemory/region/a/register", "shared memory"),
    ("GET", "/v2/trace/setting", "trace"),
    ("POST", f"/v2/models/{MODEL}/trace/setting", "trace"),
    ("GET", "/v2/logging", "log"),
)


@pytest.mark.parametrize(("method", "path", "named"), REFUSED)
async def test_what_triton_does_and_baton_does_not_is_said(
    gateway: Gateway, method: str, path: str, named: str
) -> None:
    answer = await gateway.http.request(method, path, content=b'{"parameters": {}}' if method == "POST" else None)
    assert (answer.status_code, named in answer.json()["error"]) == (400, True), answer.text


async def test_errors_have_the_protocol_s_form_wherever_they_arise(gateway: Gateway) -> None:
    for method, path, status in (
        ("GET", "/v2/nothing", 404),
        ("GET", "/v2/models/other", 404),
        ("DELETE", PATH, 405),
        ("POST", "/v2/models/other/infer", 400),
    ):
        answer = await gateway.http.request(method, path)
        assert (answer.status_code, answer.json().keys()) == (status, {"error"}), path
    gateway.script.refuse = OverloadedError("full", retry_after_s=7)
    answer = await gateway.http.post(f"{PATH}/infer", json=infer_body())
    assert (answer.status_code, answer.json(), answer.headers["retry-after"]) == (429, {"error": "full"}, "7")
    gateway.script.refuse = UnavailableError("nobody")
    assert (await gateway.http.post(f"{PATH}/generate_stream", json={"text_input": "a"})).status_code == 503


@pytest.mark.parametrize("per_event", [1, 2, 7, 1000])
async def test_a_stream_survives_any_cut_of_its_tokens(gateway: Gateway, per_event: int) -> None:
    gateway.script.per_event = per_event
    body = {"text_input": PROMPT, "parameters": {"stop": "no such end"}}
    told = events(await gateway.http.post(f"{PATH}/generate_stream", json=body))
    assert "".join(one["text_output"] for one in told) == TEXT
