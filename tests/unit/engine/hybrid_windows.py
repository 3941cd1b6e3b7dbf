"""A hybrid model whose attention has sliding windows: one layer sees everything, two the last tokens, the others keep states.

No family has windows beside states yet. This is Qwen3.5's checkpoint with windows put into the spec that is read from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from engine import resolving
from engine.spec.model import ModelSpec
from tests.unit.engine.families import hybrids

WINDOW = 40  # tokens
KINDS = ["linear_attention", "full_attention", "full_attention", "linear_attention", "full_attention"]
CASE = replace(
    hybrids.QWEN_3_5, name="windows and states", fields=hybrids.STATE | {"layer_types": KINDS, "num_hidden_layers": 5}
)
SEES_ALL = 2  # of the layers


def build(folder: Path) -> Path:
    """Write the checkpoint."""
    return CASE.build(folder)


@contextmanager
def windows() -> Iterator[None]:
    """Within, engines read the spec with its windows."""
    read = resolving.read_model_spec

    def windowed(*given: Any, **options: Any) -> ModelSpec:
        model = read(*given, **options)
        layers = [
            layer.with_attention(window=WINDOW) if layer.attention is not None and number != SEES_ALL else layer
            for number, layer in enumerate(model.layers)
        ]
        return replace(model, layers=tuple(layers))

    with mock.patch.object(resolving, "read_model_spec", windowed):
        yield
