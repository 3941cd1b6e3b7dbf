"""Models of vectors on a GPU say what they say on a CPU: in float32, in 16 bits, and beside other inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cosine_similarity

from engine.pooling.engine import PoolingConfig, PoolingEngine, PoolingInput
from engine.pooling.families import read_encoder_spec
from tests.pooling_models import FAMILIES, build_pooling_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = (7, 61, 1, 30, 61)
TEXTS = [[(13 * length + 5 * at + at * at) % 100 + 6 for at in range(length)] for length in LENGTHS]


def vectors(model: Path, device: str, dtype: str) -> torch.Tensor:
    engine = PoolingEngine(PoolingConfig(model=model, device=device, dtype=dtype))
    inputs = [PoolingInput(tokens=tokens) for tokens in TEXTS]
    together = torch.cat(engine.compute(inputs))
    alone = torch.cat([engine.compute([one])[0] for one in inputs])
    assert float((together - alone).abs().max()) < (1e-5 if dtype == "float32" else 2e-2)
    return together


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_those_of_the_cpu(family: str, tmp_path: Path) -> None:
    model = build_pooling_model(tmp_path, family)
    wanted = vectors(model, "cpu", "float32")
    assert float((vectors(model, "cuda", "float32") - wanted).abs().max()) < 1e-5
    for dtype, least in (("bfloat16", 0.999), ("float16", 0.9999)):
        if dtype == "float16" and read_encoder_spec(model).overflows:
            with pytest.raises(ValueError, match="overflows in it: take bfloat16 or float32"):
                vectors(model, "cuda", dtype)
        else:
            assert float(cosine_similarity(vectors(model, "cuda", dtype), wanted).min()) > least
