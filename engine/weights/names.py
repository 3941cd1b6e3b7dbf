"""The names of a checkpoint's tensors, theirs and ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredNames:
    """Where a checkpoint keeps the tensors that we call `model.layers.0…`, `lm_head…`."""

    renamed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))  # beginning of a name -> ours
    ignored: tuple[str, ...] = ()  # beginnings of the names of what is not computed

    def ours(self, name: str) -> str | None:
        """Our name of a tensor; None: it is not computed."""
        if name.startswith(self.ignored):
            return None
        for theirs, ours in self.renamed.items():
            if name.startswith(theirs):
                return ours + name[len(theirs) :]
        return name

    def without_keys(self, layers: Iterable[int]) -> StoredNames:
        """The same, but a checkpoint may have keys' and values' tensors of these layers, which borrow theirs."""
        parts = [f"layers.{layer}.self_attn.{kind}_" for layer in layers for kind in "kv"]
        more = (before + part for before in self.theirs("model.") for part in parts)
        return replace(self, ignored=(*self.ignored, *more))

    def within(self, whole: StoredNames) -> StoredNames:
        """The names of a checkpoint in which what we call so is named as `whole` says, and that holds more."""
        hidden = (theirs for each in self.ignored for theirs in whole.theirs(each))
        return StoredNames(renamed={**whole.renamed, **self.renamed}, ignored=(*whole.ignored, *hidden))

    def theirs(self, name: str) -> list[str]:
        """All names that a checkpoint may have for what we call so, ours first."""
        renamed = [theirs + name[len(ours) :] for theirs, ours in self.renamed.items() if name.startswith(ours)]
        return [name, *renamed]


AS_OURS = StoredNames()
