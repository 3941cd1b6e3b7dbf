"""A GGUF file's metadata of one architecture, with a record of entries that were read."""

from __future__ import annotations

import struct
from typing import Any

from engine.spec.model import UnsupportedModelError
from modelfiles.gguf import GgufHeader

Config = dict[str, Any]
_MAX_FACTORS = 1 << 12
_MAX_LAYERS = 1 << 12  # families refuse more
_MAX_NUMBER = 1 << 31
_FEW = 8
# Entries that repeat other fields, or don't affect the arithmetic.
_HARMLESS = {"vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "attention.value_length", "pooling_type"}
_CAUSAL = "attention.causal"
# M-RoPE and deep-stack fields of vision models: a text token's three positions are equal, and it has no image features.
_HARMLESS |= {"rope.dimension_sections", "n_deepstack_layers"}


class Entries:
    """The metadata of one architecture, with a record of entries that were read."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self._header, self._beginning = header, f"{architecture}."
        self._read: set[str] = set()
        self.newest = ""  # the last entry read

    def get(self, name: str, default: Any = None) -> Any:
        """A value; a single one for all layers if they agree."""
        self._read.add(name)
        self.newest = name
        value = self._header.metadata.get(self._beginning + name, default)
        if isinstance(value, list):
            if not value or any(each != value[0] for each in value):
                raise self.unsupported(name)
            return value[0]
        return value

    def of_layers(self, name: str) -> list[Any]:
        """One value a layer."""
        self._read.add(name)
        self.newest = name
        value = self._header.metadata.get(self._beginning + name)
        if not isinstance(value, list) or len(value) != self["block_count"]:
            raise self.unsupported(name)
        return value[: self.num_layers]

    def layers_of(self, name: str) -> list[Any]:
        """One value a layer, expanded if there is a single one."""
        value = self._header.metadata.get(self._beginning + name)
        return self.of_layers(name) if isinstance(value, list) else [self[name]] * self.num_layers

    def ignore(self, name: str) -> None:
        """Skip entries that tensors repeat."""
        self._read.add(name)

    def where_any(self, name: str) -> Any:
        """The value of some layers, if the others have 0."""
        self._read.add(name)
        self.newest = name
        value = self._header.metadata.get(self._beginning + name)
        found = {each for each in value if each} if isinstance(value, list) else {value}
        if len(found) != 1 or any(type(each) is not int for each in found - {None}):
            raise self.unsupported(name)
        return found.pop()

    @property
    def num_layers(self) -> int:
        """Number of layers, without those that predict further tokens, which are not computed."""
        count, predicting = self.number("block_count"), self.number_or("nextn_predict_layers", 0)
        self.agree("block_count", 1 <= count <= _MAX_LAYERS)
        self.agree("nextn_predict_layers", predicting < count)
        return count - predicting

    def number_or(self, name: str, default: int) -> int:
        return self.number(name) if self.get(name) is not None else default

    def layers_with(self, tensor: str) -> list[bool]:
        """For each layer, True if it has a tensor."""
        return [self.has(f"blk.{layer}.{tensor}") for layer in range(self.num_layers)]

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise UnsupportedModelError(f"{self._header.file}: {self._beginning}{name} is missing")
        return value

    def number(self, name: str) -> int:
        """0 or more."""
        value = self[name]
        if type(value) is not int or not 0 <= value < _MAX_NUMBER:
            raise self.unsupported(name)
        return value

    def size(self, name: str) -> int:
        """1 or more."""
        value = self.number(name)
        if value == 0:
            raise self.unsupported(name)
        return value

    def has(self, tensor: str) -> bool:
        return tensor in self._header.tensors

    def rows(self, tensor: str) -> int:
        if tensor not in self._header.tensors:
            raise UnsupportedModelError(f"{self._header.file}: there is no tensor {tensor}")
        return self._header.tensors[tensor].shape[0]

    def columns(self, tensor: str) -> int:
        self.rows(tensor)
        return self._header.tensors[tensor].shape[-1]

    def floats(self, tensor: str) -> list[float]:
        """The values of a short tensor."""
        found = self._header.tensors[tensor]
        count = found.shape[0]
        if found.kind != "F32" or len(found.shape) != 1 or count > _MAX_FACTORS:
            raise UnsupportedModelError(f"{found.file}: {tensor} is no list of up to {_MAX_FACTORS} F32")
        with found.file.open("rb") as opened:
            opened.seek(found.begin)
            return list(struct.unpack(f"<{count}f", opened.read(found.end - found.begin)))

    def dtype(self) -> str:
        """Return the dtype that most weights are stored in, if the engine computes in it."""
        sizes: dict[str, int] = {}
        for tensor in self._header.tensors.values():
            if len(tensor.shape) > 1:
                sizes[tensor.kind] = sizes.get(tensor.kind, 0) + tensor.end - tensor.begin
        most = max(sizes, key=lambda kind: sizes[kind], default="")
        return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")

    def agree(self, name: str, does: bool) -> None:
        """Raise UnsupportedModelError if a size differs from the tensors'."""
        if not does:
            raise UnsupportedModelError(f"{self._said(name)}, but the file's tensors say otherwise")

    def unsupported(self, name: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._said(name)} is not supported")

    def _said(self, name: str) -> str:
        value = self._header.metadata.get(self._beginning + name)
        few = value[:_FEW] if isinstance(value, list) else value
        return f"{self._header.file}: {self._beginning}{name} = {str(few)[:40]}"

    def check_all_read(self) -> None:
        if self.get(_CAUSAL, True) is not True:  # an embedding model with bidirectional attention
            raise self.unsupported(_CAUSAL)
        for key, value in self._header.metadata.items():
            name = key.removeprefix(self._beginning)
            if name != key and value and name not in self._read | _HARMLESS:
                raise self.unsupported(name)
