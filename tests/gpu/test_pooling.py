"""Models of vectors on a GPU say what they say on a CPU: in float32, in 16 bits, beside other inputs, and in captured passes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cosine_similarity

from engine.pooling.engine import PoolingConfig, PoolingEngine, PoolingInput
from engine.pooling.families import read_encoder_spec
from tests.jina_models import TASKS, build_jina
from tests.pooling_models import FAMILIES, build_pooling_model
from tests.unit.engine.pooling.nomic import build_nomic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = ("bfloat16", "float16")
CLOSE = 0.9999  # cosine
REAL_HEADS = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 512}
LENGTHS = (7, 61, 1, 30, 61)
MIXED = (1, 300, 17, 260, 2, 64, 129, 500, 31, 400, 5, 77, 222, 310, 90, 12)
ALIKE = (256,) * 12


def inputs(lengths: Sequence[int], **fields: Any) -> list[PoolingInput]:
    return [
        PoolingInput(tokens=[(13 * length + 5 * at + at * at) % 100 + 6 for at in range(length)], **fields)
        for length in lengths
    ]


def engine_of(model: Path, device: str, dtype: str, **options: Any) -> PoolingEngine:
    return PoolingEngine(PoolingConfig(model=model, device=device, dtype=dtype, **options))


def with_real_heads(folder: Path, family: str) -> Path:
    heads = {"head_dim": 64} if "head_dim" in FAMILIES[family][1] else {}
    return build_pooling_model(folder, family, **REAL_HEADS, **heads)


def vectors(model: Path, device: str, dtype: str) -> torch.Tensor:
    engine = engine_of(model, device, dtype)
    together = torch.cat(engine.compute(inputs(LENGTHS)))
    alone = torch.cat([engine.compute([one])[0] for one in inputs(LENGTHS)])
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


def test_experts_are_those_of_the_cpu(tmp_path: Path) -> None:
    """In float32: in 16 bits a router takes another one of two that are about as good."""
    build_nomic(tmp_path)
    assert float((vectors(tmp_path, "cuda", "float32") - vectors(tmp_path, "cpu", "float32")).abs().max()) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_of_any_and_of_equal_lengths_in_sixteen_bits(family: str, tmp_path: Path) -> None:
    model = with_real_heads(tmp_path, family)
    plain = engine_of(model, "cpu", "float32")
    for lengths in (MIXED, ALIKE):
        wanted = torch.cat(plain.compute(inputs(lengths)))
        for dtype in DTYPES[: 1 if read_encoder_spec(model).overflows else 2]:
            found = torch.cat(engine_of(model, "cuda", dtype).compute(inputs(lengths)))
            assert float(cosine_similarity(found, wanted).min()) > CLOSE


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_passes_are_those_kernel_by_kernel(family: str, dtype: str, tmp_path: Path) -> None:
    model = with_real_heads(tmp_path, family)
    plain = engine_of(model, "cuda", dtype, captures=False, prefix_bytes=0)
    captured = engine_of(model, "cuda", dtype, prefix_bytes=0)
    for lengths in ((30,), (500,), (30,), (500,), (7,), (2, 9, 1), (350, 100, 3), (13,), MIXED[:6]):
        asked = inputs(lengths, second=lengths[0] // 2)
        found, wanted = (torch.cat(engine.compute(asked)) for engine in (captured, plain))
        assert float((found - wanted).abs().max()) < (1e-5 if dtype == "float32" else 2e-2)
        assert float(cosine_similarity(found, wanted).min()) > CLOSE
    assert len(captured._passes) == 3, "two sizes that came twice, and the largest"
    assert not len(plain._passes)


def test_each_adapter_has_captured_passes(tmp_path: Path) -> None:
    model = build_jina(tmp_path)
    plain, captured = (engine_of(model, "cuda", "float32", captures=captures) for captures in (False, True))
    for _ in range(3):
        for task in ("", *TASKS):
            for one in inputs((9, 30), adapter=task):
                [found], [wanted] = captured.compute([one]), plain.compute([one])
                assert float((found - wanted).abs().max()) < 1e-5
    assert len(captured._passes) == 2 + len(TASKS), "one of each adapter, and one of the largest size"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prefixes_are_kept_and_read_in_captured_passes(dtype: str, tmp_path: Path) -> None:
    model = with_real_heads(tmp_path, "Qwen3Model")
    plain = engine_of(model, "cpu", "float32", prefix_bytes=0)
    captured = engine_of(model, "cuda", dtype, prefix_bytes=8 << 20)
    [instruction], found = inputs((40,)), 0
    for at in range(12):
        asked = [
            PoolingInput(tokens=[*instruction.tokens, *range(6 + at, 20 + 3 * at + text)]) for text in range(1 + at % 3)
        ]
        vectors, wanted = (torch.cat(engine.compute(asked)) for engine in (captured, plain))
        found += sum(captured.found)
        assert float(cosine_similarity(vectors, wanted).min()) > CLOSE
        if dtype == "float32":
            assert float((vectors - wanted).abs().max()) < 1e-5
    assert found >= 9 * 32
    assert len(captured._passes) > 1
