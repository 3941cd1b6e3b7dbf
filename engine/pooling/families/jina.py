"""Jina's third embedder (`XLMRobertaLoRA`): XLM-R with rotated heads, and an adapter for each task."""

from __future__ import annotations

from dataclasses import replace

from engine.families.reading import Fields, dtype_of
from engine.pooling.families.reading import activation_of, names_of, packed_attention, rope_of, tokens_of
from engine.pooling.spec import AdaptersSpec, EncoderLayerSpec, EncoderSpec, FeedForwardSpec
from engine.spec.ends import NormSpec
from engine.spec.model import UnsupportedModelError
from modelfiles.jina import tasks_of


def read_jina(fields: Fields, is_headed: bool) -> EncoderSpec:
    """Jina v3: norms behind both halves, no learnt positions; every matrix and table has its adapters beside it."""
    fields.only("model_type", "xlm-roberta")
    fields.only("position_embedding_type", "rotary")
    fields.only("emb_pooler")
    fields.only("load_trained_adapters", True)
    # Fields about training, its code's speed, and the gateway's part.
    fields.ignore(
        "lora_dropout_p",
        "lora_main_params_trainable",
        "use_reentrant",
        "truncate_dim",
        "lora_prompts",
        "task_instructions",
    )
    tasks, rank = tasks_of(fields), fields.number("lora_rank")
    if not tasks:
        raise UnsupportedModelError("config.json: lora_adaptations names no adapter")
    attention = packed_attention(
        fields, "mixer.out_proj", rope=rope_of(fields, "", fields.real("rotary_emb_base", 10_000.0)), has_bias=True
    )
    types = fields.count("type_vocab_size") or 1
    layer = EncoderLayerSpec(
        attention=replace(attention, inputs=("mixer.Wqkv",)),
        mlp=FeedForwardSpec(
            inputs=("mlp.fc1",),
            output="mlp.fc2",
            intermediate_size=fields.number("intermediate_size"),
            activation=activation_of(fields, "hidden_act"),
        ),
        norms=("norm1", "norm2"),
    )
    stored = names_of("roberta.", "pooler.")
    weight = ".parametrizations.weight"
    endings = {f"{weight}.original": ".weight"} | {f"{weight}.0.lora_{one}": f".lora_{one}" for one in "AB"}
    return EncoderSpec(
        hidden_size=fields.number("hidden_size"),
        max_position_embeddings=fields.number("max_position_embeddings"),
        tokens=tokens_of(fields, norm="emb_ln", num_types=types),
        layers=(layer,) * fields.number("num_hidden_layers"),
        under="encoder.layers.{}.",
        norms=NormSpec(kind="layer", eps=fields.real("layer_norm_eps", 1e-5), has_bias=True),
        dtype=dtype_of(fields),
        stored=replace(stored, endings=endings),
        adapters=AdaptersSpec(count=len(tasks), rank=rank, scale=fields.real("lora_alpha", 1.0) / rank),
    )
