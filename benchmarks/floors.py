"""What physics allows: times that no program can beat on a device with the given ceilings, from config.json alone.

A step must read its weights and its KV once and do its arithmetic once; the larger of both times is the floor, as if one hid
the other perfectly. Left out, because small: activations, logits, norms, and everything that a kernel launch costs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from engine.models.config import DecoderConfig

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What a device was measured to reach at best."""

    bytes_per_s: float  # a copy's reads and writes
    read_bytes_per_s: float  # a sum's reads, for comparison: no floor uses it
    flops_per_s: float  # a large matrix product in the model's dtype
    upload_bytes_per_s: float  # from pinned host memory


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """What one model reads and computes. A position is one token of context."""

    layer_parameters: int  # of all layers: everything but the embedding and the head
    head_parameters: int  # V * E; a tied model's table counts here
    stored_parameters: int  # in the checkpoint
    item_bytes: int
    kv_bytes: int  # a position's, all layers
    attention_flops: int  # of one query at one position, all layers

    @classmethod
    def of(cls, config: DecoderConfig, dtype: str) -> Self:
        """`dtype` is the one that the engine computes in, for weights and KV."""
        hidden, intermediate = config.hidden_size, config.intermediate_size
        qkv = config.q_size + 2 * config.kv_size
        layer = hidden * qkv + config.q_size * hidden + 3 * hidden * intermediate
        layer += qkv * config.qkv_bias + hidden * config.output_bias + (2 * intermediate + hidden) * config.mlp_bias
        layer += 2 * hidden + 2 * config.head_dim * config.qk_norm
        head = config.vocab_size * hidden
        layers = layer * config.num_layers + hidden
        return cls(
            layer_parameters=layers,
            head_parameters=head,
            stored_parameters=layers + head * (1 if config.tie_word_embeddings else 2),
            item_bytes=ITEM_BYTES[dtype],
            kv_bytes=2 * config.num_layers * config.kv_size * ITEM_BYTES[dtype],
            attention_flops=4 * config.q_size * config.num_layers,
        )

    @property
    def read_parameters(self) -> int:
        """What a step reads, however small: not the embedding, of which it reads a few rows."""
        return self.layer_parameters + self.head_parameters

    @property
    def weight_bytes(self) -> int:
        return self.read_parameters * self.item_bytes


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes to move and operations to do; both add up."""

    num_bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.num_bytes + other.num_bytes, self.flops + other.flops)

    def seconds(self, ceilings: Ceilings) -> float:
        return max(self.num_bytes / ceilings.bytes_per_s, self.flops / ceilings.flops_per_s)


def decode_step(cost: ModelCost, *, batch: int, context: int) -> Work:
    """One token for each of `batch` sequences, attending to `context` positions each."""
    return Work(
        cost.weight_bytes + batch * context * cost.kv_bytes,
        batch * (2 * cost.read_parameters + context * cost.attention_flops),
    )


def prefill(cost: ModelCost, prompts: Iterable[int], *, passes: int = 1) -> Work:
    """Whole prompts of the given lengths, nothing cached; logits for each prompt's last token. KV is written once."""
    flops, tokens = 0, 0
    for length in prompts:
        tokens += length
        flops += 2 * cost.layer_parameters * length + cost.attention_flops * length * length // 2
        flops += 2 * cost.head_parameters
    return Work(passes * cost.weight_bytes + tokens * cost.kv_bytes, flops)


def offline(cost: ModelCost, *, requests: int, prompt: int, output: int) -> Work:
    """`requests` prompts and `output` tokens after each; the first of them comes out of the prefill.

    Weights are counted as read `output` times, as if all requests ran at once; how many can depends on memory.
    """
    work = prefill(cost, [prompt] * requests)
    for step in range(1, output):
        work += decode_step(cost, batch=requests, context=prompt + step)
    return work


def upload(cost: ModelCost, ceilings: Ceilings) -> float:
    """Seconds to bring the checkpoint to the device."""
    return cost.stored_parameters * cost.item_bytes / ceilings.upload_bytes_per_s
