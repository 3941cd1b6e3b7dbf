# mypy: allow-untyped-calls
"""GTE's encoder in plain torch, a text at a time: its own class is remote code, which no test loads.

Written from the model's description (mGTE, arXiv 2407.19669; "ntk": kexue.fm/archives/9706).
T tokens, E hidden size, H heads, D head size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from tests.pooling_models import NORMALIZED, build_word_tokenizer, randomise, write_modules
from tests.unit.engine.pooling.references import turned

FIELDS: dict[str, Any] = {
    "architectures": ["NewModel"],
    "attention_probs_dropout_prob": 0.0,
    "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
    "classifier_dropout": 0.0,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 32,
    "id2label": {"0": "LABEL_0"},
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "layer_norm_eps": 1e-12,
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "max_position_embeddings": 96,
    "model_type": "new",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "pack_qkv": True,
    "pad_token_id": 1,
    "position_embedding_type": "rope",
    "rope_scaling": {"factor": 8.0, "type": "ntk"},
    "rope_theta": 20000,
    "torch_dtype": "float32",
    "type_vocab_size": 1,
    "unpad_inputs": False,
    "use_memory_efficient_attention": False,
    "vocab_size": 128,
}


class _Attention(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size = config["hidden_size"]
        if config["pack_qkv"]:
            self.qkv_proj = nn.Linear(size, 3 * size)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(size, size) for _ in range(3))
        self.o_proj = nn.Linear(size, size)
        self.config = config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, heads = len(x), self.config["num_attention_heads"]
        if self.config["pack_qkv"]:
            parts = self.qkv_proj(x).view(count, 3, heads, -1).unbind(1)
        else:
            parts = tuple(each(x).view(count, heads, -1) for each in (self.q_proj, self.k_proj, self.v_proj))
        queries, keys, values = (part.transpose(0, 1) for part in parts)  # [H, T, D]
        angles = self._angles(queries.shape[-1])
        queries, keys = turned(queries, angles), turned(keys, angles)
        shares = (queries @ keys.transpose(1, 2) / queries.shape[-1] ** 0.5).softmax(-1)
        return torch.as_tensor(self.o_proj((shares @ values).transpose(0, 1).reshape(count, -1)))

    def _angles(self, size: int) -> torch.Tensor:
        factor = (self.config["rope_scaling"] or {"factor": 1.0})["factor"]
        pair = torch.arange(size // 2, dtype=torch.float64)
        return torch.as_tensor((factor * self.config["rope_theta"]) ** (-2 * pair / size) / factor ** (2 / size))


class _Mlp(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.inner = config["intermediate_size"]
        self.up_gate_proj = nn.Linear(config["hidden_size"], 2 * self.inner, bias=False)
        self.down_proj = nn.Linear(self.inner, config["hidden_size"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.up_gate_proj(x)
        return torch.as_tensor(self.down_proj(both[:, : self.inner] * nn.functional.gelu(both[:, self.inner :])))


class _Layer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size, eps = config["hidden_size"], config["layer_norm_eps"]
        self.attention, self.mlp = _Attention(config), _Mlp(config)
        self.attn_ln, self.mlp_ln = nn.LayerNorm(size, eps), nn.LayerNorm(size, eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attn_ln(x + self.attention(x))
        return torch.as_tensor(self.mlp_ln(x + self.mlp(x)))


class _Embeddings(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size = config["hidden_size"]
        self.word_embeddings = nn.Embedding(config["vocab_size"], size)
        self.num_types = config["type_vocab_size"]
        if self.num_types:
            self.token_type_embeddings = nn.Embedding(self.num_types, size)
        self.LayerNorm = nn.LayerNorm(size, config["layer_norm_eps"])

    def forward(self, tokens: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
        x = self.word_embeddings(tokens)
        if self.num_types:
            x = x + self.token_type_embeddings(types if self.num_types > 1 else types * 0)
        return torch.as_tensor(self.LayerNorm(x))


class Gte(nn.Module):
    """Tokens' vectors [T, E]; with `labels` scores as `ForSequenceClassification` has them."""

    def __init__(self, config: dict[str, Any], *, labels: int = 0) -> None:
        super().__init__()
        size = config["hidden_size"]
        self.new = nn.ModuleDict(
            {
                "embeddings": _Embeddings(config),
                "encoder": nn.ModuleDict(
                    {"layer": nn.ModuleList(_Layer(config) for _ in range(config["num_hidden_layers"]))}
                ),
                "pooler": nn.ModuleDict({"dense": nn.Linear(size, size)}),
            }
        )
        # Without labels it is the head of tokens' weights, which gte-multilingual-base has.
        self.classifier = nn.Linear(size, labels or 1)

    def forward(self, text: list[int], second: int = 0) -> torch.Tensor:
        types = (torch.arange(len(text)) >= (second or len(text))).long()
        x = self.new["embeddings"](torch.tensor(text), types)
        for layer in self.new["encoder"]["layer"]:  # type: ignore[index, union-attr]
            x = layer(x)
        return torch.as_tensor(x)

    def scores(self, text: list[int], second: int = 0) -> torch.Tensor:
        first = self(text, second)[:1]
        return torch.as_tensor(self.classifier(self.new["pooler"]["dense"](first).tanh()))  # type: ignore[index, operator]


def build_gte(folder: Path, *, labels: int = 0, prefix: str = "new.", **changes: Any) -> Gte:
    """Write a random checkpoint with its files; return the reference, in float64."""
    fields = {**FIELDS, **changes}
    if labels:
        names = {str(at): f"LABEL_{at}" for at in range(labels)}
        fields |= {"architectures": ["NewForSequenceClassification"], "id2label": names}
    model = Gte(fields, labels=labels)
    randomise(model, 0)
    if not labels:
        model.classifier.bias.data += 2.0  # some words weigh something
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {prefix + name.removeprefix("new."): each for name, each in model.state_dict().items() if "new." in name}
    tensors |= {name: each for name, each in model.state_dict().items() if "new." not in name}
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields))
    build_word_tokenizer(folder, longest=fields["max_position_embeddings"])
    if not labels:
        write_modules(folder, NORMALIZED, {"pooling_mode_cls_token": True}, fields["hidden_size"])
    return model.double().eval()
