"""The plain-torch twins, the CPU's product path, against float64 references."""

from __future__ import annotations

import random

import pytest
import torch

from engine.kernels import activation, altup, norm, rope
from engine.kernels.attention import Scores
from engine.kernels.attention.reference import attend
from tests.unit.kernels import references
from tests.unit.kernels.references import close

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SEEDS = range(6)


@pytest.fixture(params=SEEDS)
def draw(request: pytest.FixtureRequest) -> random.Random:
    """Random shapes; torch's own numbers are seeded likewise."""
    torch.manual_seed(request.param)
    return random.Random(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(draw: random.Random, dtype: torch.dtype) -> None:
    shape = (draw.randint(1, 9), draw.randint(1, 5), draw.randint(1, 300))
    x, residual = torch.randn(2, *shape).to(dtype).unbind(0)
    weight = torch.randn(shape[-1]).to(dtype)
    close(norm.rms_norm.reference(x, weight, 1e-5), references.rms_norm(x, weight, 1e-5))
    normed, total = norm.add_and_norm.reference(x, residual, weight, 1e-5)
    close(total, x.double() + residual.double())
    close(normed, references.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_activation(draw: random.Random, dtype: torch.dtype) -> None:
    gate_up = (3 * torch.randn(draw.randint(1, 9), 2 * draw.randint(1, 300))).to(dtype)
    close(activation.act_and_mul.reference(gate_up), references.silu_and_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_activation(draw: random.Random, dtype: torch.dtype) -> None:
    gate_up = (3 * torch.randn(draw.randint(1, 9), 2 * draw.randint(1, 300)) + 1).to(dtype)
    cutoff = draw.uniform(-1, 2)
    out = activation.sparse_act_and_mul.reference(gate_up, cutoff, "gelu_tanh")
    close(out, references.sparse_gelu_and_mul(gate_up, cutoff))


@pytest.mark.parametrize("dtype", DTYPES)
def test_streams(draw: random.Random, dtype: torch.dtype) -> None:
    num_streams = draw.randint(2, 5)
    active = draw.randrange(num_streams)
    streams, activated, router, predicting, correcting = references.streams_case(
        num_streams, draw.randint(1, 9), draw.randint(1, 100), dtype, "cpu"
    )
    out = altup.predict_streams.reference(streams, router, predicting, active=active)
    close(out, references.predicted_streams(streams, router, predicting, active))
    out = altup.correct_streams.reference(streams, activated, router, correcting, active=active)
    close(out, references.corrected_streams(streams, activated, router, correcting, active))


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope(draw: random.Random, dtype: torch.dtype, with_norm: bool) -> None:
    tokens, kv_heads, group, half, block_size = (draw.randint(1, top) for top in (20, 4, 4, 64, 16))
    fused = torch.randn(tokens, kv_heads * (group + 2), 2 * half).to(dtype)
    q, k, v = fused.split([kv_heads * group, kv_heads, kv_heads], dim=1)
    positions = torch.randint(0, 50, (tokens,), dtype=torch.int32)
    angles = torch.rand(50, half) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    num_blocks = -(-tokens // block_size) + 2
    slots = torch.randperm(num_blocks * block_size)[:tokens].int()
    pool = torch.full((num_blocks, 3, 2, block_size, kv_heads, 2 * half), 7.0).to(dtype)
    q_norm, k_norm = torch.randn(2, 2 * half).to(dtype).unbind(0) if with_norm else (None, None)
    out = rope.rope_and_write_kv.reference(
        fused.flatten(1), positions, cos_sin, slots, pool[:, 1], rope.Heads(q_norm=q_norm, k_norm=k_norm)
    )
    if q_norm is not None and k_norm is not None:
        q, k = references.rms_norm(q, q_norm, 1e-6), references.rms_norm(k, k_norm, 1e-6)
    expected_q, expected_k = (references.rotated(x, positions, cos_sin) for x in (q, k))
    scale = 3 if with_norm else 1  # two roundings more, of numbers up to 8
    close(out / scale, expected_q / scale, dtype)
    written = pool[slots // block_size, 1, :, slots % block_size]
    close(written[:, 0] / scale, expected_k / scale, dtype)
    assert torch.equal(written[:, 1], v)
    again, given = torch.full_like(pool, 7.0), fused.flatten(1).clone()
    spare = rope.rope_and_write_kv.reference(
        given, positions, cos_sin, slots, again[:, 1], rope.Heads(q_norm=q_norm, k_norm=k_norm), is_spare=True
    )
    close(spare / scale, expected_q / scale, dtype)
    close(again / scale, pool.double() / scale, dtype)
    pool[slots // block_size, 1, :, slots % block_size] = 7.0
    assert bool((pool == 7.0).all())


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(draw: random.Random, dtype: torch.dtype, decode: bool) -> None:
    kv_heads, group = draw.randint(1, 3), draw.randint(1, 4)
    lengths = []
    for _ in range(draw.randint(1, 4)):
        new = 1 if decode else draw.randint(1, 20)
        lengths.append((new, new + draw.randint(0, 60)))
    window = draw.choice([0, 1, 7, 40])
    q, kv_layer, batch = references.attention_case(
        lengths,
        heads=(kv_heads * group, kv_heads),
        head_dim=draw.choice([16, 24, 80]),
        block_size=draw.choice([1, 4, 16]),
        dtype=dtype,
    )
    out = attend(q, kv_layer, batch, Scores(scale=0.2, window=window))
    close(out, references.attention(q, kv_layer, batch, 0.2, window))
