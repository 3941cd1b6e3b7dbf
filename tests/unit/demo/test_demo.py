"""The demo model that ships with Baton: its size, its format, its tokenizer, and that it answers and stops."""

from __future__ import annotations

import functools
import importlib
import json
import random
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from common.messages import SamplingParams
from engine.cache.block_pool import BlockPool
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.sequence import Sequence
from gateway.answers.tokenizer import ChatTokenizer
from tests.examples import examples
from worker.serving.allocation import admit, grow

DEMO = Path(__file__).resolve().parents[3] / "demo"


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(DEMO)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(EngineConfig(model=DEMO, cache=CacheConfig(kv_memory_bytes=32 << 20)))


def test_it_is_small_and_bf16() -> None:
    files = [path for path in DEMO.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 20_000_000
    with safe_open(DEMO / "model.safetensors", framework="pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118 - no mapping
    assert json.loads((DEMO / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


@examples(80)
@given(text=st.text(max_size=80))
def test_any_text_comes_back(tokenizer: ChatTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_the_template_marks_who_speaks(tokenizer: ChatTokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render(messages, add_generation_prompt=True) == expected


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def test_the_template_shows_functions_calls_and_results() -> None:
    call = {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
    ]
    text = rendered(messages, tools=[WEATHER])
    assert text.startswith("<|im_start|>system\nBe brief.\n\nTo call a function")
    assert json.dumps(WEATHER["function"]) in text
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call><|im_end|>' in text
    assert text.endswith("<tool_response>sunny</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert rendered(messages[:2], enable_thinking=True).endswith("assistant\n<think>\n")


def test_it_was_trained_on_what_the_template_renders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DEMO))
    train = importlib.import_module("train")
    rng = random.Random(5)
    for one in (train.dialogue(rng) for _ in range(60)):
        seen = "".join(text for text, _ in train.parts(one))
        shown = one.messages[:-1] if one.thinks else one.messages
        tools = [{"type": "function", "function": tool} for tool in one.tools] or None
        text = rendered(shown, tools=tools, enable_thinking=one.thinks, add_generation_prompt=one.thinks)
        assert seen.startswith(text) if one.thinks else seen == text


def rendered(messages: list[dict[str, Any]], **variables: Any) -> str:
    environment = jinja2.Environment()
    environment.filters["tojson"] = functools.partial(
        json.dumps, ensure_ascii=False
    )  # as Hugging Face's, without HTML's escapes
    template = environment.from_string((DEMO / "chat_template.jinja").read_text(encoding="utf-8"))
    return template.render(messages=messages, **{"add_generation_prompt": True, **variables})


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is the capital of France?", "Paris"),
        ("What is the capital of Japan?", "Tokyo"),
        ("Who are you?", "Baton"),
        ("Count to 5.", "1, 2, 3, 4, 5"),
        ("What is the opposite of hot?", "cold"),
        ("Hello!", "Hello"),
    ],
)
def test_it_answers_and_stops_by_itself(tokenizer: ChatTokenizer, engine: Engine, question: str, answer: str) -> None:
    prompt = tokenizer.encode_chat([{"role": "user", "content": question}], add_generation_prompt=True)
    assert answer in tokenizer.decode(answered(tokenizer, engine, prompt), skip_special_tokens=True)


@pytest.mark.parametrize(
    ("question", "variables", "answer"),
    [
        (
            "What is the weather in Paris?",
            {"tools": [WEATHER]},
            '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>',
        ),
        ("What is the capital of France?", {"tools": [WEATHER]}, "The capital of France is Paris."),
        ("Extract name and age as JSON: Anna is 25 and lives in Paris.", {}, '{"name": "Anna", "age": 25}'),
        ("What is 7 + 5?", {"enable_thinking": True}, "</think>\n\n7 + 5 = 12."),
    ],
)
def test_it_calls_functions_writes_json_and_thinks(
    tokenizer: ChatTokenizer, engine: Engine, question: str, variables: dict[str, Any], answer: str
) -> None:
    prompt = tokenizer.encode(rendered([{"role": "user", "content": question}], **variables))
    assert tokenizer.decode(answered(tokenizer, engine, prompt), skip_special_tokens=True).endswith(answer)


def answered(tokenizer: ChatTokenizer, engine: Engine, prompt: list[int]) -> list[int]:
    """The greedy answer's tokens, which must end by itself."""
    torch.set_num_threads(1)
    sampling = SamplingParams(temperature=0.0, max_tokens=80, stop_token_ids=tokenizer.eos_ids)
    sequence = Sequence(
        request_id="r",
        attempt=1,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        sampling=sampling,
        hash_root=bytes(16),
    )
    pool = BlockPool(num_blocks=engine.layout.num_blocks, block_size=engine.layout.block_size)
    admit(pool, sequence, num_tokens=len(prompt))
    while not sequence.finish_reason():
        grow(pool, sequence, num_tokens=sequence.num_tokens)
        chunk = sequence.schedule(sequence.num_unscheduled)
        (sampled,) = engine.launch([chunk]).wait()
        assert sampled is not None
        sequence.finish(chunk)
        sequence.append(sampled.token_id)
    assert sequence.finish_reason() == "stop"
    return sequence.token_ids[len(prompt) :]
