"""Models that pool, by the kernels of GPUs: a random one of a class against transformers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from engine.kernels.rope import rope_and_write_kv
from engine.pooling import encoder
from engine.pooling.engine import PoolingInput
from tests.pooling_models import build_pooling_model
from tests.unit.engine.pooling.references import EXACT, engine_of, inputs, reference
from tests.unit.kernels.triton_checks import Suite

# Calls of the fused kernel, one a layer: without norms of heads, with them, and with weights that are less by 1.
ROTATED = {"ModernBertModel": 3, "NomicBertModel": 3, "Qwen3Model": 3, "Gemma3TextModel": 3}


def check(family: str, device: str, large: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = build_pooling_model(Path(folder), family)
        engine, theirs, texts = engine_of(model, device=device), reference(model), inputs()[1:5]
        texts.append([*texts[3][:16], 5, 6])
        asked = [PoolingInput(tokens=text, work="token_embed", is_raw=True) for text in texts]
        with mock.patch.object(encoder, "rope_and_write_kv", wraps=rope_and_write_kv) as fused:
            found = engine.compute(asked)
        assert fused.call_count == ROTATED[family]
        assert engine.found[-1] == (16 if family == "Qwen3Model" else 0), "a decoder shares a block"
        for text, own in zip(texts, found, strict=True):
            with torch.no_grad():
                wanted = theirs(torch.tensor([text])).last_hidden_state[0].float()
            torch.testing.assert_close(own, wanted, **EXACT)


CHECKS: dict[str, Callable[[str, bool], None]] = {family: partial(check, family) for family in ROTATED}
SUITE = Suite(CHECKS)
run, interpret = SUITE.run, SUITE.interpret
