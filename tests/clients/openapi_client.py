"""openapi-python-client: makes a client of the gateway's document, without a warning, and asks with it."""

from __future__ import annotations

import compileall
import importlib
import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from cases import BASE_URL, MODEL, case, run

URL = BASE_URL.removesuffix("/v1")
FOLDER = Path(tempfile.mkdtemp(prefix="baton-generated-"))
PACKAGE = "baton_client"


@case("a client of the whole document, without a warning")
def generated() -> None:
    document = FOLDER / "openapi.json"
    with urllib.request.urlopen(f"{URL}/openapi.json", timeout=60) as answer:
        document.write_bytes(answer.read())
    tool = Path(sys.executable).parent / "openapi-python-client"
    words = [str(tool), "generate", "--path", str(document), "--output-path", str(FOLDER / PACKAGE), "--meta", "none"]
    config = FOLDER / "config.json"
    config.write_text(json.dumps({"post_hooks": []}))
    said = subprocess.run([*words, "--config", str(config)], capture_output=True, text=True, check=True)
    assert "arning" not in said.stdout + said.stderr, (said.stdout + said.stderr)[:400]
    assert compileall.compile_dir(FOLDER / PACKAGE, quiet=1)
    sys.path.insert(0, str(FOLDER))


def api(name: str) -> Any:
    return importlib.import_module(f"{PACKAGE}.api.default.{name}").sync


def models() -> Any:
    return importlib.import_module(f"{PACKAGE}.models")


def client() -> Any:
    return importlib.import_module(PACKAGE).Client(base_url=URL, raise_on_unexpected_status=True)


@case("models, tokens")
def lists() -> None:
    assert MODEL in [model.id for model in api("get_v1_models")(client=client()).data]
    told = api("post_tokenize")(client=client(), body=models().TokenizeRequest(prompt="Hello", model=MODEL))
    assert told.count == len(told.tokens)


@case("chat, and an answer by structured_outputs")
def chat() -> None:
    said = models()
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    body = said.ChatRequest.from_dict(asked | {"temperature": 0})
    assert body.to_dict()["messages"] == asked["messages"]
    answer = api("post_v1_chat_completions")(client=client(), body=body)
    assert "Paris" in answer.choices[0].message.content
    body = said.ChatRequest.from_dict(asked | {"structured_outputs": {"json_object": True}, "max_tokens": 5})
    assert api("post_v1_chat_completions")(client=client(), body=body).usage.completion_tokens == 5


@case("TGI's generate")
def generate() -> None:
    body = models().TgiRequest.from_dict({"inputs": "The capital of France is", "parameters": {"max_new_tokens": 4}})
    assert api("post_generate")(client=client(), body=body).generated_text


run()
