"""Tensors of models that pool: texts in, one row of each out."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.answers.catalogue import PooledFacts
from gateway.dialects.kserve.tensors import BYTES
from gateway.dialects.kserve.wish import TEXT_INPUT
from gateway.http.problem import Json

EMBEDDING, SCORES = "embedding", "scores"
FLOATS = "FP32"
PAIR = 2


@dataclass(frozen=True, slots=True)
class RowTensor:
    """An output: a row of numbers for each text or pair, as bytes."""

    name: str
    shape: list[int]
    raw: bytes
    datatype: str = FLOATS


def tensors_of(facts: PooledFacts) -> tuple[list[Json], list[Json]]:
    """Inputs and outputs of a model, -1 for the number of texts."""
    scores = facts.pooling.labels
    texts = {"name": TEXT_INPUT, "datatype": BYTES, "shape": [-1, PAIR] if len(scores) == 1 else [-1]}
    return [texts], [{"name": SCORES if scores else EMBEDDING, "datatype": FLOATS, "shape": [-1, facts.pooling.width]}]
