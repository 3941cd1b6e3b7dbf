# mypy: allow-untyped-calls
"""Texts to ask about, and what transformers computes for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import torch
import transformers

QUERY = "capital of france"
DOCUMENTS = ["paris is the capital of france", "the cat sat on the mat", "hello world, hello dog"]
CLOSE = {"abs": 1e-5}


def tokens(folder: Path, *texts: str) -> tuple[torch.Tensor, torch.Tensor]:
    encoded = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json")).backend_tokenizer
    found = encoded.encode(*texts)
    return torch.tensor([found.ids]), torch.tensor([found.type_ids])


def logits(folder: Path, *texts: str) -> torch.Tensor:
    """Logits of a text or a pair as transformers computes them."""
    ids, types = tokens(folder, *texts)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(ids, token_type_ids=types).logits[0]


def vector(folder: Path, text: str) -> torch.Tensor:
    ids, _ = tokens(folder, text)
    with torch.no_grad():
        states = transformers.AutoModel.from_pretrained(folder).eval()(ids).last_hidden_state[0]
    return torch.nn.functional.normalize(states.mean(0), dim=0)


async def ask(client: httpx.AsyncClient, path: str, **fields: Any) -> Any:
    answer = await client.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()
