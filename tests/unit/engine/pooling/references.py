# mypy: allow-untyped-calls
"""References of encoders: transformers' own models in float64, and inputs of many lengths."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.pooling.engine import PoolingConfig, PoolingEngine, PoolingInput

LENGTHS = (1, 2, 5, 5, 17, 40, 64, 40, 3)
EXACT = {"rtol": 1e-5, "atol": 1e-5}


def inputs(seed: int = 0, *, most: int = 64) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 100, (min(n, most),), generator=generator).tolist() for n in LENGTHS]


def engine_of(folder: Path, **options: Any) -> PoolingEngine:
    return PoolingEngine(PoolingConfig(model=folder, **options))


def reference(folder: Path, kind: Any = transformers.AutoModel) -> Any:
    """Transformers' own, in float64: in float32 its sums differ from the truth as ours do, and by the processor."""
    return kind.from_pretrained(folder, attn_implementation="eager", dtype=torch.float64).eval()


def check_vectors(
    folder: Path, theirs: Callable[[list[int]], torch.Tensor], pooled: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Compare vectors of tokens [T, E] and of texts, alone and among others, with a reference's.

    `pooled` makes a text's [1, E] of the reference's tokens.
    """
    engine, texts = engine_of(folder), inputs()
    together = engine.compute([PoolingInput(tokens=text, work="token_embed", is_raw=True) for text in texts])
    vectors = engine.compute([PoolingInput(tokens=text) for text in texts])
    for text, found, vector in zip(texts, together, vectors, strict=True):
        with torch.no_grad():
            wanted = theirs(text).float()
        torch.testing.assert_close(found, wanted, **EXACT)
        torch.testing.assert_close(vector, torch.nn.functional.normalize(pooled(wanted)), **EXACT)
        [alone] = engine.compute([PoolingInput(tokens=text, work="token_embed", is_raw=True)])
        torch.testing.assert_close(alone, found, **EXACT)


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate [H, T, D]: each pair (d, d + D/2) as a complex number, turned at each position by its angle [D / 2] once more."""
    turns = torch.outer(torch.arange(x.shape[1], dtype=torch.float64), angles)
    found = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(turns), turns)
    return torch.cat((found.real, found.imag), dim=-1)


def changed(folder: Path, names: dict[str, str] | None = None, **fields: Any) -> Path:
    """The same with some fields of its configuration changed, or under other names."""
    config = folder / "config.json"
    read = json.loads(config.read_bytes()) | fields
    config.write_text(json.dumps({(names or {}).get(name, name): value for name, value in read.items()}))
    return folder
