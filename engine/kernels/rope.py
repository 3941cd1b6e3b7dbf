"""From the QKV projection to the pool, in one kernel: norms of heads, rotation, the KV write.

T tokens, P partial sums, Hq query heads, Hkv key and value heads, D head size, R rotated dimensions, B block size.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct

import torch

from engine.kernels import native
from engine.kernels.codes import Codes, decoded, encoded, head_dim, turned
from engine.kernels.device import native_takes, twin
from engine.kernels.norm import rms_norm
from engine.kernels.once import Once


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The processing of each head on its way to the pool. All norms are RMSNorm."""

    q_norm: torch.Tensor | None = None  # [D]: weight of the queries' norm; None: no norm, or no weight
    k_norm: torch.Tensor | None = None
    eps: float = 1e-6
    norm_plus_one: bool = False  # weights are these tensors plus 1
    norms_without_weight: bool = False
    norm_after: bool = False  # after the rotation
    norms_values: bool = False  # without a weight
    interleaved: bool = False  # adjacent dimensions form a pair; else those R / 2 apart
    query_growth: torch.Tensor | None = None  # [positions] float32: scales of queries
    gated: bool = False  # each query head is followed by its output's gate

    def are_only_rotated(self, cos_sin: torch.Tensor, head_dim: int) -> bool:
        """True if the whole head is rotated by halves, and nothing else."""
        return self.q_norm is None and self.k_norm is None and self.are_plain(cos_sin, head_dim)

    def are_plain(self, cos_sin: torch.Tensor | None, head_dim: int) -> bool:
        """True if there is at most a weighted norm before a rotation of the whole head by halves."""
        others = (self.norm_plus_one and self.q_norm is not None, self.norms_without_weight, self.norm_after)
        return (
            cos_sin is not None
            and cos_sin.shape[1] == head_dim
            and not (
                any(others) or self.norms_values or self.interleaved or self.gated or self.query_growth is not None
            )
        )


@twin("engine.kernels.triton_rope")
def rope_and_write_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    slots: torch.Tensor,
    kv_layer: torch.Tensor,
    how: Heads,
    *,
    codes: Codes | None = None,
    in_place: bool = False,
    is_spare: bool = False,
    once: Once | None = None,
) -> torch.Tensor:
    """Return the rotated queries [T, Hq, D]; write the rotated keys, and the values, into `kv_layer`.

    `qkv` [T, (Hq + 2 Hkv) D], or partial sums of it [P, T, ...] in float32: queries, keys, values side by side; of `gated`
    heads [T, (2 Hq + 2 Hkv) D]. `positions`
    [T] and `slots` [T] (block * B + offset; negative: not written) are int32; `cos_sin` [positions, R] float32 holds
    cos | sin halves for the first R dimensions, None: nothing is rotated. `kv_layer` [num_blocks, 2, B, Hkv, D] is a strided
    view of the pool, and the result has its dtype, or that of the numbers if the pool keeps `codes` of them. `in_place`: what
    the pool holds then replaces the keys and values in `qkv`, too. `is_spare`: nobody reads `qkv` afterwards, it may be
    overwritten. `once`: of the pass. With int4 codes queries and keys are `turned` at last.
    """
    num_kv_heads, dim = kv_layer.shape[3], head_dim(kv_layer, codes)
    once = once or Once()
    heads = _heads(qkv, kv_layer.dtype if codes is None else codes.dtype, dim)
    num_rotated = heads.shape[1] - num_kv_heads  # keys and values may be absent
    if is_spare and cos_sin is not None and how.are_only_rotated(cos_sin, dim):
        if (codes is None or codes.in_half) and _is_native(heads, kv_layer, cos_sin, positions, slots):
            _rotate_natively(heads, num_kv_heads, positions, cos_sin, slots, kv_layer)
            return heads[:, : -2 * num_kv_heads]
        if codes is None:
            return _rotated_in_place(heads, num_kv_heads, positions, cos_sin, slots, kv_layer, how, once)
    q, k = _queries_and_keys(heads[:, :num_rotated], num_rotated - num_kv_heads, positions, cos_sin, how, once)
    if codes is not None and codes.kind == "int4":
        q, k = turned(q), turned(k)
    v = heads[:, num_rotated:]
    if how.norms_values:
        v = rms_norm.reference(v, None, how.eps)
    own = heads[:, num_rotated - num_kv_heads :] if in_place else None  # a view of `qkv`
    _write((k, v), slots, kv_layer, codes, own, once)
    return q


def _write(
    both: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    kv_layer: torch.Tensor,
    codes: Codes | None,
    own: torch.Tensor | None,
    once: Once,
) -> None:
    """Write keys and values [T, Hkv, D] to the pool, and as it holds them to `own` [T, 2 Hkv, D]."""
    block_size, num_kv_heads = kv_layer.shape[2:4]
    written, blocks, offsets = once((id(slots), block_size), lambda: _places(slots, block_size))
    if codes is None and own is None:
        kv_layer[blocks, :, offsets] = torch.stack([x[written] for x in both], dim=1)
        return
    for plane, x in enumerate(both):
        kept, scales = (x, None) if codes is None else encoded(x, plane, codes)
        kv_layer[blocks, plane, offsets] = kept[written]
        if codes is not None and codes.scales is not None and scales is not None:
            codes.scales[blocks, plane, offsets] = scales[written]
        if own is not None:
            own[:, plane * num_kv_heads : (plane + 1) * num_kv_heads] = _as_kept(kept, scales, plane, codes)


