"""GGUF tensors under our names, with the converter's changes to their values undone.

Rows of Llama's queries and keys stand in pairs that are rotated together; Gemma's norms hold the 1 that is added to them;
the experts of a layer are one tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.gguf_delta import MODULES as OF_DELTA
from engine.checkpoint.gguf_delta import stored_of_delta
from engine.checkpoint.gguf_tables import ALONE, IN_LAYER, OUTSIDE, written
from engine.checkpoint.safetensors import CheckpointError, StoredTensor
from modelfiles.gguf import GgufHeader, GgufTensor, read_header

_LAYER = re.compile(r"blk\.(\d+)\.([\w.]+?)(\.weight|\.bias)?\Z")
_MOST_EXPERTS = 1 << 14
# Tensors that became parameters of the rope.
_IN_CONFIG = ("rope_freqs", "rope_factors_long", "rope_factors_short", "attn_rot_embd")


def stored_in_gguf(file: Path) -> Iterator[StoredTensor]:
    """Every tensor under its name in Hugging Face's format. Raises GgufError, CheckpointError."""
    header = read_header(file)
    for tensor in header.tensors.values():
        yield from _renamed(tensor, header)


def _renamed(tensor: GgufTensor, header: GgufHeader) -> Iterator[StoredTensor]:
    own, found = written(header).names, _LAYER.match(tensor.name)
    if found is None:
        module, _, kind = tensor.name.rpartition(".")
        if module not in _IN_CONFIG:
            name = f"{own.get(module, OUTSIDE.get(module, module))}.{kind}"
            if "{}" in name:
                yield from _each(tensor, name)
                return
            yield _stored(tensor, name, undo=_undo(header, name))
        return
    layer, module, kind = found[1], found[2], found[3] or ""
    if module == "ffn_norm":  # Falcon-H1's has no suffix
        kind = kind or ".weight"
    if module not in _IN_CONFIG and int(layer) not in _predicting(header):
        ours = own.get(module, IN_LAYER.get(module, module))
        name = f"model.layers.{layer}.{ours}{'' if module in ALONE and module not in own else kind}"
        yield from _of_layer(tensor, header, layer, module, name)


def _of_layer(tensor: GgufTensor, header: GgufHeader, layer: str, module: str, name: str) -> Iterator[StoredTensor]:
    if module == "attn_kv_b" and f"blk.{layer}.attn_k_b.weight" in header.tensors:
        return  # some files have both forms
    how = written(header)
    if how.has_delta and module in OF_DELTA and f"blk.{layer}.ssm_out.weight" in header.tensors:
        yield from stored_of_delta(tensor, module, layer, header, _logarithm if module == "ssm_a" else None)
    elif module == "attn_qkv" and (how.in_pairs or how.has_delta):
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} holds queries, keys and values: convert without --fuse-qkv"
        )
    elif "{}" in name:
        yield from _each(tensor, name, order=_transposed if module == "attn_k_b" else None)
    else:
        yield _whole(tensor, header, int(layer), module, name)


def _whole(tensor: GgufTensor, header: GgufHeader, layer: int, module: str, name: str) -> StoredTensor:
    if module in ("attn_q", "attn_k") and written(header).in_pairs:
        heads = _heads(header, "head_count" if module == "attn_q" else "head_count_kv", layer)
        return _stored(tensor, name, order=_pairs(tensor, heads))
    if module == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:
        return _stored(tensor, name, shape=(1, *tensor.shape))
    if module == "ssm_norm":
        return _stored(tensor, name, shape=(math.prod(tensor.shape),))
    return _stored(tensor, name, undo=_logarithm if module == "ssm_a" else _undo(header, name))


def _stored(tensor: GgufTensor, name: str, *, shape: tuple[int, ...] = (), **done: Any) -> StoredTensor:
    return StoredTensor(name, tensor.kind, shape or tensor.shape, tensor.file, tensor.begin, tensor.end, **done)


def _each(
    tensor: GgufTensor, name: str, *, order: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Iterator[StoredTensor]:
    """Matrices of experts or heads in one tensor. `order`: each is stored transposed."""
    count, *shape = tensor.shape
    if not shape or count > _MOST_EXPERTS:
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} of the shape {list(tensor.shape)} is not that of up to {_MOST_EXPERTS} experts"
        )
    length = (tensor.end - tensor.begin) // count
    shape = shape if order is None else shape[::-1]
    for index in range(count):
        begin = tensor.begin + index * length
        yield StoredTensor(
            name.format(index), tensor.kind, tuple(shape), tensor.file, begin, begin + length, order=order
        )


def _transposed(ours: torch.Tensor) -> torch.Tensor:
    return ours.t()


def _logarithm(decays: torch.Tensor) -> torch.Tensor:
    """The logarithm A_log; converters store -exp of it."""
    return (-decays).log()


def _without_one(weights: torch.Tensor) -> torch.Tensor:
    return weights - 1


def _undo(header: GgufHeader, name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
    return _without_one if written(header).norms_hold_one and name.endswith("norm.weight") else None


def _predicting(header: GgufHeader) -> range:
    """The last layers, which predict further tokens (MTP) and are not computed."""
    architecture = header.metadata.get("general.architecture")
    count, own = (header.metadata.get(f"{architecture}.{name}") for name in ("block_count", "nextn_predict_layers"))
    return range(count - own, count) if type(count) is type(own) is int else range(0)


def _heads(header: GgufHeader, name: str, layer: int) -> int:
    architecture = header.metadata["general.architecture"]
    heads = header.metadata.get(f"{architecture}.attention.{name}")
    heads = header.metadata.get(f"{architecture}.attention.head_count") if heads is None else heads
    if isinstance(heads, list):
        heads = heads[layer] if layer < len(heads) else None
    if type(heads) is not int or heads < 1:
        raise CheckpointError(f"{header.file}: {architecture}.attention.{name} = {heads!r:.40} is no number of heads")
    return heads


def _pairs(tensor: GgufTensor, heads: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Our rows, with half-split rotary pairs, in the order of the file, where pairs are interleaved."""
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise CheckpointError(f"{tensor.file}: {tensor.name} has {rows} rows, which are no pairs of {heads} heads")
    return lambda ours: ours.unflatten(0, (-1, 2, rows // heads // 2)).transpose(1, 2)
