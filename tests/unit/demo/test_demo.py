"""The demo model that ships with Baton: its size, its format, its tokenizer, and that it answers and stops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from common.messages import SamplingParams
from engine.cache.block_pool import BlockPool
from engine.config import EngineConfig
from engine.engine import Engine
from engine.sequence import Sequence
from gateway.answers.tokenizer import ChatTokenizer
from worker.serving.allocation import admit, grow

DEMO = Path(__file__).resolve().parents[3] / "demo"


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(DEMO)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(EngineConfig(model=DEMO, kv_memory_bytes=32 << 20))


def test_it_is_small_and_bf16() -> None:
    files = [path for path in DEMO.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 20_000_000
    with safe_open(DEMO / "model.safetensors", framework="pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118 - no mapping
    assert json.loads((DEMO / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=80))
def test_any_text_comes_back(tokenizer: ChatTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_the_template_marks_who_speaks(tokenizer: ChatTokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render(messages, add_generation_prompt=True) == expected


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
    torch.set_num_threads(1)
    prompt = tokenizer.encode_chat([{"role": "user", "content": question}], add_generation_prompt=True)
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
    assert answer in tokenizer.decode(sequence.token_ids[len(prompt) :], skip_special_tokens=True)
