# mypy: allow-untyped-calls
"""One decoder for Llama, Mistral, Qwen2 and Qwen3: pre-norm blocks, grouped-query attention over paged KV, gated SiLU MLP.

Shapes: T tokens of the step, R sampled rows, E hidden size, Hq query heads, Hkv key and value heads, D head size,
I intermediate size, V vocabulary. q, k, v (and gate, up) are one matrix each layer, so that they are one product.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch

from engine.batch import ForwardBatch
from engine.kernels.attention import needs_qkv, paged_attention
from engine.kernels.embedding import embed
from engine.kernels.linear import gated_linear, linear, linear_onto, linear_parts
from engine.kernels.norm import add_rms_norm, rms_norm
from engine.kernels.rope import rope_and_write_kv
from engine.models.config import DecoderConfig
from engine.models.rope import cos_sin_table


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One block's parameters; a bias or norm that the family lacks is None."""

    input_norm: torch.Tensor  # [E]
    qkv: torch.Tensor  # [(Hq + 2 Hkv) D, E]
    qkv_bias: torch.Tensor | None  # [(Hq + 2 Hkv) D]
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None  # [D]
    output: torch.Tensor  # [E, Hq D]
    output_bias: torch.Tensor | None  # [E]
    post_norm: torch.Tensor  # [E]
    gate_up: torch.Tensor  # [2 I, E]
    gate_up_bias: torch.Tensor | None  # [2 I]
    down: torch.Tensor  # [E, I]
    down_bias: torch.Tensor | None  # [E]


