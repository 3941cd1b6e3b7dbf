"""What a model's folder says of sampling holds where a client says nothing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.answers.tokenizer import ChatTokenizer
from gateway.app import HttpSettings
from gateway.request.defaults import sampling_defaults
from tests.models import build_tokenizer
from tests.unit.gateway.conftest import MODEL, Gateway, run_gateway

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"model": MODEL, "prompt": "Hi"},
}


@pytest.fixture
async def cool(tmp_path: Path) -> AsyncIterator[Gateway]:
    build_tokenizer(tmp_path)
    said = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "max_new_tokens": 3}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    async with run_gateway(ChatTokenizer(tmp_path), HttpSettings()) as gateway:
        yield gateway


@pytest.mark.parametrize("route", BODIES)
async def test_what_a_client_leaves_open_is_as_the_model_wants_it(cool: Gateway, route: str) -> None:
    await cool.http.post(route, json=BODIES[route] | {"top_p": 0.5, "top_k": -1, "temperature": None})
    sampling = cool.script.submitted[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.6, 0.5, 0, 0.0)
    assert sampling.max_tokens > 3


@pytest.mark.parametrize(
    ("said", "taken"),
    [
        ({}, {}),
        ({"temperature": 0, "top_k": 5.0}, {"temperature": 0.0, "top_k": 5}),
        ({"temperature": 3}, {}),
        ({"temperature": "hot", "top_p": True, "min_p": float("nan")}, {}),
    ],
)
def test_what_the_api_would_refuse_is_left_out(said: dict[str, Any], taken: dict[str, float]) -> None:
    assert sampling_defaults(said) == taken
