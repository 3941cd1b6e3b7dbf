"""A GGUF file answers as `transformers` does with the same weights, token for token, in each architecture that is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gguf_files import write_gguf
from tests.unit.engine.families.case import Case
from tests.unit.engine.families.dense import BY_KIND, GEMMA, LLAMA3, LONGROPE, MULTIPLIED, TWO_KINDS, YARN
from tests.unit.engine.families.exact import Bench
from tests.unit.engine.families.experts import EXPERTS
from tests.unit.engine.families.hybrids import CONVOLUTIONS, OF_LFM_2_MOE

LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
OF_GPT_OSS = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 40,
    "head_dim": 16,
    "sliding_window": 24,
    "rope_parameters": YARN | {"truncate": False},
}
CASES = (
    Case(name="llama", config="LlamaConfig", fields={"attention_bias": True, "mlp_bias": True}),
    Case(name="llama3", config="LlamaConfig", fields={"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    Case(name="llama-yarn", config="LlamaConfig", fields={"rope_parameters": YARN, "head_dim": 32}),
    Case(name="llama-linear", config="LlamaConfig", fields={"rope_parameters": LINEAR}),
    Case(name="mistral", config="MistralConfig", fields={"sliding_window": None}),
    Case(
        name="mixtral",
        config="MixtralConfig",
        fields={"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    Case(name="qwen2", config="Qwen2Config", fields={"tie_word_embeddings": True}),
    Case(name="qwen2moe", config="Qwen2MoeConfig", fields={**EXPERTS, "shared_expert_intermediate_size": 64}),
    Case(name="qwen3", config="Qwen3Config", fields={"head_dim": 32}),
    Case(
        name="qwen3moe",
        config="Qwen3MoeConfig",
        fields={**EXPERTS, "head_dim": 32, "norm_topk_prob": True},
    ),
    Case(name="gemma", config="GemmaConfig", fields={"head_dim": 32, "tie_word_embeddings": True}),
    Case(
        name="gemma2",
        config="Gemma2Config",
        fields=GEMMA
        | {"sliding_window": 20, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
        | {"query_pre_attn_scalar": 32},
    ),
    Case(
        name="gemma3",
        config="Gemma3TextConfig",
        fields=GEMMA
        | {"query_pre_attn_scalar": 32, "num_hidden_layers": 7, "sliding_window": 20, "rope_parameters": BY_KIND}
        | {"layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]},
    ),
    Case(name="phi3", config="Phi3Config", fields={"sliding_window": 40}),
    Case(
        name="phi3-long",
        config="Phi3Config",
        fields={"original_max_position_embeddings": 16, "partial_rotary_factor": 0.75, "rope_parameters": LONGROPE},
        shortest=17,
    ),
    Case(name="granite", config="GraniteConfig", fields=MULTIPLIED),
    Case(name="smollm3", config="SmolLM3Config", fields={"num_hidden_layers": 5}),
    Case(name="olmo2", config="Olmo2Config"),
    Case(name="olmo3", config="Olmo3Config", fields=TWO_KINDS | {"rope_parameters": BY_KIND}),
    Case(name="gpt_oss", config="GptOssConfig", fields=OF_GPT_OSS),
    Case(name="qwen2vl", config="Qwen2Config"),
    Case(name="qwen3vlmoe", config="Qwen3MoeConfig", fields={**EXPERTS, "norm_topk_prob": True}),
    Case(name="lfm2", config="Lfm2Config", fields=CONVOLUTIONS),
    Case(name="lfm2moe", config="Lfm2MoeConfig", fields=OF_LFM_2_MOE | {"tie_word_embeddings": True}),
)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_it_answers_as_transformers(case: Case, tmp_path: Path) -> None:
    other = case.name if "vl" in case.name else ""

    def stored(folder: Path) -> Path:
        return write_gguf(folder, tmp_path / "model.gguf", architecture=other)

    Bench(case, tmp_path / "model", stored=stored).check_handed_over(chunk_size=23)