def _as_kept(kept: torch.Tensor, scales: torch.Tensor | None, plane: int, codes: Codes | None) -> torch.Tensor:
    """The values as read back from the pool."""
    return kept if codes is None else decoded(kept, scales, codes.factors[plane], codes.dtype)


def _heads(qkv: torch.Tensor, dtype: torch.dtype, head_dim: int) -> torch.Tensor:
    """The product as [T, Hq + 2 Hkv, D]: itself, if it has the dtype."""
    if qkv.dim() == 3:
        qkv = qkv.sum(dim=0)
    return qkv.to(dtype).unflatten(-1, (-1, head_dim))


def _rotated_in_place(
    heads: torch.Tensor,
    num_kv_heads: int,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    kv_layer: torch.Tensor,
    how: Heads,
    once: Once,
) -> torch.Tensor:
    """Rotate in place within the projection [T, Hq + 2 Hkv, D], where keys and values then are as in the pool."""
    cos, sin = once((id(cos_sin), how.interleaved), lambda: _angles_at(positions, cos_sin, how))
    pairs = heads[:, :-num_kv_heads]
    wide = pairs.float()
    others = wide.roll(wide.shape[-1] // 2, -1).mul_(sin)
    pairs.copy_(others.add_(wide.mul_(cos)))
    block_size = kv_layer.shape[2]
    written, blocks, offsets = once((id(slots), block_size), lambda: _places(slots, block_size))
    both = heads[:, -2 * num_kv_heads :].unflatten(1, (2, num_kv_heads))
    kv_layer[blocks, :, offsets] = both if isinstance(written, slice) else both[written]
    return heads[:, : -2 * num_kv_heads]


# `Rotation` of `engine/kernels/native/rows.c`.
_ROTATION = Struct("5P12q")


def _is_native(
    heads: torch.Tensor, kv_layer: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
) -> bool:
    """True if the kernel in C computes it, with the same bits."""
    return heads.shape[2] % 16 == 0 and cos_sin.is_contiguous() and native_takes(heads, kv_layer, positions, slots)


def _rotate_natively(
    heads: torch.Tensor,
    num_kv_heads: int,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    kv_layer: torch.Tensor,
) -> None:
    library, (num_rows, num_heads, size) = native.library(), heads.shape
    assert library is not None
    library.baton_rows_rotate(
        _ROTATION.pack(
            heads.data_ptr(), positions.data_ptr(), slots.data_ptr(), cos_sin.data_ptr(), kv_layer.data_ptr(),
            num_rows, heads.stride(0), num_heads - 2 * num_kv_heads, num_kv_heads, size, kv_layer.shape[2],
            *kv_layer.stride()[:4], kv_layer.dtype == torch.float16, torch.get_num_threads(),
        )
    )  # fmt: skip


def _queries_and_keys(
    heads: torch.Tensor,
    num_query_heads: int,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    how: Heads,
    once: Once,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normed and rotated queries and keys of the projection [T, Hq + Hkv, D]: together, if treated alike."""
    angles = None
    if cos_sin is not None:
        table = cos_sin
        angles = once((id(table), how.interleaved), lambda: _angles_at(positions, table, how))
    if how.gated or how.q_norm is not None or how.k_norm is not None:
        q, k = heads[:, :num_query_heads], heads[:, num_query_heads:]
        q, k = (
            _prepared(q[:, ::2] if how.gated else q, how.q_norm, angles, how),
            _prepared(k, how.k_norm, angles, how),
        )
    else:
        q, k = _prepared(heads, None, angles, how).tensor_split((num_query_heads,), dim=1)
    if how.query_growth is not None:
        q = (q.float() * how.query_growth[positions.long()][:, None, None]).to(q.dtype)
    return q, k


def _places(slots: torch.Tensor, block_size: int) -> tuple[torch.Tensor | slice, torch.Tensor, torch.Tensor]:
    """The written tokens, their blocks and offsets."""
    written = slots >= 0 if bool((slots < 0).any()) else slice(None)
    slots = slots[written].long()
    return written, slots // block_size, slots % block_size


def _angles_at(positions: torch.Tensor, cos_sin: torch.Tensor, how: Heads) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors [T, 1, R] of each dimension, and of its pair's other one."""
    cos, sin = cos_sin[positions.long(), None].chunk(2, dim=-1)
    if how.interleaved:
        return cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def _prepared(
    x: torch.Tensor, weight: torch.Tensor | None, angles: tuple[torch.Tensor, torch.Tensor] | None, how: Heads
) -> torch.Tensor:
    """Normed and rotated heads."""
    is_normed = weight is not None or how.norms_without_weight
    if is_normed and not how.norm_after:
        x = rms_norm.reference(x, weight, how.eps, plus_one=how.norm_plus_one)
    if angles is not None:
        x = _rotate(x, *angles, interleaved=how.interleaved)
    if is_normed and how.norm_after:
        x = rms_norm.reference(x, weight, how.eps, plus_one=how.norm_plus_one)
    return x


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    size = cos.shape[-1]
    pairs = x.float() if size == x.shape[-1] else x[..., :size].float()
    if interleaved:
        others = pairs.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        others = torch.cat((pairs[..., size // 2 :], pairs[..., : size // 2]), dim=-1)
    rotated = (pairs * cos).add_(others.mul_(sin)).to(x.dtype)
    return rotated if size == x.shape[-1] else torch.cat((rotated, x[..., size:]), dim=-1)
