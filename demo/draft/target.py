"""The model that a draft head learns from: a plain Llama read from a GGUF file or a folder, in torch alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from engine.checkpoint.encodings import encoding_of
from engine.checkpoint.gguf_names import stored_in_gguf
from engine.checkpoint.safetensors import StoredTensor, stored_tensors
from modelfiles.files import read_json
from modelfiles.gguf import is_gguf, read_header

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, [positions, head_dim]


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    eps: float
    theta: float
    positions: int

    @property
    def aux_layers(self) -> tuple[int, int, int]:
        """The layers whose input the draft head reads: low, middle, high."""
        if self.layers < 6:
            return 0, self.layers // 2, self.layers - 1
        return 2, self.layers // 2, self.layers - 3


class Target:
    """A Llama's forward pass: whole sequences, or one token a sequence with a KV cache of static shape."""

    def __init__(self, model: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.device, self.dtype = shape_of(model), device, dtype
        weights = {_name_of(stored): _read(stored).to(device, dtype) for stored in _stored(model)}
        self.embedding = weights["model.embed_tokens.weight"]
        self.head = weights.get("lm_head.weight", self.embedding)
        self.norm = weights["model.norm.weight"]
        self._layers = [_fused(weights, f"model.layers.{layer}.") for layer in range(self.shape.layers)]

    def whole(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The three hidden states, concatenated, and the normalised last one of each position of `ids` [B, T]."""

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k, v = (x.repeat_interleave(self.shape.heads // self.shape.kv_heads, 1) for x in (k, v))
            return scaled_dot_product_attention(q, k, v, is_causal=True)

        rotation = rotations(self.shape, ids.shape[1], self.device)
        return self._pass(ids, rotation, attend)

    def cache(self, rows: int, length: int) -> torch.Tensor:
        """An empty KV cache: [layers, K and V, rows, kv_heads, length, head_dim]."""
        shape = (self.shape.layers, 2, rows, self.shape.kv_heads, length, self.shape.head_dim)
        return torch.zeros(shape, device=self.device, dtype=self.dtype)

    def step(self, ids: torch.Tensor, at: int, cache: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """The logits behind one more token `ids` [B] of each sequence, at position `at`."""
        group, head_dim = self.shape.heads // self.shape.kv_heads, self.shape.head_dim

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            cache[layer, 0, :, :, at], cache[layer, 1, :, :, at] = k[:, :, 0], v[:, :, 0]
            keys, values = cache[layer, 0, :, :, : at + 1], cache[layer, 1, :, :, : at + 1]
            grouped = q.reshape(len(ids), self.shape.kv_heads, group, head_dim)
            scores = torch.matmul(grouped, keys.transpose(-1, -2)) * head_dim**-0.5
            return torch.matmul(scores.softmax(-1), values).reshape(q.shape)

        here = rotation[0][at : at + 1], rotation[1][at : at + 1]
        return linear(self._pass(ids[:, None], here, attend)[1][:, 0], self.head)

    def _pass(self, ids: torch.Tensor, rotation: Rotation, attend: Attend) -> tuple[torch.Tensor, torch.Tensor]:
        shape, aux = self.shape, list[torch.Tensor]()
        sizes = [heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
        x = self.embedding[ids]
        for layer, w in enumerate(self._layers):
            if layer in shape.aux_layers:
                aux.append(x)
            normed = rms_norm(x, (shape.hidden,), w["input_layernorm"], shape.eps)
            q, k, v = (by_head(part, shape.head_dim) for part in linear(normed, w["qkv"]).split(sizes, -1))
            mixed = attend(layer, rotated(q, rotation), rotated(k, rotation), v)
            x = x + linear(mixed.transpose(1, 2).flatten(2), w["o"])
            gate, up = linear(rms_norm(x, (shape.hidden,), w["post"], shape.eps), w["gate_up"]).chunk(2, -1)
            x = x + linear(silu(gate) * up, w["down"])
        return torch.cat(aux, -1), rms_norm(x, (shape.hidden,), self.norm, shape.eps)


def by_head(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[B, T, heads * head_dim] as [B, heads, T, head_dim]."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def rotations(shape: Shape, positions: int, device: torch.device) -> Rotation:
    """The rotary embedding's cosines and sines of so many positions."""
    powers = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float64) / shape.head_dim
    angles = torch.arange(positions, device=device, dtype=torch.float64)[:, None] * shape.theta**-powers
    angles = torch.cat((angles, angles), -1)
    return angles.cos().float(), angles.sin().float()


def rotated(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotary embedding of x [B, heads, T, head_dim]."""
    first, second = x.chunk(2, -1)
    cos, sin = (part.to(x.dtype) for part in rotation)
    return x * cos + torch.cat((-second, first), -1) * sin


def shape_of(model: Path) -> Shape:
    """The sizes that a GGUF file's metadata or a folder's config.json states. Raises KeyError for another family."""
    if not is_gguf(model):
        c = read_json(model, "config.json")
        head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
        theta = (c.get("rope_parameters") or c).get("rope_theta", 10_000.0)
        sizes = c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"], c["num_attention_heads"]
        rest = c["vocab_size"], c["rms_norm_eps"], theta, c["max_position_embeddings"]
        return Shape(*sizes, c["num_key_value_heads"], head_dim, *rest)
    header = read_header(model)
    m: Mapping[str, Any] = {
        key.removeprefix("llama."): v for key, v in header.metadata.items() if key.startswith("llama.")
    }
    hidden, heads = m["embedding_length"], m["attention.head_count"]
    return Shape(
        hidden=hidden,
        intermediate=m["feed_forward_length"],
        layers=m["block_count"],
        heads=heads,
        kv_heads=m["attention.head_count_kv"],
        head_dim=m.get("attention.key_length", hidden // heads),
        vocabulary=len(header.metadata["tokenizer.ggml.tokens"]),
        eps=m["attention.layer_norm_rms_epsilon"],
        theta=m["rope.freq_base"],
        positions=m["context_length"],
    )


def _stored(model: Path) -> list[StoredTensor]:
    return list(stored_in_gguf(model) if is_gguf(model) else stored_tensors(model))


def _read(stored: StoredTensor) -> torch.Tensor:
    data = np.fromfile(stored.file, np.uint8, stored.end - stored.begin, offset=stored.begin)
    values = encoding_of(stored, torch.float32).decode(torch.from_numpy(data)).float()
    if stored.undo is not None:
        values = stored.undo(values)
    found = torch.empty(stored.shape)
    placed = found if stored.order is None else stored.order(found)
    placed.copy_(values.reshape(placed.shape))
    return found


_GGUF_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


def _name_of(stored: StoredTensor) -> str:
    """The tensor's name in Hugging Face's Llama: GGUF's norms are named by their place."""
    return ".".join(_GGUF_NORMS.get(part, part) for part in stored.name.split("."))


def _fused(weights: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    return {
        "input_layernorm": weights[prefix + "input_layernorm.weight"],
        "post": weights[prefix + "post_attention_layernorm.weight"],
        "qkv": torch.cat([weights[f"{attention}{name}_proj.weight"] for name in "qkv"]),
        "o": weights[attention + "o_proj.weight"],
        "gate_up": torch.cat([weights[f"{mlp}{name}_proj.weight"] for name in ("gate", "up")]),
        "down": weights[mlp + "down_proj.weight"],
    }
