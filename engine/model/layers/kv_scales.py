"""The scales of fp8 keys and values in checkpoints; without them both are 1."""

from __future__ import annotations

import torch

from engine.model.layers.building import Surroundings
from engine.spec.attention import AttentionSpec
from engine.spec.mla import MLASpec
from engine.spec.model import UnsupportedModelError
from engine.weights.parameters import Parameter, Part, Way

# Tensors [1] for keys and for values, under different tools' names; the last one is for both.
NAMES = (
    ("self_attn.k_scale", "self_attn.v_scale"),
    ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    ("self_attn.kv_scale", "self_attn.kv_scale"),
)
# Scales of queries and attention weights, which stay in the compute dtype.
UNUSED = ("self_attn.q_scale", "self_attn.prob_scale", "self_attn.q_proj.q_scale")


def declare_factors(spec: AttentionSpec | MLASpec, around: Surroundings) -> torch.Tensor | None:
    """Declare [2] float32, for keys and for values, or [1] for latents; None if a layer's KV is not quantised.

    Only fp8 reads the checkpoint's.
    """
    weights, under = around.weights, around.under
    names = {name for pair in NAMES for name in pair}
    weights.unused |= {under + name for name in UNUSED}
    if spec.codes != "fp8":
        weights.unused |= {under + name for name in names}
        return None if spec.codes is None else torch.ones(2, device=weights.device)
    # MLA's checkpoints may lack scales of values.
    pairs = [pair[:1] for pair in NAMES] if isinstance(spec, MLASpec) else NAMES
    weights.unused |= {under + name for name in names.difference(*pairs)}
    shape = (len(pairs[0]),)
    whole = Parameter(shape=shape, parts=_parts(pairs[0]), format=torch.float32)
    ways = [Way(Parameter(shape=shape, parts=_parts(pair))) for pair in pairs]
    factors = weights.new(whole, ways=ways, under=under, default=1.0)

    def check() -> None:
        if not bool((factors.isfinite() & (factors > 0)).all()):
            raise UnsupportedModelError(f"{under}{NAMES[0][0]} and v_scale must be positive, not {factors.tolist()}")

    weights.when_loaded.append(check)
    return factors


def _parts(names: tuple[str, ...]) -> tuple[Part, ...]:
    return tuple(Part(name=name, rows=slice(row, row + 1)) for row, name in enumerate(names))
