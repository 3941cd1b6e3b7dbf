# mypy: allow-untyped-calls
"""References of encoders: transformers' own models in float64, and inputs of many lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.pooling.engine import PoolingConfig, PoolingEngine

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


def changed(folder: Path, names: dict[str, str] | None = None, **fields: Any) -> Path:
    """The same with some fields of its configuration changed, or under other names."""
    config = folder / "config.json"
    read = json.loads(config.read_bytes()) | fields
    config.write_text(json.dumps({(names or {}).get(name, name): value for name, value in read.items()}))
    return folder
