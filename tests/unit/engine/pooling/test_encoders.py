# mypy: allow-untyped-calls
"""Vectors and scores are those of transformers, alone and among others of any length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from engine.kernels.native import floats
from engine.pooling import engine as pooling_engine
from engine.pooling import masks
from engine.pooling.engine import PoolingInput
from engine.pooling.heads import cut
from tests.pooling_models import FAMILIES, build_pooling_model
from tests.unit.engine.pooling.references import EXACT, changed, engine_of, inputs, reference

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "windows of the upper layers": (
        "Qwen2Model",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    "windows by layer": (
        "Qwen3Model",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "a window that is not used": ("Qwen2Model", {"use_sliding_window": False, "sliding_window": 8}),
    "biases": ("ModernBertModel", {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "local_attention": 8}),
    "biases of attention": ("LlamaModel", {"attention_bias": True}),
    "another activation": ("BertModel", {"hidden_act": "relu"}),
    "a Gemma that reads from left to right": ("Gemma3TextModel", {"use_bidirectional_attention": False}),
    "no types": ("NomicBertModel", {"type_vocab_size": 1}),
}


@pytest.mark.parametrize(
    ("family", "changes"),
    [*((family, {}) for family in FAMILIES), *OTHERS.values()],
    ids=[*FAMILIES, *OTHERS],
)
def test_tokens_vectors_are_those_of_transformers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = build_pooling_model(tmp_path, family, **changes)
    engine, theirs = engine_of(folder), reference(folder)
    texts = inputs()
    together = engine.compute([PoolingInput(tokens=text, work="token_embed", is_raw=True) for text in texts])
    for text, found in zip(texts, together, strict=True):
        with torch.no_grad():
            wanted = theirs(torch.tensor([text])).last_hidden_state[0].float()
        torch.testing.assert_close(found, wanted, **EXACT)
        [alone] = engine.compute([PoolingInput(tokens=text, work="token_embed", is_raw=True)])
        torch.testing.assert_close(alone, found, **EXACT)


@pytest.mark.parametrize("at_once", [1, 7, 16, 39])
@pytest.mark.parametrize(
    ("family", "changes"),
    [("ModernBertModel", {"local_attention": 16}), ("MistralModel", {"sliding_window": 9})],
    ids=["both sides", "before"],
)
def test_windows_of_long_texts_are_computed_part_by_part(
    family: str, changes: dict[str, Any], at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(floats, "is_usable", lambda: False)  # by torch
    engine = engine_of(build_pooling_model(tmp_path, family, **changes))
    asked = [PoolingInput(tokens=text, work="token_embed", is_raw=True) for text in inputs()]
    whole = engine.compute(asked)
    monkeypatch.setattr(masks, "QUERIES_AT_ONCE", at_once)
    for found, wanted in zip(engine.compute(asked), whole, strict=True):
        torch.testing.assert_close(found, wanted, **EXACT)


@pytest.mark.skipif(not floats.is_usable(), reason="needs AVX-512 and a compiler")
@pytest.mark.parametrize("family", ["BertModel", "ModernBertModel", "Qwen3Model"])
def test_kernels_give_the_same_bits_alone_and_among_others(family: str, tmp_path: Path) -> None:
    folder = build_pooling_model(tmp_path, family)
    asked = [PoolingInput(tokens=text, work="token_embed", is_raw=True) for text in inputs()]
    together = engine_of(folder, num_threads=2).compute(asked)
    engine = engine_of(folder, num_threads=1)
    for one, found in zip(asked, together, strict=True):
        assert torch.equal(engine.compute([one])[0], found)


def _pooled(states: torch.Tensor, mode: str) -> torch.Tensor:
    """The definitions, a text at a time."""
    count = torch.arange(1, len(states) + 1).float()[:, None]
    return {
        "cls": lambda: states[0],
        "lasttoken": lambda: states[-1],
        "max": lambda: states.max(0).values,
        "mean": lambda: states.mean(0),
        "mean_sqrt_len_tokens": lambda: states.sum(0) / len(states) ** 0.5,
        "weightedmean": lambda: (states * count).sum(0) / count.sum(),
    }[mode]()


@pytest.mark.parametrize(
    ("said", "modes"),
    [
        ({"pooling_mode_mean_tokens": True}, ["mean"]),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ["cls"]),
        ({"pooling_mode": "lasttoken"}, ["lasttoken"]),
        ({"pooling_mode": ["max", "weightedmean"]}, ["max", "weightedmean"]),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, ["mean_sqrt_len_tokens"]),
    ],
)
def test_pooling_is_what_the_files_say(said: dict[str, Any], modes: list[str], tmp_path: Path) -> None:
    folder = build_pooling_model(tmp_path, modules=["Pooling"], pooling=said)
    engine, theirs = engine_of(folder), reference(folder)
    texts = inputs(1)
    for text, found in zip(texts, engine.compute([PoolingInput(tokens=text) for text in texts]), strict=True):
        with torch.no_grad():
            states = theirs(torch.tensor([text])).last_hidden_state[0].float()
        wanted = torch.cat([_pooled(states, mode) for mode in modes])[None]
        torch.testing.assert_close(found, wanted, **EXACT)


def test_products_and_lengths_follow(tmp_path: Path) -> None:
    """Dense, then Normalize; fewer dimensions have length 1 again; raw vectors keep theirs."""
    folder = build_pooling_model(tmp_path, modules=["Pooling", "Dense", "Normalize"])
    engine, theirs = engine_of(folder), reference(folder)
    dense = load_file(folder / "2_Dense" / "model.safetensors")
    [text, *_] = inputs(2)[4:]
    with torch.no_grad():
        mean = theirs(torch.tensor([text])).last_hidden_state[0].float().mean(0)
    raw = torch.tanh(mean @ dense["linear.weight"].T + dense["linear.bias"])[None]
    asked = [PoolingInput(tokens=text), PoolingInput(tokens=text, dimensions=8), PoolingInput(tokens=text, is_raw=True)]
    whole, short, plain = engine.compute(asked)
    torch.testing.assert_close(whole, raw / raw.norm(), **EXACT)
    torch.testing.assert_close(short, raw[:, :8] / raw[:, :8].norm(), **EXACT)
    torch.testing.assert_close(plain, raw, **EXACT)


def _dense(folder: Path) -> torch.Tensor:
    return load_file(folder / "model.safetensors")["linear.weight"]


def test_tokens_have_vectors_of_length_1_where_nothing_is_pooled(tmp_path: Path) -> None:
    """ColBERT's: a matrix behind the encoder, and no pooling."""
    folder = build_pooling_model(tmp_path, modules=["Dense"])
    engine, theirs = engine_of(folder), reference(folder)
    assert (engine.pooling.works, engine.pooling.size) == (("token_embed", "maxsim"), 24)
    texts = inputs(4)
    asked = [PoolingInput(tokens=text, work="token_embed") for text in texts]
    for text, found in zip(texts, engine.compute(asked), strict=True):
        with torch.no_grad():
            states = theirs(torch.tensor([text])).last_hidden_state[0].float()
        wanted = torch.nn.functional.normalize(states @ _dense(folder / "1_Dense").T, dim=-1)
        torch.testing.assert_close(found, wanted, **EXACT)


