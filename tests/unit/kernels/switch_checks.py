"""Checks of what dense models switch on: soft-caps, sinks, other norms, rotations and activations. Like `triton_checks`."""

from __future__ import annotations

import itertools

import torch

from engine.kernels import activation, altup, attention, linear, norm, rope
from tests.unit.kernels import references
from tests.unit.kernels.references import close
from tests.unit.kernels.triton_checks import checking


def check_scores(device: str) -> None:
    """Decoding, prompts read through tables, and prompts read in bulk."""
    decode, prompts = [(1, 1), (1, 150)], [(9, 9), (40, 85)]
    for lengths, softcap, has_sinks in itertools.product((decode, prompts), (0.0, 1.5), (False, True)):
        window = 20 if softcap else 0
        sinks = 2 * torch.randn(4, device=device) if has_sinks else None
        for dtype in (torch.float32, torch.float16):
            _check_scores(
                lengths, 64, dtype, device, attention.Scores(scale=0.3, window=window, softcap=softcap, sinks=sinks)
            )
    for lengths, chunk, dtype in itertools.product((decode, prompts), (7, 24, 64), (torch.float32, torch.float16)):
        _check_scores(lengths, 16, dtype, device, attention.Scores(scale=0.3, window=-chunk))
    for lengths in ([(1, 40), (1, 9)], [(5, 40), (20, 20)]):  # Gemma 4's widest heads
        _check_scores(lengths, 512, torch.float16, device, attention.Scores(scale=0.1))
        sinks = 2 * torch.randn(4, device=device)  # MiMo-V2's keys
        _check_scores(lengths, 192, torch.float16, device, attention.Scores(scale=0.1, window=20, sinks=sinks))


def _check_scores(
    lengths: list[tuple[int, int]], head_dim: int, dtype: torch.dtype, device: str, how: attention.Scores
) -> None:
    q, kv_layer, batch = references.attention_case(
        lengths, heads=(4, 2), head_dim=head_dim, block_size=16, dtype=dtype, device=device
    )
    plan = references.plan_of(q, batch, num_kv_heads=2, block_size=16, window=how.window, is_plain=False)
    out = attention.paged_attention(q.contiguous(), kv_layer, plan, how)
    close(out, references.attention(q, kv_layer, batch, how.scale, how.window, softcap=how.softcap, sinks=how.sinks))


def check_norms(device: str) -> None:
    for dtype in (torch.float32, torch.float16):
        x, residual = torch.randn(2, 3, 100, device=device).to(dtype).unbind(0)
        weight = torch.randn(100, device=device).to(dtype)
        close(norm.rms_norm(x, None, 1e-5), references.rms_norm(x, torch.ones_like(weight), 1e-5))
        one_more = weight.double() + 1
        close(norm.rms_norm(x, weight, 1e-5, plus_one=True), references.rms_norm(x, one_more, 1e-5))
        normed, total = norm.add_rms_norm(x, residual, weight, 1e-5, plus_one=True)
        close(total, x.double() + residual.double())
        close(normed, references.rms_norm(total, one_more, 1e-5))


def check_gates(device: str) -> None:
    for dtype in (torch.float32, torch.float16):
        gate_up = (3 * torch.randn(3, 2 * 1030, device=device)).to(dtype)
        gate, up = gate_up.double().chunk(2, dim=-1)
        expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
        close(activation.act_and_mul(gate_up, "gelu_tanh"), expected)
        x, weight = torch.randn(3, 256, device=device).to(dtype), torch.randn(128, 256, device=device).to(dtype) / 16
        gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
        expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
        close(linear.gated_linear(x, weight, None, "gelu_tanh"), expected, dtype)
        heads, product = torch.randn(5, 3, 40, device=device).to(dtype), torch.randn(5, 300, device=device).to(dtype)
        gates = product[:, :240].double().view(5, 3, 2, 40)[:, :, 1]
        close(activation.gated_heads(heads, product), heads.double() * gates.sigmoid())
    extreme = torch.tensor([[-200.0, 200.0, 1.0, 1.0]], device=device)
    close(activation.act_and_mul(extreme, "gelu_tanh"), torch.tensor([[0.0, 200.0]], device=device))


