"""The reference of answers is right itself."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from tests.models import build_tiny_model
from tests.reference import greedy_tokens


def test_token_0_in_a_prompt_is_a_token_like_others(tmp_path: Path) -> None:
    """`generate` takes it for padding where it is told that 0 pads."""
    model, prompt = build_tiny_model(tmp_path / "llama", "llama"), [0, 5, 0, 7, 300, 0]
    network = transformers.LlamaForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(8):
            tokens.append(int(network(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert greedy_tokens(model, [prompt], 8) == [tokens[len(prompt) :]]
