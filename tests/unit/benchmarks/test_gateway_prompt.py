"""The gateway's long prompt has as many tokens as its figure's name says, whatever tokenizer the demo model has by now."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gateway.__main__ import TEXT_2000
from gateway.answers.tokenizer import ChatTokenizer

DEMO = Path(__file__).resolve().parents[3] / "demo"


def test_the_long_prompt_has_2000_tokens() -> None:
    tokens = ChatTokenizer(DEMO).encode_chat([{"role": "user", "content": TEXT_2000}])
    assert 1990 <= len(tokens) <= 2010
