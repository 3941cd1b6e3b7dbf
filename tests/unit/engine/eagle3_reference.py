"""EAGLE-3 heads of random weights, and their drafts in plain torch: every row of the text computed anew for each token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, rms_norm, silu
from transformers import AutoModelForCausalLM

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, EPS, THETA = 64, 4, 2, 16, 48, 1e-5, 5000.0
VOCABULARY, DRAFT_VOCABULARY = 512, 96
SHAPES = {
    "fc": (HIDDEN, 3 * HIDDEN),
    "layers.0.input_layernorm": (HIDDEN,),
    "layers.0.hidden_norm": (HIDDEN,),
    "layers.0.self_attn.q_proj": (HEADS * HEAD_DIM, 2 * HIDDEN),
    "layers.0.self_attn.k_proj": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
    "layers.0.self_attn.v_proj": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
    "layers.0.self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "layers.0.post_attention_layernorm": (HIDDEN,),
    "layers.0.mlp.gate_proj": (INNER, HIDDEN),
    "layers.0.mlp.up_proj": (INNER, HIDDEN),
    "layers.0.mlp.down_proj": (HIDDEN, INNER),
    "norm": (HIDDEN,),
    "lm_head": (DRAFT_VOCABULARY, HIDDEN),
}
FURTHER = {
    "input_layernorm": (HIDDEN,),
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "post_attention_layernorm": (HIDDEN,),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
MASK = 509
MORE = {
    "two_layers": {f"layers.1.{name}": shape for name, shape in FURTHER.items()},
    "norm_before_fc": {"input_norm": (3 * HIDDEN,)},
    "fc_norm": {f"fc_norm.{number}": (HIDDEN,) for number in range(3)},
    "embed": {"embed_tokens": (VOCABULARY, HIDDEN)},
}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "max_position_embeddings": 1024,
    "vocab_size": VOCABULARY,
    "draft_vocab_size": DRAFT_VOCABULARY,
    "torch_dtype": "float32",
}


def write_head(folder: Path, *flags: str, seed: int = 0, **changes: Any) -> Path:
    """Write a head of SpecForge's layout, with `flags` on; return the folder.

    "embed": with a table of its own; "parallel": P-EAGLE, with "two_layers".
    """
    folder.mkdir(parents=True, exist_ok=True)
    noise = torch.Generator().manual_seed(seed)
    shapes = SHAPES | {name: shape for flag in flags for name, shape in MORE.get(flag, {}).items()}
    tensors = dict[str, torch.Tensor]()
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=noise)
        drawn = 1 + 0.2 * drawn if len(shape) == 1 else 1.5 * drawn * shape[-1] ** -0.5
        tensors[f"{name.replace('layers.0.', 'midlayer.')}.weight"] = drawn
    ids = torch.randperm(VOCABULARY, generator=noise)[:DRAFT_VOCABULARY].sort().values
    tensors["d2t"] = ids - torch.arange(DRAFT_VOCABULARY)
    tensors["t2d"] = torch.isin(torch.arange(VOCABULARY), ids)
    if "parallel" in flags:
        tensors["mask_hidden"] = torch.randn((1, 1, 3 * HIDDEN), generator=noise)
        changes = {"mask_token_id": MASK, "num_hidden_layers": 1 + ("two_layers" in flags)} | changes
    said = [flag for flag in flags if flag not in ("embed", "parallel", "two_layers")]
    config = CONFIG | dict.fromkeys(said, True) | changes
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Reference:
    """A target of transformers and a head, `flags` as it was written with."""

    def __init__(self, target: Path, tensors: dict[str, torch.Tensor], *flags: str) -> None:
        self._network = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self._flags = flags
        self._ids = tensors["d2t"] + torch.arange(DRAFT_VOCABULARY)
        self._weights = {
            name.removesuffix(".weight").replace("midlayer.", ""): weight for name, weight in tensors.items()
        }
        table = self._network.get_input_embeddings().weight
        self._table = self._weights.get("embed_tokens", table)

    @torch.no_grad()
    def drafts(self, token_ids: list[int], count: int) -> tuple[int, ...]:
        """The drafts behind the tokens, of which the last one was just sampled."""
        states = self._network(torch.tensor([token_ids[:-1]]), output_hidden_states=True).hidden_states
        hidden = self._combined(torch.cat([states[layer][0] for layer in range(3)], -1))
        tokens, drafted = token_ids[1:], list[int]()
        if "parallel" in self._flags:
            masks = self._combined(self._weights["mask_hidden"][0]).expand(count - 1, -1)
            tokens = [*tokens, *[MASK] * (count - 1)]
            out = self._layer(self._table[torch.tensor(tokens)], torch.cat((hidden, masks)))
            out = self._further(out) if "two_layers" in self._flags else out
            found = linear(self._normed(out[-count:], "norm"), self._weights["lm_head"]).argmax(-1)
            return tuple(self._ids[found].tolist())
        for _ in range(count):
            out = self._layer(self._table[torch.tensor(tokens)], hidden)[-1:]
            normed = self._normed(out, "norm")
            drafted.append(int(self._ids[linear(normed, self._weights["lm_head"]).argmax()]))
            tokens.append(drafted[-1])
            hidden = torch.cat((hidden, normed if "norm_output" in self._flags else out))
        return tuple(drafted)

    def _combined(self, joined: torch.Tensor) -> torch.Tensor:
        if "fc_norm" in self._flags:
            states = joined.chunk(3, -1)
            joined = torch.cat([self._normed(x, f"fc_norm.{number}") for number, x in enumerate(states)], -1)
        joined = self._normed(joined, "input_norm") if "norm_before_fc" in self._flags else joined
        return linear(joined, self._weights["fc"])

    def _layer(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        normed = self._normed(hidden, "hidden_norm")
        x = torch.cat((self._normed(embedded, "input_layernorm"), normed), -1)
        return self._halves(x, normed if "norm_before_residual" in self._flags else hidden)

    def _further(self, x: torch.Tensor) -> torch.Tensor:
        return self._halves(self._normed(x, "layers.1.input_layernorm"), x, "layers.1.")

    def _halves(self, x: torch.Tensor, residual: torch.Tensor, under: str = "") -> torch.Tensor:
        """A layer from its attention's input on."""
        w = {name.removeprefix(under): weight for name, weight in self._weights.items() if name.startswith(under)}
        q, k, v = (
            linear(x, w[f"self_attn.{name}_proj"]).unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1) for name in "qkv"
        )
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (_rotated(k), v))
        scores = _rotated(q) @ k.transpose(-1, -2) * HEAD_DIM**-0.5
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(unseen, float("-inf")).softmax(-1) @ v
        residual = residual + linear(mixed.transpose(0, 1).flatten(1), w["self_attn.o_proj"])
        x = self._normed(residual, f"{under}post_attention_layernorm")
        return residual + linear(silu(linear(x, w["mlp.gate_proj"])) * linear(x, w["mlp.up_proj"]), w["mlp.down_proj"])

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, x.shape[-1:], self._weights[name], EPS)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [heads, T, D]."""
    angles = torch.arange(x.shape[1])[:, None] * THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.cat((angles, angles), -1)
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()
