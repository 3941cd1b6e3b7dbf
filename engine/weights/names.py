"""Names of a checkpoint's tensors, and ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredNames:
    """The mapping from a checkpoint's names to ours, such as `model.layers.0…`, `lm_head…`."""

    renamed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))  # prefix of a name -> ours
    ignored: tuple[str, ...] = ()  # prefixes of names that are not computed
    endings: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))  # a name's ending -> ours

    def ours(self, name: str) -> str | None:
        """Our name of a tensor; None: it is not computed."""
        if name.startswith(self.ignored):
            return None
        for theirs, ours in self.endings.items():
            if name.endswith(theirs):
                name = name.removesuffix(theirs) + ours
                break
        for theirs, ours in self.renamed.items():
            if name.startswith(theirs):
                return ours + name[len(theirs) :]
        return name

    def without_keys(self, layers: Iterable[int]) -> StoredNames:
        """The same, also ignoring key and value tensors of these layers, which borrow theirs."""
        parts = [f"layers.{layer}.self_attn.{kind}_" for layer in layers for kind in "kv"]
        more = (before + part for before in self.theirs("model.") for part in parts)
        return replace(self, ignored=(*self.ignored, *more))

    def within(self, whole: StoredNames) -> StoredNames:
        """The names for a larger checkpoint, in which our names have the prefix `whole`."""
        hidden = (theirs for each in self.ignored for theirs in whole.theirs(each))
        return StoredNames(renamed={**whole.renamed, **self.renamed}, ignored=(*whole.ignored, *hidden))

    def theirs(self, name: str) -> list[str]:
        """All possible names in a checkpoint for ours, our own first."""
        renamed = [theirs + name[len(ours) :] for theirs, ours in self.renamed.items() if name.startswith(ours)]
        return [name, *renamed]


AS_OURS = StoredNames()
