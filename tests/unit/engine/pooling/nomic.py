# mypy: allow-untyped-calls
"""A reference of NomicBert with experts (nomic-embed-text-v2-moe), written from its description, and its files."""

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
    "activation_function": "gelu",
    "architectures": ["NomicBertModel"],
    "attn_pdrop": 0.0,
    "causal": False,
    "expert_choice_router": False,
    "ffn_div": 1,
    "layer_norm_epsilon": 1e-5,
    "max_trained_positions": 2048,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "model_type": "nomic_bert",
    "moe_every_n_layers": 2,
    "moe_impl": "megablocks",
    "moe_normalize_expert_weights": False,
    "moe_resid_pdrop": 0.0,
    "moe_top_k": 2,
    "n_embd": 32,
    "n_head": 4,
    "n_inner": 48,
    "n_layer": 4,
    "n_positions": 96,
    "num_experts": 6,
    "num_shared_experts": 0,
    "pad_token_id": 1,
    "qkv_proj_bias": True,
    "rotary_emb_base": 10000.0,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_scaling_factor": None,
    "router_aux_loss_coef": 0.1,
    "scale_attn_weights": True,
    "torch_dtype": "float32",
    "type_vocab_size": 1,
    "vocab_size": 128,
}


class _Attention(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size = config["n_embd"]
        self.Wqkv, self.out_proj = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.heads, self.base = config["n_head"], config["rotary_emb_base"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.Wqkv(x).view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3)  # [H, T, D] each
        size = queries.shape[-1]
        angles = self.base ** (-2 * torch.arange(size // 2, dtype=torch.float64) / size)
        queries, keys = turned(queries, angles), turned(keys, angles)
        shares = (queries @ keys.transpose(1, 2) / size**0.5).softmax(-1)
        return torch.as_tensor(self.out_proj((shares @ values).transpose(0, 1).reshape(len(x), -1)))


class _Mlp(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config["n_embd"], config["n_inner"])
        self.fc2 = nn.Linear(config["n_inner"], config["n_embd"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.fc2(nn.functional.gelu(self.fc1(x))))


class _Experts(nn.Module):
    """Every expert computes every token; those that weren't chosen weigh nothing."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size, self.count, self.chosen = config["n_embd"], config["num_experts"], config["moe_top_k"]
        rows = self.count * config["n_inner"]
        self.router = nn.ModuleDict({"layer": nn.Linear(size, self.count, bias=False)})
        self.experts = nn.ParameterDict({"bias": nn.Parameter(torch.zeros(size))})
        self.both = nn.ParameterDict({name: nn.Parameter(torch.zeros(rows, size)) for name in ("w1", "w2")})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.router["layer"](x).softmax(-1)
        least = shares.sort(-1, descending=True).values[:, self.chosen - 1, None]
        shares = torch.where(shares >= least, shares, torch.zeros(()))
        ups, downs = (self.both[name].view(self.count, -1, x.shape[1]) for name in ("w1", "w2"))
        inner = nn.functional.gelu(torch.einsum("te,nie->nti", x, ups))
        return torch.as_tensor(torch.einsum("tn,nti,nie->te", shares, inner, downs) + self.experts["bias"])


class Nomic(nn.Module):
    """Tokens' vectors [T, E]."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size, eps = config["n_embd"], config["layer_norm_epsilon"]
        self.words, self.types = nn.Embedding(config["vocab_size"], size), nn.Embedding(1, size)
        self.emb_ln = nn.LayerNorm(size, eps)
        every = config["moe_every_n_layers"]
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "attn": _Attention(config),
                    "mlp": _Experts(config) if at % every == 1 else _Mlp(config),
                    "norm1": nn.LayerNorm(size, eps),
                    "norm2": nn.LayerNorm(size, eps),
                }
            )
            for at in range(config["n_layer"])
        )

    def forward(self, text: list[int]) -> torch.Tensor:
        tokens = torch.tensor(text)
        x = self.emb_ln(self.words(tokens) + self.types(tokens * 0))
        for layer in self.layers:
            x = layer["norm1"](x + layer["attn"](x))  # type: ignore[index, operator]
            x = layer["norm2"](x + layer["mlp"](x))  # type: ignore[index, operator]
        return torch.as_tensor(x)


NAMES = {
    "words.": "embeddings.word_embeddings.",
    "types.": "embeddings.token_type_embeddings.",
    "layers.": "encoder.layers.",
    ".both.": ".experts.mlp.",
}


def build_nomic(folder: Path, **changes: Any) -> Nomic:
    """Write a random checkpoint with its files; return the reference, in float64."""
    fields = {**FIELDS, **changes}
    with torch.random.fork_rng(devices=[]):  # two experts that are as good in each run, or in none
        torch.manual_seed(0)
        model = Nomic(fields)
    randomise(model, 0)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict[str, torch.Tensor]()
    for name, each in model.state_dict().items():
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        tensors[name] = each.contiguous()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields))
    build_word_tokenizer(folder, longest=fields["n_positions"])
    write_modules(folder, NORMALIZED, {"pooling_mode_mean_tokens": True}, fields["n_embd"])
    return model.double().eval()
