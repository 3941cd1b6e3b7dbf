"""GGUF tensors of gated delta rule layers: one tensor holds the rows of queries, keys and values.

Qwen3.5's values stand in another order there: the first of each key head's, then the second, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from engine.checkpoint.gguf_tables import written
from engine.checkpoint.safetensors import CheckpointError, StoredTensor
from modelfiles.gguf import GgufHeader, GgufTensor

_NAMES = {
    "ssm_ba": "in_proj_ba.weight",
    "ssm_alpha": "a_proj.weight",
    "ssm_beta": "b_proj.weight",
    "attn_gate": "g_proj.weight",
    "ssm_a": "A_log",
    "ssm_dt": "dt_bias",
    "ssm_norm": "o_norm.weight",
    "ssm_out": "o_proj.weight",
}
_CUT = {"attn_qkv": "{}_proj.weight", "ssm_conv1d": "{}_conv1d.weight"}
MODULES = (*_NAMES, *_CUT)


def stored_of_delta(
    tensor: GgufTensor, module: str, layer: str, header: GgufHeader, undo: Callable[[torch.Tensor], torch.Tensor] | None
) -> Iterator[StoredTensor]:
    """Split one tensor of such a layer into ours. Raises CheckpointError if its size doesn't fit."""
    heads, under = _heads(header), f"model.layers.{layer}.linear_attn."
    whole = StoredTensor("", tensor.kind, tensor.shape, tensor.file, tensor.begin, tensor.end, undo=undo)
    if module in _CUT:
        sizes = (heads.keys, heads.keys, heads.values)
        for kind, part in zip("qkv", _rows(whole, sizes, tensor.name), strict=True):
            order = heads.rows_in_turn(heads.value_dim) if kind == "v" else None
            yield replace(part, name=under + _CUT[module].format(kind), order=order)
        return
    named = replace(whole, name=under + _NAMES[module])
    if module == "ssm_out":
        yield replace(named, columns=heads.columns)
    elif module == "attn_gate":
        yield replace(named, order=heads.rows_in_turn(heads.value_dim))
    elif module in ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"):
        yield replace(named, order=heads.rows_in_turn(1))
    else:
        yield named


@dataclass(frozen=True, slots=True)
class _Heads:
    groups: int  # key heads
    ratio: int  # value heads for each
    key_dim: int
    value_dim: int
    in_turn: bool

    @property
    def keys(self) -> int:
        return self.groups * self.key_dim

    @property
    def values(self) -> int:
        return self.groups * self.ratio * self.value_dim

    @property
    def columns(self) -> tuple[int, int, int] | None:
        return (self.groups, self.ratio, self.value_dim) if self.in_turn else None

    def rows_in_turn(self, size: int) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """The file's order of our rows, `size` for each value head."""
        if not self.in_turn:
            return None
        return lambda ours: ours.unflatten(0, (self.groups, self.ratio, size)).transpose(0, 1)


def _heads(header: GgufHeader) -> _Heads:
    architecture = header.metadata["general.architecture"]
    names = ("group_count", "time_step_rank", "state_size", "inner_size")
    found = [header.metadata.get(f"{architecture}.ssm.{name}") for name in names]
    groups, heads, key_dim, inner = (value if type(value) is int and value > 0 else 1 for value in found)
    if None in found or heads % groups or inner % heads:
        said = ", ".join(f"{name} = {value!r:.40}" for name, value in zip(names, found, strict=True))
        raise CheckpointError(f"{header.file}: {architecture}.ssm: {said} are no heads")
    return _Heads(groups, heads // groups, key_dim, inner // heads, written(header).values_in_turn)


def _rows(whole: StoredTensor, sizes: tuple[int, ...], name: str) -> Iterator[StoredTensor]:
    """The tensor's rows, split into parts."""
    count = whole.shape[0]
    if sum(sizes) != count:
        raise CheckpointError(f"{whole.file}: {name} has {count} rows, the metadata say {' + '.join(map(str, sizes))}")
    length, begin = (whole.end - whole.begin) // count, whole.begin
    for size in sizes:
        end = begin + size * length
        yield replace(whole, shape=(size, *whole.shape[1:]), begin=begin, end=end)
        begin = end
