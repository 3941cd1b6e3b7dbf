"""What each way in which a CPU keeps weights or KV costs SmolLM2-135M-Instruct: `make real`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.quality import perplexity
from benchmarks.quality.agreement import arms_of, engine_of

pytestmark = pytest.mark.real
# Percent of perplexity over float32, of five windows: chance moves it by half a percent.
MOST_COST = {
    "quantization=int8,dtype=float32": 1.5,
    "quantization=int8,dtype=bfloat16": 1.5,
    "kv_cache_dtype=int8,dtype=float32": 1.5,
    "kv_cache_dtype=fp8,dtype=float32": 3.0,
    "kv_cache_dtype=int4,dtype=float32": 14.0,
    "quantization=fp8,dtype=float32": 6.0,
    "quantization=int4,dtype=float32": 70.0,
    "quantization=int4": 45.0,
    "dtype=bfloat16": 1.5,
}


@pytest.mark.parametrize("fields", MOST_COST)
def test_no_format_costs_more_than_it_did(fields: str, smollm2: Path) -> None:
    """As benchmarks/results/perplexity.md has it, of one window of each text."""
    windows = perplexity.texts(smollm2, 1)
    arms = arms_of(["plain:dtype=float32", f"this:{fields}"])
    plain, this = (perplexity.scored(engine_of(smollm2, "cpu", each), windows) for each in arms.values())
    lost = perplexity.perplexity(*this.values()) / perplexity.perplexity(*plain.values()) - 1
    assert 100 * lost < MOST_COST[fields]