def test_two_products_follow_the_mean_of_embeddinggemma(tmp_path: Path) -> None:
    folder = build_pooling_model(tmp_path, "Gemma3TextModel", modules=["Pooling", "Dense", "Dense", "Normalize"])
    [text, *_] = inputs(5)[6:]
    with torch.no_grad():
        mean = reference(folder)(torch.tensor([text])).last_hidden_state[0].float().mean(0)
    first = load_file(folder / "2_Dense" / "model.safetensors")
    middle = torch.tanh(mean @ first["linear.weight"].T + first["linear.bias"])
    wanted = torch.nn.functional.normalize(middle @ _dense(folder / "3_Dense").T, dim=0)[None]
    torch.testing.assert_close(engine_of(folder).compute([PoolingInput(tokens=text)])[0], wanted, **EXACT)
    with pytest.raises(ValueError, match="--dtype float16: this model overflows in it"):
        engine_of(folder, dtype="float16")


# A head of ModernBERT's has what its configuration says.
OF_HEADS: dict[tuple[str, int], dict[str, Any]] = {
    ("ModernBertForSequenceClassification", 3): {"classifier_pooling": "mean", "classifier_bias": True}
}


@pytest.mark.parametrize(
    "family",
    [
        "BertForSequenceClassification",
        "XLMRobertaForSequenceClassification",
        "MPNetForSequenceClassification",
        "ModernBertForSequenceClassification",
    ],
)
@pytest.mark.parametrize("labels", [1, 3])
def test_scores_are_those_of_transformers(family: str, labels: int, tmp_path: Path) -> None:
    folder = build_pooling_model(tmp_path, family, num_labels=labels, **OF_HEADS.get((family, labels), {}))
    engine = engine_of(folder)
    theirs = reference(folder, transformers.AutoModelForSequenceClassification)
    texts = inputs(3)
    seconds = [len(text) // 2 for text in texts]
    asked = [
        PoolingInput(tokens=text, work="classify", second=at, is_raw=True)
        for text, at in zip(texts, seconds, strict=True)
    ]
    has_types = family.startswith("Bert")
    for text, at, found in zip(texts, seconds, engine.compute(asked), strict=True):
        types = torch.tensor([[int(bool(at) and place >= at) for place in range(len(text))]])
        with torch.no_grad():
            wanted = theirs(torch.tensor([text]), **({"token_type_ids": types} if has_types else {})).logits.float()
        torch.testing.assert_close(found, wanted, **EXACT)
    [one] = engine.compute([PoolingInput(tokens=texts[4], work="classify")])
    [raw] = engine.compute([PoolingInput(tokens=texts[4], work="classify", is_raw=True)])
    torch.testing.assert_close(one, raw.sigmoid() if labels == 1 else raw.softmax(-1), **EXACT)


PUBLISHED: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "NomicBertModel": (
        {
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
            "layer_norm_eps": "layer_norm_epsilon",
            "hidden_act": "dropped_act",
        },
        {
            "activation_function": "swiglu",
            "dropped_act": None,
            "causal": False,
            "rope_parameters": None,
            "rotary_emb_base": 1000,
            "rotary_emb_fraction": 1.0,
            "rotary_emb_interleaved": False,
            "rotary_scaling_factor": None,
            "scale_attn_weights": True,
            "max_trained_positions": 2048,
            "use_xentropy": True,
        },
    ),
    "EuroBertModel": (
        {},
        {"clf_pooling": "late", "mask_token": "<|mask|>", "pad_token": "<|end_of_text|>", "rope_scaling": None},
    ),
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_a_configuration_of_the_model_s_own_code_means_the_same(family: str, tmp_path: Path) -> None:
    names, fields = PUBLISHED[family]
    folder, [text, *_] = build_pooling_model(tmp_path, family), inputs()[4:]
    [wanted] = engine_of(folder).compute([PoolingInput(tokens=text)])
    [found] = engine_of(changed(folder, names, **fields)).compute([PoolingInput(tokens=text)])
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("BertModel", "hidden_act", "mish"),
        ("BertModel", "position_embedding_type", "relative_key"),
        ("BertModel", "embedding_factor", 2),
        ("BertModel", "is_decoder", True),
        ("MPNetModel", "relative_attention_num_buckets", 8),
        ("LlamaModel", "sliding_window", 8),
        ("LlamaModel", "mlp_bias", True),
        ("NomicBertModel", "causal", True),
        ("NomicBertModel", "rotary_emb_interleaved", True),
        ("NomicBertModel", "rotary_scaling_factor", 2),
        ("NomicBertModel", "scale_attn_weights", False),
    ],
)
def test_what_is_not_computed_is_refused_by_name(family: str, field: str, value: object, tmp_path: Path) -> None:
    folder = changed(build_pooling_model(tmp_path, family), **{field: value})
    with pytest.raises(ValueError, match=f"{field} = {value!r} is not supported"):
        engine_of(folder)


