# mypy: allow-untyped-calls
"""Tensors of models that pool, over HTTP and gRPC."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch

from tests.needs import needs
from tests.unit.gateway.pooling.served import CLOSE, DOCUMENTS, QUERY, ask, logits, vector


@pytest.mark.asyncio(loop_scope="module")
async def test_tensors_go_in_as_texts_and_come_out_as_rows(client: httpx.AsyncClient, models: dict[str, Path]) -> None:
    wanted = [pytest.approx(vector(models["mini"], text).tolist(), **CLOSE) for text in DOCUMENTS]
    about = {"name": "text_input", "datatype": "BYTES", "shape": [3]}
    told = await ask(client, "/v2/models/mini/infer", id="mine", inputs=[about | {"data": DOCUMENTS}])
    [output] = told["outputs"]
    assert (told["id"], told["model_name"], told["model_version"]) == ("mine", "mini", "1")
    assert (output["name"], output["datatype"], output["shape"]) == ("embedding", "FP32", [3, 32])
    assert [output["data"][at : at + 32] for at in range(0, 96, 32)] == wanted
    raw = b"".join(struct.pack("<I", len(text)) + text.encode() for text in DOCUMENTS)
    inputs = [about | {"shape": [3, 1], "parameters": {"binary_data_size": len(raw)}}]
    head = msgspec.json.encode({"inputs": inputs, "parameters": {"binary_data_output": True, "dimensions": 8}})
    length = {"inference-header-content-length": str(len(head))}
    answer = await client.post("/v2/models/mini/versions/1/infer", content=head + raw, headers=length)
    end = int(answer.headers["inference-header-content-length"])
    assert msgspec.json.decode(answer.content[:end])["outputs"][0]["parameters"] == {"binary_data_size": 96}
    short = torch.nn.functional.normalize(vector(models["mini"], DOCUMENTS[0])[:8], dim=0)
    assert list(struct.unpack("<8f", answer.content[end : end + 32])) == pytest.approx(short.tolist(), **CLOSE)
    pairs = [part for text in DOCUMENTS for part in (QUERY, text)]
    scored = await ask(client, "/v2/models/cross/infer", inputs=[about | {"shape": [3, 2], "data": pairs}])
    scores = [logits(models["cross"], QUERY, text).sigmoid().item() for text in DOCUMENTS]
    assert scored["outputs"][0]["data"] == pytest.approx(scores, **CLOSE)
    for body, says in (
        ({"inputs": [about | {"datatype": "FP32", "data": [1, 2, 3]}]}, "must be BYTES"),
        ({"inputs": [about | {"shape": [2], "data": DOCUMENTS}]}, "has 3 elements"),
        ({"inputs": [about | {"shape": [1, 2], "data": DOCUMENTS[:2]}]}, "a vector is of one text"),
        ({"inputs": [about | {"data": DOCUMENTS}], "outputs": [{"name": "other"}]}, "embedding is"),
        ({"inputs": [about | {"data": DOCUMENTS}], "parameters": {"beams": 2}}, "beams"),
    ):
        refused = await client.post("/v2/models/mini/infer", json=body)
        assert (refused.status_code, says in refused.json()["error"]) == (400, True), refused.text


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("streams", [False, True])
async def test_grpc_has_the_rows_of_http(streams: bool, client: httpx.AsyncClient, models: dict[str, Path]) -> None:
    needs("grpc")
    from gateway.rpc.messages import MESSAGES
    from gateway.rpc.server import RpcSettings, serving
    from tests.unit.gateway.kserve.rpc import calling

    def request(model: str, texts: list[str], shape: list[int], **given: int) -> Any:
        made = MESSAGES["InferRequest"](model_name=model, id="mine")
        made.inputs.add(name="text_input", datatype="BYTES", shape=shape).contents.bytes_contents.extend(
            [text.encode() for text in texts]
        )
        for name, value in given.items():
            made.parameters[name].int64_param = value
        return made

    app = client._transport.app  # type: ignore[attr-defined]
    bounds = RpcSettings(host="127.0.0.1", port=0, max_body_bytes=200_000, max_calls=8, end_s=0)
    async with serving(app.state.door, bounds, app.state.pooled_tensors) as port, calling(port, streams) as infer:
        answer = await infer(request("mini", DOCUMENTS, [3]))
        [output], [raw] = answer.outputs, answer.raw_output_contents
        assert (answer.id, answer.model_name, output.name, output.datatype) == ("mine", "mini", "embedding", "FP32")
        assert list(output.shape) == [3, 32]
        wanted = [number for text in DOCUMENTS for number in vector(models["mini"], text).tolist()]
        assert list(struct.unpack("<96f", raw)) == pytest.approx(wanted, **CLOSE)
        short = await infer(request("mini", DOCUMENTS, [3], dimensions=8))
        assert list(short.outputs[0].shape) == [3, 8]
        scored = await infer(request("cross", [QUERY, DOCUMENTS[0]], [1, 2]))
        score = logits(models["cross"], QUERY, DOCUMENTS[0]).sigmoid().item()
        assert struct.unpack("<f", scored.raw_output_contents[0]) == (pytest.approx(score, **CLOSE),)
        for wrong, says in (
            (request("mini", DOCUMENTS[:2], [1, 2]), "a vector is of one text"),
            (request("mini", DOCUMENTS, [3], beams=2), "beams"),
        ):
            assert says in await infer(wrong)


@pytest.mark.asyncio(loop_scope="module")
async def test_tensors_of_models_that_pool_are_described(client: httpx.AsyncClient) -> None:
    described = (await client.get("/v2/models/mini")).json()
    assert described["inputs"] == [{"name": "text_input", "datatype": "BYTES", "shape": [-1]}]
    assert described["outputs"] == [{"name": "embedding", "datatype": "FP32", "shape": [-1, 32]}]
    config = (await client.get("/v2/models/cross/config")).json()
    assert config["output"] == [{"name": "scores", "data_type": "TYPE_FP32", "dims": [-1, 1]}]
    assert (await client.get("/v2/models/mini/ready")).json() == {"name": "mini", "ready": True}
    before = (await client.get("/v2/models/mini/stats")).json()["model_stats"][0]["inference_count"]
    await ask(client, "/v1/embeddings", model="mini", input="a")
    assert (await client.get("/v2/models/mini/stats")).json()["model_stats"][0]["inference_count"] == before + 1
    listed = await ask(client, "/v2/repository/index")
    assert {one["state"] for one in listed if one["name"] in ("cross", "mood", "mini")} == {"READY"}
    for path in ("other", "other/ready", "mini/versions/2", "mini/versions/2/ready"):
        assert (await client.get(f"/v2/models/{path}")).status_code == 404, path
