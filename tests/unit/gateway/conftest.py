"""The application over a real loopback server, answered by a script instead of workers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn
from tokenizers import Tokenizer, decoders, models, normalizers

from common.tracing import Tracer
from gateway.answers.catalogue import Catalogue
from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings, MakeResponses, create_app
from gateway.dialects import DIALECTS
from gateway.dialects.dialect import Dialect
from gateway.http.connection import BoundedProtocol
from gateway.request.spec import Loads
from gateway.responses.service import nothing_kept
from tests.fakes.generations import ScriptedGenerations
from tests.models import build_tokenizer
from tests.unit.gateway.tokenizers_of_others import SHAPES, write_folder

ROOT = Path(__file__).resolve().parents[3]
MODEL = "scripted"
TEXT = "The capital of France is Paris. Größe 🙂 and the sea."


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """Byte-level BPE, as Qwen's and Llama 3's."""
    folder = tmp_path_factory.mktemp("byte-level")
    build_tokenizer(folder)
    return ChatTokenizer(folder)


@pytest.fixture(scope="session")
def demo() -> ChatTokenizer:
    """The demo model's: reasoning and tool calls by their marks."""
    return ChatTokenizer(ROOT / "demo")


@pytest.fixture(scope="session")
def prefix_space_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """As Llama 2's and Mistral's: `▁` for spaces, one before the text, byte tokens for what has no token."""
    folder = tmp_path_factory.mktemp("prefix-space")
    words = [
        "<s>",
        "</s>",
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdehlnortuw,.!ü",
        "▁th",
        "he",
    ]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "h")]
    vocabulary |= {"▁t": len(vocabulary)}
    built = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    built.add_special_tokens(["<s>", "</s>", "<unk>"])
    built.save(str(folder / "tokenizer.json"))
    return ChatTokenizer(folder)


@pytest.fixture(scope="module", params=[*SHAPES, "demo"])
def any_tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """One of each usual shape."""
    if request.param == "demo":
        return ChatTokenizer(ROOT / "demo")
    return ChatTokenizer(write_folder(tmp_path_factory.mktemp("shapes") / request.param, request.param))


@dataclass
class Gateway:
    """A running gateway, its script, and clients of it."""

    url: str
    script: ScriptedGenerations
    tokenizer: ChatTokenizer
    openai: openai.AsyncOpenAI
    http: httpx.AsyncClient


@contextlib.asynccontextmanager
async def run_gateway(
    tokenizer: ChatTokenizer,
    settings: HttpSettings,
    *,
    key: str = "none",
    protocol: type[BoundedProtocol] = BoundedProtocol,
    dialects: Sequence[Dialect] = DIALECTS,
    tracer: Tracer | None = None,
    catalogue: Callable[[ScriptedGenerations], Catalogue] | None = None,
    responses: MakeResponses = nothing_kept,
    loads: Loads | None = None,
) -> AsyncIterator[Gateway]:
    """Serve on an ephemeral port of the loopback address. `catalogue`: by default of one model."""
    script = ScriptedGenerations(lambda spec: [*tokenizer.encode(TEXT), *tokenizer.eos_ids])
    served = script.catalogue(tokenizer) if catalogue is None else catalogue(script)
    app = create_app(
        generations=script,
        catalogue=served,
        settings=settings,
        dialects=dialects,
        tracer=tracer,
        responses=responses,
        loads=loads,
    )
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(
        uvicorn.Config(app, http=protocol, log_level="critical", lifespan="off", timeout_graceful_shutdown=5)
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client,
        httpx.AsyncClient(base_url=url, timeout=60, verify=False) as http,
    ):
        yield Gateway(url=url, script=script, tokenizer=tokenizer, openai=client, http=http)
    server.should_exit = True
    await serving


@pytest.fixture(scope="module")
async def served(tokenizer: ChatTokenizer) -> AsyncIterator[Gateway]:
    async with run_gateway(tokenizer, HttpSettings(max_body_bytes=200_000)) as gateway:
        yield gateway


@pytest.fixture
async def gateway(served: Gateway) -> AsyncIterator[Gateway]:
    """The module's gateway with a fresh script."""
    vars(served.script).update(vars(ScriptedGenerations(served.script.script)))
    usual = served.script.script
    yield served
    served.script.script = usual
