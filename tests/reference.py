"""What a trusted implementation answers: `transformers` on the CPU in float32."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from transformers import AutoConfig


def greedy_tokens(model: Path, prompts: list[list[int]], num_tokens: int, *, cached: bool = True) -> list[list[int]]:
    """Return `num_tokens` greedy tokens for each prompt, computed one by one, EOS ignored; `cached`: each alone."""
    torch.set_num_threads(1)
    (architecture,) = AutoConfig.from_pretrained(model).architectures
    # The other implementations of attention leave soft-caps out.
    load = getattr(transformers, architecture).from_pretrained
    network = load(model, dtype=torch.float32, attn_implementation="eager").eval()
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            tokens = torch.tensor([prompt])
            output = network.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),  # else each 0 in a prompt would be padding, and not attended to
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                use_cache=cached,
            )
            answers.append(output[0, len(prompt) :].tolist())
    return answers