@pytest.mark.parametrize(
    ("family", "fields", "says"),
    [
        ("LlamaModel", {"rope_parameters": {"rope_type": "yarn", "factor": 4}}, "only the plain rotation"),
        (
            "LlamaModel",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "only the plain rotation",
        ),
        ("LlamaModel", {"rope_parameters": ["yarn"]}, "only the plain rotation"),
        ("ModernBertModel", {"layer_types": ["full_attention"]}, "layer_types names 1 layers of 3"),
        ("ModernBertModel", {"layer_types": ["linear"] * 3}, "layer_types = .'linear'. is not supported"),
        ("RobertaModel", {"pad_token_id": 95}, "pad_token_id = 95 leaves none of max_position_embeddings = 96"),
        ("BertModel", {"dtype": "int3"}, "dtype = 'int3' is not supported"),
        ("BertModel", {"num_attention_heads": 5}, "num_attention_heads = 5 does not divide hidden_size = 32"),
        ("BertModel", {"architectures": ["T5EncoderModel"]}, "T5EncoderModel is not computed as an encoder"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(
    family: str, fields: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=says):
        engine_of(changed(build_pooling_model(tmp_path, family), **fields))


@pytest.mark.parametrize(
    ("quantization", "dtype", "least"),
    [("int8", "auto", 0.999), ("fp8", "auto", 0.99), ("int4", "auto", 0.9), ("auto", "bfloat16", 0.999)],
)
def test_weights_in_fewer_bits_make_near_vectors_of_another_model(
    quantization: str, dtype: str, least: float, tmp_path: Path
) -> None:
    folder = build_pooling_model(tmp_path, hidden_size=128, intermediate_size=256)
    plain, other = engine_of(folder), engine_of(folder, quantization=quantization, dtype=dtype)
    asked = [PoolingInput(tokens=text) for text in inputs()]
    for wanted, found in zip(plain.compute(asked), other.compute(asked), strict=True):
        assert least < (wanted @ found.T).item() < 1.001
        assert not torch.equal(wanted, found)
    assert plain.fingerprint != other.fingerprint


def test_skipped_tokens_are_pooled_as_by_sentence_transformers(tmp_path: Path) -> None:
    """A first token stays that of the text, and a weight the token's number there."""
    said = {"pooling_mode": ["cls", "mean", "weightedmean", "max", "lasttoken"]}
    engine, (first, text, other) = (
        engine_of(build_pooling_model(tmp_path, modules=["Pooling"], pooling=said)),
        inputs()[4:7],
    )
    wanted = []
    for tokens, skip in ((first, 0), (text, 3), (other, 500)):
        [states] = engine.compute([PoolingInput(tokens=tokens, work="token_embed", is_raw=True)])
        own = states[min(skip, len(states) - 1) :]
        numbers = torch.arange(len(states) - len(own) + 1, len(states) + 1).float()[:, None]
        weighted = (own * numbers).sum(0) / numbers.sum()
        wanted.append(torch.cat([states[0], own.mean(0), weighted, own.max(0).values, own[-1]])[None])
    asked = [PoolingInput(tokens=tokens, skipped=skip) for tokens, skip in ((first, 0), (text, 3), (other, 500))]
    torch.testing.assert_close(torch.cat(engine.compute(asked)), torch.cat(wanted), **EXACT)


def test_each_vector_is_cut_once_whatever_others_ask_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, rows = engine_of(build_pooling_model(tmp_path)), list[int]()

    def counting(vectors: torch.Tensor, dimensions: int, *, normalizes: bool) -> torch.Tensor:
        rows.append(len(vectors))
        return cut(vectors, dimensions, normalizes=normalizes)

    monkeypatch.setattr(pooling_engine, "cut", counting)
    asked = [PoolingInput(tokens=[2, 9, 3], dimensions=at % 32, is_raw=at % 2 > 0) for at in range(128)]
    found = engine.compute(asked)
    assert sum(rows) == 128
    assert [one.shape for one in found[:3]] == [(1, 32), (1, 1), (1, 2)]
    torch.testing.assert_close(found[33][0], found[65][0])
