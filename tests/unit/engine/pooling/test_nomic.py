"""NomicBert's experts: vectors are those of an independent reference, alone and among others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine.pooling.nomic import build_nomic
from tests.unit.engine.pooling.references import changed, check_vectors, engine_of


@pytest.mark.parametrize(
    "changes",
    [{}, {"moe_every_n_layers": 3, "moe_top_k": 1}, {"num_experts": 3, "moe_top_k": 3, "rotary_emb_base": 1000.0}],
    ids=["every second layer", "every third", "all are chosen"],
)
def test_tokens_vectors_are_those_of_the_reference(changes: dict[str, Any], tmp_path: Path) -> None:
    check_vectors(tmp_path, build_nomic(tmp_path, **changes), lambda vectors: vectors.mean(0, keepdim=True))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"activation_function": "swiglu"}, "activation_function = 'swiglu' is not supported"),
        ({"moe_normalize_expert_weights": True}, "moe_normalize_expert_weights = True is not supported"),
        ({"expert_choice_router": True}, "expert_choice_router = True is not supported"),
        ({"num_shared_experts": 1}, "num_shared_experts = 1 is not supported"),
        ({"ffn_div": 2}, "ffn_div = 2 is not supported"),
        ({"moe_top_k": 7}, "moe_top_k = 7 of num_experts = 6"),
        ({"moe_top_k": None}, "moe_top_k must be a positive integer"),
        ({"moe_every_n_layers": 0}, "moe_every_n_layers must be a positive integer"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    build_nomic(tmp_path)
    with pytest.raises(ValueError, match=says):
        engine_of(changed(tmp_path, **changes))
