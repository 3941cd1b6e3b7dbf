"""KServe's protocol over gRPC, in process: the same door, the same bodies and the same outputs as over HTTP."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.needs import needs

needs("grpc")

import grpc  # noqa: E402 - skipped above where it is missing

from common.errors import OverloadedError, UnavailableError, WorkerFailedError  # noqa: E402
from gateway.answers.tokenizer import ChatTokenizer  # noqa: E402
from gateway.app import HttpSettings, create_app  # noqa: E402
from gateway.rpc.messages import MESSAGES  # noqa: E402
from gateway.rpc.server import RpcSettings, serving  # noqa: E402
from gateway.rpc.service import SERVICE  # noqa: E402
from gateway.tenants.tenants import Tenants  # noqa: E402
from tests.certificates import make_certificates  # noqa: E402
from tests.fakes.generations import ScriptedGenerations  # noqa: E402
from tests.unit.gateway.conftest import MODEL, TEXT  # noqa: E402
from tests.unit.gateway.kserve.rpc import streaming, whole  # noqa: E402
from tests.unit.gateway.recorder import Recorder  # noqa: E402

PROMPT = "Say it: "
SECRET = "the-key-of-a-client"
TIMEOUT_S = 60
NO_TLS: Mapping[str, str] = {}


@dataclass
class Rpc:
    """A running gRPC server, its script and spans, and a client of it."""

    script: ScriptedGenerations
    spans: Recorder
    tokenizer: ChatTokenizer
    channel: Any

    async def call(self, method: str, request: Any, response: str, **options: Any) -> Any:
        return await whole(self.channel, method, response)(
            request, timeout=options.pop("timeout", TIMEOUT_S), **options
        )

    async def infer(self, request: Any, **options: Any) -> Any:
        return await self.call("ModelInfer", request, "InferResponse", **options)

    def stream(self, **options: Any) -> Any:
        return streaming(self.channel)(timeout=TIMEOUT_S, **options)

    async def streamed(self, *requests: Any) -> list[Any]:
        """All responses to these requests."""
        call = self.stream()
        for request in requests:
            await call.write(request)
        await call.done_writing()
        return [response async for response in call]


def channel_to(address: str, tls: Mapping[str, str]) -> Any:
    if not tls:
        return grpc.aio.insecure_channel(address)
    authority = (Path(tls["tls_cert"]).parent / "ca.pem").read_bytes()
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(authority))


@asynccontextmanager
async def run_rpc(tokenizer: ChatTokenizer, *, tls: Mapping[str, str] = NO_TLS, **settings: Any) -> AsyncIterator[Rpc]:
    script, spans = ScriptedGenerations(lambda spec: [*tokenizer.encode(TEXT), *tokenizer.eos_ids]), Recorder()
    app = create_app(
        generations=script, catalogue=script.catalogue(tokenizer), settings=HttpSettings(**settings), tracer=spans
    )
    bounds = RpcSettings(host="127.0.0.1", port=0, max_body_bytes=200_000, max_calls=64, end_s=0, **tls)
    async with serving(app.state.door, bounds) as port, channel_to(f"127.0.0.1:{port}", tls) as channel:
        yield Rpc(script, spans, tokenizer, channel)


@pytest.fixture(scope="module")
async def served(tokenizer: ChatTokenizer) -> AsyncIterator[Rpc]:
    async with run_rpc(tokenizer) as rpc:
        yield rpc


@pytest.fixture
async def rpc(served: Rpc) -> Rpc:
    vars(served.script).update(vars(ScriptedGenerations(served.script.script)))
    served.spans.spans.clear()
    return served


def request(text: str = PROMPT, *, raw: bool = False, **said: Any) -> Any:
    """A request with a text, and sampling parameters and switches as request parameters."""
    made = MESSAGES["InferRequest"](model_name=MODEL, id="mine")
    tensor = made.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    if raw:
        made.raw_input_contents.append(struct.pack("<I", len(text.encode())) + text.encode())
    else:
        tensor.contents.bytes_contents.append(text.encode())
    for name, value in said.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
        setattr(made.parameters[name], kind, value)
    return made


def texts(response: Any, name: str = "text_output") -> list[str]:
    at = next(at for at, one in enumerate(response.outputs) if one.name == name)
    raw, found = response.raw_output_contents[at], list[str]()
    while raw:
        (length,) = struct.unpack_from("<I", raw)
        found.append(raw[4 : 4 + length].decode())
        raw = raw[4 + length :]
    return found


async def status_of(call: Any) -> tuple[Any, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "contents"])
async def test_infer_answers_whole(rpc: Rpc, raw: bool) -> None:
    response = await rpc.infer(request(raw=raw, return_finish_reason=True))
    assert (response.model_name, response.model_version, response.id) == (MODEL, "1", "mine")
    assert (texts(response), texts(response, "finish_reason")) == ([PROMPT + TEXT], ["stop"])
    shorter = await rpc.infer(request(raw=raw, exclude_input_in_output=True, max_tokens="3", temperature=0.5))
    assert TEXT.startswith(texts(shorter)[0])
    sampling = rpc.script.submitted[-1].sampling
    assert (sampling.max_tokens, sampling.temperature) == (3, 0.5)
    assert rpc.script.running == {}


async def test_a_stream_s_requests_are_answered_in_pieces_or_whole(rpc: Rpc) -> None:
    whole = request(exclude_input_in_output=True)
    whole.id = "whole"
    told = [one.infer_response for one in await rpc.streamed(request(stream=True), whole)]
    assert ["".join(texts(one)[0] for one in told if one.id == name) for name in ("mine", "whole")] == [TEXT, TEXT]
    assert len([one for one in told if one.id == "mine"]) > 5
    finals = [one.id for one in told if one.parameters["triton_final_response"].bool_param]
    assert sorted(finals) == ["mine", "whole"]
    assert rpc.script.running == {}


async def test_a_stream_may_end_with_an_empty_response(rpc: Rpc) -> None:
    *parts, last = await rpc.streamed(request(stream=True, triton_enable_empty_final_response=True))
    assert "".join(texts(one.infer_response)[0] for one in parts) == TEXT
    assert not any(one.infer_response.parameters["triton_final_response"].bool_param for one in parts)
    assert last.infer_response.parameters["triton_final_response"].bool_param
    assert not last.infer_response.outputs


async def test_an_error_ends_its_own_request_alone(rpc: Rpc) -> None:
    wrong = request(top_k="many")
    wrong.id = "wrong"
    told = await rpc.streamed(wrong, request(stream=True))
    failed = [one for one in told if one.error_message]
    assert [(one.infer_response.id, "top_k" in one.error_message) for one in failed] == [("wrong", True)]
    assert "".join(texts(one.infer_response)[0] for one in told if not one.error_message) == TEXT
    rpc.script.fail, rpc.script.fail_after = WorkerFailedError("broke"), 3
    *parts, last = await rpc.streamed(request(stream=True))
    assert (last.error_message, bool(parts)) == ("broke", True)
    rpc.script.fail = ZeroDivisionError("a bug")
    assert (await rpc.streamed(request(stream=True)))[-1].error_message == "internal error"
    assert await status_of(rpc.infer(request())) == (grpc.StatusCode.INTERNAL, "internal error")


STATUSES = {
    "a field": ({"temperature": 7.0}, None, grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
    "a stream": ({"stream": True}, None, grpc.StatusCode.INVALID_ARGUMENT, "ModelStreamInfer"),
    "no room": ({}, OverloadedError("full", retry_after_s=7), grpc.StatusCode.RESOURCE_EXHAUSTED, "full"),
    "no worker": ({}, UnavailableError("nobody"), grpc.StatusCode.UNAVAILABLE, "nobody"),
    "a worker": ({}, WorkerFailedError("broke"), grpc.StatusCode.INTERNAL, "broke"),
}


@pytest.mark.parametrize("case", STATUSES)
async def test_errors_are_statuses(rpc: Rpc, case: str) -> None:
    said, error, code, named = STATUSES[case]
    rpc.script.refuse = error
    status, details = await status_of(rpc.infer(request(**said)))
    assert (status, named in details) == (code, True), details
    assert rpc.script.running == {}


async def test_a_model_a_version_and_a_tensor_are_checked(rpc: Rpc) -> None:
    other = request()
    other.model_name = "other"
    assert (await status_of(rpc.infer(other)))[0] == grpc.StatusCode.NOT_FOUND
    version = request()
    version.model_version = "2"
    assert (await status_of(rpc.infer(version)))[0] == grpc.StatusCode.NOT_FOUND
    fewer = request(raw=True)
    fewer.inputs.add(name="stream", datatype="BOOL", shape=[1])
    assert "raw_input_contents" in (await status_of(rpc.infer(fewer)))[1]
    cut = request(raw=True)
    cut.raw_input_contents[0] = cut.raw_input_contents[0][:-1]
    assert "ends within an element" in (await status_of(rpc.infer(cut)))[1]
    half = request()
    half.inputs.add(name="top_p", datatype="FP16", shape=[1])
    assert "raw_input_contents" in (await status_of(rpc.infer(half)))[1]


async def test_a_call_that_is_given_up_cancels_its_work(rpc: Rpc) -> None:
    rpc.script.hold_after = 2
    for giving_up in ("whole", "stream"):
        call = rpc.stream() if giving_up == "stream" else asyncio.ensure_future(rpc.infer(request()))
        if giving_up == "stream":
            await call.write(request(stream=True))
        await rpc.script.until(lambda: bool(rpc.script.running))
        call.cancel()
        await rpc.script.until(lambda: not rpc.script.running)


async def test_a_call_s_deadline_is_the_answer_s(rpc: Rpc) -> None:
    await rpc.infer(request(), timeout=60)
    assert 0 < rpc.script.submitted[-1].deadline_s < 70
    await rpc.infer(request(), timeout=None)
    assert rpc.script.submitted[-1].deadline_s == 600


async def test_a_call_is_traced_and_has_an_id(rpc: Rpc) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    call = rpc.channel.unary_unary(f"/{SERVICE}/ModelInfer")(
        request().SerializeToString(), metadata=(("traceparent", trace), ("x-request-id", "known"))
    )
    await call
    assert dict(await call.trailing_metadata())["x-request-id"] == "known"
    (span,) = rpc.spans.spans
    assert (span.name, span.context[3:35]) == (f"{SERVICE}/ModelInfer", trace[3:35])
    assert span.attributes["rpc.method"] == "ModelInfer"
    assert span.attributes["gen_ai.usage.output_tokens"] > 3
    await status_of(rpc.infer(request(temperature=7.0)))
    assert rpc.spans.spans[-1].attributes["rpc.grpc.status_code"] == grpc.StatusCode.INVALID_ARGUMENT.value[0]


async def test_server_and_models_tell_of_themselves(rpc: Rpc) -> None:
    nothing, model = MESSAGES["Nothing"](), MESSAGES["Model"](name=MODEL)
    assert (await rpc.call("ServerLive", nothing, "Live")).live
    assert (await rpc.call("ServerReady", nothing, "Ready")).ready
    assert (await rpc.call("ModelReady", model, "Ready")).ready
    assert (await rpc.call("ServerMetadata", nothing, "Server")).name == "baton"
    assert (await rpc.call("ModelMetadata", model, "ModelMetadata")).inputs[0].name == "text_input"
    config = (await rpc.call("ModelConfig", model, "ModelConfig")).config
    assert (config.name, config.input[0].data_type, config.model_transaction_policy.decoupled) == (MODEL, 13, True)
    assert [one.name for one in (await rpc.call("ModelStatistics", model, "Statistics")).model_stats] == [MODEL]
    index = await rpc.call("RepositoryIndex", MESSAGES["IndexRequest"](ready=True), "Index")
    assert [(one.name, one.state) for one in index.models] == [(MODEL, "READY")]
    unknown = rpc.call("ModelMetadata", MESSAGES["Model"](name="other"), "ModelMetadata")
    assert (await status_of(unknown))[0] == grpc.StatusCode.NOT_FOUND
    rpc.script.not_ready_reason = "no worker"
    assert not (await rpc.call("ServerReady", nothing, "Ready")).ready


@pytest.mark.parametrize(
    "method", ["RepositoryModelLoad", "SystemSharedMemoryStatus", "CudaSharedMemoryRegister", "LogSettings"]
)
async def test_what_triton_does_and_baton_does_not_is_said(rpc: Rpc, method: str) -> None:
    status, details = await status_of(rpc.call(method, MESSAGES["Nothing"](), "Nothing"))
    assert (status, len(details) > 20) == (grpc.StatusCode.UNIMPLEMENTED, True)


async def test_too_large_a_message_is_refused(rpc: Rpc) -> None:
    status, _ = await status_of(rpc.infer(request("x" * 300_000)))
    assert status == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_keys_are_read_from_metadata(tokenizer: ChatTokenizer) -> None:
    async with run_rpc(tokenizer, tenants=Tenants(api_keys=[SECRET])) as rpc:
        nothing = MESSAGES["Nothing"]()
        assert (await rpc.call("ServerLive", nothing, "Live")).live
        refused = [rpc.infer(request()), rpc.call("ServerMetadata", nothing, "Server"), _first(rpc.stream())]
        for call in refused:
            assert (await status_of(call))[0] == grpc.StatusCode.UNAUTHENTICATED
        for metadata in ((("authorization", f"Bearer {SECRET}"),), (("x-api-key", SECRET),)):
            assert texts(await rpc.infer(request(), metadata=metadata)) == [PROMPT + TEXT]
        assert rpc.script.submitted[0].origin.tenant.name == "default"


async def test_a_certificate_is_http_s(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    files = {"tls_cert": str(made.server), "tls_key": str(made.server_key)}
    async with run_rpc(tokenizer, tls=files) as rpc:
        assert (await rpc.call("ServerLive", MESSAGES["Nothing"](), "Live")).live


async def _first(call: Any) -> Any:
    await call.done_writing()
    return await call.read()