class Decoder:
    """Weights and forward pass. The weights are uninitialised until a loader has filled `destinations()`."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device, max_model_len: int) -> None:
        self.config = config
        self._dtype, self._device = dtype, device
        self._embedding = self._new(config.vocab_size, config.hidden_size)
        self._head = self._embedding if config.tie_word_embeddings else torch.empty_like(self._embedding)
        self._norm = self._new(config.hidden_size)
        self._layers = [self._new_layer() for _ in range(config.num_layers)]
        table = cos_sin_table(config.rope, head_dim=config.head_dim, num_positions=max_model_len)
        self._cos_sin = table.to(device)
        self._scale = config.head_dim**-0.5

    def forward(
        self, batch: ForwardBatch, kv: torch.Tensor, *, logits: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Compute the batch, writing its KV into the pool; return the sampled rows' logits [R, V], None for R = 0.

        `kv`: [num_blocks, num_layers, 2, block_size, Hkv, D], the model's dtype, which is the logits' too.
        `logits`: where they go; None = newly allocated.
        """
        eps, rows, last = self.config.rms_norm_eps, batch.sampled_rows, len(self._layers) - 1
        prompts = batch.attention.prefill is not None
        residual = embed(batch.token_ids, batch.sources, batch.newest, self._embedding)
        x: torch.Tensor | None = rms_norm(residual, self._layers[0].input_norm, eps)
        for index, layer in enumerate(self._layers):
            if index > 0:
                x, residual = add_rms_norm(x, residual, layer.input_norm, eps)
            assert x is not None  # a normalised row is
            q, qkv = self._project(layer, x, batch, kv[:, index])
            plan = batch.attention
            if (
                prompts and index == last
            ):  # of the rows that are not sampled, later tokens need the keys and values alone
                if batch.final is None or rows is None:
                    return None
                q, qkv, plan, residual = q.index_select(0, rows), None, batch.final, residual.index_select(0, rows)
            window = self.config.windows[index]
            x = paged_attention(q, kv[:, index], plan, scale=self._scale, window=window, qkv=qkv).flatten(-2)
            x = linear_onto(residual, x, layer.output, layer.output_bias)
            x, residual = add_rms_norm(x, residual, layer.post_norm, eps)
            x = gated_linear(x, layer.gate_up, layer.gate_up_bias)
            x = linear_onto(residual, x, layer.down, layer.down_bias)
        if not batch.num_sampled:
            return None
        if rows is not None and not prompts:
            x, residual = None if x is None else x.index_select(-2, rows), residual.index_select(0, rows)
        x, _ = add_rms_norm(x, residual, self._norm, eps)
        return linear(x, self._head, None, out=logits)

    def _project(
        self, layer: LayerWeights, x: torch.Tensor, batch: ForwardBatch, kv_layer: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[T, E] -> rotated queries [T, Hq, D], and [T, (Hq + 2 Hkv) D] where attention reads keys and values there.

        Keys and values are in the pool then; `kv_layer` is [num_blocks, 2, block_size, Hkv, D], a strided view of it.
        """
        prompts = batch.attention.prefill is not None
        qkv = (linear if prompts else linear_parts)(x, layer.qkv, layer.qkv_bias)
        stays = needs_qkv(batch.attention, kv_layer)
        q = rope_and_write_kv(
            qkv,
            batch.positions,
            self._cos_sin,
            batch.slots,
            kv_layer,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=self.config.rms_norm_eps,
            in_place=stays,
        )
        return q, qkv if stays else None

    def with_a_layer_of_each_kind(self) -> Decoder:
        """Return a decoder of the first layer, the last one and one with each window between them: no kernel is missing."""
        windows = self.config.windows
        kinds = {windows.index(window, 1) for window in windows[1:]}
        chosen = sorted({0, len(windows) - 1} | kinds)
        decoder = copy.copy(self)
        decoder._layers = [self._layers[index] for index in chosen]
        decoder.config = replace(self.config, num_layers=len(chosen), windows=tuple(windows[index] for index in chosen))
        return decoder

    def destinations(self) -> dict[str, torch.Tensor]:
        """Return where each of the checkpoint's tensors goes: its name -> a view of the merged weight."""
        views = {"model.embed_tokens.weight": self._embedding, "model.norm.weight": self._norm}
        if not self.config.tie_word_embeddings:
            views["lm_head.weight"] = self._head
        for index, layer in enumerate(self._layers):
            views |= {f"model.layers.{index}.{name}": view for name, view in self._layer_destinations(layer).items()}
        return views

    def _layer_destinations(self, layer: LayerWeights) -> dict[str, torch.Tensor]:
        config = self.config
        q, k, v = layer.qkv.split((config.q_size, config.kv_size, config.kv_size))
        gate, up = layer.gate_up.chunk(2)
        views: dict[str, torch.Tensor | None] = {
            "input_layernorm.weight": layer.input_norm,
            "self_attn.q_proj.weight": q,
            "self_attn.k_proj.weight": k,
            "self_attn.v_proj.weight": v,
            "self_attn.q_norm.weight": layer.q_norm,
            "self_attn.k_norm.weight": layer.k_norm,
            "self_attn.o_proj.weight": layer.output,
            "self_attn.o_proj.bias": layer.output_bias,
            "post_attention_layernorm.weight": layer.post_norm,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": layer.down,
            "mlp.down_proj.bias": layer.down_bias,
        }
        if layer.qkv_bias is not None:
            parts = layer.qkv_bias.split((config.q_size, config.kv_size, config.kv_size))
            views |= {f"self_attn.{name}_proj.bias": part for name, part in zip("qkv", parts, strict=True)}
        if layer.gate_up_bias is not None:
            gate_bias, up_bias = layer.gate_up_bias.chunk(2)
            views |= {"mlp.gate_proj.bias": gate_bias, "mlp.up_proj.bias": up_bias}
        return {name: view for name, view in views.items() if view is not None}

    def _new(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _new_layer(self) -> LayerWeights:
        config, new = self.config, self._new
        qkv_size = config.q_size + 2 * config.kv_size
        return LayerWeights(
            input_norm=new(config.hidden_size),
            qkv=new(qkv_size, config.hidden_size),
            qkv_bias=new(qkv_size) if config.qkv_bias else None,
            q_norm=new(config.head_dim) if config.qk_norm else None,
            k_norm=new(config.head_dim) if config.qk_norm else None,
            output=new(config.hidden_size, config.q_size),
            output_bias=new(config.hidden_size) if config.output_bias else None,
            post_norm=new(config.hidden_size),
            gate_up=new(2 * config.intermediate_size, config.hidden_size),
            gate_up_bias=new(2 * config.intermediate_size) if config.mlp_bias else None,
            down=new(config.hidden_size, config.intermediate_size),
            down_bias=new(config.hidden_size) if config.mlp_bias else None,
        )
