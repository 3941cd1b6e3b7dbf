"""DFlash and DSpark heads of random weights, and their drafts in plain torch: the whole text computed anew for each block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, rms_norm, silu
from transformers import AutoModelForCausalLM

from tests.unit.engine.eagle3_reference import DRAFT_VOCABULARY, HIDDEN, VOCABULARY

HEADS, KV_HEADS, HEAD_DIM, INNER, EPS, THETA = 4, 1, 32, 48, 1e-5, 5000.0
LAYERS, BLOCK, MASK, RANK, WINDOW = 2, 5, 509, 8, 24
TARGET_LAYERS = [0, 1]  # whose output it reads
LAYER = {
    "input_layernorm": (HIDDEN,),
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.q_norm": (HEAD_DIM,),
    "self_attn.k_norm": (HEAD_DIM,),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "post_attention_layernorm": (HIDDEN,),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
SHAPES: dict[str, tuple[int, ...]] = {
    "fc": (HIDDEN, len(TARGET_LAYERS) * HIDDEN),
    "hidden_norm": (HIDDEN,),
    "norm": (HIDDEN,),
    **{f"layers.{number}.{name}": shape for number in range(LAYERS) for name, shape in LAYER.items()},
}
OWN_ENDS = {"embed_tokens": (VOCABULARY, HIDDEN), "lm_head": (DRAFT_VOCABULARY, HIDDEN)}
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": EPS,
    "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
    "max_position_embeddings": 1024,
    "vocab_size": VOCABULARY,
    "block_size": BLOCK,
    "dtype": "float32",
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": TARGET_LAYERS},
}


def write_dflash(folder: Path, *flags: str, seed: int = 0, **changes: Any) -> Path:
    """Write a head of z-lab's layout; return the folder.

    `flags`: "ends", with embedding, LM head and vocabulary of its own; "window", its first layer; "dspark", DeepSpec's with a
    bias; "anchor", each row predicts the next token.
    """
    folder.mkdir(parents=True, exist_ok=True)
    noise, shapes = torch.Generator().manual_seed(seed), dict(SHAPES)
    shapes |= OWN_ENDS if "ends" in flags else {}
    if "dspark" in flags:
        outputs = DRAFT_VOCABULARY if "ends" in flags else VOCABULARY
        shapes |= {"markov_head.markov_w1": (VOCABULARY, RANK), "markov_head.markov_w2": (outputs, RANK)}
        shapes |= {"confidence_head.proj": (1, HIDDEN + RANK)}
    tensors = dict[str, torch.Tensor]()
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=noise)
        tensors[f"{name}.weight"] = 1 + 0.2 * drawn if len(shape) == 1 else 1.5 * drawn * shape[-1] ** -0.5
    config = CONFIG | changes
    if "ends" in flags:
        ids = torch.randperm(VOCABULARY, generator=noise)[:DRAFT_VOCABULARY].sort().values
        tensors |= {"d2t": ids - torch.arange(DRAFT_VOCABULARY), "t2d": torch.isin(torch.arange(VOCABULARY), ids)}
        config["draft_vocab_size"] = DRAFT_VOCABULARY
    if "window" in flags:
        kinds = ["sliding_attention", *["full_attention"] * (LAYERS - 1)]
        config |= {"layer_types": kinds, "sliding_window": WINDOW, "use_sliding_window": True}
    if "dspark" in flags:
        config |= {"architectures": ["Qwen3DSparkModel"], "markov_rank": RANK, "enable_confidence_head": True}
        config |= {"sample_from_anchor": "anchor" in flags}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class DFlashReference:
    """A target of transformers and a head, `flags` as it was written with."""

    def __init__(self, target: Path, head: Path, *flags: str) -> None:
        self._network = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self._flags = flags
        tensors = load_file(head / "model.safetensors")
        self._weights = {name.removesuffix(".weight"): weight for name, weight in tensors.items()}
        self._table = self._weights.get("embed_tokens", self._network.get_input_embeddings().weight)
        self._lm_head = self._weights.get("lm_head", self._network.get_output_embeddings().weight)

    @torch.no_grad()
    def drafts(self, token_ids: list[int], count: int) -> tuple[int, ...]:
        """The drafts behind the tokens, of which the last one was just sampled."""
        states = self._network(torch.tensor([token_ids[:-1]]), output_hidden_states=True).hidden_states
        aux = torch.cat([states[layer + 1][0] for layer in TARGET_LAYERS], -1)
        context = self._normed(linear(aux, self._weights["fc"]), "hidden_norm")
        shift = 0 if "anchor" in self._flags else 1
        x = self._table[torch.tensor([token_ids[-1], *[MASK] * (count + shift - 1)])]
        for number in range(LAYERS):
            x = self._layer(x, context, f"layers.{number}.", window="window" in self._flags and number == 0)
        logits = linear(self._normed(x, "norm"), self._lm_head)[shift:]
        drafted = [token_ids[-1]]
        for row in logits:
            if "dspark" in self._flags:
                before = self._weights["markov_head.markov_w1"][drafted[-1]]
                row = row + linear(before, self._weights["markov_head.markov_w2"])
            found = int(row.argmax())
            drafted.append(found + int(self._weights["d2t"][found]) if "ends" in self._flags else found)
        return tuple(drafted[1:])

    def _layer(self, x: torch.Tensor, context: torch.Tensor, under: str, *, window: bool) -> torch.Tensor:
        own = self._normed(x, f"{under}input_layernorm")
        seen = torch.cat((context, own))
        q, k, v = (
            linear(rows, self._weights[f"{under}self_attn.{name}_proj"]).unflatten(-1, (-1, HEAD_DIM))
            for name, rows in (("q", own), ("k", seen), ("v", seen))
        )
        q, k = self._normed(q, f"{under}self_attn.q_norm"), self._normed(k, f"{under}self_attn.k_norm")
        positions = torch.arange(len(seen))
        queries = positions[len(context) :]
        q, k = _rotated(q.transpose(0, 1), queries), _rotated(k.transpose(0, 1), positions)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (k, v.transpose(0, 1)))
        scores = q @ k.transpose(-1, -2) * HEAD_DIM**-0.5
        if window:
            behind = queries[:, None] - positions
            scores = scores.masked_fill((behind < 0) | (behind >= WINDOW), float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = x + linear(mixed, self._weights[f"{under}self_attn.o_proj"])
        own = self._normed(x, f"{under}post_attention_layernorm")
        gate, up, down = (self._weights[f"{under}mlp.{name}_proj"] for name in ("gate", "up", "down"))
        return x + linear(silu(linear(own, gate)) * linear(own, up), down)

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, x.shape[-1:], self._weights[name], EPS)


def _rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [heads, T, D]."""
    angles = positions[:, None] * THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.cat((angles, angles), -1)
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()