def check_sparse_gates(device: str) -> None:
    for dtype, shape in itertools.product((torch.float32, torch.float16), [(3, 2 * 100), (2, 2 * 2048), (1, 2)]):
        gate_up = (3 * torch.randn(shape, device=device) + 1).to(dtype)
        for cutoff in (-0.5, 1.6):
            expected = references.sparse_gelu_and_mul(gate_up, cutoff)
            close(activation.sparse_act_and_mul(gate_up, cutoff, "gelu_tanh"), expected, dtype)


def check_streams(device: str) -> None:
    for dtype in (torch.float32, torch.float16):
        for num_streams, tokens, features, active in [(4, 3, 64, 0), (3, 1, 100, 2), (2, 5, 1, 1), (5, 2, 2048, 0)]:
            streams, activated, router, predicting, correcting = references.streams_case(
                num_streams, tokens, features, dtype, device
            )
            expected = references.predicted_streams(streams, router, predicting, active)
            close(altup.predict_streams(streams, router, predicting, active=active), expected, dtype)
            expected = references.corrected_streams(streams, activated, router, correcting, active)
            close(altup.correct_streams(streams, activated, router, correcting, active=active), expected, dtype)


def check_heads(device: str) -> None:
    """Each switch of a head's way against plain torch, which `test_exact.py` compares with transformers."""
    weights = torch.randn(2, 32, device=device)
    growth = torch.rand(50, device=device) + 0.5
    for dtype, parts in ((torch.float32, 1), (torch.float32, 3), (torch.float16, 1)):
        q_norm, k_norm = weights.to(dtype)
        for how, rotated in (
            (rope.Heads(), 16),
            (rope.Heads(interleaved=True), 32),
            (rope.Heads(interleaved=True, q_norm=q_norm, k_norm=k_norm), 16),
            (rope.Heads(), 0),
            (rope.Heads(norms_without_weight=True, query_growth=growth), 32),
            (rope.Heads(q_norm=q_norm, k_norm=k_norm, norm_plus_one=True), 32),
            (rope.Heads(q_norm=q_norm, k_norm=k_norm, norm_after=True), 24),
            (rope.Heads(q_norm=q_norm, k_norm=k_norm, norms_values=True), 32),
            (rope.Heads(q_norm=q_norm, k_norm=k_norm, norm_plus_one=True, gated=True), 8),
        ):
            for in_place in (False, True) if parts == 1 else (False,):
                _check_heads(how, rotated, dtype, device, parts=parts, in_place=in_place)
        for how in (rope.Heads(), rope.Heads(q_norm=q_norm, k_norm=q_norm, norms_values=True)):  # queries alone
            _check_heads(how, 32, dtype, device, parts=parts, in_place=False, kv_heads=0)


def _check_heads(
    how: rope.Heads,
    rotated: int,
    dtype: torch.dtype,
    device: str,
    *,
    parts: int,
    in_place: bool,
    kv_heads: int = 2,
) -> None:
    tokens, q_heads, head_dim, block_size = 5, 3, 32, 4
    columns = (q_heads * (1 + how.gated) + 2 * kv_heads) * head_dim
    qkv = torch.randn(tokens, columns, device=device).to(dtype)
    if parts > 1:
        shares = torch.randn(parts, *qkv.shape, device=device)
        shares[0] = qkv.float() - shares[1:].sum(dim=0)
        qkv = shares
    positions = torch.randint(0, 50, (tokens,), device=device, dtype=torch.int32)
    angles = torch.rand(50, rotated // 2, device=device) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1) if rotated else None
    slots = torch.randperm(12, device=device)[:tokens].int()
    slots[2] = -1
    results = []
    for compute in (rope.rope_and_write_kv, rope.rope_and_write_kv.reference):
        pool = torch.full((3, 1, 2, block_size, kv_heads, head_dim), 7.0, device=device).to(dtype)
        given = qkv.clone()
        out = compute(given, positions, cos_sin, slots, pool[:, 0], how, in_place=in_place)
        results.append((out, pool, given))
    for ours, expected in zip(*results, strict=True):
        close(ours, expected.double(), dtype)


CHECKS = {
    "scores": check_scores,
    "norms": check_norms,
    "gates": check_gates,
    "sparse_gates": check_sparse_gates,
    "streams": check_streams,
    "heads": check_heads,
}


def run(name: str, device: str, *, large: bool) -> None:
    """Run one check; its assertions tell."""
    with checking(device):
        CHECKS[name](device)


def interpret(name: str) -> None:
    """For `interpreter`."""
    run(name, "cpu", large=False)
