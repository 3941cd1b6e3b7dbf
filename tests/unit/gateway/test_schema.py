"""No body, however odd, is more than a wrong request."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequestError
from gateway.dialects.openai.foreign import CHAT, COMPLETIONS
from gateway.dialects.openai.schema import ChatRequest, CompletionRequest
from gateway.http.fields import parse_body
from gateway.routes.text import DetokenizeRequest, TokenizeRequest
from tests.examples import examples

MODELS = [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest]
FIELDS = sorted(
    {name for model in MODELS for name in [*model.model_fields, *model.unsupported]} | {*CHAT, *COMPLETIONS}
)

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "0", "7"]) | st.text(max_size=4), inner)
    ),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"]) | values, "content": values},
        optional={"name": values, "tool_calls": values, "refusal": values},
    ),
    max_size=3,
)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
@examples(60)
@given(data=st.data())
def test_any_body_is_parsed_or_refused(model: Any, data: st.DataObject) -> None:
    fields = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), values, max_size=4)
    valid = {"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": "x", "tokens": [1]}
    body = {name: value for name, value in valid.items() if name in model.model_fields}
    if model is TokenizeRequest:
        del body["messages"]
    body |= data.draw(fields) | data.draw(st.just({}) | st.fixed_dictionaries({"messages": messages}))
    with contextlib.suppress(InvalidRequestError):
        parsed = parse_body(json.dumps(body).encode(), model)
        if isinstance(parsed, ChatRequest):
            assert all(isinstance(message.as_template_input()["content"], str) for message in parsed.messages)
        if isinstance(parsed, CompletionRequest):
            assert all(isinstance(prompt, str | list) and prompt for prompt in parsed.prompts)


@examples(80)
@given(raw=st.binary(max_size=60) | st.text(alphabet='{}[]":,\\u0123456789tfn', max_size=40).map(str.encode))
def test_any_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        parse_body(raw, ChatRequest)


def test_every_field_is_documented() -> None:
    manual = (Path(__file__).parents[3] / "docs/http-api.md").read_text(encoding="utf-8")
    missing = [name for name in FIELDS if f"`{name}`" not in manual and f"{name}:" not in manual]
    assert [name for name in missing if not name.startswith("guided_")] == []
